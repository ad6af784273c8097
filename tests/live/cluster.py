"""Workers as real processes behind a fault proxy, and a gateway in the test's own loop."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import tempfile
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from tests import tiny
from tests.device.reference import expected, prompt_of
from tests.live import nursery
from tests.live.client import Client
from tests.live.fault_proxy import FRONT, FaultProxy
from tests.live.stack import HOST, get, parse_pools, post, request_bytes
from twofold.config import EngineSettings, WorkerAddress, WorkerSettings
from twofold.live.gateway import Gateway
from twofold.live.gateway_public import PublicApi
from twofold.live.http import HttpServer
from twofold.live.ports import free_ports
from twofold.live.tokeniser import Tokeniser

FAMILY = "llama"
MODEL = "tiny"
B = 16
N_OUTPUT = 24
CANARY = 3 * B + 5
DEADLINE_S = 8.0
"""Until the gateway gives a request up: in push what a lost claim comes to, since decode cannot
tell a prefill worker that computes from one that has not heard of it."""

GAUGES = ("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc")


class Cluster:
    """Made by `cluster`. `proxy` sits on every connection between the workers."""

    def __init__(self, workers: list[WorkerSettings], gateway: Gateway, folder: Path) -> None:
        self.workers = {worker.name: worker for worker in workers}
        self.gateway = gateway
        self.proxy = FaultProxy()
        self.public = HttpServer(PublicApi(gateway).handle)
        self.tokeniser = Tokeniser(tiny.cached_model(FAMILY))
        self.log = folder / "log"
        self._context = nursery.context()
        self._processes: dict[str, Any] = {}
        self._salts = 0

    async def start(self) -> None:
        for name, worker in self.workers.items():
            await self.proxy.front(worker.handoff_port)
            self.spawn(name)
        await self.public.start(HOST, 0)
        await self.gateway.start()
        await self.ready()

    async def close(self) -> None:
        await self.public.close(0.2)
        await self.gateway.stop()
        for process in self._processes.values():
            process.kill()
            process.join()
        await self.proxy.close()

    # ------------------------------------------------------------------ processes

    def spawn(self, name: str) -> None:
        made = self._context.Process(
            target=nursery.live, args=(self.workers[name], str(self.log)), daemon=True
        )
        made.start()
        self._processes[name] = made

    def signal(self, name: str, number: signal.Signals) -> None:
        os.kill(self._processes[name].pid, number)

    def kill(self, name: str) -> None:
        """kill -9, and gone."""
        self.signal(name, signal.SIGKILL)
        self._processes[name].join()

    async def restart(self, name: str) -> None:
        """A new life of a worker that was killed, once the gateway has met it."""
        worker = self.gateway.workers[name]
        before = worker.identity.engine_id if worker.identity else ""
        self.spawn(name)

        def is_met() -> bool:
            worker.poll_now.set()
            return worker.identity is not None and worker.identity.engine_id != before

        await self.wait(is_met, 30.0, f"{name} is back")
        await self.ready()

    async def ready(self, within_s: float = 30.0) -> None:
        await self.wait(lambda: self.gateway.unready() is None, within_s, "gateway ready")

    async def wait(self, condition: Any, within_s: float, what: str) -> None:
        end = time.monotonic() + within_s
        while not condition():
            assert time.monotonic() < end, f"not in {within_s} s: {what}; {self.said()}"
            await asyncio.sleep(0.003)

    def said(self) -> str:
        """The last of what the workers wrote."""
        return self.log.read_text()[-2000:]

    # ------------------------------------------------------------------ requests

    def ask(self, n_prompt: int, n_output: int = N_OUTPUT) -> tuple[Client, asyncio.Task[None]]:
        """Begin a streamed request that no cache knows."""
        client = Client(self.reference(n_prompt)[:n_output])
        data = json.dumps(self._body(n_prompt, n_output) | {"stream": True}).encode()
        request = request_bytes("POST", "/v1/completions", data)
        return client, asyncio.create_task(client.run(self.public.port, request))

    def reference(self, n_prompt: int) -> list[str]:
        """What transformers answers, token by token."""
        tokens = expected(FAMILY, n_prompt, 0, N_OUTPUT).tokens
        return [self.tokeniser.token_text(token) for token in tokens]

    def _body(self, n_prompt: int, n_output: int) -> dict[str, Any]:
        self._salts += 1
        return {
            "model": MODEL,
            "prompt": prompt_of(n_prompt),
            "max_tokens": n_output,
            "temperature": 0,
            "ignore_eos": True,
            "logprobs": 0,
            "cache_salt": f"case {self._salts}",
        }

    async def canary(self) -> None:
        """A request after the fault is answered right, over both workers."""
        answer = await post(self.public.port, "/v1/completions", self._body(CANARY, 8))
        assert answer.status == 200, (answer.body, self.said())
        tokens = answer.json["choices"][0]["logprobs"]["tokens"]
        assert tokens == self.reference(CANARY)[:8], "the canary got wrong text"
        assert int(answer.headers["x-twofold-transferred"]) > 0, "no KV was handed over"

    # ------------------------------------------------------------------ what is held

    async def states(self) -> dict[str, Any]:
        """Each worker's own account, or None where it does not answer."""
        found: dict[str, Any] = {}
        for name, worker in self.workers.items():
            found[name] = None
            with contextlib.suppress(OSError, ValueError, AssertionError):
                found[name] = (await get(worker.port, "/conservation")).json
        return found

    async def at_baseline(self, within_s: float) -> None:
        """Until nothing is held, known or in flight anywhere."""
        end = time.monotonic() + within_s
        while True:
            states = await self.states()
            if all(map(is_empty, states.values())) and not (
                self.gateway.sessions or self.gateway.router.requests
            ):
                return
            assert time.monotonic() < end, f"held after {within_s} s: {states}; {self.said()}"
            await asyncio.sleep(0.01)

    async def gauges(self) -> dict[str, float]:
        """All gauges of work in flight, by worker."""
        found: dict[str, float] = {}
        for name, worker in self.workers.items():
            for line in (await get(worker.port, "/metrics")).body.decode().splitlines():
                if line.startswith(GAUGES):
                    found[f"{name} {line.partition('{')[0]}"] = float(line.rsplit(" ", 1)[1])
        return found


