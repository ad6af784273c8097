"""Deployments of one prefill and one decode worker each, as `twofold serve` starts them."""

from __future__ import annotations

import asyncio
import json
import os
import random
from pathlib import Path
from typing import Any, Final

import msgspec
from tests.live.stack import Answer, post

from benchmarks.handoff.conditions import BLOCK_SIZE, HOST, Config
from benchmarks.handoff.journals import Handoff, handoffs
from twofold.config import EngineSettings, ServeSettings, WorkerAddress
from twofold.live.deployment import Deployment, plan_deployment
from twofold.live.ports import free_ports
from twofold.live.supervisor import Supervisor

MODEL: Final = "bench"
_PORTS: Final = 6  # HTTP and peers of two workers, public and admin of a gateway


def random_ids(rng: random.Random, n: int) -> list[int]:
    """A prompt that no worker has read before."""
    return [rng.randrange(3, 600) for _ in range(n)]


def _settings(model: Path, config: Config, kv_blocks: int) -> ServeSettings:
    engine = EngineSettings(
        model=str(model),
        served_model_name=MODEL,
        block_size=BLOCK_SIZE,
        kv_blocks=kv_blocks,
        handoff=config.handoff,  # type: ignore[arg-type]
        transport=config.transport,  # type: ignore[arg-type]
    )
    return ServeSettings(engine=engine, port=0)


def _place(planned: Deployment, ports: list[int], record: Path) -> Deployment:
    """The deployment on these ports, its workers recorded."""
    workers = tuple(
        msgspec.structs.replace(
            worker,
            port=ports[2 * i],
            handoff_port=ports[2 * i + 1],
            record=str(record / f"{worker.role}.journal"),
        )
        for i, worker in enumerate(planned.workers)
    )
    gateway = msgspec.structs.replace(
        planned.gateway,
        port=ports[4],
        admin_port=ports[5],
        workers=tuple(WorkerAddress(w.name, w.role, w.host, w.port) for w in workers),
    )
    return msgspec.structs.replace(planned, workers=workers, gateway=gateway)


class Live:
    """One deployment for each of `configs`, all up at once so that rounds can be interleaved.

    Those that are not asked anything use no CPU to speak of.
    """

    def __init__(self, model: Path, configs: list[Config], folder: Path, *, kv_blocks: int) -> None:
        self.configs = configs
        self._ports: dict[Config, int] = {}
        self._folders: dict[Config, Path] = {}
        self._supervisors: list[Supervisor] = []
        self._log: list[str] = []
        ports = free_ports(_PORTS * len(configs))
        for i, config in enumerate(configs):
            record = folder / f"{config.handoff}-{config.transport}"
            record.mkdir()
            planned = plan_deployment(_settings(model, config, kv_blocks))
            placed = _place(planned, ports[_PORTS * i : _PORTS * (i + 1)], record)
            port = placed.gateway.port
            self._folders[config], self._ports[config] = record, port
            self._supervisors.append(
                Supervisor(placed.children(), ready_at=(HOST, port), emit=self._log.append)
            )

    async def start(self) -> None:
        """Start all, a pair at a time, and wait until they serve. Raises TimeoutError."""
        for supervisor in self._supervisors:
            await supervisor.start()
            await supervisor.wait_ready(180)

    async def stop(self) -> None:
        """Stop all; journals are whole after that."""
        await asyncio.gather(*(supervisor.stop() for supervisor in self._supervisors))

    def port(self, config: Config) -> int:
        """Where its gateway listens."""
        return self._ports[config]

    async def ask(self, config: Config, prompt: list[int], max_tokens: int) -> Answer:
        """One completion. Raises RuntimeError for any answer but 200."""
        body: dict[str, Any] = {
            "model": MODEL,
            "prompt": prompt,
            "max_tokens": max_tokens,
            "temperature": 0,
            "ignore_eos": True,
        }
        answer = await post(self._ports[config], "/v1/completions", json.dumps(body).encode())
        if answer.status != 200:
            raise RuntimeError(f"{config}: {answer.status} {answer.body[:200]!r}")
        return answer

    def handoffs(self, config: Config) -> list[Handoff]:
        """What the journals say, after `stop`."""
        folder = self._folders[config]
        prefill, decode = folder / "prefill.journal", folder / "decode.journal"
        return handoffs(prefill.read_bytes(), decode.read_bytes())

    def journal_bytes(self) -> int:
        """Size of all journals."""
        return sum(
            os.stat(folder / name).st_size
            for folder in self._folders.values()
            for name in ("prefill.journal", "decode.journal")
        )
