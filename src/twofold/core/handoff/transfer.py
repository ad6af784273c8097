"""One push of one prompt's KV, as the worker that has it keeps track of it."""

from __future__ import annotations

from typing import Final

import msgspec

from twofold.core.blocks import Hold
from twofold.core.request import Request
from twofold.messages import Claim
from twofold.types import BlockId, RequestId, ceil_div

MOST_EARLY: Final = 1024
"""Offers that may wait for their prompt; one more is refused."""


class Transfer(msgspec.Struct):
    """What is known of its prompt and of its offer; either may come first."""

    transfer: int
    generation: int
    peer: str = ""
    claim: Claim | None = None
    request: Request | None = None  # while it computes
    request_id: RequestId = -1
    hold: Hold | None = None  # once it has finished
    checksums: tuple[int, ...] | None = None
    n_cached: int = 0
    n_sent: int = 0  # blocks whose writes have all been started
    n_layers: int = 0  # layers of the blocks of the step in flight whose writes have
    n_preempted: int = 0
    n_writes: int = 0
    in_flight: int = 0
    n_bytes: int = 0
    queue_ns: int = 0
    compute_ns: int = 0
    finished_ns: int = 0
    told: bool = False  # Written was sent
    unwanted: bool = False  # Done(ok) came early: decode has it all already
    ending: str = ""  # why it ends, once the writes in flight have
    ends_as: str = ""  # "received", "released" or "expired"

    def n_final(self, computed: int, block_size: int) -> int:
        """Blocks that no step writes to any more once `computed` tokens are, while it computes."""
        assert self.request is not None
        n_prompt = self.request.n_prompt
        return computed // block_size if computed < n_prompt else ceil_div(n_prompt - 1, block_size)

    def pairs(self, first: int, end: int) -> tuple[tuple[BlockId, BlockId], ...]:
        """(our block, the peer's) for blocks number `first` to `end` that the peer wants."""
        claim = self.claim
        assert claim is not None
        ours = self.hold.blocks if self.hold is not None else ()
        if self.request is not None:
            ours = tuple(self.request.blocks)
        first = max(first, claim.first)
        end = min(end, claim.first + len(claim.blocks))
        return tuple((ours[i], claim.blocks[i - claim.first]) for i in range(first, end))
