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
    InTurn,
    Times,
    Workers,
    at_client,
    at_prefill,
    attainment,
    highest,
    one_token_less,
    simulate,
)
from twofold.cost.models import model_shape
from twofold.cost.pipeline import Pipeline
from twofold.cost.profile import Polynomial, Profile
from twofold.cost.readers import read_profile
from twofold.cost.step_profile import step_time
from twofold.trace import Lengths, TraceRequest, poisson

SOURCE: Final = "DistServe"
SHAREGPT: Final = "sharegpt_8k_lengths_llama2.csv.gz"
OPT_LIMIT: Final = 2048
FIRST_MESSAGES: Final = "llmservingsim_sharegpt_llama_req300_rate10.csv"
ARXIV: Final = "arxiv_summarization_4k_lengths_llama2.csv.gz"
SHORT_ANSWER: Final = 10
STANDIN: Final = (
    "lengths are a stand-in, as DistServe's own ShareGPT file (OPT tokens) is not in the data: "
    "openchat_sharegpt4 (Llama-2 tokens) with prompt + output < 2,048; its script takes the next "
    "turn of either speaker as the answer, so every second answer here is as long as a user's "
    "message (the prompts of LLMServingSim's ShareGPT trace); mean 593 in and 291 out"
)
STANDIN_ARXIV: Final = (
    "lengths are a stand-in, as LongBench is not in the data: arxiv_summarization with prompt + "
    "output < 2,048, without prompts below 1,400 tokens, as DistServe's script cuts contexts to "
    "1,900 to 2,048; most of LongBench's tasks are questions with answers of a few words, so two "
    "of three answers here are of 10 tokens; mean 1,673 in and 57 out (both numbers are assumed)"
)
LONG: Final = 1400
LONGER: Final = 100
"""Prompts below are left out to show what longer ones do: their mean becomes 780 tokens."""
OVERHEAD: Final = (
    "shipped {} fit with what DistServe's simulator adds to a step (2 ms and 1e-4 ms per token of "
    "context; 1 ms more for a prefill)"
)
STAGES: Final = (
    "in a pipeline of p stages each takes 1/p of a step, and nothing goes between them, as in "
    "DistServe's simulator, which has its addition on the first stage alone, not shared out"
)
SAMPLED: Final = (
    "first token at the end of prefill as DistServe counts it, so that n output tokens are n - 1 "
    "decode steps"
)


class Placement(msgspec.Struct, frozen=True, kw_only=True):
    """DistServe's degrees for one model."""

    model: str
    prefill_tp: int = 0
    prefill_pp: int = 1
    decode_tp: int = 0
    decode_pp: int = 1
    vllm_tp: int = 0

    @property
    def gpus(self) -> int:
        """Of one pair."""
        return self.prefill_tp * self.prefill_pp + self.decode_tp * self.decode_pp

    @property
    def name(self) -> str:
        """As the rows have it: TP2 prefill + TP1 PP2 decode."""
        prefill = _degree(self.prefill_tp, self.prefill_pp)
        return f"{prefill} prefill + {_degree(self.decode_tp, self.decode_pp)} decode"


def _degree(tp: int, pp: int) -> str:
    return f"TP{tp}" + (f" PP{pp}" if pp > 1 else "")


OPT_13B: Final = Placement(model="opt-13b", prefill_tp=2, decode_tp=1, vllm_tp=1)
OPT_66B: Final = Placement(model="opt-66b", prefill_tp=4, decode_tp=2, decode_pp=2, vllm_tp=4)


def fit(data: Data, model: str, tp: int, engine: str = "distserve") -> Profile:
    """The shipped coefficients."""
    path = data.path(f"profiles/distserve/profiler-a100-80g.{engine}.json")
    return read_profile(path, f"{model}:{tp}")


