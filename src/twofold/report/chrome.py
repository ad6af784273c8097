"""One run as a Chrome trace, to look at in Perfetto or chrome://tracing.

A process per worker and one for the gateway; inside each, as many lanes as requests overlapped.
Phases follow one another from the arrival on, in the order of the ledger, on the worker that does
them. A record holds relays as one sum, which is shown before the first token; what really lay
between two legs is therefore in the right place to within that sum.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import IO, Any, Final

import msgspec

from twofold.metrics.ledger import PHASES
from twofold.metrics.record import RequestRecord
from twofold.report.results import Header

GATEWAY: Final = "gateway"
_ON_PREFILL: Final = frozenset({"tokenise", "prefill_queue", "prefill"})
_ON_GATEWAY: Final = frozenset({"queue", "recovery", "relay", "unattributed"})
_ROLES: Final = ("prefill", "mixed", "decode")
_TOKENS: Final = "answer"


class _Lanes:
    """Numbers lanes of one worker so that slices on a lane never overlap."""

    def __init__(self) -> None:
        self._busy: list[tuple[int, int]] = []  # (end, lane), by end
        self._n = 0

    def take(self, start_ns: int, end_ns: int) -> int:
        """A lane that is free from `start_ns` on, in use until `end_ns` from now on."""
        if self._busy and self._busy[0][0] <= start_ns:
            _, lane = heapq.heappop(self._busy)
        else:
            lane = self._n
            self._n += 1
        heapq.heappush(self._busy, (end_ns, lane))
        return lane


class _Writer:
    """Turns records into events one by one, holding no more than the lanes."""

    def __init__(self) -> None:
        self._pids: dict[str, int] = {}
        self._lanes: dict[str, _Lanes] = {}

    def events(self, record: RequestRecord) -> Iterator[dict[str, Any]]:
        """The events of one request, tracks that it is the first on included."""
        prefill, decode = record.prefill or record.decode, record.decode
        if not record.phases_ns or not decode:
            yield from self._unserved(record)
            return
        # Consecutive phases on one worker share a lane, so that a request reads as one row.
        stretches: list[tuple[str, list[tuple[str, int, int]]]] = []
        at_ns = record.arrival_ns
        for name in PHASES:
            took_ns = record.phases_ns.get(name, 0)
            if took_ns <= 0:
                continue
            where = GATEWAY if name in _ON_GATEWAY else prefill if name in _ON_PREFILL else decode
            if not stretches or stretches[-1][0] != where:
                stretches.append((where, []))
            stretches[-1][1].append((name, at_ns, at_ns + took_ns))
            at_ns += took_ns
        if record.token_times_ns and record.token_times_ns[-1] > at_ns:
            stretches.append((decode, [(_TOKENS, at_ns, record.token_times_ns[-1])]))
        ends: dict[str, tuple[int, int]] = {}
        arrow = record.prefill not in ("", decode)
        for where, slices in stretches:
            yield from self._track(where)
            lane = self._lanes[where].take(slices[0][1], slices[-1][2])
            place = {"pid": self._pids[where], "tid": lane}
            for name, start_ns, end_ns in slices:
                yield _slice(record, name, start_ns, end_ns, place)
                if arrow and where == prefill and name == "prefill":
                    ends[where] = (end_ns, lane)
                    # Just before the end, so that the arrow is tied to this slice and no other.
                    yield {**_flow(record, "s", max(start_ns, end_ns - 1)), **place}
                elif arrow and where == decode and prefill in ends:
                    del ends[prefill]
                    yield {**_flow(record, "f", start_ns), "bp": "e", **place}

    def _unserved(self, record: RequestRecord) -> Iterator[dict[str, Any]]:
        yield from self._track(GATEWAY)
        lane = self._lanes[GATEWAY].take(record.arrival_ns, record.end_ns)
        place = {"pid": self._pids[GATEWAY], "tid": lane}
        yield _slice(record, record.outcome, record.arrival_ns, record.end_ns, place)

    def _track(self, worker: str) -> Iterator[dict[str, Any]]:
        if worker in self._pids:
            return
        pid = len(self._pids) + 1
        self._pids[worker] = pid
        self._lanes[worker] = _Lanes()
        rank = next((i + 1 for i, role in enumerate(_ROLES) if worker.startswith(role)), 2)
        order = 0 if worker == GATEWAY else rank
        for name, args in (
            ("process_name", {"name": worker}),
            ("process_sort_index", {"sort_index": order}),
        ):
            yield {"name": name, "ph": "M", "pid": pid, "args": args}


def _slice(
    record: RequestRecord, name: str, start_ns: int, end_ns: int, place: dict[str, int]
) -> dict[str, Any]:
    args: dict[str, Any] = {
        "request": record.request_id,
        "input_tokens": record.input_tokens,
        "output_tokens": record.output_tokens,
        "outcome": record.outcome,
    }
    more = {
        "reason": record.reason,
        "class": record.klass,
        "cached_tokens": record.n_cached,
        "preempted": record.n_preempted,
        "kv_bytes": record.n_bytes,
    }
    args |= {key: value for key, value in more.items() if value}
    return {
        "name": name,
        "cat": "request",
        "ph": "X",
        "ts": _us(start_ns),
        "dur": _us(end_ns - start_ns),
        **place,
        "args": args,
    }


def _flow(record: RequestRecord, kind: str, at_ns: int) -> dict[str, Any]:
    return {
        "name": "handoff",
        "cat": "handoff",
        "ph": kind,
        "id": record.request_id,
        "ts": _us(at_ns),
    }


def _us(ns: int) -> msgspec.Raw:
    """Microseconds with all digits: a float would lose nanoseconds of a long run."""
    return msgspec.Raw(f"{ns // 1000}.{ns % 1000:03d}".encode())


def write_chrome_trace(
    file: IO[bytes], records: Iterable[RequestRecord], header: Header | None = None
) -> int:
    """Write the events of `records`, in order of arrival, as they come; how many there were."""
    writer = _Writer()
    encode = msgspec.json.Encoder().encode
    file.write(b'{"displayTimeUnit":"ms","otherData":')
    file.write(encode(header) if header is not None else b"{}")
    file.write(b',"traceEvents":[')
    n = 0
    for record in records:
        for event in writer.events(record):
            file.write(b",\n" if n else b"\n")
            file.write(encode(event))
            n += 1
    file.write(b"\n]}\n")
    return n


def save_chrome_trace(
    path: str | Path, records: Iterable[RequestRecord], header: Header | None = None
) -> int:
    """The same into a file. Raises OSError."""
    with Path(path).open("wb") as file:
        return write_chrome_trace(file, records, header)
