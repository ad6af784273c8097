"""The one request-trace type, what a reader says about a file, and the error it raises."""

from __future__ import annotations

from typing import Final, Protocol

import msgspec

MAX_TOKENS: Final = 2**31 - 1
"""No real prompt or answer is longer: a larger count is a damaged field."""


class Lengths(msgspec.Struct, frozen=True, gc=False):
    """One request without a time: token counts, and what it shares with others.

    `hash_ids` name the prompt's blocks of `block_tokens` tokens in order, the last of which may be
    part full; equal ids mean equal prefixes. They are kept whole, 0 <= id < 2**64. None: unknown.
    """

    input_tokens: int
    output_tokens: int
    hash_ids: tuple[int, ...] | None = None
    block_tokens: int = 0
    klass: str = ""


class TraceRequest(msgspec.Struct, frozen=True, gc=False):
    """One request of a trace. `arrival_ns` counts from the trace's first row, never below 0."""

    arrival_ns: int
    input_tokens: int
    output_tokens: int
    hash_ids: tuple[int, ...] | None = None
    block_tokens: int = 0
    klass: str = ""

    def at(self, arrival_ns: int) -> TraceRequest:
        """The same request at another time."""
        return TraceRequest(
            arrival_ns,
            self.input_tokens,
            self.output_tokens,
            self.hash_ids,
            self.block_tokens,
            self.klass,
        )


class HasLengths(Protocol):
    """What arrivals can be generated for: a `Lengths` or a `TraceRequest`."""

    @property
    def input_tokens(self) -> int:
        """Tokens of the prompt, at least 1."""

    @property
    def output_tokens(self) -> int:
        """Tokens of the answer, at least 1."""

    @property
    def hash_ids(self) -> tuple[int, ...] | None:
        """Ids of the prompt's blocks, or None."""

    @property
    def block_tokens(self) -> int:
        """Tokens of one hashed block, 0 without hashes."""

    @property
    def klass(self) -> str:
        """Class of the request, may be empty."""


class TraceInfo(msgspec.Struct):
    """What a reader took a file to be, and what its last pass counted.

    `format` is one of `twofold.trace.FORMATS`. `times` says in words how times were read
    ("ISO, exact to the ns", "relative, s", "epoch, ms", "none"). `lengths` is "given" or says how
    they were estimated. `rows` and `bad` belong to the last pass over the file; `bad_reasons`
    keeps the first few messages. `sha256` is of the file as stored, compressed or not.
    """

    path: str
    format: str
    sha256: str
    timed: bool
    times: str
    lengths: str = "given"
    rows: int = 0
    bad: int = 0
    bad_reasons: list[str] = msgspec.field(default_factory=list)
    sorted_here: bool = False

    def describe(self) -> str:
        """One line for a person."""
        parts = [f"{self.path}: {self.format}", f"{self.rows} rows", f"times: {self.times}"]
        if self.lengths != "given":
            parts.append(f"lengths: {self.lengths}")
        if self.sorted_here:
            parts.append("sorted by arrival")
        if self.bad:
            parts.append(f"{self.bad} bad rows left out, the first: {self.bad_reasons[0]}")
        return ", ".join(parts)


class TraceError(ValueError):
    """A trace that cannot be read: "file:line:column: what is wrong; what would be right"."""

    def __init__(self, path: str, line: int | None, column: str | None, problem: str) -> None:
        self.path = path
        self.line = line
        self.column = column
        self.problem = problem
        place = path if line is None else f"{path}:{line}"
        super().__init__(
            f"{place}: {problem}" if column is None else f"{place}:{column}: {problem}"
        )


class RowError(ValueError):
    """One bad row, before its file and line are known."""

    def __init__(self, column: str | None, problem: str) -> None:
        self.column = column
        self.problem = problem
        super().__init__(problem)
