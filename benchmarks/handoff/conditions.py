"""What was measured on, and the model that it was measured with."""

from __future__ import annotations

import os
import platform
import sys
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any, Final, NamedTuple

from tests.tiny import make_model

from twofold.device.weights import layout_of, load_model

MODES: Final = ("pull", "push", "layerwise")
TRANSPORTS: Final = ("shm", "tcp")
BLOCK_SIZE: Final = 16
HOST: Final = "127.0.0.1"

_SHAPE: Final[dict[str, Any]] = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "max_position_embeddings": 16384,
}


class Config(NamedTuple):
    """Who moves the bytes, and how."""

    handoff: str
    transport: str

    def __str__(self) -> str:
        return f"{self.handoff}, {self.transport}"


def configs(transports: tuple[str, ...] = TRANSPORTS) -> list[Config]:
    """Every mode by every transport."""
    return [Config(mode, transport) for mode in MODES for transport in transports]


def make_bench_model(directory: Path) -> tuple[Path, dict[str, Any]]:
    """A llama with random weights that reads 8,192 tokens, and what it is, in figures.

    As many KV heads as query heads: much KV for little computing, as large models have against
    accelerators, so that the share of the handoff is not made small by a slow prefill alone.
    """
    path = make_model("llama", directory / "handoff-llama", **_SHAPE)
    loaded = load_model(path)
    layout = layout_of(loaded, block_size=BLOCK_SIZE)
    return path, {
        "model": "random llama, float32",
        **_SHAPE,
        "block_size": BLOCK_SIZE,
        "kv_bytes_per_token": layout.block_bytes // BLOCK_SIZE,
    }


def _cpu() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor()


def conditions(note: str) -> dict[str, Any]:
    """The machine and its load, now; `note` says what else runs on it."""
    return {
        "cpu": _cpu(),
        "cpus": os.cpu_count(),
        "load_average": [round(each, 2) for each in os.getloadavg()],
        "also_running": note,
        "python": platform.python_version(),
        "kernel": platform.release(),
        **{name: version(name) for name in ("torch", "numpy", "xxhash", "uvloop")},
    }


def shared_clock() -> str:
    """The clock of `time.monotonic_ns`, which all processes of this machine must share.

    Raises RuntimeError where they might not.
    """
    name = time.get_clock_info("monotonic").implementation
    if name != "clock_gettime(CLOCK_MONOTONIC)":
        raise RuntimeError(f"monotonic clock {name}: may not be the same in two processes")
    return "CLOCK_MONOTONIC"


class Progress:
    """A bar on stderr, where that is a terminal; else a line for each part."""

    def __init__(self, name: str, total: int) -> None:
        self._name, self._total, self._done = name, total, 0
        self._is_bar = sys.stderr.isatty()
        self._show()

    def step(self, n: int = 1) -> None:
        self._done = min(self._total, self._done + n)
        if self._is_bar:
            self._show()

    def end(self) -> None:
        if self._is_bar:
            print(file=sys.stderr)

    def _show(self) -> None:
        if not self._is_bar:
            print(f"{self._name}: {self._total} steps", file=sys.stderr, flush=True)
            return
        filled = 30 * self._done // max(1, self._total)
        bar = "#" * filled + "." * (30 - filled)
        text = f"\r{self._name:<13}[{bar}] {self._done}/{self._total}"
        print(text, end="", file=sys.stderr, flush=True)
