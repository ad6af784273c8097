"""Opens a trace file: finds its format, streams its requests, and refuses bad rows exactly."""

from __future__ import annotations

import csv
import gzip
import hashlib
import io
import itertools
import json
import zlib
from collections.abc import Iterator
from decimal import Decimal
from pathlib import Path
from typing import Any, Final, TextIO

from twofold.trace.columns import TIME_NAMES, read_header
from twofold.trace.formats import CsvFormat, Format, JsonLinesFormat, RawRow, ShareGptFormat
from twofold.trace.request import (
    MAX_TOKENS,
    Lengths,
    RowError,
    TraceError,
    TraceInfo,
    TraceRequest,
)
from twofold.trace.times import TimeReader, TimeUnit

FORMATS: Final = ("azure", "burstgpt", "csv", "lengths-csv", "mooncake", "sharegpt", "twofold")
MOONCAKE_BLOCK_TOKENS: Final = 512
_KEPT_REASONS: Final = 5
_HEAD: Final = 1 << 16


class Trace:
    """A trace file, read anew at each pass so that memory stays flat.

    Iterating gives `TraceRequest`s in order of arrival; it raises TraceError at the first bad row,
    at a row earlier than the one before it (unless `sort`), when the file has no times, and when
    nothing is left to read. `lengths()` gives the same rows without times, in the file's order.
    `info` is complete after a pass.
    """

    def __init__(
        self, path: Path, file_format: Format, unit: TimeUnit | None, *, sort: bool, skip_bad: bool
    ) -> None:
        self._path = path
        self._format = file_format
        self._unit = unit or file_format.time_unit
        self._sort = sort
        self._skip_bad = skip_bad
        self.info = TraceInfo(
            path=str(path),
            format=file_format.name,
            sha256=_sha256(path),
            timed=file_format.time_column is not None,
            times="none" if file_format.time_column is None else "not read yet",
            sorted_here=sort,
        )

    def __iter__(self) -> Iterator[TraceRequest]:
        if self._format.time_column is None:
            raise TraceError(
                str(self._path),
                1,
                None,
                f"a {self._format.name} file has no arrival times; add a column ({TIME_NAMES}) "
                "or ask for generated arrivals",
            )
        return self._sorted() if self._sort else self._streamed()

    def lengths(self) -> Iterator[Lengths]:
        """Rows without their times, in the file's order; times are not looked at."""
        for _line, _raw, lengths in self._rows():
            yield lengths

    def _streamed(self) -> Iterator[TraceRequest]:
        clock = TimeReader(self._format.time_column or "", self._unit)
        first = last = None
        for line, raw, row in self._rows():
            try:
                now = clock.ns(raw.time)
                if last is not None and now < last:
                    raise RowError(
                        clock.column,
                        f"{raw.time} is before the row above it; sort the file by arrival, "
                        "or ask for it to be sorted",
                    )
            except RowError as error:
                self._unread(line, error)
                continue
            last = now
            if first is None:
                first = now
                self.info.times = clock.kind
            yield TraceRequest(
                now - first,
                row.input_tokens,
                row.output_tokens,
                row.hash_ids,
                row.block_tokens,
                row.klass,
            )

    def _sorted(self) -> Iterator[TraceRequest]:
        clock = TimeReader(self._format.time_column or "", self._unit)
        rows: list[tuple[int, Lengths]] = []
        for line, raw, row in self._rows():
            try:
                rows.append((clock.ns(raw.time), row))
            except RowError as error:
                self._unread(line, error)
        rows.sort(key=lambda pair: pair[0])
        self.info.times = clock.kind
        for now, row in rows:
            yield TraceRequest(
                now - rows[0][0],
                row.input_tokens,
                row.output_tokens,
                row.hash_ids,
                row.block_tokens,
                row.klass,
            )

    def _rows(self) -> Iterator[tuple[int, RawRow, Lengths]]:
        """Well-formed rows with their line; counts them and the bad ones in `info`."""
        info, file_format = self.info, self._format
        info.rows = info.bad = 0
        info.bad_reasons = []
        with _text(self._path) as stream:
            records = file_format.records(stream)
            while True:
                try:
                    line, record = next(records)
                except StopIteration:
                    break
                except (OSError, EOFError, zlib.error) as error:
                    raise TraceError(str(self._path), None, None, f"cannot read: {error}") from None
                try:
                    raw = file_format.parse(record)
                    row = _lengths(raw, file_format)
                except RowError as error:
                    self._bad(line, error)
                    continue
                info.rows += 1
                info.lengths = file_format.lengths
                yield line, raw, row
        if info.rows == info.bad == 0:
            raise TraceError(str(self._path), None, None, "the trace is empty; it needs a request")
        if info.rows == 0:
            raise TraceError(
                str(self._path),
                None,
                None,
                f"no good row; the first bad one: {info.bad_reasons[0]}",
            )

    def _unread(self, line: int, error: RowError) -> None:
        """A row that `_rows` counted as good and whose time is not."""
        self.info.rows -= 1
        self._bad(line, error)

    def _bad(self, line: int, error: RowError) -> None:
        located = TraceError(str(self._path), line, error.column, error.problem)
        if not self._skip_bad:
            raise located from None
        self.info.bad += 1
        if len(self.info.bad_reasons) < _KEPT_REASONS:
            self.info.bad_reasons.append(str(located))


