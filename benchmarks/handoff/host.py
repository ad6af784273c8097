"""A process that holds several workers, for the parts that need no computing on the prefill side.

    python -m benchmarks.handoff.host   (started by `pairs.py`, told what to hold on stdin)

Everything of a worker is real: sockets, core, transport, checksums, threads. Only where `replay` is
asked, the device is none: a step ends at once, and its KV is whatever the pool holds, which is
random numbers. So a prefill worker hands over KV and takes no core away from decode by computing.

The first line on stdin is the order; the answer is a line with every worker's identity. Then each
line asks for the CPU time so far: of the event loop's thread and of the whole process. At the end
of stdin it stops.
"""

from __future__ import annotations

import asyncio
import json
import logging
import signal
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final
from unittest import mock

import msgspec
import numpy as np
import uvloop

from benchmarks.handoff.conditions import BLOCK_SIZE, HOST, Config
from twofold.config import EngineSettings, Role, WorkerSettings
from twofold.device.runner import Row, Runner, Sampled
from twofold.device.weights import LoadedModel, load_model
from twofold.live.tokeniser import Tokeniser
from twofold.live.worker import Worker

MODEL: Final = "bench"
_LAYER_GROUPS: Final = 4  # as often as a real step tells how far it is


class Order(msgspec.Struct, frozen=True, kw_only=True):
    """What to hold: a worker for each of `configs`, as (handoff, transport)."""

    model: str
    role: Role
    configs: list[tuple[str, str]]
    kv_blocks: int
    replay: bool = False


class Replaying(Runner):
    """No device: what is in the pool stands for what would have been computed."""

    def run(
        self, rows: Sequence[Row], on_layers: Callable[[int], None] | None = None
    ) -> list[Sampled | None]:
        """Answer at once, with token 0 where one is asked for."""
        if on_layers is not None:
            layers = self._pool.layers
            for i in range(1, _LAYER_GROUPS):
                on_layers(layers * i // _LAYER_GROUPS)
        return [Sampled(0) if row.sample else None for row in rows]


def _fill(worker: Worker) -> None:
    """Random KV, small enough to be finite in any sum."""
    cells = np.frombuffer(worker.memory.buffer, np.float32)
    rng = np.random.default_rng(1)
    cells[:] = rng.standard_normal(cells.size, dtype=np.float32) * np.float32(0.1)


def _worker(order: Order, config: Config, loaded: LoadedModel, tokeniser: Tokeniser) -> Worker:
    engine = EngineSettings(
        model=order.model,
        served_model_name=MODEL,
        block_size=BLOCK_SIZE,
        kv_blocks=order.kv_blocks,
        handoff=config.handoff,  # type: ignore[arg-type]
        transport=config.transport,  # type: ignore[arg-type]
    )
    settings = WorkerSettings(
        name=f"{order.role}-{config.handoff}-{config.transport}",
        role=order.role,
        host=HOST,
        port=0,
        handoff_port=0,
        engine=engine,
        record="",
    )
    if not order.replay:
        return Worker(settings, loaded, tokeniser)
    with mock.patch("twofold.live.worker.Runner", Replaying):
        worker = Worker(settings, loaded, tokeniser)
    _fill(worker)
    return worker


async def _serve(order: Order) -> None:
    loaded = load_model(order.model)
    tokeniser = Tokeniser(Path(order.model))
    workers = [_worker(order, Config(*each), loaded, tokeniser) for each in order.configs]
    identities: list[dict[str, Any]] = []
    for worker in workers:
        await worker.start()
        identities.append(worker.identity() | {"http_port": worker.http_port})
    print(json.dumps(identities), flush=True)
    lines = asyncio.StreamReader()
    loop = asyncio.get_running_loop()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(lines), sys.stdin)
    while await lines.readline():
        print(json.dumps([time.thread_time_ns(), time.process_time_ns()]), flush=True)
    for worker in workers:
        await worker.stop()


def main() -> None:
    logging.disable(logging.WARNING)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the end of stdin ends it, after Ctrl-C too
    # Nothing else is sent before the answer, so no line is left behind in the buffer.
    order = msgspec.json.decode(sys.stdin.readline(), type=Order)
    uvloop.run(_serve(order))


if __name__ == "__main__":
    main()
