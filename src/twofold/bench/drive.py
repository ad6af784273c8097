"""Sends a trace's requests at its times and notes when every token came.

Open loop: a request is sent when it is due, however many are under way, because that is what
users do. Each streams over a connection of its own, so that no request waits for another's.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Callable, Sequence
from typing import Any, Final, Literal

import msgspec

from twofold.metrics.ledger import PHASES, parse_server_timing
from twofold.metrics.record import RequestRecord
from twofold.trace import TraceRequest

_DATA: Final = b"data: "
_READ_BYTES: Final = 65536

Outcome = Literal["finished", "refused", "failed", "cancelled"]


class Target(msgspec.Struct, frozen=True):
    """Where to send, and as which model."""

    host: str
    port: int
    model: str


Now = Callable[[], int]
Prompt = Callable[[int, TraceRequest], list[int]]


def body_of(target: Target, prompt: Sequence[int], n_output: int) -> bytes:
    """A streamed completion of exactly `n_output` tokens, greedy."""
    body: dict[str, Any] = {
        "model": target.model,
        "prompt": list(prompt),
        "max_tokens": n_output,
        "ignore_eos": True,
        "temperature": 0,
        "stream": True,
    }
    return json.dumps(body, separators=(",", ":")).encode()


class _Reader:
    """Splits a chunked event stream into events and notes when each came."""

    def __init__(self) -> None:
        self.status = 0
        self.headers: dict[str, str] = {}
        self.times_ns: list[int] = []
        self.done = False
        self.broken = False
        self._rest = b""
        self._in_head = True

    def feed(self, data: bytes, now_ns: int) -> None:
        self._rest += data
        if self._in_head and not self._head():
            return
        # Events of this endpoint never hold a raw newline, so lines are enough, and the lines
        # of the chunked framing are none of ours.
        *lines, self._rest = self._rest.split(b"\n")
        for line in lines:
            if line.startswith(b"data: [DONE]"):
                self.done = True
            elif line.startswith(b'data: {"error"'):
                self.broken = True
            elif line.startswith(_DATA):
                self.times_ns.append(now_ns)

    def _head(self) -> bool:
        head, found, rest = self._rest.partition(b"\r\n\r\n")
        if not found:
            return False
        lines = head.decode("latin-1").split("\r\n")
        self.status = int(lines[0].split()[1])
        self.headers = {
            k.lower(): v.strip() for k, _, v in (line.partition(":") for line in lines[1:])
        }
        self._rest = rest
        self._in_head = False
        return True

    @property
    def outcome(self) -> Outcome:
        if self.status == 200 and self.done and not self.broken:
            return "finished"
        return "refused" if 400 <= self.status < 500 or self.status == 503 else "failed"


async def send_one(
    target: Target, number: int, row: TraceRequest, prompt: Sequence[int], now: Now
) -> RequestRecord:
    """Send one request now; never raises for what the endpoint does."""
    data = body_of(target, prompt, row.output_tokens)
    head = (
        f"POST /v1/completions HTTP/1.1\r\nhost: {target.host}:{target.port}\r\n"
        f"content-type: application/json\r\ncontent-length: {len(data)}\r\n"
        f"connection: close\r\n\r\n"
    )
    reader = _Reader()
    sent_ns = now()
    with contextlib.suppress(OSError):
        stream, writer = await asyncio.open_connection(target.host, target.port)
        try:
            writer.write(head.encode() + data)
            while piece := await stream.read(_READ_BYTES):
                reader.feed(piece, now())
        finally:
            writer.close()
    return _record(number, row, sent_ns, now(), reader)


def _record(
    number: int, row: TraceRequest, sent_ns: int, end_ns: int, reader: _Reader
) -> RequestRecord:
    times = tuple(reader.times_ns)
    phases = parse_server_timing(reader.headers.get("server-timing", ""))
    named: dict[str, int] = {name: phases[name] for name in PHASES if name in phases}
    if times and named:
        # What the endpoint does not account for: the network, and this client.
        rest = times[0] - sent_ns - sum(named.values())
        named["unattributed"] = named.get("unattributed", 0) + rest
    return RequestRecord(
        request_id=number,
        arrival_ns=sent_ns,
        end_ns=end_ns,
        outcome=reader.outcome,
        input_tokens=row.input_tokens,
        output_tokens=row.output_tokens,
        token_times_ns=times,
        phases_ns=named,
    )


async def drive(
    target: Target,
    rows: Sequence[TraceRequest],
    prompt: Prompt,
    now: Now,
    on_end: Callable[[RequestRecord], None] = lambda record: None,
) -> list[RequestRecord]:
    """Send every row when it is due after the call; the records in the order of `rows`.

    `prompt(number, row)` gives a row's token ids; `on_end` is called as requests end.
    """
    bodies = [prompt(i, row) for i, row in enumerate(rows)]
    began_ns = now()

    async def one(number: int, row: TraceRequest) -> RequestRecord:
        while (left_ns := began_ns + row.arrival_ns - now()) > 0:
            await asyncio.sleep(left_ns / 1e9)
        record = await send_one(target, number, row, bodies[number], now)
        on_end(record)
        return record

    return list(await asyncio.gather(*(one(i, row) for i, row in enumerate(rows))))
