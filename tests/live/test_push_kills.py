"""kill -9 of either worker amid a push, and what a peer that cannot be reached does to blocks."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import pytest

from tests import tiny
from tests.device.reference import prompt_of
from tests.live.stack import get, post, running, until
from tests.live.test_kills import Service, running_service
from twofold.live.clock import LoopClock
from twofold.live.processes import Processes
from twofold.live.push import Incoming, Outgoing
from twofold.messages import Claim, Closed, Fenced, FromPeer, ToPeer, Write, WriteDone
from twofold.transport.base import Completion
from twofold.types import KVHandle

MODES = pytest.mark.parametrize("handoff", ["push", "layerwise"])


async def _held(service: Service, role: str) -> int:
    worker = next(w for w in service.deployment.workers if w.role == role)
    state = (await get(worker.port, "/conservation")).json
    return int(state["blocks"]["held"])


async def _until_decode_holds(service: Service) -> None:
    end = time.monotonic() + 10
    while await _held(service, "decode") == 0:
        assert time.monotonic() < end, "decode offered no blocks"
        await asyncio.sleep(0.005)


def _send(service: Service, name: str, number: signal.Signals) -> None:
    os.kill(service.supervisor.pids()[name], number)


@pytest.mark.parametrize(("transport", "handoff"), [("shm", "layerwise"), ("tcp", "push")])
def test_kill_of_either_worker_amid_a_push(transport: str, handoff: str) -> None:
    """First the writer dies while it may still write, then whom it writes to."""

    async def main() -> None:
        async with running_service(
            transport=transport, handoff=handoff, layerwise_min_tokens=32
        ) as service:
            await service.canary()
            for victim in ("prefill-0", "decode-0"):
                # Decode offers its blocks while prefill stands still: a push has begun, for sure.
                _send(service, "prefill-0", signal.SIGSTOP)
                streams = [
                    asyncio.create_task(service.stream(150 + 40 * i, 20, 10 * i)) for i in range(6)
                ]
                await _until_decode_holds(service)
                if victim == "decode-0":
                    _send(service, "decode-0", signal.SIGSTOP)
                    _send(service, "prefill-0", signal.SIGCONT)
                    await asyncio.sleep(0.05)  # a moment to write to one that does not answer
                killed = time.monotonic()
                pid = service.supervisor.pids()[victim]
                os.kill(pid, signal.SIGKILL)
                ends = await asyncio.gather(*streams)
                assert all(kind in ("error", "reset") for kind, _ in ends), (victim, ends)
                assert max(at for _, at in ends) - killed < 2.0, (victim, ends)
                await service.back()
                assert service.supervisor.pids()[victim] != pid
                await service.canary()

    asyncio.run(main())


# -------------------------------------------------------------------------------- writes


class _Moves:
    """A transport that only notes what it is asked for."""

    def __init__(self) -> None:
        self.writes: list[tuple[int, Any]] = []
        self.cancelled: list[int] = []

    def write(self, number: int, segment: str, pairs: Any, layers: Any, n_layers: int) -> None:
        self.writes.append((number, layers))

    def cancel(self, number: int) -> None:
        self.cancelled.append(number)


def _write(request_id: int, number: int, layers: tuple[int, int] = (0, 4)) -> Write:
    return Write(request_id, number, "d", "there", ((1, 2),), layers)


def test_writes_of_a_request_go_one_at_a_time_and_in_order() -> None:
    moves: Any = _Moves()
    said: list[Any] = []
    exports: list[Callable[[str], None]] = []
    outgoing = Outgoing(
        transport=moves,
        n_layers=4,
        export=lambda blocks, then: exports.append(then),
        deliver=said.append,
    )
    for effect in (_write(3, 1, (0, 2)), _write(3, 2, (2, 4)), _write(5, 1), _write(3, 3)):
        outgoing.write(effect)
    assert len(exports) == 2, "the second write of a request did not wait"
    for then in exports[:2]:
        then("")
    assert moves.writes == [(-1, (0, 2)), (-2, (0, 4))]
    outgoing.done(Completion(-1, ok=True, n_bytes=50))
    exports[2]("")
    assert moves.writes[2:] == [(-3, (2, 4))]
    # What waits is answered at once, what is under way when it has ended.
    outgoing.cancel(3)
    assert moves.cancelled == [-3]
    assert said == [
        WriteDone(3, 1, ok=True, n_bytes=50),
        WriteDone(3, 3, ok=False, reason="cancelled"),
    ]
    outgoing.done(Completion(-3, ok=False, reason="cancelled"))
    outgoing.done(Completion(-2, ok=True, n_bytes=100))
    assert said[2:] == [
        WriteDone(3, 2, ok=False, reason="cancelled"),
        WriteDone(5, 1, ok=True, n_bytes=100),
    ]
    # Cancelled, or failed, before the transport has heard of it.
    outgoing.write(_write(3, 4))
    outgoing.cancel(3)
    exports[3]("")
    outgoing.write(_write(3, 5))
    exports[4]("export failed: out of memory")
    assert [(m.number, m.reason) for m in said[4:]] == [
        (4, "cancelled"),
        (5, "export failed: out of memory"),
    ]
    assert len(moves.writes) == 3
    outgoing.cancel(3)  # nothing is left to cancel


# -------------------------------------------------------------------------------- fences


class _Reachable:
    """A transport whose peers write by themselves, as over shared memory."""

    def __init__(self) -> None:
        self.closed: list[str] = []

    def open_window(self, blocks: Any) -> str:
        return f"window of {blocks}"

    def close_window(self, segment: str) -> bool:
        self.closed.append(segment)
        return False


def _claim(peer: str, transfer: int) -> ToPeer:
    layout: Any = None
    return ToPeer(peer, Claim(transfer, 0, layout, "mine", 0, (1, 2)), "host", 1)


def _handle(peer: str, transfer: int) -> KVHandle:
    return KVHandle(
        engine_id=peer, host="host", port=1, request_id=transfer, generation=0, n_tokens=9
    )


def test_a_fence_waits_for_the_death_of_the_very_process() -> None:
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)

    async def main() -> None:
        answered: list[Any] = []
        processes = Processes(LoopClock())
        transport: Any = _Reachable()
        incoming = Incoming(transport=transport, processes=processes, deliver=answered.append)
        try:
            processes.met("p", child.pid)
            for transfer in (7, 8, 9):
                sent = incoming.claim(_claim("p", transfer)).message
                assert isinstance(sent, Claim)
                assert sent.segment == "window of (1, 2)"
                incoming.fence(transfer, _handle("p", transfer))
                incoming.fence(transfer, _handle("p", transfer))  # said twice
            # One says that it has stopped after all: the core hears of that by itself.
            incoming.heard(FromPeer("p", Closed(8, 0, valid=False)))
            await asyncio.sleep(0.1)
            assert answered == []
            # A stop is not an end: it could go on, and write.
            child.send_signal(signal.SIGSTOP)
            await asyncio.sleep(0.1)
            assert answered == []
            child.kill()
            await until(lambda: len(answered) == 2, what="fenced")
            assert answered == [Fenced(7), Fenced(9)]
            # Whoever was never met has never been sent a claim.
            incoming.claim(_claim("q", 1))
            incoming.fence(4, _handle("q", 1))
            await until(lambda: answered[2:] == [Fenced(4)], what="fenced")
        finally:
            processes.close()
            child.kill()
            child.wait()
            assert child.stdin is not None
            child.stdin.close()

    asyncio.run(main())


def test_a_written_transfer_is_fenced_at_once() -> None:
    answered: list[Any] = []
    processes: Any = None
    transport: Any = _Reachable()
    incoming = Incoming(transport=transport, processes=processes, deliver=answered.append)
    incoming.claim(_claim("p", 7))
    incoming.heard(FromPeer("other", Closed(7, 0, valid=True)))
    assert transport.closed == []
    incoming.heard(FromPeer("p", Closed(7, 0, valid=True)))
    assert transport.closed == ["window of (1, 2)"]
    incoming.fence(3, _handle("p", 7))
    assert answered == [Fenced(3)]


# ------------------------------------------------------------------------- odd parameters


def _ask(n: int, **params: Any) -> dict[str, Any]:
    return {
        "model": "llama",
        "prompt": prompt_of(n),
        "max_tokens": 1,
        "temperature": 0,
        "kv_transfer_params": params,
    }


@MODES
def test_odd_parameters_of_a_leg_are_refused_and_harm_none(handoff: str) -> None:
    async def main() -> None:
        async with running(tiny.cached_model("llama"), "1P1D", handoff=handoff) as stack:
            prefill, decode = stack.worker("prefill"), stack.worker("decode")
            path = "/v1/completions"
            where = {
                "do_remote_prefill": True,
                "remote_engine_id": prefill.engine_id,
                "remote_host": "127.0.0.1",
                "remote_port": prefill.handoff_port,
            }
            pulled = {"remote_request_id": 1, "remote_generation": 0, "remote_num_tokens": 9}
            for params, name in (
                (where | pulled, "transfer_id"),
                (where | {"transfer_id": []}, "transfer_id"),
                (where | {"transfer_id": ""}, "transfer_id"),
                (where | {"transfer_id": 5, "remote_host": None}, "remote_host"),
            ):
                body = _ask(20, **params) | {"model": stack.model}
                answer = await post(decode.http_port, path, body)
                assert answer.status == 400, answer.body
                assert answer.error["param"] == f"kv_transfer_params.{name}"
            # Text of others' making names a transfer as well; both ends make the same of it.
            ask = _ask(40, do_remote_decode=True, transfer_id="xfer-1") | {"model": stack.model}
            first = asyncio.create_task(post(prefill.http_port, path, ask))
            core = prefill.driver.core  # type: ignore[union-attr]
            await until(lambda: bool(core.engine.requests or core.source.counts.in_hand))
            again = await post(prefill.http_port, path, ask)
            assert (again.status, again.error["code"]) == (409, "duplicate_handle")
            body = _ask(40, **where, transfer_id="xfer-1") | {"model": stack.model}
            answer = await post(decode.http_port, path, body)
            assert answer.status == 200, answer.body
            assert int(answer.headers["x-twofold-transferred"]) > 0
            assert (await first).status == 200
            # Decode asked of prefill what its own answer said, one leg after the other.
            ask = _ask(50, do_remote_decode=True) | {"model": stack.model}
            told = (await post(prefill.http_port, path, ask)).json["kv_transfer_params"]
            answer = await post(decode.http_port, path, _ask(50, **told) | {"model": stack.model})
            assert answer.status == 200, answer.body
            await stack.at_baseline()

    asyncio.run(main())
