"""The worker process: a model, its core, and everything that connects the two to the world."""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import os
import signal
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

from twofold.config import EngineSettings, WorkerSettings
from twofold.core import journal
from twofold.core.handoff import MODES
from twofold.core.worker import WorkerCore
from twofold.device.runner import Runner
from twofold.device.sampling import Sampled
from twofold.device.weights import LoadedModel, layout_of, load_model
from twofold.live.clock import LoopClock
from twofold.live.http import HttpServer
from twofold.live.peer import PeerLinks
from twofold.live.tokeniser import Tokeniser
from twofold.live.worker_api import WorkerApi
from twofold.live.worker_driver import WorkerDriver
from twofold.live.worker_metrics import WorkerMetrics
from twofold.messages import Ended, Token
from twofold.transport.choose import make_transport, unusable
from twofold.transport.memory import PoolMemory
from twofold.types import NS_PER_S, seconds_to_ns

_log = logging.getLogger("twofold.worker")

_DEFAULT_MAX_MODEL_LEN = 8192
_DRAIN_NS = 3 * NS_PER_S
_MAX_BODY_BYTES = 64 * 1024 * 1024


class Worker:
    """One worker: made with a loaded model, `start`ed on a loop, `stop`ped with a drain.

    Raises ValueError, with the setting's name and the bytes, when there is no memory for its KV.
    """

    def __init__(self, settings: WorkerSettings, loaded: LoadedModel, tokeniser: Tokeniser) -> None:
        engine = settings.engine
        self.name, self.role = settings.name, settings.role
        self.http_port = settings.port
        self.handoff_port = settings.handoff_port
        self._host = settings.host
        self._advertise = settings.advertise
        self._transport_name = engine.transport
        self._record = settings.record
        self._tokeniser = tokeniser
        self._vocab_size = loaded.vocab_size
        self._eos = loaded.eos_token_ids or tokeniser.eos_token_ids
        self.model_name = engine.served_model_name or loaded.path.name
        self._clock = LoopClock()
        self.layout = msgspec.structs.replace(
            layout_of(loaded, block_size=engine.block_size),
            transport=_transport(engine.transport),
            handoff=engine.handoff,
            checksum=engine.checksum,
        )
        # Random, so that no peer takes this life of the worker for the one before it.
        epoch = os.urandom(16)
        self.engine_id = f"{self.name}-{epoch.hex()[:12]}"
        self.memory, self._runner = _pool(engine, loaded, self.layout.block_bytes, epoch)
        longest = engine.kv_blocks * engine.block_size
        self.max_model_len = min(
            engine.max_model_len or loaded.max_len or _DEFAULT_MAX_MODEL_LEN, longest
        )
        self._core_settings: dict[str, Any] = {
            "layout": self.layout,
            "n_blocks": engine.kv_blocks,
            "max_num_seqs": engine.max_num_seqs,
            "max_num_batched_tokens": engine.max_num_batched_tokens,
            "max_model_len": self.max_model_len,
            "max_waiting": engine.max_waiting,
            "prefix_caching": engine.prefix_caching,
            "handoff": engine.handoff,
            "lease_ns": seconds_to_ns(engine.lease_s),
            "min_layerwise_tokens": engine.layerwise_min_tokens,
            "chunk_policy": engine.chunk_policy,
            "chunk_cap_tokens": engine.chunk_cap_tokens,
            "chunk_goal_ns": seconds_to_ns(engine.chunk_tpot_s),
        }
        self._journal: BinaryIO | None = None
        self._server: HttpServer | None = None
        self._api: WorkerApi | None = None
        self.driver: WorkerDriver | None = None

    async def start(self) -> None:
        """Listen for peers and for HTTP. Raises OSError when a port is taken."""
        driver = self.driver = self._make_driver()
        links = driver.links = PeerLinks(
            self.engine_id, driver.deliver, on_met=driver.processes.met
        )
        self.handoff_port = await links.listen(self._host, self.handoff_port)
        self._api = WorkerApi(
            driver=driver,
            model=self.model_name,
            max_model_len=self.max_model_len,
            vocab_size=self._vocab_size,
            tokeniser=self._tokeniser,
            eos_token_ids=self._eos,
            clock=self._clock,
            identity=self.identity(),
            metrics=self._metrics.render,
            call_soon_threadsafe=asyncio.get_running_loop().call_soon_threadsafe,
        )
        self._server = HttpServer(self._api.handle, max_body_bytes=_MAX_BODY_BYTES)
        await self._server.start(self._host, self.http_port)
        self.http_port = self._server.port

    def _make_driver(self) -> WorkerDriver:
        soon = asyncio.get_running_loop().call_soon_threadsafe

        def notify() -> None:
            if self.driver is not None:
                soon(self.driver.completions)

        hashed = self.layout.checksum != "off"
        transport = make_transport(
            self._transport_name,
            notify,
            host=self._host,
            advertise=self._advertise,
            checksums=hashed,
        )
        settings = {**self._core_settings, "segment": transport.register(self.memory)}
        if self._record:
            self._journal = open(self._record, "wb")  # noqa: SIM115
            self._journal.write(journal.header("worker", settings))
        core = WorkerCore(**settings)
        self._metrics = WorkerMetrics(
            core, {"model_name": self.model_name, "worker": self.name, "role": self.role}
        )
        return WorkerDriver(
            core=core,
            runner=self._runner,
            memory=self.memory,
            transport=transport,
            clock=self._clock,
            call_soon_threadsafe=soon,
            on_token=self._on_token,
            on_ended=self._on_ended,
            journal_file=self._journal,
            by_layer=MODES[self.layout.handoff].by_layer,
            n_layers=self.layout.layers,
            checksum=hashed,
        )

    def identity(self) -> dict[str, Any]:
        """Who this worker is in this life, for gateways and peers."""
        return {
            "name": self.name,
            "role": self.role,
            "engine_id": self.engine_id,
            "model": self.model_name,
            "max_model_len": self.max_model_len,
            "kv_blocks": self.memory.n_blocks,
            "max_num_seqs": self._core_settings["max_num_seqs"],
            "handoff_host": self._advertise or self._host,
            "handoff_port": self.handoff_port,
            "layout": msgspec.to_builtins(self.layout),
        }

    def _on_token(self, effect: Token, sampled: Sampled) -> None:
        assert self._api is not None
        if effect.phases is not None:
            self._metrics.first_token(effect.phases)
        self._api.token(effect, sampled)

    def _on_ended(self, effect: Ended) -> None:
        assert self._api is not None
        took_ns = self._api.ended(effect)
        if took_ns is not None:
            self._metrics.ended(effect, took_ns)

    async def stop(self) -> None:
        """Refuse new requests, let those under way and their handoffs end, then close."""
        assert self.driver is not None
        assert self._api is not None
        assert self._server is not None
        self._api.draining = True
        until_ns = self._clock.now_ns() + _DRAIN_NS
        while self._busy() and self._clock.now_ns() < until_ns:
            await asyncio.sleep(0.02)
        await self._server.close(grace_s=1.0)
        await self.driver.close()
        self._api.close()
        self._runner.close()
        self.memory.close()
        if self._journal is not None:
            self._journal.close()

    def _busy(self) -> bool:
        assert self.driver is not None
        core = self.driver.core
        return bool(core.engine.requests) or core.source.counts.in_hand > 0


