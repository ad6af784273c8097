"""NIXL (`nixl`), over its UCX backend: TCP, and the kernel's copy between processes of one host."""

from __future__ import annotations

import base64
import binascii
import logging
import os
import threading
from collections.abc import Sequence
from typing import Any, Final

from twofold.transport.foreign_link import EngineError
from twofold.transport.segment import EngineSegment, NixlSegment

_log = logging.getLogger("twofold.transport")

# UCX prints to stdout unless told otherwise, and takes over the handlers of fatal signals.
_QUIET: Final = {
    "UCX_LOG_FILE": "stderr",
    "UCX_LOG_LEVEL": "error",
    "UCX_HANDLE_ERRORS": "none",
    "NIXL_LOG_LEVEL": "FATAL",
}

_TLS: Final = "tcp,cma,self"
"""What UCX may use, unless UCX_TLS is set. Its shared memory would leave names behind."""

_PUMP_S: Final = 0.001
"""How often a served agent looks at its sockets. Its own thread would take a whole core."""


def _load() -> Any:
    """The package. Raises EngineError."""
    for name, value in _QUIET.items():
        os.environ.setdefault(name, value)
    try:
        import nixl
    except ImportError as error:
        raise EngineError(f"nixl cannot be loaded: {error}") from error
    # It logs to stdout by a handler of its own.
    log = logging.getLogger("nixl")
    log.handlers.clear()
    log.propagate = True
    log.setLevel(logging.WARNING)
    return nixl


def _agent(module: Any, memory: Sequence[tuple[int, int]]) -> Any:
    """An agent with a random name, without threads, with memory registered."""
    try:
        config = module.nixl_agent_config(enable_prog_thread=False, backends=[])
        agent = module.nixl_agent(f"twofold-{os.urandom(8).hex()}", config)
        options = {} if "UCX_TLS" in os.environ else {"engine_config": f"TLS={_TLS}"}
        agent.create_backend("UCX", options)
        agent.register_memory([(at, n_bytes, 0, "") for at, n_bytes in memory], "DRAM")
    except Exception as error:
        raise EngineError(f"nixl does not start: {error}") from error
    return agent


class NixlLink:
    """An agent for one peer: only its end is sure to end what it copies. See `Link`.

    Nothing lands between calls, since the agent has no thread of its own.
    """

    reconnects = False

    def __init__(self, agent: Any, endpoint: str) -> None:
        self._agent = agent
        self._copies: dict[int, Any] = {}
        try:
            self._peer = agent.add_remote_agent(base64.b64decode(endpoint, validate=True))
        except (binascii.Error, ValueError) as error:
            raise EngineError(f"nixl: malformed endpoint: {error}") from error
        except Exception as error:
            raise EngineError(f"nixl: the peer cannot be reached: {error}") from error

    def start(self, own: int, peer: int, n_bytes: int) -> int:
        """See `Link.start`."""
        agent = self._agent
        try:
            ours = agent.get_xfer_descs([(own, n_bytes, 0)], "DRAM")
            theirs = agent.get_xfer_descs([(peer, n_bytes, 0)], "DRAM")
            handle = agent.initialize_xfer("READ", ours, theirs, self._peer)
            self._copies[id(handle)] = handle
            agent.transfer(handle)
        except Exception as error:
            raise EngineError(f"nixl: the copy cannot begin: {error}") from error
        return id(handle)

    def is_done(self, copy: int) -> bool:
        """See `Link.is_done`."""
        handle = self._copies[copy]
        try:
            state = self._agent.check_xfer_state(handle)
            if state == "PROC":
                return False
            del self._copies[copy]
            handle.release()
        except Exception as error:
            raise EngineError(f"nixl: the copy has failed: {error}") from error
        if state != "DONE":
            raise EngineError("nixl: the copy has failed")
        return True

    def close(self) -> None:
        """See `Link.close`. Handles first: they hold on to the agent."""
        self._copies.clear()
        self._agent = None


class NixlEngine:
    """See `Engine`. Raises EngineError when the package cannot be loaded."""

    segment: type[EngineSegment] = NixlSegment

    def __init__(self) -> None:
        self._module = _load()
        # Plugins are loaded by the first agent, and not by two at once.
        self._beginning = threading.Lock()
        self._stop = threading.Event()
        self._pump: threading.Thread | None = None

    def serve(self, address: int, n_bytes: int) -> str:
        """See `Engine.serve`. UCX listens on all of the machine's networks, or UCX_NET_DEVICES."""
        with self._beginning:
            agent = _agent(self._module, [(address, n_bytes)])
        endpoint = base64.b64encode(agent.get_agent_metadata()).decode()
        self._pump = threading.Thread(target=self._serve, args=(agent,), name="kv-nixl")
        self._pump.daemon = True
        self._pump.start()
        return endpoint

    def _serve(self, agent: Any) -> None:
        while not self._stop.wait(_PUMP_S):
            try:
                agent.get_new_notifs()
            except Exception:
                _log.warning("nixl: an agent that serves has failed", exc_info=True)
                return

    def link(self, endpoint: str, into: Sequence[tuple[int, int]]) -> NixlLink:
        """See `Engine.link`."""
        with self._beginning:
            agent = _agent(self._module, into)
        return NixlLink(agent, endpoint)

    def close(self) -> None:
        """See `Engine.close`."""
        self._stop.set()
        if self._pump is not None:
            self._pump.join()
            self._pump = None
