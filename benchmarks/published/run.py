"""One check, run in whatever process."""

from __future__ import annotations

import time
from pathlib import Path

import msgspec

from benchmarks.published.checks import CHECKS
from benchmarks.published.data import Data
from benchmarks.published.rows import Row


class Result(msgspec.Struct, frozen=True, kw_only=True):
    """One check: its rows, how long it took, and the SHA-256 of the files it read."""

    check: str
    rows: list[Row]
    seconds: float
    files: dict[str, str]


def run_check(name: str, root: str, quick: bool) -> Result:
    """One check, in whatever process."""
    data = Data(Path(root), quick=quick)
    started = time.perf_counter()
    rows = CHECKS[name](data)
    seconds = round(time.perf_counter() - started, 1)
    return Result(check=name, rows=rows, seconds=seconds, files=dict(sorted(data.used.items())))