def _pool(
    engine: EngineSettings, loaded: LoadedModel, block_bytes: int, epoch: bytes
) -> tuple[PoolMemory, Runner]:
    """The KV blocks in host memory and on the device. Raises ValueError when there is no room."""
    try:
        # Populated now: the first requests should not pay for fresh pages.
        memory = PoolMemory(engine.kv_blocks, block_bytes, epoch, populate=True)
        runner = Runner(
            loaded,
            num_blocks=engine.kv_blocks,
            block_size=engine.block_size,
            buffer=memory.buffer,
            threads=engine.threads,
        )
    except (OSError, MemoryError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        text = f"--kv-blocks {engine.kv_blocks}, of {block_bytes} bytes each: {reason}"
        raise ValueError(text) from error
    return memory, runner


def _transport(name: str) -> str:
    """`name`, and for shared memory the host and the process namespace that it is good for."""
    if name != "shm":
        return name
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"shm@{boot[:8]}.{os.stat('/proc/self/ns/pid').st_ino}"


def _load(settings: WorkerSettings) -> tuple[LoadedModel, Tokeniser]:
    engine = settings.engine
    loaded = load_model(engine.model, dtype=engine.dtype, device=engine.device)
    path = Path(engine.model)
    return loaded, Tokeniser(path if path.is_dir() else path.parent)


async def _serve(worker: Worker) -> None:
    loop = asyncio.get_running_loop()
    stopping = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stopping.set)
    await worker.start()
    _log.info(
        "ready %s on port %d, peers on %d: %s, %d KV blocks of %d tokens, longest request %d",
        worker.role,
        worker.http_port,
        worker.handoff_port,
        worker.model_name,
        worker.memory.n_blocks,
        worker.layout.block_size,
        worker.max_model_len,
    )
    await stopping.wait()
    _log.info("stopping")
    await worker.stop()


def run_worker(settings: WorkerSettings) -> int:
    """Serve until SIGTERM or SIGINT; the exit code. Raises ValueError for what cannot be served."""
    import uvloop

    engine = settings.engine
    if reason := unusable(engine.transport, engine.handoff):
        raise ValueError(reason)
    if settings.advertise:
        try:
            ipaddress.ip_address(settings.advertise)
        except ValueError:
            text = f"--advertise {settings.advertise}: must be a numeric address"
            raise ValueError(text) from None
    loaded, tokeniser = _load(settings)
    worker = Worker(settings, loaded, tokeniser)
    try:
        uvloop.run(_serve(worker))
    except OSError as error:
        raise ValueError(f"{settings.host}: cannot listen: {error}") from error
    return 0
