"""The frames of the TCP transport: how they look, and every check on what a peer sent. Pure.

A request to read is a header and ranges of blocks; the answer is one frame per range, in order: a
header and the blocks' bytes. A request to write is a header that names a window, and one frame
per piece: a header and its bytes; the answer is one header that says whether all have landed.
Integers are little-endian. Whatever does not fit is a FrameError, after which nothing more on that
connection can be trusted.
"""

from __future__ import annotations

import struct
from typing import Final, NamedTuple

from twofold.transport.segment import EPOCH_BYTES

VERSION: Final = 1
MAX_RANGES: Final = 65_536
MAX_RANGE_BYTES: Final = 64 * 1024 * 1024
"""Most bytes of one range, unless it is a single block."""

_REQUEST_MAGIC: Final = b"2FRQ"
_WRITE_MAGIC: Final = b"2FWR"
_ANSWER_MAGIC: Final = b"2FAN"
_REQUEST: Final = struct.Struct(f"<4sHHI{EPOCH_BYTES}sQ")
"""magic, version, flags, number of ranges or pieces, epoch, tag or window."""
_RANGE: Final = struct.Struct("<II")
"""first block, number of blocks."""
_PIECE: Final = struct.Struct("<IIQQQ")
"""first block, number of blocks, offset in the block, bytes, checksum."""
_ANSWER: Final = struct.Struct(f"<4sHH{EPOCH_BYTES}sQIIQQ")
"""magic, version, status, epoch, tag, first block, number of blocks, bytes, checksum."""

REQUEST_BYTES: Final = _REQUEST.size
RANGE_BYTES: Final = _RANGE.size
PIECE_BYTES: Final = _PIECE.size
ANSWER_BYTES: Final = _ANSWER.size

_FLAG_CHECKSUM: Final = 1

OK: Final = 0
STALE: Final = 1
OUTSIDE: Final = 2
CLOSED: Final = 3
DAMAGED: Final = 4
_REFUSALS: Final = {
    STALE: "stale segment: the peer's pool has another epoch",
    OUTSIDE: "the peer says that the blocks are outside its pool",
    CLOSED: "the peer does not let these blocks be written, or not any more",
    DAMAGED: "checksum differs: blocks changed on the way",
}


class FrameError(Exception):
    """What came is not a frame of this protocol, or not the one expected."""


class RequestHead(NamedTuple):
    """The fixed part of a request. `tag` comes back in each answer; of a write it is the window,
    and `n_ranges` the number of pieces."""

    n_ranges: int
    epoch: bytes
    tag: int
    checksum: bool
    writes: bool = False


class PieceHead(NamedTuple):
    """What comes before the bytes of one piece of a write: bytes from `offset` on of block `first`,
    or `n` whole blocks from there on."""

    first: int
    n: int
    offset: int
    n_bytes: int
    checksum: int


class Range(NamedTuple):
    """`n` neighbouring blocks from `first` on."""

    first: int
    n: int


def pack_request(epoch: bytes, tag: int, ranges: list[Range], checksum: bool) -> bytes:
    """A whole request frame."""
    flags = _FLAG_CHECKSUM if checksum else 0
    head = _REQUEST.pack(_REQUEST_MAGIC, VERSION, flags, len(ranges), epoch, tag)
    return head + b"".join(_RANGE.pack(*each) for each in ranges)


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


def pack_write(epoch: bytes, window: int, n_pieces: int, checksum: bool) -> bytes:
    """The head of a request to write; its pieces follow."""
    flags = _FLAG_CHECKSUM if checksum else 0
    return _REQUEST.pack(_WRITE_MAGIC, VERSION, flags, n_pieces, epoch, window)


def pack_piece(piece: PieceHead) -> bytes:
    """The header of one piece; its bytes follow."""
    return _PIECE.pack(*piece)


def unpack_piece(data: bytearray, n_blocks: int, block_bytes: int) -> PieceHead | None:
    """The header in `data`, PIECE_BYTES long, or None when it does not lie in such a pool."""
    piece = PieceHead(*_PIECE.unpack(data))
    if not inside([Range(piece.first, piece.n)], n_blocks, block_bytes) or piece.n_bytes < 1:
        return None
    if piece.n > 1:
        return piece if (piece.offset, piece.n_bytes) == (0, piece.n * block_bytes) else None
    return piece if piece.offset + piece.n_bytes <= block_bytes else None


def unpack_ranges(data: bytearray) -> list[Range]:
    """The ranges in `data`, as many as it has room for."""
    return [Range(first, n) for first, n in _RANGE.iter_unpack(data)]


def inside(ranges: list[Range], n_blocks: int, block_bytes: int) -> bool:
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
