"""Watches the workers: asks each who it is, again and again, and says when that changes."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Sequence
from typing import Final

import msgspec

from twofold.config import Role, WorkerAddress
from twofold.live.clock import Clock
from twofold.live.upstream import Upstream
from twofold.messages import WorkerGone, WorkerSeen
from twofold.types import KVLayout, seconds_to_ns

log = logging.getLogger("twofold.gateway")

_POLL_S: Final = 0.5
_TIMEOUT_S: Final = 2.0


class Identity(msgspec.Struct, frozen=True, kw_only=True):
    """A worker's answer to GET /layout."""

    role: Role
    engine_id: str
    model: str
    max_model_len: int = 0
    layout: KVLayout | None = None
    kv_blocks: int = 0
    max_num_seqs: int = 0
    handoff_host: str = ""
    handoff_port: int = 0


_decode_identity = msgspec.json.Decoder(Identity).decode


class Worker:
    """One worker as the gateway knows it; `identity` is None while it does not answer."""

    def __init__(self, address: WorkerAddress, clock: Clock) -> None:
        self.name = address.name
        self.address = address
        self.upstream = Upstream(address.host, address.port, clock=clock)
        self.identity: Identity | None = None
        self.why = "has not answered yet"
        self.poll_now = asyncio.Event()


def models_of(workers: Iterable[Worker]) -> dict[str, int]:
    """Names that can be asked for now, with the largest max_model_len of their workers."""
    found: dict[str, int] = {}
    for worker in workers:
        if worker.identity is not None:
            name = worker.identity.model
            found[name] = max(found.get(name, 0), worker.identity.max_model_len)
    return found


class Watcher:
    """Polls every worker and calls `tell` with WorkerSeen and WorkerGone when things change."""

    def __init__(
        self,
        workers: Sequence[Worker],
        tell: Callable[[WorkerSeen | WorkerGone], None],
        clock: Clock,
    ) -> None:
        self._workers = workers
        self._tell = tell
        self._clock = clock
        self._tasks: list[asyncio.Task[None]] = []

    def start(self) -> None:
        """Begin to poll."""
        loop = asyncio.get_running_loop()
        self._tasks = [loop.create_task(self._watch(worker)) for worker in self._workers]

    async def stop(self) -> None:
        """End the polling."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def lost(self, worker: Worker) -> None:
        """A connection to `worker` broke: it counts as gone until it answers, asked at once."""
        if worker.identity is not None:
            worker.identity = None
            worker.why = "a connection to it broke"
            worker.upstream.drop_idle()
            self._tell(WorkerGone(worker.name))
        worker.poll_now.set()

    async def _watch(self, worker: Worker) -> None:
        while True:
            next_ns = self._clock.now_ns() + seconds_to_ns(_POLL_S)
            worker.poll_now.clear()
            await self._poll(worker)
            left_s = max(0.0, (next_ns - self._clock.now_ns()) / 1e9)
            try:
                async with asyncio.timeout(left_s):
                    await worker.poll_now.wait()
            except TimeoutError:
                continue

    async def _poll(self, worker: Worker) -> None:
        try:
            head, body = await worker.upstream.fetch("GET", "/layout", timeout_s=_TIMEOUT_S)
            if head.status != 200:
                raise ConnectionError(f"GET /layout gave status {head.status}")
            identity = _decode_identity(body)
        except (ConnectionError, msgspec.DecodeError, UnicodeDecodeError) as error:
            self._gone(worker, str(error))
        else:
            self._seen(worker, identity)

    def _gone(self, worker: Worker, why: str) -> None:
        worker.why = why
        if worker.identity is not None:
            worker.identity = None
            worker.upstream.drop_idle()
            log.warning("worker %s is gone: %s", worker.name, why)
            self._tell(WorkerGone(worker.name))

    def _seen(self, worker: Worker, identity: Identity) -> None:
        if identity == worker.identity:
            return
        if identity.role != worker.address.role:
            log.warning(
                "worker %s was to be %s but is %s",
                *(worker.name, worker.address.role, identity.role),
            )
        log.info(
            "worker %s is up: %s, %s, life %s",
            *(worker.name, identity.role, identity.model, identity.engine_id),
        )
        worker.identity = identity
        worker.why = ""
        self._tell(
            WorkerSeen(
                worker=worker.name,
                role=identity.role,
                engine_id=identity.engine_id,
                layout=identity.layout,
                kv_blocks=identity.kv_blocks,
                max_num_seqs=identity.max_num_seqs,
                model=identity.model,
            )
        )


def as_paired(message: WorkerSeen | WorkerGone, handoff: str) -> WorkerSeen | WorkerGone:
    """`message` as a router of mode `handoff` may take it.

    A worker of another mode must be paired with none, not even with one like itself, and whoever
    asks why is told so: its layout names it. One that does not say its mode has the gateway's.
    """
    if not isinstance(message, WorkerSeen) or message.layout is None:
        return message
    theirs = message.layout.handoff
    if theirs in ("", handoff) or message.role == "mixed":
        return message
    said = f"{theirs} at {message.worker} ({handoff} at the gateway)"
    log.warning("worker %s is paired with none: its handoff is %s", message.worker, said)
    return msgspec.structs.replace(
        message, layout=msgspec.structs.replace(message.layout, handoff=said)
    )
