"""How many ranges a handoff's blocks fall into as the pools of both workers age.

The pools of the cores, without processes: prompts of mixed length are read, handed over and
decoded, a few at a time and ending in no order. A range is a run of blocks that lie next to each
other on both sides, which a transport moves in one piece.
"""

from __future__ import annotations

import random
import statistics
from typing import Any, Final

import msgspec

from benchmarks.handoff.conditions import BLOCK_SIZE, Progress
from twofold.core.blocks import BlockPool
from twofold.core.links import Link
from twofold.transport.runs import merge
from twofold.types import BlockId, ceil_div

_BLOCKS: Final = 2048
_DECODING: Final = 8
_LONGEST: Final = 4096
_AGES: Final = (10, 100, 1000, 3000)
_QUICK_AGES: Final = (10, 100)


class _Decoding(msgspec.Struct):
    """One answer being written: its blocks, and how many more it will take."""

    tokens: list[int]
    blocks: list[BlockId]
    left: int


class Aging:
    """A prefill and a decode pool through which prompts go, one `handoff` after the other."""

    def __init__(self, *, caching: bool, seed: int) -> None:
        self._rng = random.Random(seed)
        self.prefill = BlockPool(_BLOCKS, BLOCK_SIZE, caching=caching)
        self.decode = BlockPool(_BLOCKS, BLOCK_SIZE, caching=caching)
        self._decoding: list[_Decoding] = []

    def handoff(self) -> tuple[int, int]:
        """(blocks, ranges) of the next prompt."""
        rng = self._rng
        n = round(BLOCK_SIZE * (_LONGEST / BLOCK_SIZE) ** rng.random())
        tokens = [rng.randrange(3, 600) for _ in range(n)]
        count = ceil_div(n, BLOCK_SIZE)
        read = self.prefill.allocate(count)
        self._keep(self.prefill, tokens, read)
        taken = self.decode.allocate(count)
        ranges = merge(list(zip(read, taken, strict=True)), count)
        self.prefill.release(read)
        self._decoding.append(_Decoding(tokens, taken, rng.randrange(1, 17)))
        self._write(rng)
        return count, len(ranges)

    def _write(self, rng: random.Random) -> None:
        """Answers grow by a block in turn, until few enough are left for the next prompt."""
        while len(self._decoding) >= _DECODING:
            one = self._decoding[rng.randrange(len(self._decoding))]
            if one.left:
                one.left -= 1
                one.blocks += self.decode.allocate(1)
                one.tokens += [rng.randrange(3, 600) for _ in range(BLOCK_SIZE)]
                continue
            self._keep(self.decode, one.tokens, one.blocks)
            self.decode.release(one.blocks)
            self._decoding.remove(one)

    @staticmethod
    def _keep(pool: BlockPool, tokens: list[int], blocks: list[BlockId]) -> None:
        links: list[Link] = []
        pool.remember(blocks, 0, len(tokens) // BLOCK_SIZE, tokens, "", links)


def measure(quick: bool) -> dict[str, Any]:
    """Ranges and blocks per handoff by age of the pools, with and without prefix caches."""
    ages = _QUICK_AGES if quick else _AGES
    progress = Progress("fragments", 2 * len(ages))
    rows: list[dict[str, Any]] = []
    for caching in (False, True):
        aging = Aging(caching=caching, seed=7)
        done = 0
        for age in ages:
            found = [aging.handoff() for _ in range(age - done)]
            done = age
            rows.append(
                {
                    "prefix_caching": caching,
                    "up_to_handoffs": age,
                    "blocks": round(statistics.fmean(blocks for blocks, _ in found), 1),
                    "ranges": round(statistics.fmean(ranges for _, ranges in found), 1),
                    "blocks_per_range": round(
                        sum(blocks for blocks, _ in found) / sum(ranges for _, ranges in found), 2
                    ),
                }
            )
            progress.step()
    progress.end()
    return {"pool_blocks": _BLOCKS, "decoding": _DECODING, "longest_tokens": _LONGEST, "rows": rows}
