"""Rows that are arithmetic: no simulation, and no excuse for being off."""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.published.data import Data, mean
from benchmarks.published.rows import Row, close, exact, holds
from twofold.cost.models import model_shape
from twofold.cost.profile import Polynomial
from twofold.cost.readers import read_profile
from twofold.cost.sizing import chunk_reads, decode_slots, loop_time_lost, transfer_ms, workers
from twofold.trace import TraceRequest
from twofold.types import ceil_div

KIB, MIB, GIB = 2.0**10, 2.0**20, 2.0**30
SHAPES = "shipped model shapes, 2 bytes per element"


def kv_rows(_: Data) -> list[Row]:
    """KV bytes, and what moving them takes."""
    qwen, small = model_shape("Qwen3-32B"), model_shape("Llama-3.1-8B")
    llama, opt = model_shape("Llama-3.1-70B"), model_shape("OPT-66B")
    long_bytes = qwen.kv_bytes(16_000)
    kv = "KV bytes"
    return [
        exact(
            kv,
            "Qwen3-32B, one token",
            "256",
            qwen.kv_bytes_per_token() / KIB,
            unit="KiB",
            conditions=SHAPES,
        ),
        exact(
            kv,
            "Qwen3-32B, 16,000 tokens",
            "4.2",
            long_bytes / 1e9,
            unit="GB",
            conditions=SHAPES,
        ),
        exact(
            kv,
            "the same over TP 8 at 50 GB/s a card",
            "10",
            transfer_ms(long_bytes, 50e9, 8),
            unit="ms",
            conditions='printed as "about 10 ms"',
        ),
        exact(
            kv,
            "Llama-3.1-8B, one token",
            "128",
            small.kv_bytes_per_token() / KIB,
            unit="KiB",
            conditions=SHAPES,
        ),
        exact(
            kv,
            "Llama-3.1-8B, a 2k prompt",
            "256",
            small.kv_bytes(2048) / MIB,
            unit="MiB",
            conditions=f"{SHAPES}; 2k is 2,048",
        ),
        exact(
            kv,
            "Llama-3-70B, one token",
            "320",
            llama.kv_bytes_per_token() / KIB,
            unit="KiB",
            conditions=f"{SHAPES}; Mooncake's 320 KB are KiB",
        ),
        exact(
            kv,
            "Llama-3-70B, a 128k prompt",
            "40",
            llama.kv_bytes(128 * 1024) / GIB,
            unit="GiB",
            printed_unit="GB",
            conditions=f"{SHAPES}; the published GB are GiB",
        ),
        exact(
            kv,
            "OPT-66B, 512 tokens",
            "1.13",
            opt.kv_bytes(512) / GIB,
            unit="GiB",
            printed_unit="GB",
            conditions=f"{SHAPES}; the published GB are GiB",
        ),
        exact(
            kv,
            "OPT-66B, 512 tokens at 10 req/s",
            "90",
            opt.kv_bytes(512) * 10 * 8 / GIB,
            unit="Gibit/s",
            printed_unit="Gbit/s",
            conditions="the published Gbit/s are binary, as the GB are",
        ),
    ]


def sizing_rows(_: Data) -> list[Row]:
    """Slots, loop time, workers, chunk reads."""
    what = "Sizing"
    little = "Little's law: rate x output tokens x time per token"
    two_each = "2 req/s of 4,000 in and 500 out, 5,000 and 800 tok/s per worker at 0.8"
    few, many = chunk_reads(8192, 1024), chunk_reads(8192, 512)
    return [
        exact(
            what,
            "slots at 8 req/s, 128 tokens, 7.0 ms",
            "7.2",
            decode_slots(8, 128, 7.0),
            conditions=little,
        ),
        exact(
            what,
            "slots at 8 req/s, 128 tokens, 10.4 ms",
            "10.6",
            decode_slots(8, 128, 10.4),
            conditions=little + "; 10.65 exactly, printed as 10.6",
        ),
        exact(
            what,
            "slots of a 2,000-token answer against 128",
            "16",
            decode_slots(1, 2000, 7.0) / decode_slots(1, 128, 7.0),
            unit="times",
            conditions=little,
        ),
        exact(
            what,
            "decode-loop time lost at 8 req/s x 14.7 ms",
            "12",
            100 * loop_time_lost(8, 14.7),
            unit="%",
            conditions="arrivals/s x preparation",
        ),
        exact(what, "prefill workers", "2", workers(2, 4000, 5000, 0.8), conditions=two_each),
        exact(what, "decode workers", "2", workers(2, 500, 800, 0.8), conditions=two_each),
        holds(
            what,
            "tokens read again in N chunks",
            "O(N^2)",
            f"{many / few:.2f} times for 16 chunks against 8",
            abs(many / few - 15 / 7) < 1e-9,
            conditions="an 8,192-token prompt: N (N - 1) / 2 chunks of context",
        ),
    ]