def with_overhead(profile: Profile, pp: int = 1) -> Profile:
    """The coefficients with what DistServe's simulator adds to every step (`add_ray_overhead`:
    2 ms and 1e-4 ms per token of context) and to every prefill (`pp` ms in each of `pp` stages).
    """
    assert profile.formula is not None
    formula = profile.formula
    a, b, c = formula.prefill

    def decode(fitted: tuple[float, float, float]) -> tuple[float, float, float]:
        return fitted[0] + 2.0, fitted[1] + 1e-4, fitted[2]

    return msgspec.structs.replace(
        profile,
        formula=Polynomial(
            prefill=(a + 2.0 + pp * pp, b + 1e-4, c),
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


def sharegpt(data: Data, *, shortest: int = 0) -> list[Lengths]:
    """STANDIN; `shortest` leaves shorter prompts out."""
    messages = [r.input_tokens for r in data.lengths(FIRST_MESSAGES)]
    found = []
    for i, r in enumerate(short_lengths(data)):
        output = r.output_tokens if i % 2 else messages[i // 2 * 7919 % len(messages)]
        if r.input_tokens >= shortest and r.input_tokens + output < OPT_LIMIT:
            found.append(Lengths(r.input_tokens, output))
    return found


def longbench(data: Data, *, shortest: int = LONG) -> list[Lengths]:
    """STANDIN_ARXIV; `shortest` leaves shorter prompts out."""
    kept = [r for r in short_lengths(data, ARXIV) if r.input_tokens >= shortest]
    return [
        Lengths(r.input_tokens, SHORT_ANSWER if i % 3 else r.output_tokens)
        for i, r in enumerate(kept)
    ]


def run_split(data: Data, place: Placement, requests: Sequence[TraceRequest]) -> list[Times]:
    """One pair of DistServe's placement, as DistServe measures it."""

    def worker(tp: int, pp: int, budget: int) -> Workers:
        return Workers(
            step=step_time(with_overhead(fit(data, place.model, tp), pp)),
            kv_tokens=kv_tokens(data, place.model, tp, pp),
            budget=budget,
            pipeline=Pipeline(stages=pp),
        )

    workers = {
        "prefill": worker(place.prefill_tp, place.prefill_pp, 8192),
        "decode": worker(place.decode_tp, place.decode_pp, 65536),
    }
    records = simulate("1P1D", model_shape(place.model.upper()), workers, one_token_less(requests))
    return [at_prefill(record) for record in records]


def run_vllm(data: Data, place: Placement, requests: Sequence[TraceRequest]) -> list[Times]:
    """One unsplit vLLM instance with the flags of DistServe's scripts."""
    profile = with_overhead(fit(data, place.model, place.vllm_tp, "vllm"))
    workers = Workers(
        step=InTurn(step_time(profile, extrapolate=True)),
        kv_tokens=kv_tokens(data, place.model, place.vllm_tp),
        budget=16384,
    )
    records = simulate("1M", model_shape(place.model.upper()), workers, requests)
    return [at_client(record) for record in records]


def example_rows(data: Data) -> list[Row]:
    """The worked example of DistServe's simulator: 1.56 req/s per GPU with TP2 and TP1."""
    published = Placement(model="opt-13b", prefill_tp=2, decode_tp=1)
    places = placements(data, "opt-13b", 4)
    found = {place.name: _best_rate(data, place, sharegpt(data)) for place in places}
    ours = found[published.name]
    longer = _best_rate(data, published, sharegpt(data, shortest=LONGER))
    best = max(found, key=lambda name: found[name])
    conditions = (
        f"OPT-13B, {OVERHEAD.format('DistServe')}, max_num_tokens of its "
        "table, one pair, NVLink 300 GB/s, N = 300 "
        "Poisson (seed 0), P90 of TTFT 200 ms and of TPOT 100 ms each, its bisection over 0 to 5 "
        f"per GPU down to 0.25; prefill steps up to 8,192 tokens; {SAMPLED}; {STANDIN}; all "
        f"{len(found)} placements of one pair on up to 4 GPUs, tensor and pipeline degrees each "
        f"its own in both phases; {STAGES}; a prefill's 1 ms is p ms in each of p stages"
    )
    shown = ", ".join(f"{name} {rate:.2f}" for name, rate in found.items())
    why = (
        f"the rate hangs on the prompts' lengths ({shown}): without prompts below {LONGER} tokens "
        f"(mean 780) it is {longer:.2f}"
    )
    return [
        close(
            SOURCE,
            "simulator example: rate per GPU of the published placement",
            1.56,
            ours,
            unit="req/s",
            conditions=conditions,
            why=why,
        ),
        holds(
            SOURCE,
            f"simulator example: best of {len(found)} placements",
            f"{published.name}, 1.56",
            f"{best}, {found[best]:.2f}",
            best == published.name,
            conditions=conditions,
            why=why,
        ),
    ]


def placements(data: Data, model: str, gpus: int) -> list[Placement]:
    """Every pair on up to `gpus`: degrees that the table of KV tokens and the coefficients have."""
    with data.path("profiles/distserve/max_num_tokens.csv").open() as file:
        rows = [row for row in csv.DictReader(file) if row["model"] == f"facebook/{model}"]
    degrees = [(int(row["tp"]), int(row["pp"])) for row in rows]
    found = [
        Placement(
            model=model, prefill_tp=tp, prefill_pp=pp, decode_tp=decode_tp, decode_pp=decode_pp
        )
        for tp, pp in degrees
        for decode_tp, decode_pp in degrees
    ]
    return [place for place in found if place.gpus <= gpus]


def _best_rate(data: Data, place: Placement, lengths: Sequence[Lengths]) -> float:
    """The rate per GPU of a placement, as DistServe's bisection finds it."""
    low, high = 0.0, 5.0
    while high - low >= 0.25:
        rate = (low + high) / 2
        times = _at_rate(data, place, lengths, rate * place.gpus)
        ok = attainment(times, 200, NEVER) >= 90 and attainment(times, NEVER, 100) >= 90
        low, high = (rate, high) if ok else (low, rate)
    return low


def _at_rate(
    data: Data, place: Placement, lengths: Sequence[Lengths], rate_rps: float
) -> list[Times]:
    requests = list(poisson(spread(lengths, 300, 0), rate_rps, seed=0))
    return run_split(data, place, requests)


def toy_rows(data: Data) -> list[Row]:
    """Figure 1: 13B, 512 in and 64 out, goals 0.4 s and 0.04 s at 90 %."""
    toy = data.paper("distserve")["fig1"]
    n = 500 if data.quick else 2000
    shape = model_shape("OPT-13B")
    split_step = step_time(fit(data, "opt-13b", 1))
    mixed_step = InTurn(step_time(fit(data, "opt-13b", 1, "vllm")))

    def best(pools: str, gpus: int, ttft_ms: float, tpot_ms: float, budget: int = 8192) -> float:
        mixed = pools == "1M"
        kv = kv_tokens(data, "opt-13b", 1)
        workers = Workers(step=mixed_step if mixed else split_step, kv_tokens=kv, budget=budget)

        def ok(rate: float) -> bool:
            requests = list(poisson([Lengths(512, 64)] * n, rate, seed=0))
            asked = requests if mixed else one_token_less(requests)
            records = simulate(pools, shape, workers, asked)
            measure = at_client if mixed else at_prefill
            return attainment([measure(r) for r in records], ttft_ms, tpot_ms) >= 90

        return highest(ok, 0.2, 60.0, 1.02) / gpus

    conditions = (
        f"shipped fit of OPT-13B TP1 on A100 (the paper says 13B), {n} Poisson requests (seed 0), "
        f"steps up to 8,192 tokens, 66,144 KV tokens, NVLink 300 GB/s; {SAMPLED}"
    )
    goals = "TTFT <= 0.4 s and TPOT <= 0.04 s for 90 %"
    colocated = best("1M", 1, 400, 40, 16384)
    prefill = best("1P8D", 1, 400, NEVER)
    alone = best("1P8D", 1, 400, NEVER, 1024)
    decode = best("8P1D", 1, NEVER, 40)
    split = best("2P1D", 3, 400, 40)
    profile = "DistServe's shipped profile does not give the figure's numbers: "
    prefill_why = (
        f"{profile}its prefill of 512 takes 72 ms, so that the queue reaches 0.4 s far above 5.6; "
        f"with at most two prompts a step {alone:.1f}"
    )
    decode_why = f"{profile}at 10 req/s its decode step is 27 ms, well below the goal of 40 ms"
    one = "one {0} worker beside eight of the other kind"
    return [
        close(
            SOURCE,
            "toy: colocated",
            toy["colocated_rps"],
            colocated,
            unit="req/s",
            conditions=(
                f"{conditions.replace('8,192', '16,384')}; vLLM's fit, prompts and "
                f"decodes in turn; {goals}"
            ),
            why=(
                f"{profile}at 1.6 req/s an answer of 1.6 s meets 2.6 prefills of 96 "
                "ms, which adds 4 ms to a TPOT of 25"
            ),
        ),
        close(
            SOURCE,
            "toy: one GPU, prefill only",
            toy["prefill_only_rps_per_gpu"],
            prefill,
            unit="req/s",
            conditions=f"{conditions}; TTFT <= 0.4 s for 90 %; {one.format('prefill')}",
            why=prefill_why,
        ),
        close(
            SOURCE,
            "toy: one GPU, decode only",
            toy["decode_only_rps_per_gpu"],
            decode,
            unit="req/s",
            conditions=f"{conditions}; TPOT <= 0.04 s for 90 %; {one.format('decode')}",
            why=decode_why,
        ),
        close(
            SOURCE,
            "toy: 2P1D per GPU",
            toy["per_gpu_rps"],
            split,
            unit="req/s",
            conditions=f"{conditions}; {goals}",
            why=decode_why,
        ),
        close(
            SOURCE,
            "toy: gain of 2P1D over colocated",
            toy["gain"],
            split / colocated,
            unit="times",
            conditions="quotient of two rows above",
            why="both are off, for the reasons there",
        ),
    ]
