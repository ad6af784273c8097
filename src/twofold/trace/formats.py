"""The file formats: how each cuts its file into records and a record into raw fields.

A format yields `(line, record)` pairs and turns one record into a `RawRow`, raising RowError for
a bad one, so that a reader may count it and go on.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator, Mapping
from decimal import Decimal
from typing import Any, Final, Literal, NamedTuple, Protocol, TextIO

import msgspec

from twofold.trace.columns import Columns
from twofold.trace.request import RowError
from twofold.trace.times import RawTime, TimeUnit

CHARACTERS_PER_TOKEN: Final = 4
_CHUNK: Final = 1 << 16
_MAX_CONVERSATION: Final = 64 << 20


class RawRow(NamedTuple):
    """Fields as the file has them. Counts are whole numbers or their text."""

    time: RawTime | None
    input: object
    output: object
    hash_ids: object = None
    klass: str = ""


class Format(Protocol):
    """One file format. Names are the columns' own, for messages."""

    name: str
    time_column: str | None
    time_unit: TimeUnit | None
    input_column: str
    output_column: str
    block_tokens: int
    lengths: str

    def records(self, lines: TextIO) -> Iterator[tuple[int, Any]]:
        """Cuts a file into records with the line each starts on."""

    def parse(self, record: Any) -> RawRow:
        """Raw fields of one record. Raises RowError."""


class CsvFormat:
    """Azure 2023 and 2024, BurstGPT, lengths-only and plain CSV: a header settles the columns."""

    block_tokens = 0
    lengths = "given"

    def __init__(self, columns: Columns) -> None:
        self.name = columns.format
        self.time_column = None if columns.time is None else columns.header[columns.time]
        self.time_unit = columns.time_unit
        self.input_column = columns.header[columns.input]
        self.output_column = columns.header[columns.output]
        self._columns = columns
        self._width = len(columns.header)

    def records(self, lines: TextIO) -> Iterator[tuple[int, list[str]]]:
        """Rows after the header; blank lines are skipped."""
        rows = csv.reader(lines)
        next(rows, None)
        while True:
            try:
                for row in rows:
                    if row:
                        yield rows.line_num, row
                return
            except csv.Error as error:
                yield rows.line_num, [f"\0{error}"]

    def parse(self, record: list[str]) -> RawRow:
        """Picks the columns of one row."""
        columns = self._columns
        if len(record) != self._width:
            if record[0].startswith("\0"):
                raise RowError(None, f"not a CSV row ({record[0][1:]}); plain text is")
            raise RowError(None, f"the row has {len(record)} columns; the header has {self._width}")
        return RawRow(
            None if columns.time is None else record[columns.time],
            record[columns.input],
            record[columns.output],
            None,
            "" if columns.klass is None else record[columns.klass],
        )


class _JsonRow(msgspec.Struct):
    """Both JSONL forms in one, so that a line is decoded once into slots."""

    timestamp: Any = None
    input_length: Any = None
    output_length: Any = None
    hash_ids: tuple[int, ...] | None = None
    type: Any = ""
    arrival_ns: Any = None
    input_tokens: Any = None
    output_tokens: Any = None
    block_tokens: Any = 0
    klass: Any = ""


class JsonLinesFormat:
    """Mooncake's JSONL, and the record that `bench` writes (`twofold`): one object a line.

    Mooncake: `timestamp` (ms), `input_length`, `output_length`, `hash_ids` of 512-token blocks,
    optionally `type`. twofold: `arrival_ns`, `input_tokens`, `output_tokens`, optionally
    `hash_ids` with `block_tokens`, and `klass`; other fields are left to other readers.
    """

    lengths = "given"

    def __init__(self, name: Literal["mooncake", "twofold"], block_tokens: int) -> None:
        self.name: str = name
        self.block_tokens = block_tokens
        mooncake = name == "mooncake"
        self.time_column: str | None = "timestamp" if mooncake else "arrival_ns"
        self.time_unit: TimeUnit | None = "ms" if mooncake else "ns"
        self.input_column = "input_length" if mooncake else "input_tokens"
        self.output_column = "output_length" if mooncake else "output_tokens"
        self._decode = msgspec.json.Decoder(_JsonRow, float_hook=Decimal).decode

    def records(self, lines: TextIO) -> Iterator[tuple[int, str]]:
        """Lines that are not blank."""
        for number, line in enumerate(lines, 1):
            if not line.isspace():
                yield number, line

    def parse(self, record: str) -> RawRow:
        """Decodes one line."""
        try:
            row = self._decode(record)
        except msgspec.ValidationError as error:
            column = "hash_ids" if "hash_ids" in str(error) else None
            right = "whole numbers are" if column else "one object a line is"
            raise RowError(column, f"{error}; {right} right") from None
        except (msgspec.DecodeError, UnicodeEncodeError) as error:
            raise RowError(None, f"not JSON ({error}); one object a line is") from None
        if self.name == "mooncake":
            return RawRow(
                row.timestamp,
                row.input_length,
                row.output_length,
                row.hash_ids,
                str(row.type or ""),
            )
        hashes: object = row.hash_ids
        if row.hash_ids is not None:
            hashes = (row.block_tokens, row.hash_ids)
        return RawRow(
            row.arrival_ns, row.input_tokens, row.output_tokens, hashes, str(row.klass or "")
        )


