"""The bounded part of the search for faults, its kept finds, and the search itself."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

import msgspec
import pytest

from twofold.core.blocks import BlockPool
from twofold.core.handoff.pull_source import PullSource
from twofold.sim import swarm
from twofold.sim.faults import Crash, Jump, ListedFaults, Pause, Sever
from twofold.sim.swarm_run import run
from twofold.sim.swarm_schedule import (
    ALL_MODES,
    TIME_LEFT_NS,
    Asked,
    Mode,
    Schedule,
    decode,
    draw,
    encode,
)
from twofold.sim.swarm_shrink import shrink
from twofold.types import NS_PER_MS

SEEDS: Final = sorted((Path(__file__).parent / "seeds").glob("*.json"))


def plain(mode: Mode, n: int = 12, **changes: Any) -> Schedule:
    """A schedule in which nothing goes wrong unless `changes` say so."""
    schedule = Schedule(
        seed=0,
        mode=mode,
        pools="1P1D",
        block_size=4,
        settings={
            "n_blocks": 64,
            "max_num_seqs": 8,
            "max_num_batched_tokens": 64,
            "max_waiting": 64,
            "min_layerwise_tokens": 4,
        },
        network={"link_bytes_per_s": 10**8, "digest_ns": 0, "layer_groups": 2},
        requests=tuple(Asked(i * NS_PER_MS, 1 + 2 * i, 3) for i in range(n)),
    )
    return msgspec.structs.replace(schedule, **changes)


@pytest.mark.parametrize("mode", ALL_MODES)
@pytest.mark.parametrize("part", range(4))
def test_a_bounded_swarm_finds_nothing(part: int, mode: Mode) -> None:
    found = swarm.tally(range(50 * part, 50 * (part + 1)), [mode], n_requests=20)
    assert found.found == []
    assert found.requests == 50 * 21
    assert min(found.outcomes[o] for o in ("finished", "failed", "cancelled", "refused")) > 20


@pytest.mark.parametrize("path", SEEDS, ids=lambda path: path.stem)
def test_kept_schedules_break_nothing_any_more(path: Path) -> None:
    assert run(decode(path.read_bytes()), full_every=1).violation == ""


@pytest.mark.parametrize("mode", ALL_MODES)
def test_without_faults_all_finish(mode: Mode) -> None:
    verdict = run(plain(mode), full_every=1)
    assert (verdict.violation, verdict.outcomes) == ("", {"finished": 13})


@pytest.mark.parametrize("mode", ALL_MODES)
@pytest.mark.parametrize("worker", ["prefill-0", "decode-0"])
def test_a_pause_shorter_than_every_limit_only_delays(mode: Mode, worker: str) -> None:
    pause = Pause(worker=worker, at_ns=8 * NS_PER_MS, for_ns=400 * NS_PER_MS)
    verdict = run(plain(mode, troubles=(pause,)))
    assert (verdict.violation, verdict.outcomes) == ("", {"finished": 13})


@pytest.mark.parametrize("mode", ALL_MODES)
@pytest.mark.parametrize("worker", ["prefill-0", "decode-0"])
def test_a_pause_longer_than_the_deadline_ends_what_it_hits_in_time(
    mode: Mode, worker: str
) -> None:
    pause = Pause(worker=worker, at_ns=8 * NS_PER_MS, for_ns=2 * TIME_LEFT_NS)
    verdict = run(plain(mode, troubles=(pause,)))
    assert verdict.violation == ""
    assert verdict.outcomes["failed"] > 3, "the pause hit nobody"
    assert verdict.outcomes["finished"] >= 1, "nobody was served after"


@pytest.mark.parametrize("mode", ALL_MODES)
@pytest.mark.parametrize("worker", ["prefill-0", "decode-0"])
def test_a_clock_that_jumps_ends_what_it_hits_and_nothing_else(mode: Mode, worker: str) -> None:
    jump = Jump(worker=worker, at_ns=8 * NS_PER_MS, by_ns=3600 * 1000 * NS_PER_MS)
    verdict = run(plain(mode, troubles=(jump,)))
    assert verdict.violation == ""
    assert verdict.outcomes["failed"] > 0, "the jump hit nobody"
    assert verdict.outcomes["finished"] > 1, "the worker is of no more use"


@pytest.mark.parametrize("mode", ALL_MODES)
def test_a_severed_connection_fails_what_was_on_it_and_is_made_anew(mode: Mode) -> None:
    sever = Sever(worker="prefill-0", other="decode-0", at_ns=9 * NS_PER_MS)
    verdict = run(plain(mode, troubles=(sever,)))
    assert verdict.violation == ""
    assert verdict.outcomes["failed"] > 0, "the cut hit nobody"
    assert verdict.outcomes["finished"] > 4


@pytest.mark.parametrize("mode", ["push", "layerwise"])
def test_two_that_reach_the_workers_in_opposite_order_do_not_wait_for_each_other(
    mode: Mode,
) -> None:
    """Pools have room for one: prefill has read the second, decode has blocks for the first."""
    asked = tuple(Asked(NS_PER_MS + 1000 * i, 18, 3) for i in range(2))
    tight = {"n_blocks": 6, "max_model_len": 24, "max_num_seqs": 8, "max_num_batched_tokens": 64}
    late = {"SendPrefill:0:0:1": (2 * NS_PER_MS,)}
    schedule = plain(mode, requests=asked, fates=late)
    schedule = msgspec.structs.replace(schedule, settings={**schedule.settings, **tight})
    verdict = run(schedule, full_every=1)
    assert (verdict.violation, verdict.outcomes) == ("", {"finished": 2, "failed": 1})


def test_listed_fates_repeat_a_seeded_run_to_the_letter() -> None:
    for seed in range(6):
        seeded = draw(seed, "push", 20)
        first = run(seeded)
        listed = msgspec.structs.replace(seeded, rates=None, fates=first.fates)
        again = run(decode(encode(listed)))
        assert (again.n_events, again.outcomes, again.fates) == (
            first.n_events,
            first.outcomes,
            first.fates,
        )


def test_a_schedule_depends_on_its_seed_alone() -> None:
    assert draw(5, "pull") == draw(5, "pull")
    assert encode(draw(5, "pull")) != encode(draw(6, "pull"))
    kinds = {type(trouble) for seed in range(40) for trouble in draw(seed, "push").troubles}
    assert len(kinds) == 6, "a kind of trouble never comes"


def test_a_violation_is_shrunk_and_can_be_kept(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Planted: one block of each release is forgotten."""
    release = BlockPool.release
    monkeypatch.setattr(BlockPool, "release", lambda pool, blocks: release(pool, blocks[1:]))
    assert swarm.main(["--seeds", "1", "--mode", "push", "--jobs", "1"]) == 1
    out = capsys.readouterr().out
    kept, _, last = out.rpartition("requests:")
    assert last.endswith("1 violations\n")
    small = decode(kept.encode())
    assert (small.requests, small.troubles, small.fates) == ((), (), {}), "the canary is enough"
    assert run(small).violation
    monkeypatch.undo()
    assert run(small).violation == ""


