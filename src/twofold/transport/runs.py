"""From pairs of blocks to runs that can be copied in one piece. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class Run(NamedTuple):
    """`n` neighbouring blocks: the peer's from `src` on go to ours from `dst` on.

    `at` is the index in the pairs of the first of them.
    """

    src: int
    dst: int
    n: int
    at: int


def merge(pairs: Sequence[tuple[int, int]], max_blocks: int) -> list[Run]:
    """Neighbours in `pairs` that are adjacent on both sides, merged to at most `max_blocks`.

    The runs cover the pairs exactly and in order.
    """
    runs: list[Run] = []
    start = 0
    while start < len(pairs):
        src, dst = pairs[start]
        n = 1
        while n < max_blocks and start + n < len(pairs) and pairs[start + n] == (src + n, dst + n):
            n += 1
        runs.append(Run(src, dst, n, start))
        start += n
    return runs


def share_out(runs: Sequence[Run], streams: int) -> list[list[Run]]:
    """`runs` in at most `streams` non-empty lists of about equally many blocks, in order."""
    total = sum(run.n for run in runs)
    shares: list[list[Run]] = [[] for _ in range(streams)]
    before = 0
    for run in runs:
        shares[before * streams // total].append(run)
        before += run.n
    return [share for share in shares if share]


def fault_in(pairs: Sequence[tuple[int, int]], peer_blocks: int, own_blocks: int) -> str:
    """What is wrong with `pairs` for pools of these sizes; empty when nothing is."""
    for src, dst in pairs:
        if not 0 <= src < peer_blocks:
            return f"peer block {src} is outside its pool of {peer_blocks} blocks"
        if not 0 <= dst < own_blocks:
            return f"own block {dst} is outside the pool of {own_blocks} blocks"
    if len({dst for _, dst in pairs}) != len(pairs):
        return "an own block is named twice as destination"
    return ""
