"""Random requests, aborts and broken steps on a tiny pool, against the reference."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from tests.unit.harness import B, FakeWorker
from twofold.messages import Abort, Submit

heads = st.sampled_from([(), (1,) * B, (1, 2) * B, (3,) * (2 * B), (1,) * (3 * B)])
tails = st.lists(st.integers(0, 4), min_size=1, max_size=6).map(tuple)


class EngineMachine(RuleBasedStateMachine):
    """One worker, answered by a device that checks every KV it reads."""

    @initialize(
        n_blocks=st.integers(4, 10),
        max_num_seqs=st.integers(1, 4),
        budget=st.integers(4, 12),
        caching=st.booleans(),
        max_waiting=st.integers(2, 9),
        stages=st.sampled_from([1, 1, 2, 3]),
    )
    def start(
        self,
        n_blocks: int,
        max_num_seqs: int,
        budget: int,
        caching: bool,
        max_waiting: int,
        stages: int,
    ) -> None:
        self.worker = FakeWorker(
            "w",
            n_blocks=n_blocks,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=budget,
            prefix_caching=caching,
            max_waiting=max_waiting,
            max_model_len=36,
            pipeline_stages=stages,
        )
        self.n = 0

    @rule(
        head=heads,
        tail=tails,
        salt=st.sampled_from(["", "", "", "s"]),
        max_tokens=st.integers(1, 12),
        min_tokens=st.integers(0, 4),
        stops=st.sampled_from([(), (), (0,), (1, 2)]),
    )
    def submit(
        self,
        head: tuple[int, ...],
        tail: tuple[int, ...],
        salt: str,
        max_tokens: int,
        min_tokens: int,
        stops: tuple[int, ...],
    ) -> None:
        self.n += 1
        self.worker.send(
            Submit(
                request_id=self.n,
                tokens=head + tail,
                max_tokens=max_tokens,
                min_tokens=min_tokens,
                stop_token_ids=stops,
                salt=salt,
            )
        )

    @precondition(lambda self: self.worker.step is not None)
    @rule(n=st.integers(1, 8))
    def steps(self, n: int) -> None:
        for _ in range(n):
            if self.worker.step is not None:
                self.worker.finish_step()

    @precondition(lambda self: self.n)
    @rule(data=st.data(), chance=st.integers(0, 2))
    def abort(self, data: st.DataObject, chance: int) -> None:
        if chance:
            return
        live = [i for i in range(1, self.n + 1) if i not in self.worker.ended] or [self.n]
        self.worker.send(Abort(data.draw(st.sampled_from(live))))

    @precondition(lambda self: self.worker.step is not None)
    @rule(chance=st.integers(0, 3))
    def fail_step(self, chance: int) -> None:
        if chance == 0:
            self.worker.fail_step()

    def teardown(self) -> None:
        if not hasattr(self, "worker"):
            return
        assert self.worker.step is not None or not self.worker.core.engine.requests, "it stalls"
        self.worker.run()
        self.worker.verify_idle()
        for request_id in self.worker.ended:
            self.worker.verify_output(request_id)


TestEngine = EngineMachine.TestCase
TestEngine.settings = settings(max_examples=250, stateful_step_count=40)