def distserve_rows(data: Data) -> list[Row]:
    """DistServe's printed profile against the reader, and its printed ratios."""
    profile = read_profile(
        data.path("profiles/distserve/profiler-a100-80g.distserve.json"), "opt-13b:1"
    )
    formula = profile.formula or Polynomial(
        prefill=(0, 0, 0), decode_small=(0, 0, 0), decode_large=(0, 0, 0), threshold=0
    )
    printed = [
        ("prefill, constant", "18.10", formula.prefill[0], "ms"),
        ("prefill, per token", "0.1019", formula.prefill[1], "ms"),
        ("prefill, per token squared", "7.12", formula.prefill[2] * 1e6, "1e-6 ms"),
        ("decode, constant", "19.93", formula.decode_small[0], "ms"),
        ("decode, per token of context", "6.27", formula.decode_small[1] * 1e4, "1e-4 ms"),
        ("decode, per sequence", "0.0385", formula.decode_small[2], "ms"),
        ("decode batch from which another fit holds", "95", formula.threshold, ""),
    ]
    where = "the shipped coefficients as read by the profile reader, A100, OPT-13B TP1"
    rows = [
        exact("DistServe", f"profile: {what}", text, value, unit=unit, conditions=where)
        for what, text, value, unit in printed
    ]
    toy = data.paper("distserve")["fig1"]
    per_gpu = min(2 * toy["prefill_only_rps_per_gpu"], toy["decode_only_rps_per_gpu"]) / 3
    printed_numbers = "the printed 5.6 (prefill), 10 (decode) and 1.6 (both) req/s"
    rows += [
        exact(
            "DistServe",
            "toy: 2P1D, req/s per GPU",
            "3.3",
            per_gpu,
            conditions=f"min(2 x 5.6, 10) / 3 from {printed_numbers}",
        ),
        exact(
            "DistServe",
            "toy: gain over colocated",
            "2.1",
            per_gpu / toy["colocated_rps"],
            unit="times",
            conditions=printed_numbers,
        ),
    ]
    goodput = data.paper("distserve")["goodput_90pct_per_gpu"]
    ratios = [
        ("opt-13b-sharegpt", "vLLM", "4.6"),
        ("opt-13b-sharegpt", "DeepSpeedMII", "7.36"),
        ("opt-66b-sharegpt", "vLLM", "2.75"),
        ("opt-66b-sharegpt", "DeepSpeedMII", "1.573"),
        ("opt-175b-sharegpt", "vLLM", "1.99"),
        ("opt-66b-humaneval", "vLLM", "5.72"),
        ("opt-66b-humaneval", "DeepSpeedMII", "1.589"),
        ("opt-66b-longbench", "vLLM", "4.24"),
        ("opt-66b-longbench", "DeepSpeedMII", "1.767"),
    ]
    rows += [
        exact(
            "DistServe",
            f"{case}: goodput ratio to {other}",
            text,
            goodput[case]["DistServe"] / goodput[case][other],
            unit="times",
            conditions="quotient of the two printed goodputs",
        )
        for case, other, text in ratios
    ]
    return rows


