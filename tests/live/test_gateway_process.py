"""The gateway as a process: signals, and an address that is taken."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec

from tests.live import fakes
from tests.live.fakes import (
    Asked,
    Client,
    FakeWorker,
    get,
    post,
    run,
    until,
)
from tests.live.gateway_rig import PATH, STREAM
from twofold.config import GatewaySettings
from twofold.live.ports import free_ports

RUN = """
import logging, sys, msgspec
from twofold.config import GatewaySettings
from twofold.live.gateway_process import run_gateway
logging.basicConfig(level=logging.INFO)
sys.exit(run_gateway(msgspec.json.decode(sys.argv[1], type=GatewaySettings)))
"""


@asynccontextmanager
async def process_for(
    worker: FakeWorker, port: int, admin_port: int, log: Path
) -> AsyncIterator[subprocess.Popen[bytes]]:
    settings = GatewaySettings(
        host="127.0.0.1",
        port=port,
        admin_host="127.0.0.1",
        admin_port=admin_port,
        workers=(await worker.start(),),
    )
    flags = (sys.executable, "-c", RUN, msgspec.json.encode(settings).decode())
    with log.open("wb") as err:
        process = subprocess.Popen(flags, stdout=err, stderr=err)  # noqa: ASYNC220
    try:
        yield process
    finally:
        process.kill()
        process.wait()
        worker.stop()


async def ready(port: int) -> None:
    while True:
        with contextlib.suppress(OSError):
            if (await get(port, "/ready")).status == 200:
                return
        await asyncio.sleep(0.02)


def test_process_lets_streams_end_when_told_to_stop(tmp_path: Path) -> None:
    log = tmp_path / "log"

    async def main() -> None:
        worker = FakeWorker("mixed", "m")
        port, admin = free_ports(2)
        go = asyncio.Event()

        async def slow(asked: Asked) -> None:
            asked.write(fakes.STREAM_HEAD + fakes.chunk(fakes.event("t0")))
            await go.wait()
            asked.write(fakes.chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n")

        worker.behaviour = slow
        async with process_for(worker, port, admin, log) as process:
            await ready(port)
            client = await Client.open(port)
            client.send(post(PATH, STREAM))
            await client.reader.readuntil(b"t0")
            process.send_signal(signal.SIGTERM)
            await until(lambda: "stopping: 1 requests" in log.read_text())
            go.set()
            assert b"[DONE]" in await client.reader.read()
            await client.close()
            await until(lambda: process.poll() is not None)
            assert process.returncode == 0

    run(main())
    assert "Traceback" not in log.read_text()


def test_process_that_cannot_listen_says_so_and_ends(tmp_path: Path) -> None:
    log = tmp_path / "log"

    async def main() -> None:
        with socket.create_server(("127.0.0.1", 0)) as taken:
            port = taken.getsockname()[1]
            async with process_for(FakeWorker("mixed", "m"), port, 0, log) as process:
                await until(lambda: process.poll() is not None)
                assert process.returncode == 2
        assert f"cannot listen at 127.0.0.1:{port}" in log.read_text()
        assert "Traceback" not in log.read_text()

    run(main())