def open_trace(
    path: str | Path,
    *,
    time_unit: TimeUnit | None = None,
    block_tokens: int = MOONCAKE_BLOCK_TOKENS,
    sort: bool = False,
    skip_bad: bool = False,
) -> Trace:
    """Opens a trace of any known format, gzipped or not.

    `time_unit` overrides what the file says of numeric times. `block_tokens` is the size of the
    blocks that a Mooncake file hashes. `sort` reads the whole file into memory and sorts it by
    arrival, rows of one time staying in order. `skip_bad` counts bad rows (`info.bad`) instead of
    raising. Raises TraceError if the file cannot be read or its format is not known.
    """
    path = Path(path)
    file_format = _detect(path, block_tokens)
    return Trace(path, file_format, time_unit, sort=sort, skip_bad=skip_bad)


def _lengths(raw: RawRow, file_format: Format) -> Lengths:
    input_tokens = _count(raw.input, file_format.input_column)
    output_tokens = _count(raw.output, file_format.output_column)
    if raw.hash_ids is None:
        return Lengths(input_tokens, output_tokens, None, 0, raw.klass)
    block, hashes = file_format.block_tokens, raw.hash_ids
    if file_format.name == "twofold":
        block, hashes = _own_hashes(hashes)
    assert isinstance(hashes, tuple)
    blocks = -(-input_tokens // block)
    if len(hashes) != blocks:
        raise RowError(
            "hash_ids",
            f"{len(hashes)} hashes for {input_tokens} tokens; {block}-token blocks need {blocks}",
        )
    if hashes and not (min(hashes) >= 0 and max(hashes) < 1 << 64):
        raise RowError("hash_ids", "a hash is outside 0 .. 2^64-1")
    return Lengths(input_tokens, output_tokens, hashes, block, raw.klass)


def _own_hashes(field: object) -> tuple[int, object]:
    assert isinstance(field, tuple)
    block, hashes = field
    if type(block) is not int or block < 1:
        raise RowError(
            "block_tokens", f"{block!r} beside hash_ids; a whole number from 1 on is right"
        )
    return block, hashes


def _count(value: object, column: str) -> int:
    """A token count from its text or number. Raises RowError; 0 is refused in its own words."""
    if type(value) is int:
        count = value
    elif isinstance(value, str) and value.isdecimal() and value.isascii():
        count = int(value) if len(value) < 20 else MAX_TOKENS + 1
    elif value is None or value == "":
        raise RowError(column, "missing; a whole number of tokens is right")
    else:
        count = _odd_count(value, column)
    if count < 1:
        problem = "0 tokens" if count == 0 else f"{count} is negative"
        raise RowError(column, f"{problem}; a request has at least 1")
    if count > MAX_TOKENS:
        raise RowError(column, f"{str(value)[:40]} is out of range; at most {MAX_TOKENS} is right")
    return count


def _odd_count(value: object, column: str) -> int:
    """Counts written by tools that turn whole numbers into "374.0"."""
    wrong = RowError(column, f"{str(value)[:40]!r} is not a whole number of tokens; 374 is")
    if not isinstance(value, (str, Decimal)):
        raise wrong
    try:
        number = Decimal(value)
    except ArithmeticError:
        raise wrong from None
    if not number.is_finite() or number.adjusted() > 18 or number != number.to_integral_value():
        raise wrong
    return int(number)


def _text(path: Path) -> TextIO:
    try:
        stream = path.open("rb")
    except OSError as error:
        raise TraceError(str(path), None, None, f"cannot read: {error.strerror}") from None
    magic = stream.read(2)
    stream.seek(0)
    source: Any = stream
    if magic == b"\x1f\x8b":
        stream.close()
        source = gzip.GzipFile(path)
    # Bytes that are not UTF-8 become replacement characters, which no number or date contains.
    return io.TextIOWrapper(source, encoding="utf-8-sig", errors="replace", newline="")


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as stream:
        while chunk := stream.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest()


def _detect(path: Path, block_tokens: int) -> Format:
    with _text(path) as stream:
        try:
            numbered = itertools.islice(_bounded_lines(stream), 1024)
            number, first = next(
                ((i, line) for i, line in enumerate(numbered, 1) if line.strip()), (1, "")
            )
        except (OSError, EOFError, zlib.error) as error:
            raise TraceError(str(path), None, None, f"cannot read: {error}") from None
    if not first:
        raise TraceError(str(path), None, None, "the trace is empty; it needs a request")
    start = first.lstrip()[0]
    if start == "[":
        return ShareGptFormat()
    if start == "{":
        return _detect_json(path, number, first, block_tokens)
    if number != 1:
        raise TraceError(str(path), 1, None, "a blank line; a CSV's first line is its header")
    try:
        return CsvFormat(read_header(next(csv.reader([first]), [])))
    except (ValueError, csv.Error) as error:
        raise TraceError(str(path), number, None, str(error)) from None


def _bounded_lines(stream: TextIO) -> Iterator[str]:
    while line := stream.readline(_HEAD):
        yield line


def _detect_json(path: Path, number: int, first: str, block_tokens: int) -> Format:
    if '"conversations"' in first or first.strip() == "{":
        return ShareGptFormat()
    try:
        keys = json.loads(first)
    except ValueError:
        raise TraceError(
            str(path), number, None, "the first line is not JSON; one object a line is right"
        ) from None
    if "input_length" in keys or ("hash_ids" in keys and "input_tokens" not in keys):
        return JsonLinesFormat("mooncake", block_tokens)
    if "input_tokens" in keys or "arrival_ns" in keys:
        return JsonLinesFormat("twofold", 0)
    raise TraceError(
        str(path),
        number,
        None,
        f"fields {', '.join(sorted(keys))[:80]} are of no known trace; Mooncake's are timestamp, "
        "input_length, output_length, hash_ids, and twofold's arrival_ns, input_tokens, "
        "output_tokens",
    )