def mooncake_rows(data: Data) -> list[Row]:
    """Mooncake's capacity, break-even and trace arithmetic."""
    paper = data.paper("mooncake")
    llama = model_shape("Llama-3.1-70B")
    token = llama.kv_bytes_per_token()
    model = paper["prefill_model"]
    n, layers, width = paper["reuse_breakeven_GB_s"]["prefix"], model["l"], model["d"]
    flops = layers * (model["a"] * n**2 * width + model["b"] * n * width**2)
    what = "Mooncake"
    saved = "prefix KV bytes / (its prefill FLOPs / (8 x {} TFLOP/s)), prefix 8,192, a 4, b 22"
    rows = [
        exact(
            what,
            "tokens in 1 TB of DRAM",
            "3",
            1e12 / token / 1e6,
            unit="million",
            conditions="320 KiB per token",
        ),
        exact(
            what,
            "bandwidth from which reuse pays, 8 x A800",
            "6",
            n * token / (flops / 8 / 312e12) / 1e9,
            unit="GB/s",
            conditions=saved.format(312),
        ),
        exact(
            what,
            "bandwidth from which reuse pays, 8 x H800",
            "19",
            n * token / (flops / 8 / 989e12) / 1e9,
            unit="GB/s",
            conditions=saved.format(989),
        ),
    ]
    table = paper["table2"]
    for column, name in ((0, "conversation"), (2, "synthetic")):
        requests = list(data.trace(f"mooncake_{name}_trace.jsonl"))
        told = [
            ("requests", table["requests"], len(requests)),
            ("mean input tokens", table["avg_input"], mean(r.input_tokens for r in requests)),
            ("mean output tokens", table["avg_output"], mean(r.output_tokens for r in requests)),
        ]
        rows += [
            exact(
                what,
                f"{name} trace: {label}",
                f"{values[column]:,}",
                ours,
                conditions="as read by the trace reader",
            )
            for label, values, ours in told
        ]
        rows.append(
            close(
                what,
                f"{name} trace: cache ratio",
                table["cache_ratio"][column],
                _cache_ratio(requests),
                conditions=(
                    "whole 512-token blocks seen before over all whole blocks, cache without limit"
                ),
            )
        )
    return rows


def _cache_ratio(requests: Sequence[TraceRequest]) -> float:
    seen: set[int] = set()
    hits = total = 0
    for request in requests:
        hashes = request.hash_ids or ()
        whole = request.input_tokens // 512
        hits += sum(block in seen for block in hashes[:whole])
        total += whole
        seen.update(hashes)
    return hits / total


def trace_rows(data: Data) -> list[Row]:
    """Medians of the Azure and Sarathi length sets."""
    rows = []
    told = data.paper("splitwise")["trace"]
    for name, file in (("coding", "code"), ("conv", "conv")):
        lengths = data.lengths(f"azure2023_{file}.csv")
        for label, values in (
            ("prompt", [r.input_tokens for r in lengths]),
            ("output", [r.output_tokens for r in lengths]),
        ):
            published = told[f"{name}_{label}_median"]
            ours = sorted(values)[len(values) // 2]
            # The paper rounds the coding prompt's median to hundreds ("1500").
            step = 100.0 if published == 1500 else 0.0
            rows.append(
                exact(
                    "Splitwise",
                    f"{file} trace: median {label} tokens",
                    f"{published:,}",
                    ours,
                    step=step,
                    conditions=f"all {len(lengths):,} rows"
                    + (", printed in hundreds" if step else ""),
                )
            )
    sets = data.paper("sarathi")["datasets"]["openchat_sharegpt4"]
    lengths = data.lengths("sharegpt_8k_lengths_llama2.csv.gz")
    for label, values in (
        ("prompt", [r.input_tokens for r in lengths]),
        ("output", [r.output_tokens for r in lengths]),
    ):
        ranked = sorted(values)
        for percent in (50, 90):
            ours = ranked[ceil_div(percent * len(ranked), 100) - 1]
            rows.append(
                exact(
                    "Sarathi-Serve",
                    f"openchat_sharegpt4: P{percent} {label} tokens",
                    f"{sets[f'{label}_p{percent}']:,}",
                    ours,
                    conditions=f"{len(ranked):,} rows, nearest rank",
                )
            )
    return rows


def paging_rows(data: Data) -> list[Row]:
    """PagedAttention's waste: the empty part of each sequence's last block."""
    lengths = data.lengths("sharegpt_8k_lengths_llama2.csv.gz")
    used = sum(r.input_tokens + r.output_tokens for r in lengths)
    kept = sum(16 * ceil_div(r.input_tokens + r.output_tokens, 16) for r in lengths)
    waste = 100 * (kept - used) / kept
    rows = [
        holds(
            "PagedAttention",
            "KV memory wasted",
            "< 4 %",
            f"{waste:.2f} %",
            waste < 4,
            conditions=(
                "empty slots of last blocks of 16, openchat_sharegpt4 lengths at their full length"
            ),
        )
    ]
    reserved = 8192 * len(lengths)
    without = 100 * (reserved - used) / reserved
    rows.append(
        holds(
            "PagedAttention",
            "KV memory wasted when the longest length is reserved",
            "60-80 %",
            f"{without:.0f} %",
            60 <= without <= 80,
            conditions="8,192 slots reserved for each of the same requests",
            why="the share follows the length mix; the published range is of its own mixes",
        )
    )
    return rows
