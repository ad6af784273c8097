"""Two legs or one, and Splitwise's mixed pool."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.policy_support import FEW, MS, split_views
from twofold.policy.choice import describe
from twofold.policy.mixed import role_now, roles_now
from twofold.policy.split import SPLIT_CHOICES, local_cost_ns
from twofold.policy.views import Incoming, PrefillView, SplitView, WholeView

ALL = sorted(SPLIT_CHOICES)
MIXED = WholeView("m", "mixed")
DECODE = WholeView("d", "decode", uncached_tokens=1_000, tokens_per_s=10_000)
REMOTE = PrefillView("p", uncached_tokens=1_000, tokens_per_s=10_000)


def split(
    policy: str, *whole: WholeView, remote: PrefillView | None = REMOTE, need: int = 0
) -> str:
    view = SplitView(Incoming(0, need_blocks=need), remote, whole, 500, 8_192)
    return SPLIT_CHOICES[policy](view).worker


@pytest.mark.parametrize("policy", ALL)
@FEW
@given(view=split_views)
def test_one_leg_goes_to_a_worker_that_is_up(policy: str, view: SplitView) -> None:
    choice = SPLIT_CHOICES[policy](view)
    homes = {worker.name: worker.home for worker in view.whole if worker.up}
    assert choice.worker == "" or choice.worker in homes
    assert choice.reason
    if policy != "mixed_pool" and choice.worker:
        assert homes[choice.worker] != "prefill"
    if view.remote is None and "mixed" in homes.values():
        assert choice.worker, "a worker started as mixed could have served it"


@pytest.mark.parametrize("policy", ALL)
@FEW
@given(view=split_views, order=st.permutations(range(4)))
def test_the_order_of_workers_does_not_matter(
    policy: str, view: SplitView, order: list[int]
) -> None:
    other = view._replace(whole=tuple([view.whole[i] for i in order]))
    assert SPLIT_CHOICES[policy](other).worker == SPLIT_CHOICES[policy](view).worker


@FEW
@given(view=split_views, by=st.integers(0, 100_000))
def test_a_longer_remote_queue_never_brings_back_the_second_leg(view: SplitView, by: int) -> None:
    if view.remote is None:
        return
    slower = view.remote._replace(queued_tokens=view.remote.queued_tokens + by)
    for policy in ("projected", "mixed_pool"):
        if SPLIT_CHOICES[policy](view).worker:
            assert SPLIT_CHOICES[policy](view._replace(remote=slower)).worker


@FEW
@given(view=split_views, queued=st.integers(0, 50_000), sequences=st.integers(0, 50))
def test_busier_decode_workers_never_draw_a_prompt(
    view: SplitView, queued: int, sequences: int
) -> None:
    busier = view._replace(
        whole=tuple(
            [
                w._replace(
                    queued_tokens=w.queued_tokens + queued, sequences=w.sequences + sequences
                )
                for w in view.whole
            ]
        )
    )
    slots = all(w.slots == 0 for w in view.whole)  # else which have room changes too
    if view.remote and slots and not SPLIT_CHOICES["projected"](view).worker:
        assert not SPLIT_CHOICES["projected"](busier).worker


def test_always_falls_back_to_a_mixed_worker_only() -> None:
    assert split("always", MIXED, DECODE) == ""
    assert split("always", MIXED, DECODE, remote=None) == "m"
    assert split("always", DECODE, remote=None) == ""


def test_never_reads_prompts_where_answers_are_written() -> None:
    assert split("never", MIXED, DECODE) == "m"
    assert split("never", DECODE) == "d"
    assert split("never", WholeView("p", "prefill")) == ""


def test_local_cost_counts_those_it_interrupts() -> None:
    assert local_cost_ns(DECODE) == 100 * MS
    assert local_cost_ns(DECODE._replace(sequences=30)) == 3_100 * MS
    assert local_cost_ns(DECODE._replace(queued_tokens=500, sequences=1)) == 250 * MS


def test_projected_compares_times_and_no_length() -> None:
    """Idle, the handoff alone decides; with answers under way, so does the delay they suffer."""
    handoff = REMOTE._replace(transfer_ns=20 * MS)
    assert split("projected", DECODE, remote=handoff) == "d"
    assert split("projected", DECODE._replace(sequences=30), remote=handoff) == ""
    queue = handoff._replace(queued_tokens=100_000)
    assert split("projected", DECODE._replace(sequences=30), remote=queue) == "d"
    # Its prompt cached on the decode worker, the same load is no reason to hand over.
    cached = DECODE._replace(sequences=30, uncached_tokens=10)
    assert split("projected", cached, remote=handoff) == "d"
    for k in (1, 20):
        scaled = DECODE._replace(uncached_tokens=1_000 * k, tokens_per_s=10_000 * k)
        remote = handoff._replace(uncached_tokens=1_000 * k, tokens_per_s=10_000 * k)
        assert split("projected", scaled, remote=remote) == "d"


def test_projected_keeps_the_pools_apart_when_it_makes_no_difference() -> None:
    assert split("projected", DECODE) == ""


def test_projected_says_both_times() -> None:
    view = SplitView(Incoming(0), REMOTE._replace(transfer_ns=20 * MS), (DECODE,))
    text = describe(SPLIT_CHOICES["projected"](view))
    assert text == "one leg takes less time: d 100.0 ms, p and handoff 120.0 ms"


def test_threshold_looks_at_length_alone() -> None:
    assert split("threshold", DECODE) == ""
    assert split("threshold", DECODE._replace(uncached_tokens=499, sequences=99)) == "d"
    assert split("threshold", DECODE._replace(uncached_tokens=500)) == ""


# ------------------------------------------------------------------------------ mixed pool


def pools(*, p: int = 0, d: int = 0, full: bool = False) -> tuple[WholeView, ...]:
    used = 100 if full else 0
    return (
        WholeView("d", "decode", queued_tokens=d, used_blocks=used, total_blocks=100),
        WholeView("p", "prefill", queued_tokens=p, total_blocks=100),
    )


def test_workers_enter_and_leave_the_mixed_pool_by_what_they_hold() -> None:
    away = WholeView("d", "decode", queued_tokens=5, sequences=3)
    assert role_now(away) == "mixed"
    assert role_now(away._replace(queued_tokens=0)) == "decode"
    assert role_now(WholeView("p", "prefill", queued_tokens=5)) == "prefill"
    assert role_now(WholeView("p", "prefill", sequences=1)) == "mixed"
    assert role_now(WholeView("m", "mixed")) == "mixed"
    assert roles_now([away, MIXED._replace(up=False)]) == (("d", "mixed"),)


def test_mixed_pool_hands_over_while_the_queue_is_within_its_limit() -> None:
    at_limit = REMOTE._replace(queued_tokens=8_192)
    assert split("mixed_pool", *pools(p=8_192), remote=at_limit, need=5) == ""


def test_mixed_pool_draws_a_decode_worker_when_prompts_pile_up() -> None:
    over = REMOTE._replace(queued_tokens=8_193)
    assert split("mixed_pool", *pools(p=8_193), remote=over, need=5) == "d"


def test_mixed_pool_draws_a_prefill_worker_when_decode_is_full() -> None:
    assert split("mixed_pool", *pools(full=True), need=5) == "p"


def test_mixed_pool_uses_who_is_in_it_before_drawing_another() -> None:
    over = REMOTE._replace(queued_tokens=9_000)
    inside = WholeView("e", "decode", queued_tokens=4_000, sequences=8, total_blocks=100)
    assert split("mixed_pool", *pools(p=9_000), inside, remote=over) == "e"
    beyond = inside._replace(queued_tokens=9_000)
    assert split("mixed_pool", *pools(p=9_000), beyond, remote=over) == "d"


def test_at_very_high_load_all_are_mixed() -> None:
    over = REMOTE._replace(queued_tokens=90_000)
    assert split("mixed_pool", *pools(p=90_000, d=80_000, full=True), remote=over, need=5) == "d"
    assert split("mixed_pool", *pools(p=70_000, d=80_000, full=True), remote=over, need=5) == "p"
