"""DistServe's set-ups: its models, placements, lengths and the limits of its engines."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from typing import Final

import msgspec

from benchmarks.published.data import Data, spread
from benchmarks.published.rows import Row, close, holds
from benchmarks.published.sim import (
    NEVER,
    Times,
    Workers,
    at_client,
    at_prefill,
    attainment,
    crossing,
    highest,
    one_token_less,
    simulate,
)
from twofold.cost.models import model_shape
from twofold.cost.profile import Polynomial, Profile
from twofold.cost.readers import read_profile
from twofold.cost.step_profile import step_time
from twofold.trace import Lengths, TraceRequest, poisson

SOURCE: Final = "DistServe"
SHAREGPT: Final = "sharegpt_8k_lengths_llama2.csv.gz"
OPT_LIMIT: Final = 2048
STANDIN: Final = (
    "lengths are a stand-in: openchat_sharegpt4 (Llama-2 tokens) with prompt + output < 2,048, "
    "mean 606 in and 395 out; DistServe's own ShareGPT file (OPT tokens) is not in the data"
)
STANDIN_ARXIV: Final = (
    "lengths are a stand-in: arxiv_summarization with prompt + output < 2,048, mean 1,332 in and "
    "204 out; LongBench itself is not in the data"
)
SAMPLED: Final = (
    "first token at the end of prefill as DistServe counts it, so that n output tokens are n - 1 "
    "decode steps"
)


class Placement(msgspec.Struct, frozen=True, kw_only=True):
    """DistServe's degrees for one model. A pipeline of p stages is run as p workers of its tensor
    degree: as many batches in flight, each token through all stages, KV shared out evenly.
    """

    model: str
    prefill_tp: int = 0
    decode_tp: int = 0
    decode_pp: int = 1
    vllm_tp: int = 0

    @property
    def gpus(self) -> int:
        """Of one pair."""
        return self.prefill_tp + self.decode_tp * self.decode_pp


OPT_13B: Final = Placement(model="opt-13b", prefill_tp=2, decode_tp=1, vllm_tp=1)
OPT_66B: Final = Placement(model="opt-66b", prefill_tp=4, decode_tp=2, decode_pp=2, vllm_tp=4)


def fit(data: Data, model: str, tp: int, engine: str = "distserve") -> Profile:
    """The shipped coefficients."""
    path = data.path(f"profiles/distserve/profiler-a100-80g.{engine}.json")
    return read_profile(path, f"{model}:{tp}")


def with_overhead(profile: Profile) -> Profile:
    """The coefficients with what DistServe's simulator adds to every step (`add_ray_overhead`:
    2 ms and 1e-4 ms per token of context) and to every prefill (1 ms).
    """
    assert profile.formula is not None
    formula = profile.formula
    a, b, c = formula.prefill

    def decode(fitted: tuple[float, float, float]) -> tuple[float, float, float]:
        return fitted[0] + 2.0, fitted[1] + 1e-4, fitted[2]

    return msgspec.structs.replace(
        profile,
        formula=Polynomial(
            prefill=(a + 3.0, b + 1e-4, c),
            decode_small=decode(formula.decode_small),
            decode_large=decode(formula.decode_large),
            threshold=formula.threshold,
            max_prefill_tokens=formula.max_prefill_tokens,
        ),
    )


def kv_tokens(data: Data, model: str, tp: int, pp: int = 1) -> int:
    """`max_num_tokens` of the shipped table."""
    with data.path("profiles/distserve/max_num_tokens.csv").open() as file:
        for row in csv.DictReader(file):
            if (row["model"], row["tp"], row["pp"]) == (f"facebook/{model}", str(tp), str(pp)):
                return int(row["max_num_tokens"])
    raise KeyError(f"{model} tp {tp} pp {pp}")


def short_lengths(data: Data, name: str = SHAREGPT) -> list[Lengths]:
    """Lengths that fit OPT's 2,048 positions."""
    return [r for r in data.lengths(name) if r.input_tokens + r.output_tokens < OPT_LIMIT]


def run_split(
    data: Data, place: Placement, requests: Sequence[TraceRequest], *, overhead: bool = False
) -> list[Times]:
    """One pair of DistServe's placement, as DistServe measures it."""

    def worker(tp: int, kv: int, budget: int) -> Workers:
        profile = fit(data, place.model, tp)
        profile = with_overhead(profile) if overhead else profile
        return Workers(step=step_time(profile), kv_tokens=kv, budget=budget)

    decode_kv = kv_tokens(data, place.model, place.decode_tp, place.decode_pp) // place.decode_pp
    workers = {
        "prefill": worker(
            place.prefill_tp, kv_tokens(data, place.model, place.prefill_tp), 8192
        ),
        "decode": worker(place.decode_tp, decode_kv, 65536),
    }
    records = simulate(
        f"1P{place.decode_pp}D",
        model_shape(place.model.upper()),
        workers,
        one_token_less(requests),
    )
    return [at_prefill(record) for record in records]


def run_vllm(data: Data, place: Placement, requests: Sequence[TraceRequest]) -> list[Times]:
    """One unsplit vLLM instance with the flags of DistServe's scripts."""
    workers = Workers(
        step=step_time(fit(data, place.model, place.vllm_tp, "vllm"), extrapolate=True),
        kv_tokens=kv_tokens(data, place.model, place.vllm_tp),
        budget=16384,
    )
    records = simulate("1M", model_shape(place.model.upper()), workers, requests)
    return [at_client(record) for record in records]


