"""One hash over the outcome of every request: equal digests mean equal runs."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

import msgspec

from twofold.metrics.record import RequestRecord


def digest(records: Iterable[RequestRecord]) -> str:
    """Hex SHA-256 over all fields of every record, in the order given.

    Each record goes in as one msgpack array of its fields in order, times as integers and phases
    sorted by name, so the digest depends on nothing but the outcomes.
    """
    sha = hashlib.sha256()
    encode = msgspec.msgpack.Encoder().encode
    for r in records:
        fields: tuple[object, ...] = (
            (r.request_id, r.klass, r.arrival_ns, r.end_ns, r.input_tokens, r.output_tokens),
            (r.outcome, r.reason, r.prefill, r.decode, r.n_cached, r.n_preempted, r.n_bytes),
            list(r.token_times_ns),
            sorted(r.phases_ns.items()),
        )
        if r.recoveries:  # what never happened adds nothing
            fields = (*fields, r.recoveries)
        sha.update(encode(fields))
    return sha.hexdigest()
