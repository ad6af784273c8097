"""kill -9 of each process while eight requests stream, in a deployment of real processes."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import time
from collections.abc import AsyncIterator
from typing import Any

import pytest

from tests import tiny
from tests.device.reference import expected, prompt_of
from tests.live.stack import HOST, get, post, request_bytes
from twofold.config import EngineSettings, GatewayLimits, ServeSettings
from twofold.live.deployment import Deployment, plan_deployment
from twofold.live.supervisor import Supervisor

MODEL = "tiny"


class Service:
    """A supervised deployment and what a client sees of it."""

    def __init__(self, deployment: Deployment, supervisor: Supervisor, log: list[str]) -> None:
        self.deployment = deployment
        self.supervisor = supervisor
        self.log = log
        self.port = deployment.gateway.port

    async def stream(self, n_prompt: int, n_output: int, seed: int) -> tuple[str, float]:
        """How one streamed request ended, and when (monotonic)."""
        body = {
            "model": MODEL,
            "prompt": prompt_of(n_prompt, seed=seed),
            "max_tokens": n_output,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
        }
        data = request_bytes("POST", "/v1/completions", json.dumps(body).encode())
        got = b""
        try:
            reader, writer = await asyncio.open_connection(HOST, self.port)
        except ConnectionError:
            return "refused", time.monotonic()
        try:
            writer.write(data)
            while piece := await asyncio.wait_for(reader.read(65536), 30):
                got += piece
        except ConnectionError:
            return "reset", time.monotonic()
        finally:
            writer.close()
        end = time.monotonic()
        if got.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n"):
            return "clean", end
        if b'"error"' in got:
            return "error", end
        return "reset", end

    async def blocks(self) -> list[dict[str, int]]:
        found = []
        for worker in self.deployment.workers:
            answer = await get(worker.port, "/conservation")
            found.append(answer.json["blocks"])
        return found

    async def back(self, within_s: float = 40.0) -> None:
        """Until every process answers and every block is free or cached."""
        end = time.monotonic() + within_s
        state: Any = None
        while time.monotonic() < end:
            with contextlib.suppress(OSError, ValueError, KeyError):
                ready = (await get(self.port, "/ready")).status == 200
                state = await self.blocks()
                if ready and all(b["active"] == b["held"] == 0 for b in state):
                    return
            await asyncio.sleep(0.05)
        pytest.fail(f"not back within {within_s} s: {state}; log: {self.log[-20:]}")

    async def canary(self, n_prompt: int = 53) -> None:
        """Right, token by token, as a single worker's answer would be."""
        want = expected("llama", n_prompt)
        answer = await post(
            self.port,
            "/v1/completions",
            {
                "model": MODEL,
                "prompt": prompt_of(n_prompt),
                "max_tokens": len(want.tokens),
                "temperature": 0,
                "ignore_eos": True,
                "logprobs": 0,
            },
        )
        assert answer.status == 200, answer.body
        assert len(answer.json["choices"][0]["logprobs"]["tokens"]) == len(want.tokens)
        values = answer.json["choices"][0]["logprobs"]["token_logprobs"]
        chosen = [top[token] for token, top in zip(want.tokens, want.top, strict=True)]
        assert values == pytest.approx(chosen, abs=1e-4)


@contextlib.asynccontextmanager
async def running_service(
    prefill: int = 1, limits: GatewayLimits | None = None, **engine_settings: Any
) -> AsyncIterator[Service]:
    engine = EngineSettings(
        model=str(tiny.cached_model("llama")),
        served_model_name=MODEL,
        lease_s=3.0,
        **engine_settings,
    )
    deployment = plan_deployment(
        ServeSettings(engine=engine, port=0, prefill=prefill, limits=limits or GatewayLimits())
    )
    log: list[str] = []
    gateway = deployment.gateway
    supervisor = Supervisor(deployment.children(), ready_at=(HOST, gateway.port), emit=log.append)
    await supervisor.start()
    try:
        await supervisor.wait_ready(60)
        yield Service(deployment, supervisor, log)
    finally:
        await supervisor.stop()


def test_kill_each_process() -> None:
    async def main() -> None:
        async with running_service() as service:
            await service.canary()
            for victim in ("decode-0", "prefill-0", "gateway"):
                await _kill_while_streaming(service, victim)

    asyncio.run(main())


async def _kill_while_streaming(service: Service, victim: str) -> None:
    streams = [asyncio.create_task(service.stream(40 + 200 * (i % 2), 400, i)) for i in range(8)]
    # Some stream already, others are still on their way through prefill.
    await _first_answers(service, streams)
    pid = service.supervisor.pids()[victim]
    killed = time.monotonic()
    os.kill(pid, signal.SIGKILL)
    ends = await asyncio.gather(*streams)
    kinds = [kind for kind, _ in ends]
    late = [(kind, at - killed) for kind, at in ends if at - killed > 1.0]
    if victim == "prefill-0":
        # Requests that had left it are none of its business any more.
        assert all(kind == "clean" for kind, _ in late), late
    else:
        assert not late, (victim, late)
        assert set(kinds) != {"clean"}, f"{victim}: nothing was cut"
    await service.back()
    assert service.supervisor.pids()[victim] != pid
    await service.canary()


async def _first_answers(service: Service, streams: list[asyncio.Task[Any]]) -> None:
    """Wait until the decode worker has requests, by its own count."""
    decode = next(w for w in service.deployment.workers if w.role == "decode")
    end = time.monotonic() + 10
    while time.monotonic() < end:
        state = (await get(decode.port, "/conservation")).json
        if state["requests"]["running"] >= 2:
            return
        assert not all(task.done() for task in streams), "over before the kill"
        await asyncio.sleep(0.002)
    pytest.fail("no request reached the decode worker")
