"""Failure policies over real workers: a handoff that fails, and kill -9 amid a prompt."""

from __future__ import annotations

import asyncio
import os
import signal
import time

import msgspec
import pytest

from tests import tiny
from tests.device.reference import expected, prompt_of
from tests.live.stack import Stack, get, running
from tests.live.test_kills import Service, running_service
from twofold.config import GatewayLimits
from twofold.messages import Digested, ReadDone, WorkerMessage

N_PROMPT = 1500
"""Read in steps of 16 tokens, so that there is time to be killed in."""


@pytest.mark.parametrize("handoff", ["pull", "push"])
@pytest.mark.parametrize(
    ("policy", "result"),
    [("retry-pair", "retried"), ("recompute-on-decode", "recomputed"), ("mixed-pool", "moved")],
)
def test_a_handoff_that_fails_is_made_good_with_the_right_answer(
    handoff: str, policy: str, result: str
) -> None:
    """What decode gets is damaged, once. The answer is as a single worker gives it."""

    async def main() -> None:
        model = tiny.cached_model("llama")
        async with running(model, "1P1D1M", handoff=handoff, failure_policy=policy) as stack:
            damaged = _damage_once(stack)
            want = expected("llama", 53)
            answer = await stack.complete(
                prompt=prompt_of(53), max_tokens=len(want.tokens), temperature=0, ignore_eos=True,
                logprobs=0,
            )  # fmt: skip
            assert answer.status == 200, answer.body
            values = answer.json["choices"][0]["logprobs"]["token_logprobs"]
            chosen = [top[token] for token, top in zip(want.tokens, want.top, strict=True)]
            assert values == pytest.approx(chosen, abs=1e-4)
            assert damaged, "nothing was damaged"
            assert getattr(stack.gateway.router.counts, result) == 1
            assert answer.headers["x-twofold-attempts"] == "2"
            await stack.at_baseline(8.0)  # less than the lease

    asyncio.run(main())


def _damage_once(stack: Stack) -> list[int]:
    """The first checksums that decode computes of what it got are wrong; ids of its requests."""
    driver = stack.worker("decode").driver
    assert driver is not None
    deliver = driver.deliver
    damaged: list[int] = []

    def damage(message: WorkerMessage) -> None:
        if isinstance(message, ReadDone | Digested) and message.checksums and not damaged:
            damaged.append(message.request_id)
            wrong = tuple(n ^ 1 for n in message.checksums)
            message = msgspec.structs.replace(message, checksums=wrong)
        deliver(message)

    driver.deliver = damage  # type: ignore[method-assign]
    return damaged


def test_a_prefill_worker_killed_amid_a_prompt_costs_time_only() -> None:
    async def main() -> None:
        limits = GatewayLimits(failure_policy="retry-pair")
        async with running_service(2, limits, max_num_batched_tokens=16, max_num_seqs=8) as service:
            await service.canary()
            answered = asyncio.create_task(service.canary(N_PROMPT))
            victim = await _reading(service, answered)
            os.kill(service.supervisor.pids()[victim], signal.SIGKILL)
            await answered
            assert await _counted(service) == {"retried": 1}
            await service.back()
            await service.canary()

    asyncio.run(main())


async def _reading(service: Service, answered: asyncio.Task[None]) -> str:
    """Wait until a prefill worker computes, by its own count; its name."""
    workers = [w for w in service.deployment.workers if w.role == "prefill"]
    end = time.monotonic() + 20
    while time.monotonic() < end:
        for worker in workers:
            state = (await get(worker.port, "/conservation")).json
            if state["requests"]["running"]:
                assert state["blocks"]["held"] == 0, "the prompt was read before the kill"
                return worker.name
        assert not answered.done(), "over before the kill"
    pytest.fail("no request reached a prefill worker")


async def _counted(service: Service) -> dict[str, int]:
    answer = await get(service.deployment.gateway.admin_port, "/metrics")
    lines = [
        line.removeprefix("twofold_recoveries_total").split()
        for line in answer.body.decode().splitlines()
        if line.startswith("twofold_recoveries_total{")
    ]
    counts = {name.split('"')[1]: int(float(n)) for name, n in lines}
    return {name: n for name, n in counts.items() if n}
