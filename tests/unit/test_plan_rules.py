"""The rules of the verdict: each way that each can be judged, and what it says it lacks."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from twofold.plan import rules
from twofold.plan.facts import Facts, Prompt
from twofold.plan.rules import AGAINST, RULES, Rule, judge, slots_needed
from twofold.plan.words import binary_bytes, decimal_bytes, figure, joined, percent, plain

PROMPT = Prompt(label="the prompt", tokens=4000, prefill_ms=800.0, transfer_ms=5.0)
KNOWN = Facts(
    tp=4,
    gpus=16,
    nodes=2,
    slo_ttft_ms=2000.0,
    slo_tpot_ms=30.0,
    rate_rps=2.0,
    prompts=(PROMPT,),
    output_tokens=500,
    ms_per_token=12.0,
    slots=64,
    prepare_ms=1.0,
    prefill_workers=2,
    decode_workers=2,
    prefix_hit_share=0.5,
)
"""Facts that speak against nothing."""


def with_(**changes: object) -> Facts:
    return msgspec.structs.replace(KNOWN, **changes)


def prompt(prefill_ms: float | None, transfer_ms: float | None = 5.0, label: str = "P50") -> Prompt:
    return Prompt(label=label, tokens=100, prefill_ms=prefill_ms, transfer_ms=transfer_ms)


def test_nothing_speaks_against_a_workload_that_splits_well() -> None:
    judged = judge(KNOWN)
    assert [rule.holds for rule in judged] == [False] * len(RULES)
    assert all(rule.because and not rule.missing for rule in judged)


def test_nothing_is_judged_of_nothing() -> None:
    judged = judge(Facts())
    assert [rule.holds for rule in judged] == [None] * len(RULES)
    assert all(rule.missing for rule in judged)
    names = [rule.rule for rule in judged]
    assert len(set(names)) == len(names)
    assert set(AGAINST) < set(names)


@pytest.mark.parametrize(
    ("rule", "facts", "holds", "says"),
    [
        (rules.one_gpu, with_(gpus=1, tp=1), True, "1 GPU at TP 1 makes 1 worker"),
        (rules.one_gpu, with_(gpus=7), True, "7 GPUs at TP 4 make 1 worker;"),
        (rules.one_gpu, with_(gpus=8), False, "8 GPUs at TP 4 make 2 workers"),
        (rules.too_few_gpus, with_(gpus=15), True, "take 16 GPUs; there are 15"),
        (rules.too_few_gpus, with_(gpus=16), False, "2 prefill and 2 decode workers at TP 4"),
        (rules.one_node, with_(nodes=1), True, "3 ratios of prefill to decode"),
        (rules.one_node, with_(nodes=None, gpus=1), True, "one host"),
        (rules.one_node, KNOWN, False, "2 nodes"),
        (rules.no_latency_goal, KNOWN, False, "TTFT 2,000 ms and TPOT 30.0 ms"),
        (rules.no_latency_goal, with_(slo_ttft_ms=None), False, "asked for: TPOT 30.0 ms"),
        (
            rules.no_latency_goal,
            with_(slo_ttft_ms=None, slo_tpot_ms=None, no_goal=True),
            True,
            "not throughput",
        ),
        (rules.link_too_slow, with_(prompts=(prompt(5.0, 5.1),)), True, "after the prefill"),
        (rules.link_too_slow, with_(prompts=(prompt(5.0, 5.0),)), False, "(100 %): hidden"),
        (rules.link_too_slow, KNOWN, False, "TTFT is 806 ms or more, goal 2,000 ms"),
        (
            rules.link_too_slow,
            with_(prompts=(prompt(None, 1000.0),)),
            True,
            "2 pairs of workers keep the link busy 100 % of the time",
        ),
        (
            rules.link_too_slow,
            with_(prompts=(prompt(2000.0, 600.0),), decode_workers=1),
            True,
            "1 pair of workers keeps the link busy 120 %",
        ),
        (rules.decode_pool_full, with_(slots=15), False, "12.0 of 15 slots held, 80 %, within"),
        (rules.decode_pool_full, with_(slots=14), True, "over the 80 % rule: 15 slots would do"),
        (rules.low_concurrency, with_(rate_rps=0.6), True, "over 4 unsplit workers: 40.7 %"),
        (rules.low_concurrency, with_(rate_rps=0.7), False, "4.20 sequences in decode"),
        (
            rules.low_concurrency,
            with_(gpus=None, prefill_workers=None, rate_rps=0.1),
            True,
            "0.6 sequences in decode over 1 unsplit worker",
        ),
        (rules.low_concurrency, with_(gpus=None), False, "over 4 unsplit workers"),
        (rules.decode_chosen_late, with_(decode_workers=1), False, "nothing to choose"),
        (rules.decode_chosen_late, KNOWN, False, "a stay in decode 6,000 ms: 13.3 %"),
        (rules.decode_chosen_late, with_(output_tokens=130), True, "51.3 % of decode's sequences"),
        (rules.decode_chosen_late, with_(output_tokens=10), True, "120 ms: 100 %"),
    ],
)
def test_rules(rule: object, facts: Facts, holds: bool, says: str) -> None:
    assert callable(rule)
    judged: Rule = rule(facts)
    assert (judged.holds, judged.missing) == (holds, ())
    assert says in judged.because


@pytest.mark.parametrize(
    ("facts", "holds", "says"),
    [
        # The same tokens are short or long by their time alone.
        (with_(prompts=(prompt(12.0),)), True, "no longer than a decode step of 12.0 ms"),
        (with_(prompts=(prompt(18.0),)), True, "a gap of 30.0 ms between tokens"),
        (with_(prompts=(prompt(18.1),)), False, "over the TPOT goal of 30.0 ms"),
        (with_(prompts=(prompt(18.0),), rate_rps=1e3, slo_tpot_ms=None), False, "instead of 12.0"),
        # Each gap would do, but there is a prefill in nearly each: 4 workers, 180 of them a second.
        (with_(prompts=(prompt(18.0),), rate_rps=180.0), False, "unsplit workers, 63.2 ms a"),
        (with_(prompts=(prompt(18.0),), rate_rps=130.0), True, "a gap of 30.0 ms"),
        (with_(prompts=(prompt(12.0),), rate_rps=210.0), False, "prefills take 63 % of 4"),
        (with_(prompts=(prompt(18.0, 17.5),), rate_rps=150.0), False, "prefills take 67.5 % of 4"),
        (
            with_(prompts=(prompt(1.0), prompt(18.0, label="P95")), rate_rps=180.0),
            True,
            "P95 (100 tokens): prefill takes 18.0 ms",
        ),
        (with_(prompts=(prompt(18.0),), rate_rps=1000.0), False, "prefills take 450 %"),
        (with_(prompts=(prompt(50.0, 49.0),)), True, "no longer than its handoff of 50.0 ms"),
        (with_(prompts=(prompt(55.0, 49.0),)), False, "a gap of 67.0 ms"),
        # A link slower than prefill does not make a prompt short.
        (with_(prompts=(prompt(800.0, 900.0),)), False, "a gap of 812 ms"),
        (
            with_(prompts=(prompt(10.0), prompt(90.0, label="P95"))),
            False,
            "But P50: prefill takes 10.0 ms, no longer than a decode step of 12.0 ms; those can",
        ),
        (with_(prompts=(prompt(90.0), prompt(100.0, label="P95"))), False, "P95 (100 tokens)"),
    ],
)  # fmt: skip
def test_short_prompts_are_judged_by_time(facts: Facts, holds: bool, says: str) -> None:
    judged = rules.short_prompts(facts)
    assert judged.holds is holds
    assert says in judged.because
    assert ("But P50" in judged.because) == ("But P50" in says)


@pytest.mark.parametrize("times", [1, 10, 1000])
def test_no_number_of_tokens_decides(times: int) -> None:
    """A machine that is `times` as fast on prompts `times` as long gets the same verdict."""
    longer = msgspec.structs.replace(PROMPT, tokens=PROMPT.tokens * times)
    holds = [rule.holds for rule in judge(with_(prompts=(longer,)))]
    assert holds == [rule.holds for rule in judge(KNOWN)]


@pytest.mark.parametrize(
    ("facts", "holds", "says"),
    [
        (with_(prefix_hit_share=0.0), False, "no prefix is reused"),
        (with_(prefix_hit_share=0.9), False, "10 % of the prompt is left"),
        (with_(prefix_hit_share=0.99), True, "no longer than a decode step"),
        (with_(prefix_hit_share=0.9, prompts=(prompt(10.0),)), False, "short already"),
        # Decode has the rest, so half of the bytes move.
        (with_(prefix_hit_share=0.5, prompts=(prompt(80.0, 78.5),)), True, "handoff of 40.3 ms"),
        (with_(prefix_hit_share=1.0), True, "prefill takes 0 ms"),
    ],
)
def test_prefix_reuse(facts: Facts, holds: bool, says: str) -> None:
    judged = rules.strong_prefix_reuse(facts)
    assert judged.holds is holds
    assert says in judged.because


@pytest.mark.parametrize(
    ("changes", "holds", "says"),
    [
        ({"prepare_ms": 0.0, "rate_rps": None}, False, "nothing runs on the loop"),
        ({"decode_workers": 1, "prepare_ms": 500.0}, True, "cannot keep up"),
        ({"prepare_ms": 500.0}, False, "50 % of the loop is lost on each of 2"),
        ({"prepare_ms": 600.1}, True, "12.0 -> 30.0 ms a token, goal 30.0 ms"),
        ({"slots": 18, "prepare_ms": 200.0, "slo_tpot_ms": None}, True, "12.0 -> 15.0 of 18 slots"),
        ({"slots": 19, "prepare_ms": 200.0, "slo_tpot_ms": None}, False, "(78.9 %, at most 80 %)"),
    ],
)
def test_preparing_handoffs_is_judged_by_what_it_costs(
    changes: dict[str, object], holds: bool, says: str
) -> None:
    judged = rules.handoff_stalls_decode(with_(**changes))
    assert judged.holds is holds
    assert says in judged.because
    assert AGAINST[judged.rule] == "pull"


def test_the_published_push_against_pull_case() -> None:
    """8 requests/s of 128 tokens on 8 slots: preparing 14.7 ms each takes what room there is."""
    facts = Facts(rate_rps=8, output_tokens=128, ms_per_token=7.0, slots=8, prepare_ms=14.7)
    full, stalls = rules.decode_pool_full(facts), rules.handoff_stalls_decode(facts)
    assert (full.holds, stalls.holds) == (True, True)
    assert full.because.startswith("7.17 of 8 slots held, 89.6 %, over the 80 % rule: 9 slots")
    assert "11.8 % of the loop is lost" in stalls.because
    assert "if one takes all" in stalls.because
    assert "7.17 -> 8.12 of 8 slots (102 %" in stalls.because
    slow = msgspec.structs.replace(facts, ms_per_token=10.4, slots=10)
    assert "10.6 of 10 slots held, 106 %" in rules.decode_pool_full(slow).because


@pytest.mark.parametrize(
    ("rule", "facts", "missing"),
    [
        (rules.one_gpu, with_(gpus=None), (("gpus",),)),
        (rules.too_few_gpus, with_(decode_workers=None), (("decode_workers",),)),
        (
            rules.no_latency_goal,
            with_(slo_ttft_ms=None, slo_tpot_ms=None),
            (("slo_ttft_ms", "slo_tpot_ms", "no_goal"),),
        ),
        (rules.short_prompts, with_(ms_per_token=None), (("ms_per_token",),)),
        (rules.short_prompts, with_(prompts=()), (("prefill_ms",),)),
        (rules.strong_prefix_reuse, with_(prefix_hit_share=None), (("prefix_hit_share",),)),
        (rules.strong_prefix_reuse, with_(ms_per_token=None), (("ms_per_token",),)),
        (rules.link_too_slow, with_(prompts=(prompt(None),)), (("prefill_ms",),)),
        (rules.link_too_slow, with_(prompts=(prompt(9.0, None),)), (("transfer_ms",),)),
        (rules.decode_pool_full, with_(output_tokens=None), (("output_tokens",),)),
        (rules.low_concurrency, with_(gpus=None, decode_workers=None), (("gpus",),)),
        (
            rules.handoff_stalls_decode,
            with_(slots=None, slo_tpot_ms=None),
            (("slots", "slo_tpot_ms"),),
        ),
        (
            rules.handoff_stalls_decode,
            with_(output_tokens=None, slo_tpot_ms=None),
            (("output_tokens", "slo_tpot_ms"),),
        ),
        (
            rules.handoff_stalls_decode,
            with_(ms_per_token=None),
            (("ms_per_token",),),
        ),
        (rules.decode_chosen_late, with_(prompts=()), (("prefill_ms",),)),
    ],
)
def test_what_is_missing_is_named(
    rule: object, facts: Facts, missing: tuple[tuple[str, ...], ...]
) -> None:
    assert callable(rule)
    judged: Rule = rule(facts)
    assert (judged.holds, judged.missing) == (None, missing)
    assert judged.because == "cannot be judged without " + " or ".join(missing[0])


maybe = st.none() | st.floats(1e-6, 1e6)
counts = st.none() | st.integers(1, 10**6)
times = st.builds(
    Prompt, label=st.just("P50"), tokens=st.integers(1, 10**6), prefill_ms=maybe, transfer_ms=maybe
)


@given(
    st.builds(
        Facts,
        tp=st.integers(1, 64),
        gpus=counts,
        nodes=counts,
        no_goal=st.booleans(),
        slo_ttft_ms=maybe,
        slo_tpot_ms=maybe,
        rate_rps=maybe,
        prompts=st.lists(times, max_size=3).map(tuple),
        output_tokens=counts,
        ms_per_token=maybe,
        slots=counts,
        prepare_ms=st.none() | st.floats(0, 1e6),
        prefill_workers=counts,
        decode_workers=counts,
        prefix_hit_share=st.none() | st.floats(0, 1),
    )
)
def test_any_facts_are_judged_or_say_what_they_lack(facts: Facts) -> None:
    for rule in judge(facts):
        assert (rule.holds is None) == bool(rule.missing)
        assert rule.because
        for fact in (fact for either in rule.missing for fact in either):
            assert not getattr(facts, fact, None)
    assert judge(facts) == judge(facts)


def test_slots_needed_is_exact_at_the_edge() -> None:
    assert [slots_needed(held) for held in (6.4, 6.41, 7.168, 0.8, 2.4, 3 * 0.8)] == [
        8, 9, 9, 1, 3, 3,
    ]  # fmt: skip


def test_words() -> None:
    assert [figure(x) for x in (0, 0.1176, 1.125, 10.6496, 99.95, 4096.5, -2.345)] == [
        "0", "0.118", "1.13", "10.6", "100.0", "4,097", "-2.35",
    ]  # fmt: skip
    assert [plain(x) for x in (8.0, 14.7, 16000, 0.1 + 0.2)] == ["8", "14.7", "16,000", "0.3"]
    assert [percent(x) for x in (0.8, 0.1176, 1.2, 0.0012, 0)] == [
        "80 %", "11.8 %", "120 %", "0.12 %", "0 %",
    ]  # fmt: skip
    assert [decimal_bytes(x) for x in (4_194_304_000, 999, 2e12)] == ["4.19 GB", "999 B", "2.00 TB"]
    assert [binary_bytes(x) for x in (262_144, 2_359_296, 40 << 30, 512, 1_048_576_000)] == [
        "256 KiB", "2.25 MiB", "40 GiB", "512 B", "1,000 MiB",
    ]  # fmt: skip
    assert [joined(x) for x in ([], ["a"], ["a", "b"], ["a", "b", "c"])] == [
        "", "a", "a and b", "a, b and c",
    ]  # fmt: skip
