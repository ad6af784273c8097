"""Mooncake: the GPU time of prefill with and without reuse of cached prefixes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from benchmarks.published.data import Data
from benchmarks.published.mooncake import SOURCE
from benchmarks.published.rows import Row, close
from twofold.cost.models import model_shape
from twofold.trace import TraceRequest

HASHED: Final = 512
FEED_FORWARD: Final = 22
ATTENTION: Final = 4
"""The paper's prefill model: layers x (a n^2 d + b n d^2) floating-point operations."""


def reuse_rows(data: Data) -> list[Row]:
    """Prefill time of vLLM, which reuses nothing, over that with a cache without limit."""
    told = data.paper("mooncake")["prefill_gpu_time_ratio_vs_mooncake"]
    rows = []
    for name in ("conversation", "synthetic"):
        whole = left = 0.0
        for request, cached in _hits(data.trace(f"mooncake_{name}_trace.jsonl")):
            whole += _flops(request.input_tokens)
            left += _flops(request.input_tokens) - _flops(cached)
        rows.append(
            close(
                SOURCE,
                f"prefill GPU time of vLLM over Mooncake's, {name}",
                told[name]["vllm"],
                whole / left,
                unit="times",
                conditions=(
                    "the paper's formula of prefill work, a 4 and b 22, all prompts of the file in "
                    "order; Mooncake's hits are those of a cache without limit"
                ),
                why="of both systems the paper gives measured GPU time, here it is arithmetic",
            )
        )
    return rows


def _flops(tokens: int) -> float:
    hidden = model_shape("Llama-3.1-70B").hidden
    return ATTENTION * tokens**2 * hidden + FEED_FORWARD * tokens * hidden**2


def _hits(requests: Iterator[TraceRequest]) -> Iterator[tuple[TraceRequest, int]]:
    """Requests, and how many of each one's leading tokens came before."""
    seen: set[int] = set()
    for request in requests:
        hashes = request.hash_ids or ()
        cached = 0
        for block in hashes[: request.input_tokens // HASHED]:
            if block not in seen:
                break
            cached += HASHED
        seen.update(hashes)
        yield request, min(cached, request.input_tokens - 1)