def test_shrinking_keeps_what_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker that forgets on a lost peer only: the crash stays, and little else."""
    lost = PullSource.peer_lost

    def careless(source: PullSource, peer: str, *rest: Any) -> None:
        for held in list(source._pool.holds.values()):
            source._pool.unhold(held.owner)
        lost(source, peer, *rest)

    monkeypatch.setattr(PullSource, "peer_lost", careless)
    crash = Crash(worker="decode-0", at_ns=7 * NS_PER_MS, down_ns=NS_PER_MS)
    pause = Pause(worker="prefill-0", at_ns=1, for_ns=1)
    slow = {"link_bytes_per_s": 10**5, "digest_ns": 0, "layer_groups": 2}
    large = plain("pull", troubles=(pause, crash), network=slow)
    small = shrink(large)
    assert small.troubles == (crash,)
    assert len(small.requests) == 1


def test_the_command_line_counts_and_refuses(capsys: pytest.CaptureFixture[str]) -> None:
    assert swarm.main(["--seeds", "2", "--start", "7", "--jobs", "1"]) == 0
    last = capsys.readouterr().out.splitlines()[-1]
    assert last.startswith("6 schedules, 306 requests, ")
    assert last.endswith(" 0 violations")
    for words in (["--seeds", "0"], ["--seeds", "x"], ["--mode", "carry"]):
        with pytest.raises(SystemExit) as ended:
            swarm.main(words)
        assert ended.value.code == 2


def test_seed_files_are_as_encode_writes_them() -> None:
    assert SEEDS, "no kept schedules found"
    for path in SEEDS:
        assert json.loads(path.read_bytes()) == json.loads(encode(decode(path.read_bytes())))


def test_a_fate_goes_to_the_message_that_it_names() -> None:
    class Message:
        request_id, generation = 3, 1

    faults = ListedFaults({"Message:3:1:2": (7,)})
    assert [faults.fate(i, Message()) for i in range(3)] == [(0,), (7,), (0,)]