def example_rows(data: Data) -> list[Row]:
    """The worked example of DistServe's simulator: 1.56 req/s per GPU with TP2 and TP1."""
    lengths = short_lengths(data)
    found: dict[str, float] = {}
    for prefill_tp, decode_tp in ((1, 1), (2, 1), (1, 2), (2, 2)):
        place = Placement(model="opt-13b", prefill_tp=prefill_tp, decode_tp=decode_tp)
        low, high = 0.0, 5.0
        while high - low >= 0.25:
            rate = (low + high) / 2
            times = _at_rate(data, place, lengths, rate * place.gpus)
            ok = attainment(times, 200, NEVER) >= 90 and attainment(times, NEVER, 100) >= 90
            low, high = (rate, high) if ok else (low, rate)
        found[f"TP{prefill_tp} prefill + TP{decode_tp} decode"] = low
    best = max(found, key=lambda name: found[name])
    conditions = (
        "OPT-13B, DistServe's fit with its simulator's overheads (+3 ms a prefill, +2 ms a decode "
        "step, 1e-4 ms per token), max_num_tokens of its table, one pair, NVLink 300 GB/s, N = "
        "300 Poisson (seed 0), P90 of TTFT 200 ms and of TPOT 100 ms each, its bisection over "
        f"0 to 5 per GPU to 0.25; prefill steps up to 8,192 tokens; {SAMPLED}; {STANDIN}; only "
        "placements without pipelines on up to 4 GPUs"
    )
    shown = ", ".join(f"{name} {rate:.2f}" for name, rate in found.items())
    why = (
        f"shorter prompts than DistServe's move the prefill knee: all placements {shown}; "
        "its grid is 0.3125 wide"
    )
    return [
        close(SOURCE, "simulator example: best rate per GPU", 1.56, found[best], unit="req/s", conditions=conditions, why=why),
        holds(SOURCE, "simulator example: best placement", "TP2 prefill + TP1 decode", best, best == "TP2 prefill + TP1 decode", conditions=conditions, why=why),
    ]


def _at_rate(
    data: Data, place: Placement, lengths: Sequence[Lengths], rate_rps: float
) -> list[Times]:
    requests = list(poisson(spread(lengths, 300, 0), rate_rps, seed=0))
    return run_split(data, place, requests, overhead=True)


def toy_rows(data: Data) -> list[Row]:
    """Figure 1: 13B, 512 in and 64 out, goals 0.4 s and 0.04 s at 90 %."""
    toy = data.paper("distserve")["fig1"]
    n = 500 if data.quick else 2000
    shape = model_shape("OPT-13B")
    workers = Workers(
        step=step_time(fit(data, "opt-13b", 1)), kv_tokens=kv_tokens(data, "opt-13b", 1)
    )

    def best(pools: str, gpus: int, ttft_ms: float, tpot_ms: float) -> float:
        def ok(rate: float) -> bool:
            requests = list(poisson([Lengths(512, 64)] * n, rate, seed=0))
            records = simulate(pools, shape, workers, one_token_less(requests))
            measure = at_client if pools == "1M" else at_prefill
            return attainment([measure(r) for r in records], ttft_ms, tpot_ms) >= 90

        return highest(ok, 0.2, 60.0, 1.02) / gpus

    conditions = (
        f"shipped DistServe fit of OPT-13B TP1 on A100 (the paper's '13B'), {n} Poisson requests "
        f"(seed 0), steps up to 8,192 tokens, 66,144 KV tokens, NVLink 300 GB/s; {SAMPLED}"
    )
    goals = "TTFT <= 0.4 s and TPOT <= 0.04 s for 90 %"
    colocated = best("1M", 1, 400, 40)
    prefill = best("1P8D", 1, 400, NEVER)
    decode = best("8P1D", 1, NEVER, 40)
    split = best("2P1D", 3, 400, 40)
    known = (
        "the shipped profile is faster than the figure's machine: a prefill of 512 takes 72 ms, so "
        "that one GPU passes 5.6 req/s before its queue reaches 0.4 s"
    )
    return [
        close(SOURCE, "toy: colocated", toy["colocated_rps"], colocated, unit="req/s", conditions=f"{conditions}; {goals}; mixed steps", why=f"{known}; a mixed step here adds the prompt's time to the decode step and pays the weights once, where the figure's engine alternates"),
        close(SOURCE, "toy: one GPU, prefill only", toy["prefill_only_rps_per_gpu"], prefill, unit="req/s", conditions=f"{conditions}; TTFT <= 0.4 s for 90 %; one prefill worker before eight decode workers", why=known),
        close(SOURCE, "toy: one GPU, decode only", toy["decode_only_rps_per_gpu"], decode, unit="req/s", conditions=f"{conditions}; TPOT <= 0.04 s for 90 %; one decode worker behind eight prefill workers", why="the shipped decode fit: a step of 95 and more sequences follows another line; the figure's batch is not told"),
        close(SOURCE, "toy: 2P1D per GPU", toy["per_gpu_rps"], split, unit="req/s", conditions=f"{conditions}; {goals}", why=known),
        close(SOURCE, "toy: gain of 2P1D over colocated", toy["gain"], split / colocated, unit="times", conditions="quotient of the two rows above", why=known),
    ]


__all__ = ["crossing", "example_rows", "toy_rows"]
