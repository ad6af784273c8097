"""vLLM's push against its pull: slots by Little's law, and the time to first token they decide."""

from __future__ import annotations

from typing import Final

from benchmarks.published.data import Data, mean
from benchmarks.published.rows import Row, close, holds, unchecked
from benchmarks.published.sim import Workers, simulate
from twofold.cost.models import model_shape
from twofold.cost.readers import read_profile
from twofold.cost.step import LinearStep
from twofold.cost.step_profile import step_time
from twofold.metrics.record import RequestRecord
from twofold.trace import Lengths, poisson
from twofold.types import NS_PER_MS

SOURCE: Final = "vLLM push against pull"


def _ttft(records: list[RequestRecord]) -> float:
    return mean((r.ttft_ns or 0) / NS_PER_MS for r in records)


def _held(records: list[RequestRecord]) -> float:
    """Mean decode slots held from the first to the last request's arrival."""
    span = records[-1].arrival_ns - records[0].arrival_ns
    busy = 0
    for record in records:
        phases = record.phases_ns
        first = phases.get("transfer", 0) + phases.get("first_step", 0)
        busy += record.token_times_ns[-1] - record.token_times_ns[0] + first
    return busy / span


def slots_rows(data: Data) -> list[Row]:
    """Decode with a fixed step of 7.0 or 10.4 ms: slots held without a limit, TTFT with eight."""
    n = 400 if data.quick else 2000
    shape = model_shape("Qwen3-32B")

    def run(step_ms: float, slots: int, count: int) -> list[RequestRecord]:
        decode = Workers(
            step=LinearStep(round(step_ms * NS_PER_MS), 0.0),
            kv_tokens=4_000_000,
            max_num_seqs=slots,
            budget=max(8192, slots),
        )
        prefill = Workers(step=LinearStep(NS_PER_MS, 0.0), kv_tokens=40_000_000, budget=65536)
        requests = poisson([Lengths(512, 128)] * count, 8.0, seed=0)
        return simulate(
            "1P1D", shape, {"prefill": prefill, "decode": decode}, requests, link_bytes_per_s=10**12
        )

    rows = []
    conditions = (
        f"decode steps fixed at {{}} ms whatever the batch, prefill of 1 "
        f"ms, transfer at 1 TB/s, {n:,} Poisson requests (seed 0) at 8 "
        "req/s of 128 tokens"
    )
    for step_ms, told in ((7.0, 7.2), (10.4, 10.6)):
        held = _held(run(step_ms, 256, n))
        rows.append(
            close(
                SOURCE,
                f"slots held at {step_ms} ms a token, simulated",
                told,
                held,
                conditions=conditions.format(step_ms),
            )
        )
    few = 100
    slow, fast = run(10.4, 8, few), run(7.0, 8, few)
    longer = _ttft(run(10.4, 8, 4 * few))
    wait = _ttft(slow) - _ttft(fast)
    eight = (
        f"{conditions.format('7.0 and 10.4')}; 8 slots; the source does not "
        f"say how many requests were sent: {few} here"
    ).replace(f"{n:,} Poisson", f"{few} Poisson")
    why = (
        f"10.6 slots wanted and 8 held is an overload, whose wait grows with every request: "
        f"{_ttft(slow) / 1e3:.1f} s over {few} requests, {longer / 1e3:.1f} s over {4 * few}"
    )
    rows.append(
        holds(
            SOURCE,
            "with 8 slots, 10.4 ms a token brings a second of TTFT and 7.0 does not",
            "+1.2 s (540 to 1744 ms)",
            f"{_ttft(fast):.0f} to {_ttft(slow):.0f} ms",
            wait > 1000 and _ttft(fast) < 1000,
            conditions=eight,
            why=why,
        )
    )
    rows.append(
        close(
            SOURCE,
            "with 8 slots: TTFT added by pull",
            1744 - 540,
            wait,
            unit="ms",
            conditions=eight,
            why=why,
        )
    )
    return rows


def mode_rows(data: Data) -> list[Row]:
    """The same deployment with either handoff, 16k prompts at 8 req/s on two 8 x H200 servers."""
    what = "Qwen3-32B, 16k prompts, 8 req/s, 8 slots: push takes off pull's TTFT"
    n = 60 if data.quick else 200
    step = step_time(
        read_profile(data.path("profiles/aiconfigurator_steps/Qwen3-32B__h200_sxm__vllm__tp8.csv")),
        extrapolate=True,
    )
    prefill = Workers(step=step, kv_tokens=2_000_000, budget=16384)
    decode = Workers(step=step, kv_tokens=2_000_000, max_num_seqs=8, budget=8192)
    found: dict[str, float] = {}
    for mode in ("pull", "push", "layerwise"):
        requests = poisson([Lengths(16000, 128)] * n, 8.0, seed=0)
        records = simulate(
            "1P1D",
            model_shape("Qwen3-32B"),
            {"prefill": prefill, "decode": decode},
            requests,
            link_bytes_per_s=400_000_000_000,
            handoff=mode,
        )
        found[mode] = _ttft(records)
    shown = ", ".join(f"{mode} {ms:.0f} ms" for mode, ms in found.items())
    conditions = (
        "one TP8 prefill worker and one TP8 decode worker, step table of "
        "aiconfigurator (BF16, an estimate), 8 decode slots, 50 GB/s a "
        f"card, 128 output tokens (not printed), {n} Poisson requests (seed "
        "0)"
    )
    load = 8 * step.step_ns([(16000, 0)], 0, 0) / NS_PER_MS / 10
    return [
        close(
            SOURCE,
            what,
            1744 / 540,
            found["pull"] / found["push"],
            unit="times",
            conditions=f"{conditions}; {shown}",
            why=(
                f"8 req/s of 16,000 new tokens are {load:.0f} % of what one such worker can read, "
                "so that both modes wait for prefill alone; the source must have had its prompts "
                "in cache, which it does not say. Its gain is decode's step falling from 10.4 to "
                "7.0 ms as preparation leaves the loop (rows above)"
            ),
        )
    ]


def unchecked_rows(_: Data) -> list[Row]:
    """What names no model or hardware."""
    return [
        unchecked(
            SOURCE,
            "512/128, TP4, 8 req/s: TTFT 2948 to 1212 ms, P99 7259 to 2827 ms, 4.65 to 5.92 req/s",
            "2948 to 1212 ms",
            "neither model nor accelerator is named, so that no step time can be chosen",
        ),
        unchecked(
            SOURCE,
            "TPOT 6.14 to 5.52 ms once submission moved to a thread",
            "6.14 to 5.52 ms",
            "a property of that program's loop; the loss itself is the arithmetic row 8 x 14.7 ms",
        ),
    ]