def is_empty(state: Any) -> bool:
    if state is None:
        return False
    blocks = state["blocks"]
    return (
        blocks["free"] + blocks["cached"] == blocks["total"]
        and not any(state["requests"].values())
        and state["handed_over"]["in_hand"] == 0
    )


@contextlib.asynccontextmanager
async def cluster(pools: str = "1P1D", **engine: Any) -> AsyncIterator[Cluster]:
    """A ready cluster over TCP; `engine` as in EngineSettings."""
    settings = EngineSettings(
        model=str(tiny.cached_model(FAMILY)),
        served_model_name=MODEL,
        transport="tcp",
        **({"kv_blocks": 128, "block_size": B, "lease_s": 3.0, "layerwise_min_tokens": 8} | engine),
    )
    roles = parse_pools(pools)
    ports = free_ports(2 * len(roles))
    workers = [
        WorkerSettings(
            name=f"{role}-{i}",
            role=role,
            host=HOST,
            port=ports[2 * i],
            handoff_port=ports[2 * i + 1],
            engine=settings,
            advertise=FRONT,
        )
        for i, role in enumerate(roles)
    ]
    gateway = Gateway(
        [WorkerAddress(w.name, w.role, HOST, w.port) for w in workers],
        request_timeout_s=DEADLINE_S,
        handoff=settings.handoff,
    )
    with tempfile.TemporaryDirectory(prefix="twofold-cluster-") as folder:
        made = Cluster(workers, gateway, Path(folder))
        try:
            await made.start()
            yield made
        finally:
            await made.close()
