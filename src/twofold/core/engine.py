"""The engine of one worker: continuous batching over a paged KV pool, one step at a time.

There are no phases in here: a step is {request: tokens to compute}, and a request runs while
tokens it knows have no KV yet. A worker's role is only which requests it is sent.

    message     effect on a request
    Submit      WAITING, or refused at once when it can never fit or the queue is full
    StepDone    tokens appended; ended by stop id, max_tokens or model length; else the next step
    StepFailed  every request of the step fails
    Abort       ended; blocks come back at once, or when the step that writes them is done

Blocks are allocated for all known tokens when a request is placed and one by one as it decodes.
When none is left the youngest running request is preempted: its blocks are freed, and it waits
to be computed again, answer so far included.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable
from operator import attrgetter
from typing import Final

from twofold.core.blocks import BlockPool
from twofold.core.chunks import Chunks
from twofold.core.request import Outcome, Request, State
from twofold.core.timers import Timers
from twofold.messages import RunStep, StepDone, StepFailed, Token, WorkerEffect
from twofold.policy import batch
from twofold.types import BlockId, RequestId

Effects = list[WorkerEffect]
Work = list[tuple[RequestId, int, int]]
_age: Final = attrgetter("id")


class Engine:
    """Schedules requests onto steps. All times are the caller's, in nanoseconds.

    `on_placed_remote(request, hits, now_ns, out)` is called when a request whose KV comes from a
    peer has got its blocks, of which the first `hits` hold cached content.
    Of requests whose KV a peer will have, `on_progress` is called when more of it exists,
    `on_held` when all does (the callee takes over the blocks), and `on_gave_up` when it never will.
    What `may_start` says no to is not even tried. `chunks` bounds the prompts of a step; None:
    they get all that is left of it."""

    def __init__(
        self,
        *,
        pool: BlockPool,
        timers: Timers,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_model_len: int,
        max_waiting: int,
        on_placed_remote: Callable[[Request, int, int, Effects], None],
        on_progress: Callable[[Request, int, Effects], None],
        on_held: Callable[[Request, int, Effects], None],
        on_gave_up: Callable[[Request, str, Effects], None],
        may_start: Callable[[Request], bool] = lambda request: True,
        chunks: Chunks | None = None,
    ) -> None:
        if max_num_batched_tokens < max_num_seqs:
            raise ValueError(
                f"max_num_batched_tokens {max_num_batched_tokens} is below max_num_seqs "
                f"{max_num_seqs}: a step could not decode every sequence"
            )
        self.pool, self.timers, self.chunks = pool, timers, chunks
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self.max_model_len, self.max_waiting = max_model_len, max_waiting
        self._on_placed_remote, self._may_start = on_placed_remote, may_start
        self._on_progress, self._on_held, self._on_gave_up = on_progress, on_held, on_gave_up
        self.requests: dict[RequestId, Request] = {}
        self.waiting: list[Request] = []
        self.running: list[Request] = []
        self.n_placed = 0  # requests that hold a slot: running, loading, verifying
        self.step: RunStep | None = None
        self.n_steps = self.n_preemptions = self._n_enqueued = 0
        self._in_step: dict[RequestId, Request] = {}
        self._tried: tuple[int, int, int] | None = None

    # ------------------------------------------------------------------ arrive

    def refusal(self, request: Request) -> str | None:
        """Why `request` can never or cannot now be taken, as a code; None when it can."""
        if request.n_prompt < 1:
            return "empty_prompt"
        if request.max_tokens < 1:
            return "no_tokens"
        if request.n_prompt + request.max_tokens > self.max_model_len:
            return "too_long"
        if request.n_blocks_at_most(self.pool.block_size) > self.pool.n_blocks:
            return "never_fits"
        # All that hold no slot: also those that wait for their ids from a peer.
        if len(self.requests) - self.n_placed >= self.max_waiting:
            return "queue_full"
        return None

    def add(self, request: Request) -> None:
        """Know `request` from now on."""
        self.requests[request.id] = request

    def enqueue(self, request: Request) -> None:
        """Let `request`, whose ids are known, wait for its place."""
        request.state = State.WAITING
        self._n_enqueued += 1
        insort(self.waiting, request, key=_age)

    # ------------------------------------------------------------------- steps

    def row(self, request_id: RequestId) -> Request:
        """The request behind a row of the step in flight; its ids and blocks stand still."""
        return self._in_step[request_id]

    def schedule(self, now_ns: int, out: Effects) -> None:
        """Start the next step, unless one is in flight or there is nothing to compute."""
        if self.step is not None or not (self.running or self.waiting):
            return
        if self.waiting:
            self._rescue()
        work: Work = []
        budget = self._continue(work)
        if self.waiting:
            self._place_waiting(work, budget, now_ns, out)
        if work:
            self.n_steps += 1
            requests, rows = self.requests, self._in_step
            for request_id, _, _ in work:
                request = rows[request_id] = requests[request_id]
                if request.first_step_ns < 0:
                    request.first_step_ns = now_ns
            self.step = RunStep(self.n_steps, tuple(work))
            out.append(self.step)
            if self.chunks is not None:
                self.chunks.began(now_ns)

    def _continue(self, work: Work) -> int:
        """Put running requests into `work`, decodes first; returns what prompts may still have."""
        budget = self.max_num_batched_tokens
        size = self.pool.block_size
        prefilling = False
        for request in list(self.running):
            computed = request.computed
            if request.n_known - computed != 1:
                prefilling = True
            elif request.state is State.RUNNING:
                short = computed // size == len(request.blocks)
                if short and not self._grow(request):
                    continue
                work.append((request.id, computed, 1))
                budget -= 1
        if self.chunks is not None:
            budget = self.chunks.tokens(budget, len(work))
        for request in self.running if prefilling else ():
            if request.n_missing > 1 and budget > 0:
                n = batch.chunk_tokens(request.n_missing, budget)
                work.append((request.id, request.computed, n))
                budget -= n
        return budget

    def _grow(self, request: Request) -> bool:
        """One more block for a decoding request; False when it had to give way itself."""
        while self.pool.available == 0:
            victim = self.running[-1]
            self._preempt(victim)
            if victim is request:
                return False
        request.blocks += self.pool.allocate(1)
        return True

    def _preempt(self, request: Request) -> None:
        self.running.remove(request)
        self.n_placed -= 1
        self.pool.release(request.blocks)
        request.blocks = []
        request.computed = 0
        request.source = None  # what a peer held is gone by now: it is computed here
        request.n_preempted += 1
        self.n_preemptions += 1
        self.enqueue(request)

    # --------------------------------------------------------------- placement

    def _need(self, request: Request) -> tuple[int, list[BlockId]]:
        """Available blocks that placing would use up, and the cached blocks it starts with."""
        hits = self.pool.lookup(request.tokens, request.salt, request.links)
        return request.n_blocks_known(self.pool.block_size) - self.pool.busy(hits), hits

    def _fits(self, need: int) -> bool:
        spare = batch.spare_blocks(len(self.running), self.pool.n_blocks)
        return self.n_placed < self.max_num_seqs and need + spare <= self.pool.available

    def _rescue(self) -> None:
        """Push younger requests out for the oldest one that has been passed over too often."""
        for request in self.waiting:
            if batch.may_preempt(request.bypassed):
                younger = [r for r in self.running if r.id > request.id]
                if self._would_fit(request, younger):
                    while not self._fits(self._need(request)[0]):
                        self._preempt(younger.pop())
                return

    def _would_fit(self, request: Request, without: list[Request]) -> bool:
        """Whether `request` could be placed if `without` gave their slots and blocks back."""
        if self.n_placed - len(without) >= self.max_num_seqs:
            return False
        need, hits = self._need(request)
        # Blocks that it starts with are counted as taken, not as needed.
        gain = self.pool.freed_by([r.blocks for r in without], hits)
        spare = batch.spare_blocks(len(self.running) - len(without), self.pool.n_blocks)
        return need + spare <= self.pool.available + gain

    def _changes(self) -> tuple[int, int, int]:
        """Counts that stand still as long as no waiting request has got a better chance."""
        return self.pool.n_released, self._n_enqueued, self.pool.cache.n_inserted

    def look_again(self) -> None:
        """What `may_start` says has changed."""
        self._tried = None

    @property
    def is_settled(self) -> bool:
        """Whether trying to place what waits is in vain until blocks come back or one arrives."""
        return not self.waiting or (self._tried or ())[:2] == self._changes()[:2]

    def _place_waiting(self, work: Work, budget: int, now_ns: int, out: Effects) -> None:
        if self._tried != self._changes():
            budget = self._try_all(work, budget, now_ns, out)
        # With no budget left some were not even tried.
        self._tried = self._changes() if budget else None

    def _try_all(self, work: Work, budget: int, now_ns: int, out: Effects) -> int:
        passed: list[Request] = []
        for request in list(self.waiting):
            if self.n_placed >= self.max_num_seqs:
                break
            if request.source is None and (budget == 0 or not self._may_start(request)):
                continue
            if not self._try_place(request, passed, now_ns, out):
                if batch.reserves(request.bypassed):
                    break
                passed.append(request)
            elif request.state is State.RUNNING and budget > 0:
                n = batch.chunk_tokens(request.n_missing, budget)
                work.append((request.id, request.computed, n))
                budget -= n
        return budget

    def place_granted(self, request: Request, now_ns: int, out: Effects) -> None:
        """Place a request whose KV a peer holds without waiting for the step to end.

        Blocks that are free now are not touched by the step in flight. Older waiting requests
        had their turn at the last step boundary; being passed over counts all the same.
        """
        passed: list[Request] = []
        for older in self.waiting:
            if older.id >= request.id:
                break
            if batch.reserves(older.bypassed):
                return
            passed.append(older)
        self._try_place(request, passed, now_ns, out)

    def _try_place(
        self, request: Request, passed: list[Request], now_ns: int, out: Effects
    ) -> bool:
        need, hits = self._need(request)
        if not self._fits(need):
            return False
        self.pool.share(hits)
        n_known = request.n_blocks_known(self.pool.block_size)
        request.blocks = hits + self.pool.allocate(n_known - len(hits))
        request.computed = len(hits) * self.pool.block_size
        self.waiting.remove(request)
        self.n_placed += 1
        for older in passed:
            older.bypassed += 1
        if request.source is not None:
            self._on_placed_remote(request, len(hits), now_ns, out)
        else:
            if request.n_preempted == 0:
                request.n_cached = request.computed
            self.start(request)
        return True

    def start(self, request: Request) -> None:
        """`request` has its blocks and all the KV it counts as computed: it runs."""
        request.state = State.RUNNING
        insort(self.running, request, key=_age)

    # ----------------------------------------------------------------- results

    def step_done(self, message: StepDone, now_ns: int, out: Effects) -> None:
        """Take the results of the step in flight."""
        assert self.step is not None, "a step ended that was not started"
        assert self.step.step == message.step, f"step {message.step} ended, not {self.step.step}"
        step, self.step = self.step, None
        rows, self._in_step = self._in_step, {}
        if self.chunks is not None:
            self.chunks.ended(step, now_ns)
        sampled = dict(message.tokens)
        size = self.pool.block_size
        for request_id, start, n in step.work:
            request = rows[request_id]
            if request.state is State.DRAINING:
                self._let_go(request)
                continue
            if (start + n) // size == start // size:
                request.computed = start + n
            else:
                self.computed_to(request, start + n)
            if request.hold:
                self._on_progress(request, now_ns, out)
            if request.n_known == start + n:
                self._append(request, sampled[request_id], now_ns, out)

    def step_failed(self, message: StepFailed, now_ns: int, out: Effects) -> None:
        """The step in flight could not be run: its requests fail."""
        assert self.step is not None, "a step failed that was not started"
        assert self.step.step == message.step, f"step {message.step} failed, not {self.step.step}"
        self.step = None
        rows, self._in_step = self._in_step, {}
        for request in rows.values():
            if request.state is State.DRAINING:
                self._let_go(request)
            else:
                self.end(request, "failed", f"device: {message.reason}", out)

    def computed_to(self, request: Request, n: int) -> None:
        """KV of the first `n` tokens exists; blocks that became full may serve others."""
        size = self.pool.block_size
        first, end = request.computed // size, n // size
        if first != end:
            self.pool.remember(
                request.blocks, first, end, request.tokens, request.salt, request.links
            )
        request.computed = n

    def _append(self, request: Request, token: int, now_ns: int, out: Effects) -> None:
        index = request.n_known - request.n_prompt
        request.append(token)
        phases = request.phases(now_ns) if index == 0 else None
        out.append(Token(request.id, index, token, phases))
        stop_ids = request.stop_token_ids
        stops = bool(stop_ids) and token in stop_ids and index + 1 > request.min_tokens
        if stops or index + 1 == request.max_tokens:
            reason = "stop" if stops else "length"
            if request.hold:
                self._end_held(request, reason, now_ns, out)
            else:
                self.end(request, "finished", reason, out)

    # --------------------------------------------------------------------- end

    def end(self, request: Request, outcome: Outcome, reason: str, out: Effects) -> None:
        """The one terminal event of a known request; its blocks come back as soon as may be."""
        out.append(request.ended(outcome, reason))
        if request.hold:
            self._on_gave_up(request, reason, out)
        self.timers.cancel(("deadline", request.id))
        if request.state is State.WAITING:
            self.waiting.remove(request)
            self._forget(request)
        elif request.state is State.CLAIMING:
            self._forget(request)
        elif request.state is State.LOADING:
            request.state = State.DRAINING
        elif request.state is State.VERIFYING:
            self.drained(request)
        elif request.state is State.RUNNING:
            self.running.remove(request)
            if request.id in self._in_step:
                request.state = State.DRAINING
            else:
                self._let_go(request)

    def _end_held(self, request: Request, reason: str, now_ns: int, out: Effects) -> None:
        out.append(request.ended("finished", reason, held=True))
        self.timers.cancel(("deadline", request.id))
        self.running.remove(request)
        self.n_placed -= 1
        self._forget(request)
        self._on_held(request, now_ns, out)

    def drained(self, request: Request) -> None:
        """The read that wrote an ended request's blocks is over."""
        self.pool.unhold(request.id)
        self._let_go(request)

    def _let_go(self, request: Request) -> None:
        self.n_placed -= 1
        self.pool.release(request.blocks)
        request.blocks = []
        self._forget(request)

    def _forget(self, request: Request) -> None:
        request.state = State.GONE
        del self.requests[request.id]
