"""Simulation against measured servers: closed loops of aiconfigurator's silicon sample."""

from __future__ import annotations

import csv
import gzip
import re
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Final

from benchmarks.published.data import Data, mean
from benchmarks.published.rows import Row, close, unchecked, with_note
from benchmarks.published.sim import ClosedLoop, Workers
from twofold.cost.models import fits_tokens, model_shape
from twofold.cost.readers import read_profile
from twofold.cost.step_profile import step_time
from twofold.metrics.record import RequestRecord
from twofold.trace import Lengths
from twofold.types import NS_PER_MS

SOURCE: Final = "aiconfigurator silicon"
MODEL: Final = "Qwen3-32B"
WAVES: Final = 5
BUDGETS: Final = (2048, 8192)


class Point:
    """One measured point, and the percent by which a simulation is off."""

    def __init__(self, row: Mapping[str, str], concurrency: int) -> None:
        self.concurrency = concurrency
        self.tp = int(row["tp_size"])
        self.isl, self.osl = int(row["isl"]), int(row["osl"])
        self.measured = float(row["silicon_ttft_ms"]), float(row["silicon_tpot_ms"])
        self.ours = (0.0, 0.0)
        self.later = (0.0, 0.0)

    def error(self, i: int, *, later: bool = False) -> float:
        """Of TTFT (0) or TPOT (1), in percent; `later`: without each client's first two."""
        ours = self.later if later else self.ours
        return 100 * (ours[i] - self.measured[i]) / self.measured[i]

    @property
    def name(self) -> str:
        """For a reader."""
        return f"{self.isl}/{self.osl} at {self.concurrency}"


def _sample(data: Data) -> tuple[list[Mapping[str, str]], int]:
    """BF16 points of Qwen3-32B on H100 under vLLM, and how many others there are."""
    path = data.path("results/aiconfigurator_silicon_sample.csv.gz")
    wanted = ("Qwen/Qwen3-32B", "h100_sxm", "vllm", "agg", "")
    keys = ("model_path", "system", "backend", "mode", "precision")
    with gzip.open(path, "rt") as file:
        rows = list(csv.DictReader(file))
    found: list[Mapping[str, str]] = [r for r in rows if tuple(r[k] for k in keys) == wanted]
    return found, len(rows) - len(found)


def _points(data: Data) -> list[Point]:
    points = []
    for row in _sample(data)[0]:
        loop = re.search(r"silicon_concurrency=(\d+)", row["silicon_data_source"])
        if loop is not None and not (data.quick and int(loop[1]) > 32):
            points.append(Point(row, int(loop[1])))
    return points


def _run(data: Data, budget: int) -> list[Point]:
    shape = model_shape(MODEL)
    points = _points(data)
    for point in points:
        table = f"profiles/aiconfigurator_steps/Qwen3-32B__h100_sxm__vllm__tp{point.tp}.csv"
        workers = Workers(
            step=step_time(read_profile(data.path(table)), extrapolate=True),
            kv_tokens=fits_tokens(shape, int(80e9 * 0.9), point.tp, 2.0),
            max_num_seqs=1024,
            budget=budget,
        )
        lengths = [Lengths(point.isl, point.osl)] * (WAVES * point.concurrency)
        records = ClosedLoop(shape, workers).serve(point.concurrency, lengths)
        point.ours = _means(records)
        point.later = _means(records[2 * point.concurrency :])
    return points


def _means(records: Sequence[RequestRecord]) -> tuple[float, float]:
    """TTFT and TPOT in ms."""
    return (
        mean((r.ttft_ns or 0) / NS_PER_MS for r in records),
        mean((r.tpot_ns or 0) / NS_PER_MS for r in records),
    )


def _size(i: int, point: Point) -> tuple[float, str]:
    return abs(point.error(i)), point.name


def silicon_rows(data: Data) -> list[Row]:
    """Qwen3-32B BF16 on H100 under vLLM: closed loops of a fixed concurrency."""
    why = {
        "TPOT": "the table has kernels only; a measured server adds time of its own to each step",
        "TTFT": (
            "equal clients that begin at once go on in step here, prompts of a whole step at a "
            "time, and the sample says neither how many requests each sent (over the last three "
            "of five the mean is {:.0f}) nor what broke the step: with answers of 80 to 100 % of "
            "the length, loops of up to 32 clients and steps of 8,192 give 100, 76 and 64 at TP2, "
            "TP4 and TP8, where TPOT is 92, 86 and 78, as there is no host time in the table"
        ),
    }
    rows = []
    for budget in BUDGETS:
        points = _run(data, budget)
        conditions = (
            f"Qwen3-32B BF16 on H100, vLLM 0.12, {len(points)} points (lengths and concurrency as "
            f"printed), step table of aiconfigurator (an estimate), {budget:,} tokens a step (not "
            f"printed: both usual settings are shown), a closed loop of {WAVES} requests a client "
            "(not printed either)"
        )
        for tp in sorted({point.tp for point in points}):
            some = [point for point in points if point.tp == tp]
            for label, i in (("TPOT", 1), ("TTFT", 0)):
                off = mean(point.error(i) for point in some)
                worst = max(some, key=partial(_size, i))
                row = close(
                    SOURCE,
                    f"TP{tp}, steps of {budget:,}: {label} of {len(some)} points (measured: 100)",
                    100.0,
                    100.0 + off,
                    conditions=conditions,
                    why=why[label].format(100 + mean(p.error(i, later=True) for p in some)),
                )
                size = mean(abs(point.error(i)) for point in some)
                note = (
                    f"mean size of the error {size:.0f} %, worst {worst.name}: "
                    f"{worst.measured[i]:.1f} ms measured, {worst.ours[i]:.1f} here"
                )
                rows.append(with_note(row, note))
    return rows + _unchecked(data)


def _unchecked(data: Data) -> list[Row]:
    others = _sample(data)[1]
    return [
        unchecked(
            SOURCE,
            f"the other {others:,} points",
            "",
            "other backends (TensorRT-LLM, SGLang), or precisions (FP8, FP4) and models for which "
            "the data has no step table of that backend and precision",
        ),
        unchecked(
            SOURCE,
            "Qwen3-32B FP8, 32 x H200, 4000/500: 812.9 split, 478.6 unsplit tok/s per GPU",
            "812.9 against 478.6",
            "the data's Qwen3-32B tables are BF16; an FP8 one would be needed for either number",
        ),
    ]
