"""Request traces: one type, readers of the published formats, filters and generators."""

from twofold.trace.filters import (
    MOONCAKE_TICK_S,
    drop_hashes,
    head,
    jitter,
    length_scale,
    merge,
    only_class,
    rate_scale,
    window,
)
from twofold.trace.reader import FORMATS, Trace, open_trace
from twofold.trace.request import Lengths, TraceError, TraceInfo, TraceRequest
from twofold.trace.synthetic import RequestClass, Tokens, gamma_arrivals, poisson, synthetic
from twofold.trace.writer import write_trace

__all__ = [
    "FORMATS",
    "MOONCAKE_TICK_S",
    "Lengths",
    "RequestClass",
    "Tokens",
    "Trace",
    "TraceError",
    "TraceInfo",
    "TraceRequest",
    "drop_hashes",
    "gamma_arrivals",
    "head",
    "jitter",
    "length_scale",
    "merge",
    "only_class",
    "open_trace",
    "poisson",
    "rate_scale",
    "synthetic",
    "window",
    "write_trace",
]
