"""Pull under every kind of fault at once, drawn by hypothesis and checked after every event."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tests.unit.harness import MS, B
from tests.unit.harness_pair import Pair
from twofold.messages import Abort, Wake
from twofold.types import KVHandle

lengths = st.sampled_from([1, 1, B - 1, B, B + 1, 2 * B, 2 * B + 1, 3 * B + 5])
index = st.integers(0, 10**6)


class PairMachine(RuleBasedStateMachine):
    """A prefill and a decode worker on tiny pools; the rules are what a network and clients do."""

    @initialize(
        p_blocks=st.integers(5, 12),
        d_blocks=st.integers(4, 8),
        seqs=st.integers(1, 4),
        caching=st.booleans(),
    )
    def start(self, p_blocks: int, d_blocks: int, seqs: int, caching: bool) -> None:
        self.pair = Pair(
            p={"n_blocks": p_blocks, "lease_ns": 400 * MS, "lost_grace_ns": 100 * MS},
            d={
                "n_blocks": d_blocks,
                "max_num_seqs": seqs,
                "prefix_caching": caching,
                "max_waiting": 4,
                "max_model_len": 24,
                "heartbeat_ns": 100 * MS,
                "claim_timeout_ns": 300 * MS,
                "verify_timeout_ns": 300 * MS,
                "repeat_ns": 50 * MS,
            },
        )
        self.used: list[KVHandle] = []

    # ------------------------------------------------------------------ clients, gateway

    @rule(n=lengths, head=st.integers(0, 2), salt=st.sampled_from(["", "", "s"]), gen=index)
    def prefill(self, n: int, head: int, salt: str, gen: int) -> None:
        tokens = tuple((head + i * i) % 5 for i in range(n))
        self.pair.prefill(tokens, generation=gen % 3, salt=salt)

    @rule(
        n=lengths,
        head=st.integers(0, 2),
        salt=st.sampled_from(["", "", "s"]),
        max_tokens=st.integers(1, 12),
        events=st.integers(0, 12),
        flip=st.sampled_from([0, 0, 0, 1]),
    )
    def whole_request(
        self, n: int, head: int, salt: str, max_tokens: int, events: int, flip: int
    ) -> None:
        """A request that gets as far as its decode leg, and then `events` events further."""
        tokens = tuple((head + i * i) % 5 for i in range(n))
        self.pair.flips = flip
        request_id = self.pair.prefill(tokens, salt=salt)
        while self.pair.p.step is not None:
            self.pair.finish_step(self.pair.p)
        for handle in [h for h in self.pair.handles if h.request_id == request_id]:
            self.pair.handles.remove(handle)
            self.used.append(handle)
            self.pair.decode(handle, max_tokens=max_tokens)
        for _ in range(events):
            self.pair.busy()

    @precondition(lambda self: self.pair.handles)
    @rule(i=index, max_tokens=st.integers(1, 9), left=st.sampled_from([0, 0, 150 * MS]))
    def dispatch(self, i: int, max_tokens: int, left: int) -> None:
        handle = self.pair.handles.pop(i % len(self.pair.handles))
        self.used.append(handle)
        self.pair.decode(handle, max_tokens=max_tokens, time_left_ns=left)

    @precondition(lambda self: self.used)
    @rule(i=index, stale=st.booleans(), chance=st.integers(0, 3))
    def dispatch_again(self, i: int, stale: bool, chance: int) -> None:
        if chance:
            return
        handle = self.used[i % len(self.used)]
        generation = handle.generation + (1 if stale else 0)
        self.pair.decode(
            KVHandle(
                engine_id="P",
                host="p",
                port=1,
                request_id=handle.request_id,
                generation=generation,
                n_tokens=handle.n_tokens,
            )
        )

    @precondition(lambda self: self.pair.handles or self.used)
    @rule(i=index, chance=st.integers(0, 2))
    def release(self, i: int, chance: int) -> None:
        if chance:
            return
        every = self.pair.handles + self.used
        self.pair.release(every[i % len(every)])

    @rule(i=index, on_p=st.booleans(), chance=st.integers(0, 2))
    def abort(self, i: int, on_p: bool, chance: int) -> None:
        if chance:
            return
        worker = self.pair.p if on_p else self.pair.d
        live = [r for r in worker.submitted if r not in worker.ended]
        if live:
            self.pair.send(worker, Abort(live[i % len(live)]))

    @precondition(lambda self: any(not r.cancelled for r in self.pair.d.reads.values()))
    @rule(i=index, and_then=st.booleans())
    def abort_reading(self, i: int, and_then: bool) -> None:
        reading = [r for r, state in self.pair.d.reads.items() if not state.cancelled]
        self.pair.send(self.pair.d, Abort(reading[i % len(reading)]))
        if and_then:  # the next one is granted blocks while that read still writes its own
            self.whole_request(2 * B + 1, i % 3, "", 9, 0, 0)
            while self.pair.net:
                self.pair.deliver()

    # ------------------------------------------------------------------ network

    @precondition(lambda self: self.pair.net)
    @rule(i=st.one_of(st.just(0), index))
    def deliver(self, i: int) -> None:
        self.pair.deliver(i % len(self.pair.net))

    @precondition(lambda self: self.pair.net)
    @rule(i=index)
    def drop(self, i: int) -> None:
        self.pair.net.pop(i % len(self.pair.net))

    @precondition(lambda self: self.pair.net)
    @rule(i=index, j=index)
    def duplicate(self, i: int, j: int) -> None:
        net = self.pair.net
        net.insert(j % (len(net) + 1), net[i % len(net)])

    @rule(which=st.sampled_from(["P", "D", "PD", "DP"]), chance=st.integers(0, 3))
    def cut(self, which: str, chance: int) -> None:
        if self.used and chance == 0:
            self.pair.cut(*("P" if end == "P" else "D" for end in which))

    # ------------------------------------------------------------------ devices, transfers

    @rule(n=st.integers(1, 25))
    def go_on(self, n: int) -> None:
        for _ in range(n):
            self.pair.busy()

    @rule(on_p=st.booleans())
    def step(self, on_p: bool) -> None:
        worker = self.pair.p if on_p else self.pair.d
        if worker.step is not None:
            self.pair.finish_step(worker)

    @rule(on_p=st.booleans(), chance=st.integers(0, 5))
    def fail_step(self, on_p: bool, chance: int) -> None:
        worker = self.pair.p if on_p else self.pair.d
        if worker.step is not None and chance == 0:
            self.pair.fail_step(worker)

    @precondition(lambda self: self.pair.p.digests)
    @rule(i=index)
    def digest(self, i: int) -> None:
        self.pair.digest(self.pair.p, i % len(self.pair.p.digests))

    @precondition(lambda self: self.pair.d.reads)
    @rule(i=index)
    def land(self, i: int) -> None:
        self.pair.go_on_reading(list(self.pair.d.reads)[i % len(self.pair.d.reads)])

    @precondition(lambda self: self.pair.d.reads)
    @rule(i=index, fails=st.booleans())
    def end_read(self, i: int, fails: bool) -> None:
        request_id = list(self.pair.d.reads)[i % len(self.pair.d.reads)]
        if fails:
            self.pair.end_read(request_id, ok=False)
        else:
            self.pair.complete_read(request_id)

    # ------------------------------------------------------------------ time

    @rule(by_ms=st.sampled_from([1, 1, 1, 20, 50, 50, 100, 301, 401]))
    def advance(self, by_ms: int) -> None:
        self.pair.advance(by_ms * MS)

    @rule(on_p=st.booleans())
    def wake_early(self, on_p: bool) -> None:
        worker = self.pair.p if on_p else self.pair.d
        if worker.wake_ns is not None:
            worker.wake_ns = None
            self.pair.send(worker, Wake())

    # ------------------------------------------------------------------ verdicts

    @invariant()
    def holds_have_owner_and_expiry(self) -> None:
        for worker in self.pair.workers.values():
            core = worker.core
            for owner, hold in core.pool.holds.items():
                assert hold.owner == owner
                assert hold.expiry_ns > 0
            counts = core.source.counts
            live = [i for i in core.pool.holds if i not in core.engine.requests]
            assert counts.in_hand == len(live)
            if live:
                assert worker.wake_ns is not None, "a lease that nothing ends"

    def teardown(self) -> None:
        if hasattr(self, "pair"):
            self.pair.quiesce()
            self.pair.verify_end()


TestPair = PairMachine.TestCase
TestPair.settings = settings(max_examples=300, stateful_step_count=50)
