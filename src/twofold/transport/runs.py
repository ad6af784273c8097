"""From pairs of blocks to runs that can be copied in one piece. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, TypeVar


class Run(NamedTuple):
    """`n` neighbouring blocks: the peer's from `src` on go to ours from `dst` on.

    `at` is the index in the pairs of the first of them.
    """

    src: int
    dst: int
    n: int
    at: int


class Piece(NamedTuple):
    """Bytes `offset` to `offset + n_bytes` of our blocks from `src` on, for the peer's from `dst`
    on. They reach over `n` whole blocks, or are a part of one.
    """

    src: int
    dst: int
    n: int
    offset: int
    n_bytes: int


_R = TypeVar("_R", Run, Piece)


def part(layers: tuple[int, int], n_layers: int, block_bytes: int) -> tuple[int, int]:
    """First and end byte of some of a block's equal parts. Raises ValueError when there are none
    such."""
    first, end = layers
    if not 0 <= first < end <= n_layers or block_bytes % n_layers:
        raise ValueError(f"layers {first} to {end} of {n_layers} in {block_bytes} bytes")
    return first * block_bytes // n_layers, end * block_bytes // n_layers


def cut(
    pairs: Sequence[tuple[int, int]], span: tuple[int, int], block_bytes: int, max_blocks: int
) -> list[Piece]:
    """Pieces that cover bytes `span` of the blocks in `pairs`; whole neighbours are merged."""
    first, end = span
    if end - first < block_bytes:
        return [Piece(src, dst, 1, first, end - first) for src, dst in pairs]
    return [Piece(r.src, r.dst, r.n, 0, r.n * block_bytes) for r in merge(pairs, max_blocks)]


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


def share_out(runs: Sequence[_R], streams: int) -> list[list[_R]]:
    """`runs` in at most `streams` non-empty lists of about equally many blocks, in order."""
    total = sum(run.n for run in runs)
    shares: list[list[_R]] = [[] for _ in range(streams)]
    before = 0
    for run in runs:
        shares[before * streams // total].append(run)
        before += run.n
    return [share for share in shares if share]


def fault_in(
    pairs: Sequence[tuple[int, int]], peer_blocks: int, own_blocks: int, *, writing: bool = False
) -> str:
    """What is wrong with `pairs` for pools of these sizes; empty when nothing is.

    They are (the peer's, ours), or (ours, the peer's) when `writing`.
    """
    for src, dst in pairs:
        own, peer = (src, dst) if writing else (dst, src)
        if not 0 <= peer < peer_blocks:
            return f"peer block {peer} is outside its pool of {peer_blocks} blocks"
        if not 0 <= own < own_blocks:
            return f"own block {own} is outside the pool of {own_blocks} blocks"
    if len({dst for _, dst in pairs}) != len(pairs):
        return f"{'a peer' if writing else 'an own'} block is named twice as destination"
    return ""
