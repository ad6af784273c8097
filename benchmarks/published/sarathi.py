"""Sarathi-Serve: what reading a prompt in chunks costs."""

from __future__ import annotations

import csv
from typing import Final

from benchmarks.published.data import Data
from benchmarks.published.rows import Row, close, holds, unchecked
from twofold.cost.readers import read_profile
from twofold.cost.step import StepTime
from twofold.cost.step_profile import step_time

SOURCE: Final = "Sarathi-Serve"


def chunk_rows(data: Data) -> list[Row]:
    """The published overheads of Figure 9 against a step table's, for the same lengths."""

    def table(name: str) -> StepTime:
        path = data.path(f"profiles/aiconfigurator_steps/{name}.csv")
        return step_time(read_profile(path), extrapolate=True)

    one = table("Meta-Llama-3.1-8B__a100_sxm__vllm__tp1")
    eight = table("Meta-Llama-3.1-70B__a100_sxm__vllm__tp8")
    lengths = (2048, 4096, 8192, 16384)
    others = [_relative(eight, prompt, 512) for prompt in lengths]
    conditions = (
        "prefill in chunks over prefill whole; the published file names no model or GPU: here "
        "Llama-3.1-8B on one A100 (step table of aiconfigurator, an estimate); chosen second, "
        f"after Llama-3.1-70B on eight, which gives {min(others):.2f} to {max(others):.2f} at 512"
    )
    rows = []
    worst: dict[int, float] = {512: 0.0, 2048: 0.0}
    with data.path("profiles/sarathi/figure-9_chunking-overhead.csv").open() as file:
        for row in csv.DictReader(file):
            prompt, chunk = int(row["prefill_length"]) + 1, int(row["chunk_size"])
            if chunk >= 16384:
                continue
            ours = _relative(one, prompt, chunk)
            if chunk in worst:
                worst[chunk] = max(worst[chunk], ours)
            rows.append(
                close(
                    SOURCE,
                    f"prefill of {prompt:,} tokens in chunks of {chunk:,}, against whole",
                    float(row["prefill_execution_time_relative"]),
                    ours,
                    unit="times",
                    conditions=conditions,
                    why=(
                        "the published whole prompt of 16,384 is slower than its chunks, "
                        "which no model of the work has"
                    ),
                )
            )
    rows.append(
        holds(
            SOURCE,
            "chunks of 512 cost at most about 25 % of prefill time",
            "<= 25 %",
            f"{100 * worst[512] - 100:.0f} %",
            worst[512] <= 1.25,
            conditions=conditions + "; worst of the four lengths",
            why="a step of 512 tokens does not fill the GPU",
        )
    )
    rows.append(
        holds(
            SOURCE,
            "chunks of 2,048 cost next to nothing",
            "negligible",
            f"{100 * worst[2048] - 100:.1f} %",
            worst[2048] <= 1.05,
            conditions=conditions + "; worst of the four lengths, negligible taken as 5 %",
            why="a step of 2,048 tokens does not fill the GPU",
        )
    )
    return rows


def _relative(step: StepTime, prompt: int, chunk: int) -> float:
    """Time in chunks over time whole."""
    chunks = [(min(chunk, prompt - at), at) for at in range(0, prompt, chunk)]
    return sum(step.step_ns([part], 0, 0) for part in chunks) / step.step_ns([(prompt, 0)], 0, 0)


def unchecked_rows(_: Data) -> list[Row]:
    """What needs profiles that are not here."""
    return [
        unchecked(
            SOURCE,
            "Table 4: Yi-34B TP2, P50 TTFT and P99 TBT",
            "0.76 s, 0.14 s",
            "no step table of Yi-34B in the data",
        ),
        unchecked(
            SOURCE,
            "capacity up to 2.6, 3.7 and 5.6 times vLLM",
            "2.6, 3.7, 5.6 times",
            "no step tables of Mistral-7B, Yi-34B or Falcon-180B on their GPUs in the data",
        ),
        unchecked(
            "TetriInfer",
            "38 % fewer resources, mean TTFT -97 %, mean job time -47 %",
            "38, -97, -47 %",
            "a simulated result whose model, load and baseline settings are not in the data",
        ),
    ]
