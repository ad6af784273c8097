"""Mooncake's transfer engine (`mooncake-transfer-engine-non-cuda`), over its TCP protocol."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any, Final

from twofold.transport.foreign_link import EngineError
from twofold.transport.segment import EngineSegment, MooncakeSegment

# The engine logs every start and every lost peer; what matters is in the completions.
_QUIET: Final = {"MC_LOG_LEVEL": "ERROR"}


def _load() -> Any:
    """The engine's module. Raises EngineError."""
    for name, value in _QUIET.items():
        os.environ.setdefault(name, value)
    try:
        from mooncake import engine
    except ImportError as error:
        raise EngineError(f"mooncake cannot be loaded: {error}") from error
    return engine


def _begin(module: Any, host: str) -> Any:
    engine = module.TransferEngine()
    if engine.initialize(host, "P2PHANDSHAKE", "tcp", ""):
        raise EngineError(f"mooncake does not start on {host}")
    return engine


class MooncakeLink:
    """An engine for one peer: only its end is sure to end what it copies. See `Link`.

    That end holds the interpreter lock for up to a second, so a link that can be used on is kept.
    """

    reconnects = True

    def __init__(self, engine: Any, endpoint: str) -> None:
        self._engine = engine
        self._endpoint = endpoint

    def start(self, own: int, peer: int, n_bytes: int) -> int:
        """See `Link.start`. The first one waits for the peer to answer."""
        # One copy in a batch, because only the state of a batch's first is told.
        batch: int = self._engine.batch_transfer_async_read(
            self._endpoint, [own], [peer], [n_bytes]
        )
        if not batch:
            raise EngineError("mooncake: the peer cannot be reached")
        return batch

    def is_done(self, copy: int) -> bool:
        """See `Link.is_done`. Not to be asked again about a copy that has ended."""
        state = self._engine.transfer_check_status(copy)
        if state < 0:
            raise EngineError("mooncake: the copy has failed")
        return bool(state)

    def close(self) -> None:
        """See `Link.close`: the engine's end closes its sockets and waits for its thread."""
        self._engine = None


class MooncakeEngine:
    """See `Engine`. `host` is the numeric address that peers are told.

    Raises EngineError when the package cannot be loaded.
    """

    segment: type[EngineSegment] = MooncakeSegment

    def __init__(self, host: str) -> None:
        self._module = _load()
        self._host = host
        self._serving: Any = None

    def serve(self, address: int, n_bytes: int) -> str:
        """See `Engine.serve`. The engine's port listens on every address of the machine."""
        engine = _begin(self._module, self._host)
        if engine.register_memory(address, n_bytes):
            raise EngineError("mooncake cannot register the pool")
        self._serving = engine
        host = f"[{self._host}]" if ":" in self._host else self._host
        return f"{host}:{engine.get_rpc_port()}"

    def link(self, endpoint: str, into: Sequence[tuple[int, int]]) -> MooncakeLink:
        """See `Engine.link`. Our own memory stays unregistered there: nobody need reach it."""
        return MooncakeLink(_begin(self._module, self._host), endpoint)

    def close(self) -> None:
        """See `Engine.close`."""
        self._serving = None
