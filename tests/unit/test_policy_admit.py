"""Joint admission at arrival, and prompt tokens per step."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.policy_support import FEW, MS, decode_views, incomings
from twofold.policy.admit import ADMISSIONS, Verdict, after
from twofold.policy.chunk import CHUNK_BUDGETS, StepView
from twofold.policy.views import AdmitView, DecodeView, Incoming

S = 1000 * MS
ROOM = DecodeView("d", sequences=4, used_blocks=60, total_blocks=100, slots=8)

admit_views = st.builds(
    AdmitView,
    incoming=incomings,
    ttft_ns=st.integers(0, 9 * S),
    prefill_ns=st.integers(0, 9 * S),
    limit_ns=st.integers(0, 5 * S),
    decode=decode_views,
    coming=st.integers(0, 40),
    coming_blocks=st.integers(0, 200),
    tpot_goal_ns=st.integers(0, 90 * MS),
)


def admit(
    policy: str,
    *decode: DecodeView,
    need: int = 5,
    ttft: int = S,
    limit: int = 2 * S,
    coming: int = 0,
    coming_blocks: int = 0,
    tpot_goal: int = 0,
) -> Verdict:
    view = AdmitView(
        Incoming(0, need_blocks=need),
        ttft,
        ttft,
        limit,
        decode or (ROOM,),
        coming,
        coming_blocks,
        tpot_goal,
    )
    return ADMISSIONS[policy](view)


@FEW
@given(view=admit_views)
def test_refusals_are_retryable_and_say_why(view: AdmitView) -> None:
    for policy, admission in ADMISSIONS.items():
        verdict = admission(view)
        assert verdict.admitted or (verdict.reason and verdict.retry_after_s >= 1), policy
    assert ADMISSIONS["none"](view).admitted
    if ADMISSIONS["joint"](view).admitted:
        assert ADMISSIONS["ttft"](view).admitted


@pytest.mark.parametrize("policy", ["ttft", "joint", "joint_predicted"])
@FEW
@given(view=admit_views, ttft=st.integers(0, 9 * S), coming=st.integers(0, 40))
def test_more_load_never_lets_a_refused_request_in(
    policy: str, view: AdmitView, ttft: int, coming: int
) -> None:
    if not ADMISSIONS[policy](view).admitted:
        busier = view._replace(
            ttft_ns=view.ttft_ns + ttft,
            coming=view.coming + coming,
            coming_blocks=view.coming_blocks + 3 * coming,
        )
        assert not ADMISSIONS[policy](busier).admitted


@pytest.mark.parametrize("policy", ["ttft", "joint", "joint_predicted"])
def test_late_is_refused_with_a_time_to_come_back(policy: str) -> None:
    assert admit(policy, ttft=2 * S).admitted
    verdict = admit(policy, ttft=4 * S + 1)
    reason = "the first token is projected after 4000 ms, 2000 ms is the limit"
    assert verdict == Verdict(False, reason, 3)
    assert admit(policy, ttft=9 * S, limit=0).admitted


def test_joint_wants_room_on_decode() -> None:
    assert admit("joint", need=40).admitted
    assert admit("joint", need=41) == Verdict(False, "no decode worker has room", 1)
    assert not admit("joint", ROOM._replace(sequences=8)).admitted
    assert admit("joint", ROOM._replace(sequences=8), DecodeView("e")).admitted
    assert not admit("joint", ROOM._replace(up=False)).admitted
    assert admit("ttft", need=41).admitted


def test_joint_counts_what_is_being_read_for_decode() -> None:
    assert admit("joint", coming=3, coming_blocks=35).admitted
    beside = Verdict(False, "decode has no room beside what is being read for it", 1)
    assert admit("joint", coming=3, coming_blocks=36) == beside
    assert admit("joint", coming=4, coming_blocks=4) == beside
    assert admit("joint", ROOM, ROOM._replace(name="e"), coming=4, coming_blocks=36).admitted


def test_what_fits_no_pool_is_left_to_the_worker_to_refuse() -> None:
    empty = DecodeView("d", total_blocks=100)
    assert admit("joint", empty, need=101).admitted


def test_a_tpot_goal_bounds_the_batch() -> None:
    slow = ROOM._replace(tpot_ns=29 * MS, tpot_rise_ns=2 * MS)
    verdict = admit("joint", slow, tpot_goal=30 * MS)
    assert verdict.reason == "TPOT is projected at 31.0 ms, 30.0 ms is the goal"
    assert admit("joint", slow, tpot_goal=31 * MS).admitted
    # An idle worker is the best there can be: refusing would be for ever.
    assert admit("joint", slow._replace(sequences=0), tpot_goal=30 * MS).admitted


def test_predicted_sees_answers_end_while_the_prompt_is_read() -> None:
    full = DecodeView(
        "d", sequences=8, slots=8, used_blocks=80, total_blocks=80, output_left=400, tpot_ns=20 * MS
    )
    assert not admit("joint", full).admitted
    assert admit("joint_predicted", full).admitted  # 50 tokens each: 8 end in 1 s
    assert not admit("joint_predicted", full._replace(output_left=40_000)).admitted


def test_answers_end_at_an_even_pace() -> None:
    view = DecodeView(
        "d", sequences=10, output_left=1_000, used_blocks=50, tpot_ns=10 * MS, tpot_rise_ns=MS // 2
    )
    half = after(view, S // 2)
    assert (half.sequences, half.used_blocks, half.output_left) == (5, 25, 500)
    assert half.tpot_ns == 7_500_000
    assert after(view, 100 * S).sequences == 0
    assert after(view, 0) == view
    assert after(view._replace(tpot_ns=0), S).sequences == 10


# ------------------------------------------------------------------------------- chunks


@FEW
@given(
    view=st.builds(
        StepView,
        budget_left=st.integers(0, 8_192),
        n_decoding=st.integers(0, 200),
        decode_ns=st.integers(0, 90 * MS),
        token_ps=st.integers(0, 10**9),
        goal_ns=st.integers(0, 90 * MS),
        cap_tokens=st.integers(0, 4_096),
        least_tokens=st.integers(1, 64),
    )
)
def test_chunks_stay_within_the_step_and_prompts_always_move(view: StepView) -> None:
    for policy, budget in CHUNK_BUDGETS.items():
        n = budget(view)
        assert 0 <= n <= view.budget_left, policy
        assert n > 0 or view.budget_left == 0, policy


def test_chunk_budgets() -> None:
    view = StepView(
        8_000, 30, decode_ns=20 * MS, token_ps=10_000_000, goal_ns=30 * MS, cap_tokens=2_048
    )
    assert CHUNK_BUDGETS["fixed"](view) == 8_000
    assert CHUNK_BUDGETS["capped"](view) == 2_048
    assert CHUNK_BUDGETS["tpot_goal"](view) == 1_000
    assert CHUNK_BUDGETS["tpot_goal"](view._replace(n_decoding=0)) == 8_000
    late = view._replace(decode_ns=40 * MS, least_tokens=16)
    assert CHUNK_BUDGETS["tpot_goal"](late) == 16
    assert CHUNK_BUDGETS["tpot_goal"](view._replace(budget_left=300)) == 300


@FEW
@given(sequences=st.integers(0, 99), more=st.integers(0, 99))
def test_slower_decodes_never_get_larger_chunks(sequences: int, more: int) -> None:
    view = StepView(4_096, 9, sequences * MS, 5_000_000, goal_ns=60 * MS)
    slower = view._replace(decode_ns=view.decode_ns + more * MS)
    assert CHUNK_BUDGETS["tpot_goal"](slower) <= CHUNK_BUDGETS["tpot_goal"](view)
