"""Simulation against measured servers: closed loops of aiconfigurator's silicon sample."""

from __future__ import annotations

import csv
import gzip
import re
from collections.abc import Mapping
from typing import Final

from benchmarks.published.data import Data, mean
from benchmarks.published.rows import Row, close, unchecked, with_note
from benchmarks.published.sim import Workers, simulate
from twofold.cost.models import fits_tokens, model_shape
from twofold.cost.readers import read_profile
from twofold.cost.step import StepTime
from twofold.cost.step_profile import step_time
from twofold.trace import TraceRequest
from twofold.types import NS_PER_MS, NS_PER_S

SILICON: Final = "aiconfigurator silicon"


def _silicon(data: Data) -> list[Mapping[str, str]]:
    path = data.path("results/aiconfigurator_silicon_sample.csv.gz")
    with gzip.open(path, "rt") as file:
        return [
            row
            for row in csv.DictReader(file)
            if (row["model_path"], row["system"], row["backend"], row["mode"], row["precision"])
            == ("Qwen/Qwen3-32B", "h100_sxm", "vllm", "agg", "")
        ]


def silicon_rows(data: Data) -> list[Row]:
    """Qwen3-32B BF16 on H100 under vLLM: closed loops of a fixed concurrency."""
    shape = model_shape("Qwen3-32B")
    by_tp: dict[int, list[tuple[float, float]]] = {}
    worst: dict[int, str] = {}
    seen = used = 0
    for row in _silicon(data):
        seen += 1
        loop = re.search(r"silicon_concurrency=(\d+)", row["silicon_data_source"])
        tp = int(row["tp_size"])
        if loop is None or (data.quick and int(loop[1]) > 64):
            continue
        used += 1
        path = data.path(f"profiles/aiconfigurator_steps/Qwen3-32B__h100_sxm__vllm__tp{tp}.csv")
        workers = Workers(
            step=step_time(read_profile(path), extrapolate=True),
            kv_tokens=fits_tokens(shape, int(80e9 * 0.9), tp, 2.0),
            max_num_seqs=1024,
            budget=8192,
        )
        ttft, tpot = _closed_loop(workers, int(loop[1]), int(row["isl"]), int(row["osl"]))
        told = float(row["silicon_ttft_ms"]), float(row["silicon_tpot_ms"])
        errors = 100 * (ttft - told[0]) / told[0], 100 * (tpot - told[1]) / told[1]
        if abs(errors[1]) > max((abs(e[1]) for e in by_tp.get(tp, ())), default=0.0):
            worst[tp] = (
                f"worst TPOT at {row['isl']}/{row['osl']}, concurrency {loop[1]}: "
                f"{told[1]:.1f} measured, {tpot:.1f} here"
            )
        by_tp.setdefault(tp, []).append(errors)
    conditions = (
        "Qwen3-32B BF16 on H100, vLLM 0.12, {n} points (input/output and "
        "concurrency as printed), step "
        "table of aiconfigurator (an estimate), 8,192 tokens a step, "
        "closed loop run as evenly spaced "
        "arrivals at the rate that keeps the concurrency by Little's law, first third left out"
    )
    rows = []
    for tp, pairs in sorted(by_tp.items()):
        for label, i in (("TPOT", 1), ("TTFT", 0)):
            off = mean(e[i] for e in pairs)
            size = mean(abs(e[i]) for e in pairs)
            why = (
                "a loop that starts with all its prompts at once keeps them in "
                "step, so that each waits for the "
                "others' prompts; evenly spaced ones do not"
                if label == "TTFT"
                else (
                    "the table has kernels only; a measured server's loop adds its own "
                    "time to each step"
                )
            )
            made = close(
                SILICON,
                f"TP{tp}: mean {label} of {len(pairs)} points (100 = measured)",
                100.0,
                100.0 + off,
                conditions=conditions.format(n=len(pairs)),
                why=why,
            )
            rows.append(
                with_note(
                    made, f"mean size of the error {size:.1f} %" + (f"; {worst[tp]}" if i else "")
                )
            )
    rows.append(
        unchecked(
            SILICON,
            f"the other {2618 - seen:,} points",
            "",
            (
                "other backends (TensorRT-LLM, SGLang), or precisions (FP8, FP4) "
                "and models for which the data has no step table of that backend "
                "and precision"
            ),
        )
    )
    rows.append(
        unchecked(
            SILICON,
            "Qwen3-32B FP8, 32 x H200, 4000/500: 812.9 split, 478.6 unsplit tok/s per GPU",
            "812.9 against 478.6",
            "the data's Qwen3-32B table is BF16; an FP8 one would be needed for either number",
        )
    )
    return rows


def _closed_loop(workers: Workers, concurrency: int, isl: int, osl: int) -> tuple[float, float]:
    """Mean TTFT and TPOT at the rate that holds `concurrency` requests in flight."""
    n = 6 * concurrency + 30
    low, high = 0.0, concurrency / _alone_s(workers.step, isl, osl)
    ttft = tpot = 0.0
    for _ in range(8):
        rate = (low + high) / 2 if low or ttft else high
        gap = round(NS_PER_S / rate)
        requests = [TraceRequest(i * gap, isl, osl) for i in range(n)]
        records = simulate("1M", model_shape("Qwen3-32B"), workers, requests)[n // 3 :]
        ttft = mean((r.ttft_ns or 0) / NS_PER_MS for r in records)
        tpot = mean((r.tpot_ns or 0) / NS_PER_MS for r in records)
        in_flight = rate * mean(r.e2e_ns / NS_PER_S for r in records)
        if in_flight > concurrency:
            high = rate
        else:
            low = rate
        if abs(in_flight - concurrency) < 0.02 * concurrency:
            break
    return ttft, tpot


def _alone_s(step: StepTime, isl: int, osl: int) -> float:
    return (
        step.step_ns([(isl, 0)], 0, 0) + step.decode_run_ns(1, isl + 1, max(osl - 1, 1))
    ) / NS_PER_S
