"""The text by which a peer finds a pool's memory: made by `register`, carried in `Grant.segment`.

It comes from another process, so it is parsed strictly and its sizes are bounded before any use.
"""

from __future__ import annotations

import ipaddress
from typing import Annotated, Final, TypeVar

import msgspec

EPOCH_BYTES: Final = 16
"""Length of the random token that names one life of a pool."""

MAX_SEGMENT_CHARS: Final = 3072
MAX_BLOCKS: Final = 2**32 - 1
MAX_BLOCK_BYTES: Final = 2**40

_Epoch = Annotated[str, msgspec.Meta(pattern=r"\A[0-9a-f]{32}\Z")]
_Blocks = Annotated[int, msgspec.Meta(ge=1, le=MAX_BLOCKS)]
_BlockBytes = Annotated[int, msgspec.Meta(ge=1, le=MAX_BLOCK_BYTES)]


class SegmentError(Exception):
    """A segment text cannot be used; the message says why."""


class ShmSegment(msgspec.Struct, frozen=True, kw_only=True, tag="shm", forbid_unknown_fields=True):
    """A pool in this host's memory: file descriptor `fd` of process `pid`."""

    pid: Annotated[int, msgspec.Meta(ge=1, le=2**31 - 1)]
    fd: Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)]
    epoch: _Epoch
    n_blocks: _Blocks
    block_bytes: _BlockBytes


class TcpSegment(msgspec.Struct, frozen=True, kw_only=True, tag="tcp", forbid_unknown_fields=True):
    """A pool behind a data port. `host` is a numeric address, so nobody waits for a resolver.

    Blocks can be written through `window` only, which names no other ever; 0: none is open.
    """

    host: Annotated[str, msgspec.Meta(min_length=1, max_length=64)]
    port: Annotated[int, msgspec.Meta(ge=1, le=65535)]
    epoch: _Epoch
    n_blocks: _Blocks
    block_bytes: _BlockBytes
    window: Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)] = 0

    def __post_init__(self) -> None:
        try:
            ipaddress.ip_address(self.host)
        except ValueError:
            raise ValueError(f"{self.host!r} is not a numeric address") from None


class EngineSegment(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A pool that a foreign transfer engine serves: `endpoint` is how that engine is found.

    The pool's header page begins at address `base` of its process.
    """

    endpoint: Annotated[str, msgspec.Meta(min_length=1, max_length=2048)]
    base: Annotated[int, msgspec.Meta(ge=1, le=2**63 - 1)]
    epoch: _Epoch
    n_blocks: _Blocks
    block_bytes: _BlockBytes


class MooncakeSegment(EngineSegment, frozen=True, kw_only=True, tag="mooncake"):
    """The endpoint is host and port of Mooncake's handshake."""


class NixlSegment(EngineSegment, frozen=True, kw_only=True, tag="nixl"):
    """The endpoint is the agent's metadata, in base 64."""


_S = TypeVar("_S", bound=ShmSegment | TcpSegment | EngineSegment)


def format_segment(segment: ShmSegment | TcpSegment | EngineSegment) -> str:
    """One line of JSON."""
    return msgspec.json.encode(segment).decode()


def parse_segment(text: str, kind: type[_S]) -> _S:
    """The segment in `text`, which must be of `kind`.

    Raises SegmentError when it is too long, malformed, of another kind or out of bounds.
    """
    if len(text) > MAX_SEGMENT_CHARS:
        raise SegmentError(f"malformed segment: longer than {MAX_SEGMENT_CHARS} characters")
    try:
        return msgspec.json.decode(text, type=kind)
    except (msgspec.DecodeError, UnicodeError) as error:
        raise SegmentError(f"malformed segment: {error}") from error
