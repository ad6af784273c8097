"""Merging pairs of blocks into runs."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from twofold.transport.runs import fault_in, merge, share_out

# Small numbers, so that neighbours and gaps both happen often.
PAIRS = st.lists(st.tuples(st.integers(0, 6), st.integers(0, 6)), max_size=24)
STRETCHES = st.lists(
    st.tuples(st.integers(0, 40), st.integers(0, 40), st.integers(1, 9)), max_size=6
)


def spread(runs: list[tuple[int, int, int]]) -> list[tuple[int, int]]:
    return [(src + i, dst + i) for src, dst, n in runs for i in range(n)]


@given(st.one_of(PAIRS, STRETCHES.map(spread)), st.integers(1, 9))
def test_runs_cover_the_pairs_in_order_and_none_could_be_longer(
    pairs: list[tuple[int, int]], max_blocks: int
) -> None:
    runs = merge(pairs, max_blocks)
    assert spread([(run.src, run.dst, run.n) for run in runs]) == pairs
    assert [run.at for run in runs] == [sum(r.n for r in runs[:i]) for i in range(len(runs))]
    for run, after in itertools.pairwise(runs):
        adjacent = (after.src, after.dst) == (run.src + run.n, run.dst + run.n)
        assert 1 <= run.n <= max_blocks
        assert run.n == max_blocks or not adjacent


def test_blocks_adjacent_on_one_side_only_are_not_merged() -> None:
    assert len(merge([(0, 5), (1, 7)], 8)) == 2
    assert len(merge([(0, 5), (2, 6)], 8)) == 2
    assert len(merge([(0, 5), (1, 6)], 8)) == 1


@given(STRETCHES.map(spread), st.integers(1, 9), st.integers(1, 5))
def test_shares_hold_every_run_once_and_about_equally_many_blocks(
    pairs: list[tuple[int, int]], max_blocks: int, streams: int
) -> None:
    runs = merge(pairs, max_blocks)
    shares = share_out(runs, streams)
    assert [run for share in shares for run in share] == runs
    assert len(shares) <= streams
    assert all(shares)
    for share in shares:
        assert sum(run.n for run in share) < len(pairs) / streams + max_blocks


def test_faults_in_pairs_are_named() -> None:
    assert fault_in([(3, 1), (0, 0)], 4, 2) == ""
    assert "peer block 4" in fault_in([(4, 1)], 4, 2)
    assert "peer block -1" in fault_in([(-1, 1)], 4, 2)
    assert "own block 2" in fault_in([(0, 2)], 4, 2)
    assert "own block -1" in fault_in([(0, -1)], 4, 2)
    assert "twice" in fault_in([(0, 1), (1, 1)], 4, 2)
