"""Push: prompts that decode has no room for yet do not take the room of those that it has."""

from __future__ import annotations

from typing import Any

import pytest

from tests.unit.harness import LAYOUT, B
from twofold.core.worker import WorkerCore
from twofold.messages import (
    Claim,
    Closed,
    Done,
    Ended,
    FromPeer,
    PeerMessage,
    Refusal,
    RunStep,
    StepDone,
    Submit,
    ToPeer,
    Wake,
    Write,
)

N_BLOCKS = 9
LONGEST = 4  # blocks of the longest request


class Prefill:
    """A prefill worker's core, and which transfers it reads."""

    def __init__(self, handoff: str, max_blocks: int = LONGEST) -> None:
        self.core = WorkerCore(
            layout=LAYOUT,
            n_blocks=N_BLOCKS,
            max_num_seqs=8,
            max_num_batched_tokens=64,
            max_model_len=max_blocks * B,
            max_waiting=64,
            segment="here",
            prefix_caching=False,
            handoff=handoff,
        )
        self.read: list[int] = []
        self.ended: list[Ended] = []
        self.said: list[PeerMessage] = []
        self.writes = 0

    def give(self, message: Any) -> None:
        todo = [message]
        while todo:
            for effect in self.core.handle(todo.pop(0), 0):
                if isinstance(effect, RunStep):
                    ids = [request_id for request_id, _, _ in effect.work]
                    self.read += ids
                    todo.append(StepDone(effect.step, tuple((i, 1) for i in ids)))
                elif isinstance(effect, Ended):
                    self.ended.append(effect)
                elif isinstance(effect, ToPeer):
                    self.said.append(effect.message)
                elif isinstance(effect, Write):
                    self.writes += 1
        self.core.check()

    def prompt(self, number: int, n_blocks: int = 3) -> None:
        tokens = tuple((number * 50 + i) % 1000 for i in range(n_blocks * B - 1))
        self.give(
            Submit(request_id=number, tokens=tokens, max_tokens=1, hold=True, transfer=100 + number)
        )

    def claim(self, number: int) -> None:
        self.give(FromPeer("d", Claim(100 + number, 0, LAYOUT, "there", 0, (1, 2, 3))))


@pytest.mark.parametrize("handoff", ["push", "layerwise"])
def test_what_has_no_offer_leaves_room_for_the_longest_that_has(handoff: str) -> None:
    made = Prefill(handoff)
    for number in range(1, 6):
        made.prompt(number)
    # One may wait for its offer here; with two, 3 of 9 blocks would be left, and 4 may be needed.
    assert made.read == [1]
    made.prompt(6, n_blocks=LONGEST)
    made.claim(6)
    assert made.read == [1, 6], "an offer was held up by prompts that have none"
    made.claim(3)
    assert made.read == [1, 6], "there was no room"
    made.give(FromPeer("d", Done(106, 0, ok=False)))
    assert made.read == [1, 6]  # its write is in flight: its blocks are still in use


@pytest.mark.parametrize("handoff", ["push", "layerwise"])
def test_with_nothing_in_use_one_starts_and_an_offer_starts_the_next(handoff: str) -> None:
    made = Prefill(handoff, max_blocks=N_BLOCKS)
    for number in (1, 2, 3):
        made.prompt(number)
    assert made.read == [1], "an idle worker waited"
    made.claim(2)
    assert made.read == [1, 2]


@pytest.mark.parametrize("handoff", ["push", "layerwise"])
def test_an_offer_that_comes_after_it_was_taken_back_is_never_written_to(handoff: str) -> None:
    """A second copy of a Claim, overtaken by word that decode has given up: its blocks are free."""
    made = Prefill(handoff)
    made.give(FromPeer("d", Done(101, 0, ok=False)))
    made.claim(1)
    assert [type(m) for m in made.said] == [Closed, Refusal]
    made.prompt(1)
    assert made.read == [1]
    assert made.writes == 0


@pytest.mark.parametrize("handoff", ["push", "layerwise"])
def test_an_offer_for_another_prompt_is_waited_for(handoff: str) -> None:
    """Nothing is in use, but decode has set blocks aside for a prompt that is still to come."""
    made = Prefill(handoff, max_blocks=N_BLOCKS)
    made.claim(2)
    made.prompt(1)
    assert made.read == []
    made.prompt(2)
    assert made.read == [2]


@pytest.mark.parametrize("claim_first", [True, False])
@pytest.mark.parametrize("handoff", ["push", "layerwise"])
def test_what_has_no_offer_gives_way_to_what_has(handoff: str, claim_first: bool) -> None:
    """Decode has reserved for the second and has no room for the first: it would never claim it."""
    made = Prefill(handoff, max_blocks=N_BLOCKS)
    made.prompt(1, n_blocks=5)
    assert made.read == [1]
    if claim_first:
        made.claim(2)
    made.prompt(2, n_blocks=5)
    if not claim_first:
        assert made.read == [1], "there was no room"
        assert made.core.source.counts.in_hand == 1
        made.claim(2)
    assert made.read == [1, 2]
    assert made.core.source.counts.released == 1
    made.prompt(3, n_blocks=4)
    made.claim(3)
    assert made.core.source.counts.released == 1, "what has an offer gave way"


@pytest.mark.parametrize("handoff", ["push", "layerwise"])
def test_a_prompt_whose_transfer_is_over_does_not_wait_for_an_offer(handoff: str) -> None:
    made = Prefill(handoff)
    made.give(FromPeer("d", Done(101, 0, ok=True)))
    made.core.handle(Wake(), 10**12)  # the memory of it has run out
    for number in (2, 3):
        made.prompt(number)
    assert made.read == [2]
    made.prompt(1)
    assert made.read == [2, 1], "it waited for an offer that never comes"
    assert made.core.source.counts.in_hand == 1


@pytest.mark.parametrize("handoff", ["push", "layerwise"])
def test_a_prompt_that_names_no_transfer_cannot_wait_for_an_offer(handoff: str) -> None:
    made = Prefill(handoff, max_blocks=N_BLOCKS)
    made.give(Submit(request_id=5, tokens=(1, 2, 3), max_tokens=1, hold=True))
    assert made.read == [5]


def test_pull_reads_as_it_comes() -> None:
    made = Prefill("pull", max_blocks=N_BLOCKS)
    for number in (1, 2, 3):
        made.prompt(number)
    assert made.read == [1, 2, 3]


@pytest.mark.parametrize("handoff", ["push", "layerwise"])
def test_a_second_prompt_of_a_transfer_is_refused(handoff: str) -> None:
    made = Prefill(handoff)
    made.prompt(1, n_blocks=1)
    submit = Submit(request_id=9, tokens=(1, 2), max_tokens=1, hold=True, transfer=101)
    made.give(submit)
    assert [(e.request_id, e.outcome, e.reason) for e in made.ended] == [
        (1, "finished", "length"),
        (9, "refused", "duplicate_handle"),
    ]
    assert made.core.source.counts.in_hand == 1
