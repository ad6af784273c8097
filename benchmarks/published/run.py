"""One check, run in whatever process."""

from __future__ import annotations

import time
from pathlib import Path

import msgspec

from benchmarks.published.checks import ARITHMETIC, CHECKS
from benchmarks.published.data import Data
from benchmarks.published.rows import Row


class Result(msgspec.Struct, frozen=True, kw_only=True):
    """One check: its rows, how long it took, and the SHA-256 of the files it read.

    The conditions of a quick run's rows say so.
    """

    check: str
    quick: bool
    rows: list[Row]
    seconds: float
    files: dict[str, str]


def run_check(name: str, root: str, quick: bool) -> Result:
    """One check, in whatever process."""
    data = Data(Path(root), quick=quick)
    started = time.perf_counter()
    rows = CHECKS[name](data)
    if quick and name not in ARITHMETIC:
        rows = [_marked(row) for row in rows]
    seconds = round(time.perf_counter() - started, 1)
    files = dict(sorted(data.used.items()))
    return Result(check=name, quick=quick, rows=rows, seconds=seconds, files=files)


def _marked(row: Row) -> Row:
    if not row.conditions:
        return row
    return msgspec.structs.replace(row, conditions=f"{row.conditions}; a quick run")
