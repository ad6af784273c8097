"""The gateway as a process: two servers, the workers' watch, signals, a clean end."""

from __future__ import annotations

import asyncio
import logging
import signal
from typing import Final

import uvloop

from twofold.config import GatewaySettings
from twofold.live.gateway import Gateway
from twofold.live.gateway_admin import AdminApi
from twofold.live.gateway_public import PublicApi
from twofold.live.http import HttpServer

log = logging.getLogger("twofold.gateway")

_DRAIN_S: Final = 10.0


def run_gateway(settings: GatewaySettings) -> int:
    """Serve until SIGTERM or SIGINT; the exit status: 0, or 2 if an address cannot be used.

    Answers under way are given ten seconds to end; a second signal cuts them.
    """
    return uvloop.run(_serve(settings))


async def _serve(settings: GatewaySettings) -> int:
    gateway = Gateway(
        settings.workers,
        handoff=settings.handoff,
        max_inflight=settings.max_inflight,
        request_timeout_s=settings.request_timeout_s,
        kept_ledgers=settings.kept_ledgers,
        prefill_policy=settings.prefill_policy,
        decode_policy=settings.decode_policy,
        split_policy=settings.split_policy,
        admission=settings.admission,
        slo_ttft_s=settings.slo_ttft_s,
        slo_tpot_s=settings.slo_tpot_s,
        failure_policy=settings.failure_policy,
        retries=settings.retries,
        recompute_tokens_per_s=settings.recompute_tokens_per_s,
    )
    public = HttpServer(
        PublicApi(gateway).handle,
        max_body_bytes=settings.max_body_bytes,
        header_timeout_s=settings.header_timeout_s,
        max_connections=2 * settings.max_inflight + 64,
    )
    admin = HttpServer(
        AdminApi(gateway).handle,
        header_timeout_s=settings.header_timeout_s,
        max_connections=128,
    )
    stop = _signals()
    for server, host, port in (
        (public, settings.host, settings.port),
        (admin, settings.admin_host, settings.admin_port),
    ):
        try:
            await server.start(host, port)
        except OSError as error:
            log.error("cannot listen at %s:%d: %s", host, port, error.strerror or error)
            await public.close(0)
            return 2
    await gateway.start()
    log.info("ready at http://%s:%d", settings.host, public.port)
    log.info("admin at http://%s:%d", settings.admin_host, admin.port)
    await stop[0].wait()
    log.info("stopping: %d requests under way", len(gateway.sessions))
    cut = asyncio.create_task(stop[1].wait())
    drained = asyncio.create_task(public.close(_DRAIN_S))
    await asyncio.wait((cut, drained), return_when=asyncio.FIRST_COMPLETED)
    cut.cancel()
    await gateway.stop()
    await public.close(0)
    await admin.close(0)
    await asyncio.gather(drained, cut, return_exceptions=True)
    return 0


def _signals() -> tuple[asyncio.Event, asyncio.Event]:
    """Events of the first and the second signal to stop."""
    first, second = asyncio.Event(), asyncio.Event()

    def on_signal() -> None:
        if first.is_set():
            second.set()
        first.set()

    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal)
    return first, second
