"""Push and layer-wise handoff under virtual time: what they cost, save, and must not do."""

from __future__ import annotations

import pytest

from tests.sim.support import MS, audited, mixture, one
from twofold.messages import Claim, ToPeer, Written
from twofold.sim.faults import AS_SENT, Fate
from twofold.sim.network import _Moving
from twofold.types import NS_PER_S

MODES = ("pull", "push", "layerwise")


def _settings(handoff: str, **more: int) -> dict[str, object]:
    return {"handoff": handoff, "min_layerwise_tokens": 64, **more}


@pytest.mark.parametrize("handoff", MODES)
@pytest.mark.parametrize("pools", ["1P1D", "2P2D"])
def test_all_finish_when_nothing_goes_wrong(handoff: str, pools: str) -> None:
    """Long prompts go in chunks, so their blocks are sent while others are written."""
    requests = mixture(30, 3, gap_ns=MS) + [one(n, 5, at_ns=400 * MS) for n in (257, 700, 1500)]
    records, _ = audited(pools, requests, settings=_settings(handoff))
    assert [r.outcome for r in records] == ["finished"] * 33
    for record in records:
        assert sum(record.phases_ns.values()) == record.ttft_ns
        assert len(record.token_times_ns) == record.output_tokens


@pytest.mark.parametrize("handoff", ["push", "layerwise"])
def test_prompts_that_share_a_small_pool_and_small_steps_all_arrive(handoff: str) -> None:
    """The prefill pool is too small for all prompts at once, and its budget cuts them up."""
    requests = [one(n, 4, at_ns=i * MS // 4) for i, n in enumerate((90, 300, 120, 280, 200, 310))]
    records, _ = audited(
        "1P1D",
        requests,
        settings=_settings(handoff),
        by_role={"prefill": {"n_blocks": 24, "max_num_batched_tokens": 32}},
    )
    assert [r.outcome for r in records] == ["finished"] * 6


@pytest.mark.parametrize("handoff", ["push", "layerwise"])
def test_a_damaged_write_is_never_believed(handoff: str, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = _Moving.copy

    def damaged(moving: _Moving) -> tuple[int, ...]:
        checksums = whole(moving)
        assert moving.ours is not None
        moving.ours._slots[moving.pairs[-1][1]][0] ^= 1
        return checksums

    monkeypatch.setattr(_Moving, "copy", damaged)
    records, _ = audited("1P1D", [one(300)], settings=_settings(handoff))
    assert (records[0].outcome, records[0].reason) == (
        "failed",
        "transfer failed: checksum mismatch",
    )


def test_on_a_slow_link_layers_hide_what_a_push_in_one_piece_shows() -> None:
    ttft = {}
    after_prefill = {}
    for handoff in MODES:
        records, _ = audited(
            "1P1D", [one(1500)], settings=_settings(handoff), link_bytes_per_s=10**7
        )
        assert records[0].outcome == "finished"
        ttft[handoff] = records[0].ttft_ns or 0
        after_prefill[handoff] = records[0].phases_ns["transfer"]
    assert ttft["layerwise"] < ttft["push"] < ttft["pull"]
    assert after_prefill["layerwise"] < after_prefill["push"] / 2


@pytest.mark.parametrize("handoff", ["push", "layerwise"])
def test_a_full_hit_on_decode_writes_nothing_and_ends(handoff: str) -> None:
    first, again = one(33), one(33, at_ns=100 * MS)
    shared = [
        type(r)(r.arrival_ns, r.input_tokens, r.output_tokens, (1, 2, 3), 16)
        for r in (first, again)
    ]
    records, _ = audited("1P1D", shared, settings=_settings(handoff))
    assert [r.outcome for r in records] == ["finished"] * 2
    assert records[0].n_bytes > 0
    assert records[1].n_bytes == 0


def test_below_the_threshold_a_prompt_goes_in_one_piece() -> None:
    for n, handoff in ((60, "push"), (60, "layerwise")):
        records, _ = audited("1P1D", [one(n)], settings=_settings(handoff))
        if handoff == "push":
            whole = records[0]
    assert records[0].token_times_ns == whole.token_times_ns


class Losing:
    """The first `left` peer messages of one kind never arrive."""

    def __init__(self, kind: type, left: int) -> None:
        self.kind = kind
        self.left = left

    def fate(self, sequence: int, message: object) -> Fate:
        if isinstance(message, ToPeer) and isinstance(message.message, self.kind) and self.left:
            self.left -= 1
            return ()
        return AS_SENT


@pytest.mark.parametrize("handoff", ["push", "layerwise"])
@pytest.mark.parametrize("kind", [Claim, Written])
@pytest.mark.parametrize("times", [1, 3])
def test_what_is_lost_is_said_again_at_the_next_heartbeat(
    handoff: str, kind: type, times: int
) -> None:
    """No deadline is set: without another copy decode would wait for ever."""
    losing = Losing(kind, times)
    records, _ = audited("1P1D", [one(300)], settings=_settings(handoff), faults=losing)
    assert losing.left == 0
    assert records[0].outcome == "finished"
    assert times * NS_PER_S <= records[0].e2e_ns < (times + 1) * NS_PER_S


def test_push_does_not_leave_decode_waiting_when_prefill_fails() -> None:
    """The prompt is refused at prefill: decode is told by its peer, not by a deadline."""
    records, _ = audited(
        "1P1D",
        [one(300, 4)],
        settings=_settings("push"),
        by_role={"prefill": {"max_model_len": 200}},
    )
    assert records[0].outcome == "refused"
    assert records[0].e2e_ns < 2 * MS
