"""The frames of the TCP transport: how they look, and every check on what a peer sent. Pure.

A request to read is a header and ranges of blocks; the answer is one frame per range, in order: a
header and the blocks' bytes.

A request to write is a header that names a window, the span of each block that is written, ranges
of blocks, and then the bytes of all of them, which are so taken in with few calls, however small
the span. The answer is one header that says whether all have landed. What was written has no
checksums here: workers compare those of whole blocks at the end (ADR 11), which finds what was
changed on the way too.

Integers are little-endian. Whatever does not fit is a FrameError, after which nothing more on that
connection can be trusted.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Final, NamedTuple

from twofold.transport.segment import EPOCH_BYTES

VERSION: Final = 2
MAX_RANGES: Final = 65_536
MAX_RANGE_BYTES: Final = 64 * 1024 * 1024
"""Most bytes of one range, unless it is a single block."""

_REQUEST_MAGIC: Final = b"2FRQ"
_WRITE_MAGIC: Final = b"2FWR"
_ANSWER_MAGIC: Final = b"2FAN"
_REQUEST: Final = struct.Struct(f"<4sHHI{EPOCH_BYTES}sQ")
"""magic, version, flags, number of ranges, epoch, tag or window."""
_RANGE: Final = struct.Struct("<II")
"""first block, number of blocks; the span of a write: first byte, end."""
_ANSWER: Final = struct.Struct(f"<4sHH{EPOCH_BYTES}sQIIQQ")
"""magic, version, status, epoch, tag, first block, number of blocks, bytes, checksum."""

REQUEST_BYTES: Final = _REQUEST.size
RANGE_BYTES: Final = _RANGE.size
ANSWER_BYTES: Final = _ANSWER.size

_FLAG_CHECKSUM: Final = 1

OK: Final = 0
STALE: Final = 1
OUTSIDE: Final = 2
CLOSED: Final = 3
_REFUSALS: Final = {
    STALE: "stale segment: the peer's pool has another epoch",
    OUTSIDE: "the peer says that the blocks are outside its pool",
    CLOSED: "the peer does not let these blocks be written, or not any more",
}


class FrameError(Exception):
    """What came is not a frame of this protocol, or not the one expected."""


class RequestHead(NamedTuple):
    """The fixed part of a request. `tag` comes back in each answer; of a write it is the window."""

    n_ranges: int
    epoch: bytes
    tag: int
    checksum: bool
    writes: bool = False

    @property
    def rest_bytes(self) -> int:
        """Length of what comes next: ranges, and before those of a write its span."""
        return (self.n_ranges + self.writes) * RANGE_BYTES


class Range(NamedTuple):
    """`n` neighbouring blocks from `first` on."""

    first: int
    n: int


def pack_request(epoch: bytes, tag: int, ranges: Sequence[Range], checksum: bool) -> bytes:
    """A whole request to read."""
    flags = _FLAG_CHECKSUM if checksum else 0
    head = _REQUEST.pack(_REQUEST_MAGIC, VERSION, flags, len(ranges), epoch, tag)
    return head + _pack_ranges(ranges)


def pack_write(epoch: bytes, window: int, ranges: Sequence[Range], span: tuple[int, int]) -> bytes:
    """What comes before the bytes of a write."""
    head = _REQUEST.pack(_WRITE_MAGIC, VERSION, 0, len(ranges), epoch, window)
    return head + _pack_ranges((span, *ranges))


def _pack_ranges(ranges: Sequence[tuple[int, int]]) -> bytes:
    return b"".join(_RANGE.pack(*each) for each in ranges)


def unpack_request(data: bytearray) -> RequestHead:
    """The head in `data`, REQUEST_BYTES long. Raises FrameError."""
    magic, version, flags, n_ranges, epoch, tag = _REQUEST.unpack(data)
    if magic not in (_REQUEST_MAGIC, _WRITE_MAGIC):
        raise FrameError(f"not a request: it begins with {magic!r}")
    if version != VERSION:
        raise FrameError(f"request of version {version}, not {VERSION}")
    if flags & ~_FLAG_CHECKSUM:
        raise FrameError(f"unknown request flags {flags:#x}")
    if not 1 <= n_ranges <= MAX_RANGES:
        raise FrameError(f"request for {n_ranges} ranges, not 1 to {MAX_RANGES}")
    writes = magic == _WRITE_MAGIC
    return RequestHead(n_ranges, epoch, tag, bool(flags & _FLAG_CHECKSUM), writes)


def fits(
    span: tuple[int, int], ranges: Sequence[tuple[int, int]], n_blocks: int, block_bytes: int
) -> bool:
    """Whether a write lies in such a pool. Parts of blocks come one by one."""
    if not inside(ranges, n_blocks, block_bytes):
        return False
    first, end = span
    whole = span == (0, block_bytes)
    return whole or (first < end <= block_bytes and all(n == 1 for _, n in ranges))


def unpack_ranges(data: bytearray) -> list[Range]:
    """The ranges in `data`, as many as it has room for."""
    return [Range(first, n) for first, n in _RANGE.iter_unpack(data)]


def inside(ranges: Sequence[tuple[int, int]], n_blocks: int, block_bytes: int) -> bool:
    """Whether all `ranges` lie in a pool and none is too long for one frame."""
    return all(
        n >= 1 and first + n <= n_blocks and (n == 1 or n * block_bytes <= MAX_RANGE_BYTES)
        for first, n in ranges
    )


def pack_answer(
    status: int, epoch: bytes, tag: int, blocks: Range, n_bytes: int, checksum: int
) -> bytes:
    """The header of one answer frame; `n_bytes` of blocks follow it."""
    return _ANSWER.pack(
        _ANSWER_MAGIC, VERSION, status, epoch, tag, blocks.first, blocks.n, n_bytes, checksum
    )


def check_answer(data: bytearray, epoch: bytes, tag: int, blocks: Range, n_bytes: int) -> int:
    """The checksum in an answer's header, ANSWER_BYTES long, if it is for `blocks`.

    Raises FrameError when the peer refuses or the header is not the one expected.
    """
    magic, version, status, its_epoch, its_tag, first, n, its_bytes, checksum = _ANSWER.unpack(data)
    if (magic, version) != (_ANSWER_MAGIC, VERSION):
        raise FrameError("malformed answer from the peer")
    if status != OK:
        raise FrameError(_REFUSALS.get(status, f"the peer refuses with unknown status {status}"))
    if its_epoch != epoch:
        raise FrameError("stale segment: the answer has another epoch")
    if (its_tag, first, n, its_bytes) != (tag, blocks.first, blocks.n, n_bytes):
        raise FrameError("the peer's answer is for other blocks than asked for")
    return int(checksum)
