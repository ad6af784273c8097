"""One client's request at the gateway: its answer so far, its legs, its times."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import msgspec

from twofold.live.exchange import EVENT_STREAM, Exchange, Header, Request
from twofold.live.gateway_legs import Handle, LegName
from twofold.live.leg import Head, Leg
from twofold.live.openai import error_body, error_event
from twofold.messages import Recovery
from twofold.metrics.ledger import Ledger, balance, format_server_timing, parse_server_timing
from twofold.metrics.ledger import Leg as LegTime
from twofold.types import ns_to_ms

_KEPT_HEADERS: Final = ("retry-after", "www-authenticate")
_DONE: Final = b"data: [DONE]"
_TAIL_BYTES: Final = 64
TRANSFERRED: Final = "x-twofold-transferred"
ATTEMPTS: Final = "x-twofold-attempts"


class Ended(msgspec.Struct, kw_only=True):
    """What is kept of a request that has ended; the body of /admin/requests/{id}."""

    request_id: str
    outcome: str
    status: int
    why: str
    phases_ms: dict[str, float]
    ttft_ms: float | None
    e2e_ms: float
    transferred_bytes: int
    prefill_worker: str
    decode_worker: str
    generation: int
    recoveries: tuple[str, ...]
    n_output: int | None
    n_events: int
    stream: bool
    routed: tuple[str, ...]

    def line(self) -> str:
        """One line for the log."""
        ttft = f"{self.ttft_ms:.1f}ms" if self.ttft_ms is not None else "-"
        # A stream that is passed on as bytes is not counted; no figure is better than a guess.
        tokens = f" tokens={self.n_output}" if self.n_output is not None else ""
        where = ">".join(filter(None, (self.prefill_worker, self.decode_worker))) or "-"
        return (
            f"{self.request_id} {self.outcome} {self.status} ttft={ttft} e2e={self.e2e_ms:.1f}ms"
            f"{tokens} {where}{f': {self.why}' if self.why else ''}"
        )


class Session:
    """One request between its arrival and its end. Carries out, decides nothing."""

    def __init__(
        self, number: int, request: Request, exchange: Exchange, data: Mapping[str, Any], path: str
    ) -> None:
        self.number = number
        self.request = request
        self.exchange = exchange
        self.data = data
        self.path = path
        self.body = b""
        self.stream = False
        self.generation = 0
        self.prefill_worker = ""
        self.decode_worker = ""
        self.legs: dict[LegName, Leg] = {}
        self.at_once = False
        """Whether a remote decode leg leaves together with its prefill leg."""
        self.handle: Handle | None = None
        self.error_answer: tuple[Head, bytes] | None = None
        self.status = 0
        self.routed: tuple[str, ...] = ()
        self.n_events = 0
        self.n_output: int | None = None
        self.transferred_bytes = 0
        self.ledger: Ledger | None = None
        self.ttft_ns = 0
        self._tail = b""
        self.recoveries: tuple[str, ...] = ()
        """What the failure policy made of legs that failed, in order: "retried since ..."."""
        self._first_sent_ns = 0
        self._attempt_sent_ns = 0
        self._sent_ns: dict[LegName, int] = {}
        self._legs: list[LegTime] = []

    # --------------------------------------------------------------------------- times

    def leg_sent(self, name: LegName, now_ns: int) -> None:
        """A leg leaves now."""
        self._sent_ns[name] = now_ns
        self._first_sent_ns = self._first_sent_ns or now_ns
        self._attempt_sent_ns = self._attempt_sent_ns or now_ns

    def recover(self, effect: Recovery) -> None:
        """A leg has failed. If another attempt follows, nothing of the old one counts for it."""
        self.recoveries += (f"{effect.result.replace('_', ' ')} since {effect.reason}",)
        if not effect.sent_again:
            return
        self.cancel("prefill", "decode")
        self.legs.clear()
        self.prefill_worker = self.decode_worker = ""
        self.handle = self.error_answer = None
        self._attempt_sent_ns = 0
        self._sent_ns.clear()
        self._legs.clear()

    def leg_answered(self, name: LegName, head: Head, now_ns: int) -> None:
        """A leg's head came now. Where both run at once, decode's time contains the other's."""
        if name == "prefill" and self.at_once:
            return
        self._legs.append(
            LegTime(
                elapsed_ns=now_ns - self._sent_ns[name],
                phases_ns=parse_server_timing(head.get("server-timing")),
            )
        )
        moved = head.get(TRANSFERRED)
        if moved.isascii() and moved.isdigit():
            self.transferred_bytes += int(moved[:18])

    def _first_byte(self, now_ns: int) -> Ledger:
        received_ns = self.request.received_ns
        self.ttft_ns = now_ns - received_ns
        queue_ns = self._first_sent_ns - received_ns
        recovery_ns = self._attempt_sent_ns - self._first_sent_ns
        self.ledger = balance(self.ttft_ns, queue_ns, self._legs, recovery_ns)
        return self.ledger

    def _answer_headers(self, ledger: Ledger) -> list[Header]:
        timing = format_server_timing({**ledger.as_ns(), "ttft": self.ttft_ns})
        headers = [("server-timing", timing), (TRANSFERRED, str(self.transferred_bytes))]
        if self.generation:
            headers.append((ATTEMPTS, str(self.generation + 1)))
        return headers

    # --------------------------------------------------------------------------- answers

    def begin_stream(self, head: Head, now_ns: int) -> None:
        """Send the head of a stream; its first bytes follow at once."""
        headers = [("cache-control", "no-cache"), *self._answer_headers(self._first_byte(now_ns))]
        self.status = 200
        self.exchange.start(200, head.get("content-type") or EVENT_STREAM, headers)

    def pass_on(self, data: bytes) -> None:
        """Send bytes of a stream as they came."""
        self.n_events += data.count(b"data: ")
        self._tail = data[-_TAIL_BYTES:] if len(data) >= _TAIL_BYTES else self._joined(data)
        exchange = self.exchange
        if exchange.chunked:
            exchange.write_raw(data)
        else:
            exchange.write(data)  # an HTTP/1.0 client; the leg is unframed
        if exchange.paused and "decode" in self.legs:
            self.legs["decode"].pause()

    def resume(self) -> None:
        """The client takes bytes again."""
        if "decode" in self.legs:
            self.legs["decode"].resume()

    def cancel(self, *names: LegName) -> None:
        """Stop legs that are under way."""
        for name in names:
            if name in self.legs:
                self.legs[name].cancel()

    def _joined(self, data: bytes) -> bytes:
        return (self._tail + data)[-_TAIL_BYTES:]

    def end_stream(self) -> bool:
        """The stream's last byte has been passed on. Whether it said that it is complete."""
        if self.exchange.chunked:
            self.exchange.end_raw()
        else:
            self.exchange.end()
        return self.is_complete()

    def is_complete(self) -> bool:
        """Whether the stream's last event has been passed on."""
        return _DONE in self._tail

    def send_whole(self, head: Head, body: bytes, now_ns: int) -> None:
        """Send an answer that is not streamed."""
        headers = self._answer_headers(self._first_byte(now_ns))
        self.n_output = _output_tokens(body)
        self.status = head.status
        self.exchange.respond(head.status, body, _type(head), headers)

    def send_error(self, status: int, code: str, reason: str, retry_after_s: int) -> None:
        """Send an error of the gateway's own, or with status 0 the worker's as it is."""
        if status == 0 and self.error_answer is not None:
            head, body = self.error_answer
            kept = [(name, head.get(name)) for name in _KEPT_HEADERS if head.get(name)]
            if head.status == 429 and not head.get("retry-after"):
                kept.append(("retry-after", "1"))
            self.status = head.status
            self.exchange.respond(head.status, body, _type(head), kept)
            return
        self.status = status or 502
        headers = [("retry-after", str(retry_after_s))] if retry_after_s else []
        body = error_body(self.status, code or "worker_failed", reason)
        self.exchange.respond(self.status, body, headers=headers)

    def cut(self, reason: str, timed_out: bool) -> None:
        """End an answer that has begun and cannot be completed: an error event and no [DONE]."""
        exchange = self.exchange
        leg = self.legs.get("decode")
        status, code = (504, "deadline_exceeded") if timed_out else (502, "worker_failed")
        if not exchange.started:
            self.send_error(status, code, reason, 0)
            return
        self.status = status
        if exchange.finished:
            return  # the worker has said so itself
        if leg is None or not leg.between_chunks:
            exchange.abort()  # inside a chunk nothing can be said any more
            return
        exchange.close_after()
        exchange.write(error_event(status, code, reason))
        exchange.end()

    def ended(self, outcome: str, why: str, now_ns: int) -> Ended:
        """What to keep of it."""
        if outcome == "cancelled":
            self.status = 499
        ledger = self.ledger
        return Ended(
            request_id=self.request.request_id,
            outcome=outcome,
            status=self.status,
            why=why,
            phases_ms=ledger.as_ms() if ledger else {},
            ttft_ms=round(ns_to_ms(self.ttft_ns), 3) if ledger else None,
            e2e_ms=round(ns_to_ms(now_ns - self.request.received_ns), 3),
            transferred_bytes=self.transferred_bytes,
            prefill_worker=self.prefill_worker,
            decode_worker=self.decode_worker,
            generation=self.generation,
            recoveries=self.recoveries,
            n_output=self.n_output,
            n_events=self.n_events,
            stream=self.stream,
            routed=self.routed,
        )


class _Usage(msgspec.Struct):
    completion_tokens: int | None = None


class _WithUsage(msgspec.Struct):
    usage: _Usage | None = None


_decode_usage = msgspec.json.Decoder(_WithUsage).decode


def _output_tokens(body: bytes) -> int | None:
    try:
        usage = _decode_usage(body).usage
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None
    return usage.completion_tokens if usage else None


def _type(head: Head) -> str:
    return head.get("content-type") or "application/json"
