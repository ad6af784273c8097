"""Handoffs' preparation, copies through host memory and shared links, against hand arithmetic."""

from __future__ import annotations

from itertools import pairwise

import pytest

from tests.sim.support import (
    BLOCK,
    BYTES_PER_S,
    LAYOUT,
    LEG,
    MS,
    PEER,
    READ,
    STEP,
    audited,
    cluster,
    mixture,
    one,
)
from twofold.cost.errors import CostError
from twofold.cost.step import LinearStep
from twofold.metrics.digest import digest
from twofold.metrics.record import RequestRecord
from twofold.sim.events import Events
from twofold.sim.link import Lane
from twofold.sim.nics import Nics
from twofold.trace.hashing import hash64
from twofold.types import NS_PER_S

PREPARE = 700_000
TICK = LinearStep(MS, 0.0)
"""Every step takes 1 ms."""


def gaps(record: RequestRecord) -> list[int]:
    return [b - a for a, b in pairwise(record.token_times_ns)]


# ------------------------------------------------------------------------- preparation


@pytest.mark.parametrize("singly", [True, False])
def test_pull_prepares_between_two_steps_of_decode(singly: bool) -> None:
    """One decodes; two more are handed over within one of its steps: the next waits for both."""
    requests = [one(2, 12), one(2, 12, at_ns=4 * MS + 5), one(2, 12, at_ns=4 * MS + 5)]
    plain, prepared = (
        cluster("2P1D", step=TICK, singly=singly, prepare_ns=ns).run(requests)
        for ns in (0, PREPARE)
    )
    # Alone: two legs, a prompt, claim and grant, the read with its confirmation, a step.
    read_ns = READ + LAYOUT.block_bytes * NS_PER_S // BYTES_PER_S + 2 * PEER
    alone_ns = 4 * LEG + MS + 2 * PEER + read_ns + MS
    assert plain[0].ttft_ns == alone_ns
    assert prepared[0].ttft_ns == alone_ns + PREPARE, "idle: it begins at once"
    assert set(gaps(plain[0])) == {MS}
    assert sorted(gaps(prepared[0])) == [MS] * 10 + [MS + 2 * PREPARE]
    # The reads begin after the step in flight and the preparations, one after the other.
    granted_ns = requests[1].arrival_ns + 3 * LEG + MS + 2 * PEER
    token = next(at for at in prepared[0].token_times_ns if at - LEG > granted_ns)
    for number in (1, 2):
        begun = token - LEG + number * PREPARE
        assert prepared[number].phases_ns["transfer"] == begun + read_ns - granted_ns


def test_preparations_of_more_than_a_step_stop_decode() -> None:
    requests = [one(2, 100), *(one(2, 1, at_ns=(40 + 20 * i) * MS) for i in range(4))]
    records = cluster("1P1D", step=TICK, prepare_ns=15 * MS).run(requests)
    first = records[0]
    span = first.token_times_ns[-1] - first.token_times_ns[0]
    # The first one's own is before its first token, the other four within its answer.
    assert span == 99 * MS + 4 * 15 * MS


@pytest.mark.parametrize("handoff", ["push", "layerwise"])
def test_push_prepares_beside_the_loops(handoff: str) -> None:
    requests = [one(40, 12), one(70, 12, at_ns=5 * MS), one(45, 12, at_ns=5 * MS)]
    settings = {"handoff": handoff, "min_layerwise_tokens": 60}
    plain, prepared = (
        audited("1P1D", requests, step=TICK, settings=settings, prepare_ns=ns)[0]
        for ns in (0, PREPARE)
    )
    assert prepared[0].ttft_ns == (plain[0].ttft_ns or 0) + PREPARE
    for record in prepared:
        assert set(gaps(record)) == {MS}, "no step of decode is late"
    assert all((r.ttft_ns or 0) >= (q.ttft_ns or 0) for r, q in zip(prepared, plain, strict=True))


def test_layers_written_later_are_not_prepared_again() -> None:
    """A prompt of many chunks: its preparation is over long before the last of it is written."""
    settings = {"handoff": "layerwise", "min_layerwise_tokens": 1, "max_num_batched_tokens": 32}
    plain, prepared = (
        cluster("1P1D", step=TICK, settings=settings, prepare_ns=ns).run([one(320, 3)])
        for ns in (0, PREPARE)
    )
    assert prepared[0].ttft_ns == plain[0].ttft_ns


def test_nothing_prepared_changes_nothing() -> None:
    requests = mixture(60, 3)
    for handoff in ("pull", "push", "layerwise"):
        made = [
            cluster("2P2D", settings={"handoff": handoff}),
            cluster(
                "2P2D",
                settings={"handoff": handoff},
                prepare_ns=0,
                bounce_bytes_per_s=0,
                share_nics=False,
            ),
        ]
        assert len({digest(one.run(iter(requests))) for one in made}) == 1


# ------------------------------------------------------------------------- host bounce


