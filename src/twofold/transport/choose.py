"""The transport that `--transport` names."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Final

from twofold.transport.base import Transport
from twofold.transport.foreign import ForeignTransport
from twofold.transport.foreign_link import Engine, EngineError
from twofold.transport.shm import ShmTransport
from twofold.transport.tcp import TcpTransport

FOREIGN: Final = {"mooncake": "mooncake.engine", "nixl": "nixl"}
"""Transports by an engine of the field's own, and the module that each needs."""


def unusable(transport: str, handoff: str) -> str:
    """Why a worker cannot hand over so, in one line; empty when it can. Imports nothing."""
    if transport not in FOREIGN:
        return ""
    if handoff != "pull":
        return (
            f"--handoff {handoff}: not with --transport {transport}, which cannot keep a late"
            " write out; use --handoff pull, or --transport shm or tcp"
        )
    try:
        found = importlib.util.find_spec(FOREIGN[transport]) is not None
    except ImportError:
        found = False
    if not found:
        return f"--transport {transport}: is not installed; try pip install 'twofold[{transport}]'"
    return ""


def make_transport(
    name: str, notify: Callable[[], None], *, host: str, advertise: str = "", checksums: bool
) -> Transport:
    """The transport `name`, for a worker on `host` that peers reach at `advertise` (if not empty).

    Raises ValueError when it cannot be had.
    """
    if name == "shm":
        return ShmTransport(notify, checksums=checksums)
    if name == "tcp":
        return TcpTransport(notify, host=host, advertise=advertise, checksums=checksums)
    try:
        engine: Engine
        if name == "mooncake":
            from twofold.transport.mooncake import MooncakeEngine

            engine = MooncakeEngine(advertise or host)
        else:
            from twofold.transport.nixl import NixlEngine

            engine = NixlEngine()
    except EngineError as error:
        raise ValueError(f"--transport {name}: {error}") from error
    return ForeignTransport(notify, engine, checksums=checksums)
