"""The router under messages in any order: late, repeated, of other generations, of dead workers.

With all policies, drawn anew each time, those for failures included.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from tests.unit.harness import LAYOUT
from twofold.core.recovery import FAILURE_POLICIES
from twofold.core.routed import Leg
from twofold.core.router import Router
from twofold.messages import (
    Arrive,
    CancelLeg,
    ClientGone,
    Cut,
    DecodeStarted,
    LegEnded,
    LegFailed,
    PrefillDone,
    Recovery,
    ReleaseHeld,
    Reply,
    RouterMessage,
    SendDecode,
    SendPrefill,
    Terminal,
    Wake,
    WakeAt,
    WorkerGone,
    WorkerSeen,
)
from twofold.policy.admit import ADMISSIONS
from twofold.policy.decode import DECODE_CHOICES
from twofold.policy.lengths import N_BUCKETS, bucket
from twofold.policy.prefill import PREFILL_CHOICES
from twofold.policy.split import SPLIT_CHOICES
from twofold.sim.audit_router import RouterBook

WORKERS: list[tuple[str, Literal["prefill", "decode", "mixed"]]] = [
    ("d1", "decode"),
    ("d2", "decode"),
    ("m", "mixed"),
    ("p1", "prefill"),
    ("p2", "prefill"),
]
OTHER = msgspec.structs.replace(LAYOUT, rope="other")
INFLIGHT = 6

picks = st.integers(0, 999)
off = st.sampled_from([0, 0, 0, 0, 1, -1])  # from the generation of the attempt under way


class RouterMachine(RuleBasedStateMachine):
    """Keeps its own account of what each request was told and of what each worker was sent."""

    @initialize(
        prefill=st.sampled_from(list(PREFILL_CHOICES)),
        decode=st.sampled_from(list(DECODE_CHOICES)),
        split=st.sampled_from(list(SPLIT_CHOICES)),
        admission=st.sampled_from(list(ADMISSIONS)),
        budget=st.sampled_from([0, 60]),
        handoff=st.sampled_from(["pull", "push"]),
        failure=st.sampled_from(FAILURE_POLICIES),
        retries=st.integers(1, 3),
    )
    def start(
        self,
        prefill: str,
        decode: str,
        split: str,
        admission: str,
        budget: int,
        handoff: str,
        failure: str,
        retries: int,
    ) -> None:
        failures: dict[str, Any] = {
            "failure_policy": failure,
            "retries": retries,
            "recompute_tokens_per_s": 60,
        }
        self.book = RouterBook(failures)
        self.router = Router(
            max_inflight=INFLIGHT,
            prefill_policy=prefill,
            decode_policy=decode,
            split_policy=split,
            admission=admission,
            seed=1,
            tpot_goal_ns=5,
            prefill_budget_tokens=budget,
            local_below_tokens=10,
            mixed_above_tokens=20,
            prefix_keys=3,
            handoff=handoff,
            **failures,
        )
        self.keeps_roles = split != "mixed_pool"
        self.now_ns = 0
        self.wake_ns: int | None = None
        self.n = 0
        self.terminal: dict[int, str] = {}
        self.answered: dict[int, str] = {}
        self.held: dict[int, str] = {}  # prefilled, not yet with a decode worker or released
        self.legs: dict[tuple[int, str], str] = {}  # workers of legs under way
        self.began: set[int] = set()
        for name, role in WORKERS:
            if name != "m":
                self.send(WorkerSeen(worker=name, role=role, engine_id=name, layout=LAYOUT))

    def _pick(self, number: int) -> int:
        """Mostly a request in flight, now and then one that has ended or never was."""
        live = list(self.router.requests)
        return live[number % len(live)] if live and number % 8 else number % 14

    def send(self, message: RouterMessage) -> None:
        effects = self.router.handle(message, self.now_ns)
        self.book.handled(self.router, self.now_ns, message, effects)
        for effect in effects:
            if isinstance(effect, WakeAt):
                self.wake_ns = effect.at_ns
                continue
            request_id = effect.request_id
            assert request_id not in self.terminal, "something after the end"
            if isinstance(effect, Terminal):
                self.terminal[request_id] = effect.outcome
                self._over(request_id)
            elif isinstance(effect, SendPrefill):
                self._sent(request_id, "prefill", effect.worker)
            elif isinstance(effect, SendDecode):
                self._sent(request_id, "decode", effect.worker)
                if effect.remote:
                    layout = self.router.workers[effect.worker].seen.layout
                    prefill = self.router.requests[request_id].prefill
                    assert layout == self.router.workers[prefill].seen.layout
            elif isinstance(effect, CancelLeg):
                assert self.legs.pop((request_id, effect.leg)) == effect.worker
            elif isinstance(effect, ReleaseHeld):
                assert self.held.pop(request_id) == effect.worker
            elif isinstance(effect, Recovery):
                assert effect.reason
                assert request_id not in self.began
                self._over(request_id)
            else:
                assert isinstance(effect, Reply | Cut)
                assert request_id not in self.answered, "two answers"
                self.answered[request_id] = type(effect).__name__
                assert isinstance(effect, Cut) == (request_id in self.began)

    def _over(self, request_id: int) -> None:
        """Nothing of this attempt is under way any more."""
        assert request_id not in self.held, "KV held that nobody frees"
        for leg in ("prefill", "decode"):
            self.legs.pop((request_id, leg), None)

    def _sent(self, request_id: int, leg: str, worker: str) -> None:
        assert self.router.workers[worker].up, "sent to a worker that is gone"
        role = self.router.workers[worker].seen.role
        if leg == "prefill":
            assert role == "prefill"
        elif self.keeps_roles:
            assert role != "prefill", "an answer from a prefill worker"
        assert all(self.router.why(request_id)), "placed for no reason"
        assert (request_id, leg) not in self.legs
        self.legs[request_id, leg] = worker

    # ------------------------------------------------------------------ messages

    @rule(which=st.sampled_from(WORKERS), other=st.booleans())
    def worker_seen(
        self, which: tuple[str, Literal["prefill", "decode", "mixed"]], other: bool
    ) -> None:
        layout = OTHER if other else LAYOUT
        name, role = which
        self.send(
            WorkerSeen(
                worker=name, role=role, engine_id=name, layout=layout, kv_blocks=9, max_num_seqs=3
            )
        )

    @rule(which=st.sampled_from(WORKERS))
    def worker_gone(self, which: tuple[str, str]) -> None:
        self.send(WorkerGone(which[0]))

    @rule(
        weight=st.integers(0, 50),
        left=st.integers(1, 10**10),
        answer=st.integers(0, 40),
        predicted=st.sampled_from([0, 20, 600]),
        keys=st.lists(st.integers(0, 5), max_size=4).map(tuple),
    )
    def arrive(
        self, weight: int, left: int, answer: int, predicted: int, keys: tuple[int, ...]
    ) -> None:
        if self.n < 12:
            self.n += 1
            self.send(
                Arrive(
                    request_id=self.n,
                    weight=weight,
                    time_left_ns=left,
                    max_tokens=answer,
                    predicted_tokens=predicted,
                    block_keys=keys,
                    block_tokens=16,
                )
            )

    def _generation(self, request_id: int, off: int) -> int:
        routed = self.router.requests.get(request_id)
        return off + (routed.generation if routed else 0)

    @rule(pick=picks, off=off)
    def prefill_done(self, pick: int, off: int) -> None:
        request_id = self._pick(pick)
        routed = self.router.requests.get(request_id)
        if routed and off == 0 and routed.prefilling:
            del self.legs[request_id, "prefill"]
            if routed.state is not Leg.STREAMING:
                self.held[request_id] = routed.prefill
        self.send(PrefillDone(request_id, self._generation(request_id, off)))

    @rule(pick=picks, off=off)
    def decode_started(self, pick: int, off: int) -> None:
        request_id = self._pick(pick)
        routed = self.router.requests.get(request_id)
        if routed and off == 0 and routed.state in (Leg.HANDOFF, Leg.ONLY, Leg.BOTH):
            self.began.add(request_id)
            self.held.pop(request_id, None)
        self.send(DecodeStarted(request_id, self._generation(request_id, off)))

    @rule(pick=picks, off=off, n_tokens=st.integers(0, 9))
    def leg_ended(self, pick: int, off: int, n_tokens: int) -> None:
        request_id = self._pick(pick)
        self.send(LegEnded(request_id, self._generation(request_id, off), n_tokens))

    @rule(
        pick=picks,
        off=off,
        leg=st.sampled_from(["prefill", "decode"]),
        status=st.sampled_from([0, 400, 429, 500, 503, 504]),
        lost=st.booleans(),
    )
    def leg_failed(
        self,
        pick: int,
        off: int,
        leg: Literal["prefill", "decode"],
        status: int,
        lost: bool,
    ) -> None:
        request_id = self._pick(pick)
        up = {name: worker.up for name, worker in self.router.workers.items()}
        generation = self._generation(request_id, off)
        if off == 0:
            self.legs.pop((request_id, leg), None)
        self.send(LegFailed(request_id, generation, leg, status, "why", lost))
        if off != 0:
            assert up == {name: worker.up for name, worker in self.router.workers.items()}

    @rule(pick=picks)
    def client_gone(self, pick: int) -> None:
        self.send(ClientGone(self._pick(pick)))

    @rule(by=st.sampled_from([1, 7, 40, 10**9]), early=st.booleans())
    def advance(self, by: int, early: bool) -> None:
        self.now_ns += by
        if self.wake_ns is not None and (self.wake_ns <= self.now_ns or early):
            self.wake_ns = None
            self.send(Wake())

    # ------------------------------------------------------------------ verdicts

    @invariant()
    def adds_up(self) -> None:
        if not hasattr(self, "router"):
            return
        router, counts = self.router, self.router.counts
        assert len(router.requests) <= INFLIGHT
        ends = counts.finished + counts.refused + counts.failed + counts.cancelled
        assert counts.received == self.n == ends + len(router.requests)
        assert len(self.terminal) == ends
        assert set(self.terminal).isdisjoint(router.requests)
        assert not router.requests or self.wake_ns is not None, "a request without a deadline"
        for name, worker in router.workers.items():
            mine = [i for (i, _), where in self.legs.items() if where == name]
            assert worker.requests == len(mine)
            assert worker.tokens == sum(router.requests[i].weight for i in mine)
            self._check_kinds(name)
        assert set(self.held) <= set(router.requests), "KV held that nobody frees"
        for request_id, outcome in self.terminal.items():
            told = request_id in self.answered
            assert told == (outcome in ("refused", "failed"))

    def _check_kinds(self, name: str) -> None:
        """A worker's prompts and answers, counted anew from the requests."""
        worker = self.router.workers[name]
        here = [r for r in self.router.requests.values() if name in (r.prefill, r.decode)]
        prompts = [r for r in here if r.prefilling and r.prefill == name]
        prompts += [r for r in here if r.state is Leg.ONLY]
        answers = [r for r in here if r.decode == name]
        assert worker.queued_tokens == sum(r.uncached for r in prompts)
        assert worker.sequences == len(answers)
        assert worker.used_blocks == sum(r.need_blocks for r in answers)
        assert worker.output_left == sum(r.output_tokens for r in answers)
        by_length = [0] * N_BUCKETS
        for request in answers:
            by_length[bucket(request.predicted_tokens)] += 1
        assert worker.by_length == by_length

    def teardown(self) -> None:
        if not hasattr(self, "router"):
            return
        for _ in range(20):
            if self.wake_ns is None:
                break
            self.now_ns = max(self.now_ns, self.wake_ns)
            self.wake_ns = None
            self.send(Wake())
        assert not self.router.requests
        assert sorted(self.terminal) == list(range(1, self.n + 1))
        for worker in self.router.workers.values():
            assert (worker.tokens, worker.requests) == (0, 0)
            assert (worker.queued_tokens, worker.sequences, worker.used_blocks) == (0, 0, 0)


TestRouter = RouterMachine.TestCase
TestRouter.settings = settings(max_examples=200, stateful_step_count=50)