@pytest.mark.parametrize("handoff", ["pull", "push"])
def test_a_bounce_is_two_more_copies(handoff: str) -> None:
    bytes_per_s = 400_000_000
    n_bytes = 3 * LAYOUT.block_bytes
    plain, bounced = (
        audited(
            "1P1D", [one(2 * BLOCK + 5)], settings={"handoff": handoff}, bounce_bytes_per_s=rate
        )[0][0]
        for rate in (0, bytes_per_s)
    )
    assert plain.n_bytes == n_bytes
    copies_ns = 2 * -(-n_bytes * NS_PER_S // bytes_per_s)
    assert copies_ns == 30_720
    assert bounced.ttft_ns == (plain.ttft_ns or 0) + copies_ns
    assert bounced.phases_ns["transfer"] == plain.phases_ns["transfer"] + copies_ns


# -------------------------------------------------------------------------------- nics


def moved(
    rates: dict[str, int], flows: list[tuple[int, str, str, int]], stop: tuple[int, int] = (0, 0)
) -> dict[int, int]:
    """When each of `flows`, (start, source, target, bytes), ended; `stop`: a flow, and when."""
    events = Events()
    nics = Nics(events, rates)
    ends: dict[int, int] = {}
    numbers: dict[int, int] = {}

    def start(index: int, source: str, target: str, n_bytes: int) -> None:
        origin = sorted(rates).index(target)
        numbers[index] = nics.start(
            source, target, origin, n_bytes, lambda: ends.update({index: events.now_ns})
        )

    for index, (at_ns, *flow) in enumerate(flows):
        events.at(at_ns, 5, 0, start, index, *flow)
    if stop[1]:
        events.at(stop[1], 5, 0, lambda: nics.stop(numbers[stop[0]]))
    events.run()
    return ends


WIRES = dict.fromkeys(("p0", "p1", "d0", "d1"), NS_PER_S)  # 1 byte per ns


def test_k_transfers_into_one_worker_share_its_link() -> None:
    """Processor sharing: of jobs begun at once, one of s bytes ends at the sum of min(s, other)."""
    flows = [(0, "p0", "d0", 100), (0, "p1", "d0", 200), (0, "p0", "d0", 300)]
    # p0 sends two of d0's three: its own half is no limit beside d0's third.
    assert moved(WIRES, flows) == {0: 300, 1: 500, 2: 600}


def test_k_transfers_out_of_one_worker_share_its_link() -> None:
    assert moved(WIRES, [(0, "p0", "d0", 100), (0, "p0", "d1", 100)]) == {0: 200, 1: 200}
    assert moved(WIRES, [(0, "p0", "d0", 100), (50, "p0", "d1", 100)]) == {0: 150, 1: 200}


def test_in_and_out_are_apart() -> None:
    flows = [(0, "p0", "d0", 100), (0, "d0", "p0", 100), (0, "p1", "d1", 100)]
    assert moved(WIRES, flows) == dict.fromkeys(range(3), 100)


def test_a_transfer_moves_at_the_lesser_of_its_two_shares() -> None:
    # p0 sends two, d1 takes two: the one between them has a half at both ends.
    flows = [(0, "p0", "d0", 100), (0, "p0", "d1", 100), (0, "p1", "d1", 100)]
    assert moved(WIRES, flows) == dict.fromkeys(range(3), 200)
    # A link of four times the rate takes four at their full rate.
    wide = {**WIRES, "p2": NS_PER_S, "p3": NS_PER_S, "d0": 4 * NS_PER_S}
    flows = [(0, f"p{i}", "d0", 100) for i in range(4)]
    assert moved(wide, flows) == dict.fromkeys(range(4), 100)


def test_what_is_stopped_frees_its_share() -> None:
    flows = [(0, "p0", "d0", 100), (0, "p1", "d0", 1000)]
    assert moved(WIRES, flows, stop=(1, 60)) == {0: 130}


def test_a_link_needs_a_rate() -> None:
    with pytest.raises(CostError, match="d0: a link of 0 bytes/s; 1 or more is right"):
        Nics(Events(), {"d0": 0})


@pytest.mark.parametrize("seed", range(8))
def test_one_pair_is_a_lane_to_the_ns(seed: int) -> None:
    jobs = [
        (hash64(seed, i, 0) % 5000, 1 + hash64(seed, i, 1) % 3000, hash64(seed, i, 2) % 4000)
        for i in range(60)
    ]

    def ends(shared: bool) -> list[tuple[int, int]]:
        events = Events()
        rate = 1_234_567_891
        lane, nics = Lane(events, rate), Nics(events, {"p": rate, "d": rate})
        found: list[tuple[int, int]] = []

        def begin(index: int, n_bytes: int, stop_ns: int) -> None:
            def finish() -> None:
                found.append((events.now_ns, index))

            number = (
                nics.start("p", "d", 0, n_bytes, finish) if shared else lane.start(n_bytes, finish)
            )
            if index % 7 == 3:
                events.after(stop_ns, 5, 0, (nics if shared else lane).stop, number)

        for index, (at_ns, n_bytes, stop_ns) in enumerate(jobs):
            events.at(at_ns, 5, 0, begin, index, n_bytes, stop_ns)
        events.run()
        return found

    assert ends(True) == ends(False)


def test_one_pair_of_workers_is_the_same_with_links_of_their_own() -> None:
    requests = mixture(80, 3, gap_ns=MS)
    made = [cluster("1P1D", link_bytes_per_s=1_000_000, share_nics=own) for own in (True, False)]
    records = [one.run(iter(requests)) for one in made]
    assert max(r.phases_ns["transfer"] for r in records[0]) > 10 * MS, "the link is busy"
    assert digest(records[0]) == digest(records[1])


def test_two_prefill_workers_share_the_link_of_one_decode_worker() -> None:
    slow = 10_000_000
    requests = [one(40), one(40)]
    apart, shared = (
        audited("2P1D", requests, link_bytes_per_s=slow, share_nics=own)[0] for own in (False, True)
    )
    alone_ns = 3 * LAYOUT.block_bytes * NS_PER_S // slow
    assert len({r.prefill for r in shared}) == 2
    for records, ns in ((apart, alone_ns), (shared, 2 * alone_ns)):
        assert [r.phases_ns["transfer"] - READ - 2 * PEER for r in records] == [ns, ns]


def test_steps_of_this_deployment_are_longer_than_its_messages() -> None:
    """Else what these tests work out by hand would not be so."""
    assert STEP.step_ns([], 1, 1) > 2 * (LEG + PEER + READ)
