"""Where the published data lies, and what was read of it."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from twofold.trace import Lengths, TraceRequest, open_trace


class DataError(ValueError):
    """The data cannot be found, in one line."""


def data_root() -> Path:
    """The folder of published data. Raises DataError."""
    repo = Path(__file__).resolve().parents[2]
    root = Path(os.environ.get("TWOFOLD_DATA") or repo.parent / "shared" / "data")
    if not (root / "papers").is_dir():
        raise DataError(f"{root}: no folder papers in it; TWOFOLD_DATA names the published data")
    return root


class Data:
    """Files under one folder; `quick` asks for shorter runs. Remembers what was read."""

    def __init__(self, root: Path, *, quick: bool = False) -> None:
        self.root = root
        self.quick = quick
        self.used: dict[str, str] = {}

    def path(self, name: str) -> Path:
        """The file or folder `name`. Raises DataError where it is absent."""
        path = self.root / name
        if not path.exists():
            raise DataError(f"{path}: not there; TWOFOLD_DATA names the published data")
        if path.is_file() and name not in self.used:
            self.used[name] = hashlib.sha256(path.read_bytes()).hexdigest()
        return path

    def paper(self, name: str) -> dict[str, Any]:
        """The figures of one paper."""
        found: dict[str, Any] = json.loads(self.path(f"papers/{name}.json").read_text())
        return found

    def trace(self, name: str) -> Iterator[TraceRequest]:
        """The requests of a trace, with their times."""
        return iter(open_trace(self.path(f"traces/{name}")))

    def lengths(self, name: str) -> list[Lengths]:
        """The lengths of a trace, in its order."""
        return list(open_trace(self.path(f"traces/{name}")).lengths())


def spread(lengths: Sequence[Lengths], n: int, seed: int) -> list[Lengths]:
    """`n` of `lengths`, drawn with a fixed stride from a start that depends on `seed`.

    The stride is the golden section of the count, so that any `n` cover the whole list evenly.
    """
    size = len(lengths)
    stride = max(1, round(size * 0.6180339887))
    while _common(stride, size) != 1:
        stride += 1
    return [lengths[(seed * 7919 + i * stride) % size] for i in range(n)]


def _common(a: int, b: int) -> int:
    while b:
        a, b = b, a % b
    return a


def mean(values: Iterable[float]) -> float:
    """The mean, NaN of nothing."""
    found = list(values)
    return sum(found) / len(found) if found else float("nan")


def at_share(values: Iterable[float], share: float) -> float:
    """The nearest-rank value that `share` of `values` do not exceed."""
    found = sorted(values)
    rank = max(1, -int(-share * len(found) // 1))
    return found[rank - 1]
