"""Frames of the control channel: the length of a message, and checks that it came as it was sent.

    bytes   content, big-endian
    4       length of the message
    4       CRC-32 of these four bytes
    8       checksum of the message (xxh3)
    ...     the message

The checks are for bits that flip on the way. A token of a `Grant` is part of the prompt, so one
that is damaged gives wrong text as surely as damaged KV. A length has a check of its own, since one
that has grown would take in what comes after it, for as long as that is within bounds.
"""

from __future__ import annotations

import struct
import zlib
from typing import Final

from twofold.transport.checksum import message_checksum

_LENGTH: Final = struct.Struct(">I")
_HEAD: Final = struct.Struct(">IIQ")
HEAD_BYTES: Final = _HEAD.size


class FrameError(ValueError):
    """Bytes that are no frame, in a few words: nothing that follows them can be understood."""


def pack_frame(message: bytes) -> bytes:
    """`message` as it goes over the wire."""
    size = len(message)
    head = _HEAD.pack(size, zlib.crc32(_LENGTH.pack(size)), message_checksum(message))
    return head + message


def take_frame(buffer: bytearray, limit: int) -> bytes | None:
    """Cut the first message off `buffer`; None while it is not whole.

    Raises FrameError when it is longer than `limit` bytes or has changed on the way.
    """
    if len(buffer) < HEAD_BYTES:
        return None
    size, check, checksum = _HEAD.unpack_from(buffer)
    if zlib.crc32(_LENGTH.pack(size)) != check:
        raise FrameError("checksum differs: the length of a message changed on the way")
    if size > limit:
        raise FrameError(f"a frame of {size} bytes, where {limit} is the most")
    if len(buffer) < HEAD_BYTES + size:
        return None
    message = bytes(memoryview(buffer)[HEAD_BYTES : HEAD_BYTES + size])
    del buffer[: HEAD_BYTES + size]
    if message_checksum(message) != checksum:
        raise FrameError("checksum differs: a message changed on the way")
    return message
