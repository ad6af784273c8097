"""The first message on a control connection: who is there, and whether it is who is meant."""

from __future__ import annotations

import os
from typing import Annotated, Final

import msgspec

from twofold.types import PROTOCOL_VERSION

HELLO_BYTES: Final = 1024
_MAGIC: Final = "twofold-peer"
_Name = Annotated[str, msgspec.Meta(min_length=1, max_length=256)]


class Hello(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """What each side says first. `expect` is whom the connecting side means to reach; `pid` is
    the process, for a peer of the same host; 0: not said."""

    magic: str
    protocol: int
    engine_id: _Name
    expect: Annotated[str, msgspec.Meta(max_length=256)] = ""
    pid: Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)] = 0


decode_hello: Final = msgspec.msgpack.Decoder(Hello).decode


def hello_bytes(engine_id: str, expect: str) -> bytes:
    """This process's own Hello, encoded."""
    return msgspec.msgpack.encode(
        Hello(
            magic=_MAGIC,
            protocol=PROTOCOL_VERSION,
            engine_id=engine_id,
            expect=expect,
            pid=os.getpid(),
        )
    )


def stranger(hello: Hello) -> str:
    """Why no worker of our kind has said `hello`, or nothing."""
    if hello.magic != _MAGIC:
        return "not a worker"
    if hello.protocol != PROTOCOL_VERSION:
        return f"protocol {hello.protocol} there, {PROTOCOL_VERSION} here"
    return ""
