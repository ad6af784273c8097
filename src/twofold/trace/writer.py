"""Writes twofold's own trace record: JSONL that the reader takes back unchanged."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import msgspec

from twofold.trace.request import TraceRequest


def write_trace(path: str | Path, requests: Iterable[TraceRequest]) -> int:
    """Writes one object a line, fields at their defaults left out; returns the number of lines.

    Each line has `arrival_ns`, `input_tokens`, `output_tokens` and, where known, `hash_ids`,
    `block_tokens` and `klass`.
    """
    count = 0
    with Path(path).open("wb") as out:
        for request in requests:
            fields: dict[str, object] = {
                "arrival_ns": request.arrival_ns,
                "input_tokens": request.input_tokens,
                "output_tokens": request.output_tokens,
            }
            if request.hash_ids is not None:
                fields["hash_ids"] = request.hash_ids
                fields["block_tokens"] = request.block_tokens
            if request.klass:
                fields["klass"] = request.klass
            out.write(msgspec.json.encode(fields) + b"\n")
            count += 1
    return count
