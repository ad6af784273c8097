"""One request as a worker's core knows it."""

from __future__ import annotations

from enum import IntEnum
from typing import Literal, TypeAlias

from twofold.core.abridged import Ids, known_links, token_list
from twofold.core.links import Link
from twofold.messages import Ended, Phases
from twofold.types import BlockId, KVHandle, RequestId, ceil_div

Outcome: TypeAlias = Literal["finished", "refused", "failed", "cancelled"]


class State(IntEnum):
    """Where a request stands on one worker.

    state      what it means                             blocks   leaves by
    CLAIMING   KV asked of a peer, ids not known yet     none     Grant, Refusal, timeout, abort
    WAITING    ids known, not placed                     none     placed; abort; deadline
    LOADING    placed, a read fills its blocks           held     ReadDone; abort
    VERIFYING  read, peer asked whether it still holds   held     Closed; timeout; abort
    RUNNING    in the batch, step by step                active   finish; preemption; abort
    DRAINING   ended, but steps or a read still write    as was   StepDone, ReadDone
    GONE       ended, blocks given back or held for a peer
    """

    CLAIMING = 0
    WAITING = 1
    LOADING = 2
    VERIFYING = 3
    RUNNING = 4
    DRAINING = 5
    GONE = 6


class Request:
    """State of one request. `tokens` is prompt and answer so far; KV of `computed` of them exists,
    and that of the next `sent` is being computed by steps in flight.
    """

    __slots__ = (
        "arrived_ns",
        "blocks",
        "bypassed",
        "checksums",
        "computed",
        "first_step_ns",
        "generation",
        "hold",
        "id",
        "links",
        "max_tokens",
        "min_tokens",
        "n_bytes",
        "n_cached",
        "n_known",
        "n_preempted",
        "n_prompt",
        "placed_ns",
        "pushed",
        "ready_ns",
        "remote_blocks",
        "salt",
        "segment",
        "sent",
        "source",
        "state",
        "stop_token_ids",
        "tokens",
        "transfer",
    )

    def __init__(
        self,
        request_id: RequestId,
        tokens: Ids,
        *,
        max_tokens: int,
        min_tokens: int,
        stop_token_ids: tuple[int, ...],
        salt: str,
        hold: bool,
        source: KVHandle | None,
        generation: int,
        now_ns: int,
        transfer: int = 0,
    ) -> None:
        self.id = request_id
        self.tokens = token_list(tokens)
        self.n_known = len(tokens)  # prompt and answer so far; 0 while the ids are not known
        self.n_prompt = source.n_tokens if source else len(tokens)
        self.max_tokens = max_tokens
        self.min_tokens = min_tokens
        self.stop_token_ids = stop_token_ids
        self.salt = salt
        self.hold = hold
        self.source = source
        self.generation = generation
        self.transfer = transfer or request_id
        self.state = State.WAITING
        self.blocks: list[BlockId] = []
        self.computed = self.sent = 0
        self.links: list[Link] = known_links(self.tokens)
        self.n_cached = 0
        self.n_preempted = 0
        self.bypassed = 0
        self.arrived_ns = now_ns
        self.placed_ns = -1  # reads began, or nothing had to be read
        self.ready_ns = -1  # its KV was committed; stays -1 for a request computed here
        self.first_step_ns = -1
        # What a Grant brought, kept until the KV is committed.
        self.remote_blocks: tuple[BlockId, ...] = ()
        self.checksums: tuple[int, ...] = ()
        self.segment = ""
        self.n_bytes = 0
        # Where KV was pushed: the peer's (queue, compute, writing) times, and when it said so.
        self.pushed: tuple[int, int, int, int] | None = None

    def ids(self) -> list[int]:
        """All known token ids, for whoever computes with them."""
        assert isinstance(self.tokens, list), "an abridged prompt has no ids"
        return self.tokens

    @property
    def n_output(self) -> int:
        """Tokens of the answer so far."""
        return max(0, self.n_known - self.n_prompt)

    def append(self, token: int) -> None:
        """One more token of the answer."""
        self.tokens.append(token)
        self.n_known += 1

    @property
    def n_missing(self) -> int:
        """Known tokens whose KV is in no step yet; 1 for one that decodes, between its steps."""
        return self.n_known - self.computed - self.sent

    def n_blocks_known(self, block_size: int) -> int:
        """Blocks for all tokens known now."""
        return ceil_div(self.n_known, block_size)

    def n_blocks_at_most(self, block_size: int) -> int:
        """Blocks it can ever need: the last token of the answer is never fed back."""
        return ceil_div(self.n_prompt + self.max_tokens - 1, block_size)

    def phases(self, now_ns: int) -> Phases:
        """Where its time went, its first token being sampled now."""
        remote = self.ready_ns >= 0
        since_ns = self.ready_ns if remote else self.arrived_ns
        queue = compute = transfer = 0
        if remote and self.pushed is not None:
            # The peer was at work while this request waited here; what it did before this
            # request arrived is not part of its time.
            queue, compute, write, told_ns = self.pushed
            left = self.ready_ns - self.arrived_ns
            transfer = min(write + self.ready_ns - told_ns, left)
            compute = min(compute, left - transfer)
            queue = min(queue, left - transfer - compute)
        elif remote:
            transfer = self.ready_ns - self.placed_ns
        return Phases(
            peer_queue_ns=queue,
            peer_compute_ns=compute,
            handoff_wait_ns=since_ns - self.arrived_ns - transfer - compute - queue,
            transfer_ns=transfer,
            queue_ns=self.first_step_ns - since_ns,
            compute_ns=now_ns - self.first_step_ns,
            n_bytes=self.n_bytes,
        )

    def ended(self, outcome: Outcome, reason: str, *, held: bool = False) -> Ended:
        """The terminal event that says what became of it."""
        return Ended(
            request_id=self.id,
            outcome=outcome,
            reason=reason,
            n_prompt=self.n_prompt,
            n_output=self.n_output,
            n_cached=self.n_cached,
            n_preempted=self.n_preempted,
            held=held,
        )
