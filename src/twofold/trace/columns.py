"""Which columns of a CSV header mean what, in the spellings that published traces use."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import msgspec

from twofold.trace.times import TimeUnit

# Keys are headers in lower case without spaces, underscores and hyphens.
_TIME: Final[dict[str, TimeUnit | None]] = {
    "timestamp": None,
    "arrival": None,
    "arrivaltime": None,
    "arrivaltimestamp": None,
    "arrivedat": None,
    "time": None,
    "ts": None,
    "starttime": None,
    "requesttime": None,
    "arrivals": "s",
    "arrivaltimes": "s",
    "timestamps": "s",
    "times": "s",
    "arrivalms": "ms",
    "arrivaltimems": "ms",
    "timestampms": "ms",
    "timems": "ms",
    "arrivalus": "us",
    "arrivaltimeus": "us",
    "timestampus": "us",
    "timeus": "us",
    "arrivalns": "ns",
    "arrivaltimens": "ns",
    "timestampns": "ns",
    "timens": "ns",
}
_INPUT: Final = frozenset(
    (
        "input",
        "inputtokens",
        "inputlength",
        "inputlen",
        "inputtoks",
        "numinputtokens",
        "prompt",
        "prompttokens",
        "promptlength",
        "promptlen",
        "promptsize",
        "numprompttokens",
        "prefilltokens",
        "numprefilltokens",
        "contexttokens",
        "requesttokens",
        "isl",
    )
)
_OUTPUT: Final = frozenset(
    (
        "output",
        "outputtokens",
        "outputlength",
        "outputlen",
        "outputtoks",
        "numoutputtokens",
        "completion",
        "completiontokens",
        "generatedtokens",
        "numgeneratedtokens",
        "decodetokens",
        "numdecodetokens",
        "tokensize",
        "responsetokens",
        "osl",
    )
)
_CLASS: Final = ("klass", "class", "logtype", "requesttype", "type", "category")

TIME_NAMES: Final = "arrival, arrival_s, arrival_ms, timestamp"
INPUT_NAMES: Final = "input_tokens, prompt_tokens, ContextTokens, Request tokens"
OUTPUT_NAMES: Final = "output_tokens, completion_tokens, GeneratedTokens, Response tokens"


class Columns(msgspec.Struct, frozen=True, kw_only=True):
    """Where a CSV keeps what: indexes into a row, and the names for messages."""

    format: str
    header: tuple[str, ...]
    time: int | None
    time_unit: TimeUnit | None
    input: int
    output: int
    klass: int | None


def _normal(name: str) -> str:
    return name.strip().lower().replace(" ", "").replace("_", "").replace("-", "")


def _only(found: list[int], header: Sequence[str], role: str) -> int | None:
    if len(found) > 1:
        names = " and ".join(repr(header[i].strip()) for i in found[:2])
        raise ValueError(f"{names} could both be the {role}; keep one of them")
    return found[0] if found else None


def read_header(header: Sequence[str]) -> Columns:
    """Understands a CSV header. Raises ValueError saying what is missing or ambiguous."""
    names = [_normal(name) for name in header]
    time = _only([i for i, name in enumerate(names) if name in _TIME], header, "arrival time")
    tokens_in = _only([i for i, name in enumerate(names) if name in _INPUT], header, "input tokens")
    tokens_out = _only(
        [i for i, name in enumerate(names) if name in _OUTPUT], header, "output tokens"
    )
    if tokens_in is None or tokens_out is None:
        role, right = (
            ("input tokens", INPUT_NAMES) if tokens_in is None else ("output tokens", OUTPUT_NAMES)
        )
        shown = ",".join(name.strip() for name in header)
        raise ValueError(
            f"the header {shown[:80]!r} has no column of {role}; one of {right} would be"
        )
    klass = next((names.index(name) for name in _CLASS if name in names), None)
    kind = "csv" if time is not None else "lengths-csv"
    unit = None if time is None else _TIME[names[time]]
    if "contexttokens" in names and "generatedtokens" in names:
        kind = "azure"
    elif "requesttokens" in names and "responsetokens" in names:
        kind, unit = "burstgpt", "s"
    return Columns(
        format=kind,
        header=tuple(name.strip() for name in header),
        time=time,
        time_unit=unit,
        input=tokens_in,
        output=tokens_out,
        klass=klass,
    )
