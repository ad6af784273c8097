"""The engine of one worker: continuous batching over a paged KV pool, step by step.

There are no phases in here: a step is {request: tokens to compute}, and a request runs while
tokens it knows have no KV yet. A worker's role is only which requests it is sent. A device that
is a pipeline has several steps in flight, which end in the order in which they were started.

    message     effect on a request
    Submit      WAITING, or refused at once when it can never fit or the queue is full
    StepDone    tokens appended; ended by stop id, max_tokens or model length; else the next step
    StepFailed  every request of the step fails
    Abort       ended; blocks come back at once, or when the steps that write them are done

Blocks are allocated for all known tokens when a request is placed and one by one as it decodes.
When none is left the youngest running request that is in no step is preempted: its blocks are
freed, and it waits to be computed again, answer so far included.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable

from twofold.core.blocks import BlockPool
from twofold.core.chunks import Chunks
from twofold.core.places import Places, age
from twofold.core.request import Outcome, Request, State
from twofold.core.timers import Timers
from twofold.messages import RunStep, StepDone, StepFailed, Token, WorkerEffect
from twofold.policy import batch
from twofold.types import RequestId

Effects = list[WorkerEffect]
Work = list[tuple[RequestId, int, int]]


class Engine(Places):
    """Schedules requests onto steps. All times are the caller's, in nanoseconds.

    `on_placed_remote(request, hits, now_ns, out)` is called when a request whose KV comes from a
    peer has got its blocks, of which the first `hits` hold cached content.
    Of requests whose KV a peer will have, `on_progress` is called when more of it exists,
    `on_held` when all does (the callee takes over the blocks), and `on_gave_up` when it never will.
    What `may_start` says no to is not even tried. `chunks` bounds the prompts of a step; None:
    they get all that is left of it. Up to `max_steps` steps are in flight at once."""

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
        max_steps: int = 1,
    ) -> None:
        if max_num_batched_tokens < max_num_seqs:
            raise ValueError(
                f"max_num_batched_tokens {max_num_batched_tokens} is below max_num_seqs "
                f"{max_num_seqs}: a step could not decode every sequence"
            )
        super().__init__(pool, max_num_seqs)
        self.timers, self.chunks = timers, chunks
        self.max_num_batched_tokens = max_num_batched_tokens
        self.max_model_len, self.max_waiting = max_model_len, max_waiting
        self.max_steps = max_steps
        self._on_placed_remote, self._may_start = on_placed_remote, may_start
        self._on_progress, self._on_held, self._on_gave_up = on_progress, on_held, on_gave_up
        self.requests: dict[RequestId, Request] = {}
        self.in_flight: list[RunStep] = []  # oldest first
        self.n_steps = self.n_preemptions = 0

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

    # ------------------------------------------------------------------- steps

    @property
    def step(self) -> RunStep | None:
        """The step in flight that ends next."""
        return self.in_flight[0] if self.in_flight else None

    def row(self, request_id: RequestId) -> Request:
        """The request behind a row of a step in flight; its ids and blocks stand still."""
        return self.requests[request_id]

    def schedule(self, now_ns: int, out: Effects) -> None:
        """Start steps, unless enough are in flight or there is nothing to compute."""
        while len(self.in_flight) < self.max_steps and (self.running or self.waiting):
            if self.waiting:
                self._rescue()
            work: Work = []
            budget = self._continue(work)
            if self.waiting:
                self._place_waiting(work, budget, now_ns, out)
            if not work:
                return
            self._start(work, now_ns, out)

    def _start(self, work: Work, now_ns: int, out: Effects) -> None:
        self.n_steps += 1
        requests = self.requests
        for request_id, _, n in work:
            request = requests[request_id]
            request.sent += n
            if request.first_step_ns < 0:
                request.first_step_ns = now_ns
        step = RunStep(self.n_steps, tuple(work))
        self.in_flight.append(step)
        out.append(step)
        if self.chunks is not None:
            self.chunks.began(now_ns)

    def _continue(self, work: Work) -> int:
        """Put running requests into `work`, decodes first; returns what prompts may still have."""
        budget = self.max_num_batched_tokens
        size = self.pool.block_size
        prefilling = False
        most = batch.decodes_at_most(len(self.running), self.max_steps)
        for request in list(self.running):
            start = request.computed + request.sent
            missing = request.n_known - start
            if missing != 1:
                prefilling = prefilling or missing > 1
            elif request.state is State.RUNNING and len(work) < most:
                short = start // size == len(request.blocks)
                if short and not self._grow(request):
                    continue
                work.append((request.id, start, 1))
                budget -= 1
        if self.chunks is not None:
            budget = self.chunks.tokens(budget, len(work))
        for request in self.running if prefilling else ():
            if request.n_missing > 1 and budget > 0:
                budget -= self._chunk(request, work, budget)
        return budget

    def _chunk(self, request: Request, work: Work, budget: int) -> int:
        """The next tokens of a prompt go into `work`; returns how many."""
        n = batch.chunk_tokens(request.n_missing, budget)
        work.append((request.id, request.computed + request.sent, n))
        return n

    def _grow(self, request: Request) -> bool:
        """One more block for a decoding request; False when it had to give way itself."""
        while self.pool.available == 0:
            victim = next(r for r in reversed(self.running) if not r.sent)
            if victim is request and self.in_flight:
                return False  # those that end next may give blocks back
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

    def _rescue(self) -> None:
        """Push younger requests out for the oldest one that has been passed over too often."""
        for request in self.waiting:
            if batch.may_preempt(request.bypassed):
                younger = [r for r in self.running if r.id > request.id and not r.sent]
                if self._would_fit(request, younger):
                    while not self._fits(self._need(request)[0]):
                        self._preempt(younger.pop())
                return

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
                budget -= self._chunk(request, work, budget)
        return budget

    def place_granted(self, request: Request, now_ns: int, out: Effects) -> None:
        """Place a request whose KV a peer holds without waiting for the step to end.

        Blocks that are free now are not touched by steps in flight. Older waiting requests
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
        insort(self.running, request, key=age)

    # ----------------------------------------------------------------- results

    def step_done(self, message: StepDone, now_ns: int, out: Effects) -> None:
        """Take the results of the step that was started first."""
        step = self._over(message.step)
        if self.chunks is not None:
            self.chunks.ended(step, now_ns)
        sampled = dict(message.tokens)
        size = self.pool.block_size
        for request_id, start, n in step.work:
            request = self.requests[request_id]
            request.sent -= n
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
        """The step that was started first could not be run: its requests fail."""
        step = self._over(message.step)
        if self.chunks is not None:
            self.chunks.failed()
        for request_id, _, n in step.work:
            request = self.requests[request_id]
            request.sent -= n
            if request.state is State.DRAINING:
                self._let_go(request)
            else:
                self.end(request, "failed", f"device: {message.reason}", out)

    def _over(self, number: int) -> RunStep:
        assert self.in_flight, "a step ended that was not started"
        step = self.in_flight.pop(0)
        assert step.step == number, f"step {number} ended, not {step.step}"
        return step

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
        if request.sent:  # steps in flight still write its blocks
            request.state = State.DRAINING
            return
        self.n_placed -= 1
        self.pool.release(request.blocks)
        request.blocks = []
        self._forget(request)

    def _forget(self, request: Request) -> None:
        request.state = State.GONE
        del self.requests[request.id]
