"""Simulation against measured servers: the H100 case where splitting loses, and silicon points."""

from __future__ import annotations

import csv
import gzip
import re
from collections.abc import Mapping, Sequence
from typing import Final

from benchmarks.published.data import Data, mean
from benchmarks.published.rows import Row, close, holds, unchecked, with_note
from benchmarks.published.sim import Workers, simulate
from twofold.cost.models import fits_tokens, model_shape
from twofold.cost.readers import read_profile
from twofold.cost.step import StepTime
from twofold.cost.step_profile import step_time
from twofold.metrics.record import RequestRecord
from twofold.trace import TraceRequest
from twofold.types import NS_PER_MS, NS_PER_S

H100: Final = "LLMServingSim2 (measured vLLM)"
SILICON: Final = "aiconfigurator silicon"


def h100_rows(data: Data) -> list[Row]:
    """One, two and one-plus-one instances of Llama-3.1-70B TP4 on the same 300 requests."""
    told = data.paper("llmservingsim2")["measured_vllm"]
    path = data.path("profiles/aiconfigurator_steps/Meta-Llama-3.1-70B__h100_sxm__vllm__tp4.csv")
    shape = model_shape("Llama-3.1-70B")
    workers = Workers(
        step=step_time(read_profile(path), extrapolate=True),
        kv_tokens=fits_tokens(shape, int(80e9 * 0.9), 4, 2.0),
        max_num_seqs=256,
        budget=8192,
    )
    requests = list(data.trace("llmservingsim_sharegpt_llama_req300_rate10.csv"))
    conditions = (
        "Llama-3.1-70B bf16, TP4 H100 an instance, the published 300 requests with their arrivals, "
        "step table of aiconfigurator (vLLM, an estimate), KV in 90 % of memory, 256 sequences and "
        "8,192 tokens a step, no prefix cache, 50 GB/s per card, latencies 0.1 ms"
    )
    found: dict[str, tuple[float, float, float]] = {}
    for name, pools in (("SD", "1M"), ("MD", "2M"), ("PDD", "1P1D")):
        records = simulate(pools, shape, workers, requests, link_bytes_per_s=200_000_000_000, latency={})
        found[name] = _measures(records)
    labels = {"SD": "one instance (SD)", "MD": "two instances (MD)", "PDD": "1P1D (PDD)"}
    why = {
        "output tokens per s": "",
        "mean TTFT": "the step table has no host time: tokenising, HTTP and scheduling are some 20 ms of each measured TTFT, and PDD's proxy and KV connector some 60 ms more; without queues nothing else is in it",
        "mean TPOT": "the table's decode step is of the kernels; the measured server's loop adds its own time to each",
    }
    rows = []
    for name, values in found.items():
        for label, unit, published, ours in zip(why, ("tok/s", "ms", "ms"), told[name], values, strict=True):
            rows.append(close(H100, f"{labels[name]}: {label}", published, ours, unit=unit, conditions=conditions, why=why[label]))
    split, two = found["PDD"], found["MD"]
    loses = split[0] <= two[0] and split[1] > two[1] and split[2] > two[2]
    shown = f"throughput {split[0]:.0f} against {two[0]:.0f}, TTFT {split[1]:.0f} against {two[1]:.0f}, TPOT {split[2]:.1f} against {two[2]:.1f}"
    rows.append(holds(H100, "1P1D is worse than two instances on the same 8 GPUs, in all three", "throughput 1801 against 1858, TTFT 129 against 50, TPOT 28.1 against 22.7", shown, loses, conditions=conditions))
    rows.append(unchecked(H100, "one Mixtral-8x7B instance (SM)", "2134 tok/s", "no step table of Mixtral-8x7B in the data"))
    return rows


def _measures(records: Sequence[RequestRecord]) -> tuple[float, float, float]:
    """Output tokens per s from the first arrival to the last token, mean TTFT and mean TPOT."""
    start = min(r.arrival_ns for r in records)
    end = max(r.token_times_ns[-1] for r in records)
    tokens = sum(len(r.token_times_ns) for r in records)
    ttft = mean((r.ttft_ns or 0) / NS_PER_MS for r in records)
    tpot = mean(r.tpot_ns / NS_PER_MS for r in records if r.tpot_ns is not None)
    return tokens * NS_PER_S / (end - start), ttft, tpot


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
        workers = Workers(step=step_time(read_profile(path), extrapolate=True), kv_tokens=fits_tokens(shape, int(80e9 * 0.9), tp, 2.0), max_num_seqs=1024, budget=8192)
        ttft, tpot = _closed_loop(workers, int(loop[1]), int(row["isl"]), int(row["osl"]))
        told = float(row["silicon_ttft_ms"]), float(row["silicon_tpot_ms"])
        errors = 100 * (ttft - told[0]) / told[0], 100 * (tpot - told[1]) / told[1]
        if abs(errors[1]) > max((abs(e[1]) for e in by_tp.get(tp, ())), default=0.0):
            worst[tp] = f"worst TPOT at {row['isl']}/{row['osl']}, concurrency {loop[1]}: {told[1]:.1f} measured, {tpot:.1f} here"
        by_tp.setdefault(tp, []).append(errors)
    conditions = (
        "Qwen3-32B BF16 on H100, vLLM 0.12, {n} points (input/output and concurrency as printed), step "
        "table of aiconfigurator (an estimate), 8,192 tokens a step, closed loop run as evenly spaced "
        "arrivals at the rate that keeps the concurrency by Little's law, first third left out"
    )
    rows = []
    for tp, errors in sorted(by_tp.items()):
        for label, i in (("TPOT", 1), ("TTFT", 0)):
            off = mean(e[i] for e in errors)
            size = mean(abs(e[i]) for e in errors)
            why = (
                "a loop that starts with all its prompts at once keeps them in step, so that each waits for the "
                "others' prompts; evenly spaced ones do not"
                if label == "TTFT"
                else "the table has kernels only; a measured server's loop adds its own time to each step"
            )
            row = close(SILICON, f"TP{tp}: mean {label} of {len(errors)} points (100 = measured)", 100.0, 100.0 + off, conditions=conditions.format(n=len(errors)), why=why)
            rows.append(with_note(row, f"mean size of the error {size:.1f} %" + (f"; {worst[tp]}" if i else "")))
    rows.append(unchecked(SILICON, f"the other {2618 - seen:,} points", "", "other backends (TensorRT-LLM, SGLang), or precisions (FP8, FP4) and models for which the data has no step table of that backend and precision"))
    rows.append(unchecked(SILICON, "Qwen3-32B FP8, 32 x H200, 4000/500: 812.9 split, 478.6 unsplit tok/s per GPU", "812.9 against 478.6", "the data's Qwen3-32B table is BF16; an FP8 one would be needed for either number"))
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
    return (step.step_ns([(isl, 0)], 0, 0) + step.decode_run_ns(1, isl + 1, max(osl - 1, 1))) / NS_PER_S
