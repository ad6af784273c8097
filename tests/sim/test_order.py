"""Virtual time and its total order; the same run whatever the process."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.sim.support import STEP, audited, cluster, mixture, one
from twofold.metrics.digest import digest
from twofold.sim import PoolsError, StuckError, plan_pools
from twofold.sim.events import Events, Kind

ROOT = Path(__file__).resolve().parents[2]

PROGRAM = """
from tests.sim.support import MS, audited, mixture
from twofold.metrics.digest import digest
from twofold.sim import Crash, SeededFaults

records, made = audited(
    "2P2D1M",
    mixture(60, 11, gap_ns=MS),
    faults=SeededFaults(seed=4, drop=0.05, duplicate=0.1, delay=0.2, most_ns=40 * MS, cut_leg=0.02),
    crashes=[Crash(worker="decode-1", at_ns=30 * MS, down_ns=20 * MS)],
    settings={"n_blocks": 20},
    time_left_ns=2000 * MS,
)
print(digest(records), made.events.n_run)
"""


def test_the_digest_is_the_same_under_any_hash_seed() -> None:
    seen: list[str] = []
    for hash_seed in ("1", "2"):
        env = {**os.environ, "PYTHONHASHSEED": hash_seed, "PYTHONPATH": str(ROOT)}
        done = subprocess.run(
            [sys.executable, "-c", PROGRAM], env=env, cwd=ROOT, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr
        seen.append(done.stdout)
    assert seen[0] == seen[1]
    assert len(seen[0].split()[0]) == 64


def test_the_digest_tells_runs_apart() -> None:
    runs = [
        audited("1P1D", mixture(20, 1))[0],
        audited("1P1D", mixture(20, 2))[0],
        audited("2M", mixture(20, 1))[0],
        audited("1P1D", mixture(20, 1), peer_latency_ns=50_001)[0],
    ]
    assert len({digest(run) for run in runs}) == len(runs)


def test_events_run_in_order_of_time_then_kind_then_sequence() -> None:
    events = Events()
    ran: list[str] = []
    events.at(5, Kind.WAKE, 0, ran.append, "5 wake")
    events.at(5, Kind.LEG, 0, ran.append, "5 leg, first")
    events.at(9, Kind.FAULT, 0, ran.append, "9 fault")
    events.at(5, Kind.RESULT, 0, ran.append, "5 result")
    events.at(5, Kind.LEG, 0, ran.append, "5 leg, second")
    events.at(5, Kind.ARRIVAL, 0, ran.append, "5 arrival")
    events.at(5, Kind.PEER, 0, ran.append, "5 peer")
    events.run()
    assert ran == [
        "5 result",
        "5 peer",
        "5 leg, first",
        "5 leg, second",
        "5 arrival",
        "5 wake",
        "9 fault",
    ]
    assert events.now_ns == 9
    with pytest.raises(AssertionError, match="is past"):
        events.at(8, Kind.LEG, 0, ran.append, "late")


def test_arrivals_of_one_nanosecond_keep_their_order() -> None:
    records, _ = audited("1M", [one(10, 1), one(200, 1), one(10, 1)], settings={"max_num_seqs": 1})
    assert [r.request_id for r in records] == [0, 1, 2]
    assert [r.token_times_ns[0] for r in records] == sorted(r.token_times_ns[0] for r in records)


def test_load_ties_go_by_name() -> None:
    records, _ = audited("3P2D", [one(40, 20) for _ in range(6)])
    assert [r.prefill for r in records] == ["prefill-0", "prefill-1", "prefill-2"] * 2


def test_a_run_without_progress_is_stopped() -> None:
    with pytest.raises(StuckError, match="50 events"):
        cluster("1M").run(mixture(20, 1), most_events=50)


def test_pools_are_counted() -> None:
    def names(spec: str) -> list[str]:
        return [plan.name for plan in plan_pools(spec, {}, STEP)]

    assert names("2P1D") == ["prefill-0", "prefill-1", "decode-0"]
    assert names("1m") == ["mixed-0"]
    assert names("1P1D1M") == ["prefill-0", "decode-0", "mixed-0"]


@pytest.mark.parametrize("spec", ["", "P", "2", "1P", "3D", "0M", "1P0D", "1X", "1P-1D", "1P+1D"])
def test_bad_pools_are_refused_in_one_line(spec: str) -> None:
    with pytest.raises(PoolsError) as caught:
        plan_pools(spec, {}, STEP)
    assert "\n" not in str(caught.value)
    assert repr(spec) in str(caught.value)