class ShareGptFormat:
    """ShareGPT: an array (or JSONL) of conversations, no times.

    One request a conversation: the first human turn and the answer to it, as vLLM's benchmark
    takes it. Counts come from `num_tokens` (or `tokens`) on the turns where given; otherwise they
    are estimated as characters / 4, rounded up, and `lengths` says so.
    """

    name = "sharegpt"
    time_column: str | None = None
    time_unit: TimeUnit | None = None
    input_column = "conversations"
    output_column = "conversations"
    block_tokens = 0

    def __init__(self) -> None:
        self.lengths = "given"

    def records(self, lines: TextIO) -> Iterator[tuple[int, object]]:
        """Objects, decoded one at a time from a window over the file."""
        yield from _json_objects(lines)

    def parse(self, record: object) -> RawRow:
        """The first question and answer of one conversation."""
        if not isinstance(record, Mapping):
            raise RowError(None, "not a JSON object; a conversation is one")
        turns = record.get("conversations", record.get("conversation"))
        if not isinstance(turns, list):
            raise RowError("conversations", "missing; a list of turns is right")
        asked: Mapping[str, object] | None = None
        for turn in turns:
            if not isinstance(turn, Mapping):
                raise RowError("conversations", "a turn is not an object; {from, value} is right")
            if turn.get("from", turn.get("role")) in ("human", "user"):
                asked = asked if asked is not None else turn
            elif asked is not None and turn.get("from", turn.get("role")) in (
                "gpt",
                "chatgpt",
                "assistant",
                "bing",
                "bard",
            ):
                return RawRow(None, self._count(asked), self._count(turn))
        raise RowError("conversations", "no human turn with an answer after it")

    def _count(self, turn: Mapping[str, object]) -> object:
        for name in ("num_tokens", "tokens"):
            given = turn.get(name)
            if isinstance(given, int) and not isinstance(given, bool):
                return given
        text = turn.get("value", turn.get("content"))
        if not isinstance(text, str):
            raise RowError("conversations", "a turn has no text in `value`")
        self.lengths = f"estimated: characters / {CHARACTERS_PER_TOKEN}, no tokenizer was used"
        return -(-len(text) // CHARACTERS_PER_TOKEN)


def _json_objects(lines: TextIO) -> Iterator[tuple[int, object]]:
    """Objects of a JSON array, or of a stream of JSON values, without holding the whole file."""
    decoder = json.JSONDecoder()
    window, at, line, chunk = "", 0, 1, _CHUNK
    while True:
        start = at
        while at < len(window) and (window[at].isspace() or window[at] in "[],"):
            at += 1
        line += window.count("\n", start, at)
        if at < len(window):
            try:
                value, end = decoder.raw_decode(window, at)
            except ValueError:
                pass
            else:
                # A number at the window's end may go on in the next chunk; an object cannot.
                if isinstance(value, dict) or end < len(window):
                    yield line, value
                    line += window.count("\n", at, end)
                    at = end
                    chunk = _CHUNK
                    continue
        more = lines.read(chunk)
        chunk = min(chunk * 2, _MAX_CONVERSATION)
        if not more or len(window) - at > _MAX_CONVERSATION:
            if at < len(window):
                yield line, None
            return
        window = window[at:] + more
        at = 0
