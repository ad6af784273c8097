"""Push, the side that has the KV: which prompts are taken in, and which may be read now.

KV of a prompt that was read before decode offered blocks for it stands here until decode does.
Decode may be waiting for other prompts meanwhile, for which it has set its blocks aside and which
wait here for room: each side would hold what the other waits for. So a prompt without an offer
is read only while enough is left for the longest one that has an offer.

A pool that has no room for two of the longest would never read one without an offer. But some
never get one: decode may have ended with a prompt, and word of it been lost. So where nothing is in
use and no offer is known, one is read all the same; and should it stand in the way of one that has
an offer after all, its KV is given up: decode's blocks for the other are what it waits for itself.
"""

from __future__ import annotations

from twofold.core.blocks import BlockPool
from twofold.core.handoff.source import Source
from twofold.core.handoff.transfer import Transfer
from twofold.core.request import Request
from twofold.types import RequestId, ceil_div


class PushAdmission(Source):
    """Transfers by name and by prompt. `reserve_blocks` is what the longest prompt takes."""

    def __init__(self, pool: BlockPool, reserve_blocks: int) -> None:
        super().__init__()
        self._pool = pool
        self._reserve_blocks = reserve_blocks
        self._sending: dict[int, Transfer] = {}
        self._transfer_of: dict[RequestId, int] = {}

    def _of(self, request_id: RequestId) -> Transfer | None:
        transfer = self._transfer_of.get(request_id)
        return self._sending.get(transfer) if transfer is not None else None

    def takes(self, request: Request) -> bool:
        """Not while another prompt of its transfer is here."""
        sending = self._sending.get(request.transfer)
        return sending is None or (sending.request is None and sending.hold is None)

    def may_start(self, request: Request) -> bool:
        """Whether its KV would not stand in the way of a prompt that has an offer.

        One whose transfer nobody has named cannot have an offer before its answer is out.
        """
        sending = self._of(request.id)
        unnamed = request.transfer == request.id
        if sending is None or sending.claim is not None or sending.unwanted or unnamed:
            return True
        if sending.ending:
            return True
        if self._pool.available == self._pool.n_blocks and not self._is_awaited():
            return True  # it stands in nobody's way: nothing is in use
        left = self._pool.available - ceil_div(request.n_prompt, self._pool.block_size)
        return left >= self._reserve_blocks

    def _is_awaited(self) -> bool:
        """Whether decode has blocks set aside for a prompt that has not been read."""
        return any(s.claim is not None and s.hold is None for s in self._sending.values())

    def in_the_way(self) -> list[Transfer]:
        """Whose KV nobody has offered blocks for, if one with an offer can never start for it."""
        idle = [s for s in self._sending.values() if s.hold and s.claim is None and not s.ending]
        if not idle:
            return []
        left = self._pool.n_blocks - sum([len(s.hold.blocks) for s in idle if s.hold is not None])
        waiting = [
            ceil_div(s.request.n_prompt, self._pool.block_size)
            for s in self._sending.values()
            if s.claim is not None and s.request is not None and not s.request.blocks
        ]
        return idle if any(need > left for need in waiting) else []
