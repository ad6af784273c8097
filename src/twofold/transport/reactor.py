"""A thread that watches non-blocking sockets, for the TCP transport's two sides.

One thread and no locks: whatever touches a socket or a block runs here, so that once a
connection is closed, nothing is written for it any more.
"""

from __future__ import annotations

import contextlib
import logging
import selectors
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Final, Protocol

_log = logging.getLogger("twofold.transport")

READ: Final = selectors.EVENT_READ
WRITE: Final = selectors.EVENT_WRITE

TIMED_OUT: Final = "timed out"
"""What `fail` is told when a deadline has passed."""


class Watched(Protocol):
    """One socket's owner."""

    sock: socket.socket
    deadline_ns: int
    """When `fail(TIMED_OUT)` is due, on the monotonic clock; 0 for never."""

    def ready(self, events: int) -> None:
        """The socket can be read or written. An OSError that it raises goes to `fail`."""

    def fail(self, reason: str) -> None:
        """Close the socket, for `reason`."""


class Reactor:
    """Runs callbacks and socket events on one thread of its own, until `stop`."""

    def __init__(self, name: str, tick_s: float) -> None:
        self._tick_s = tick_s
        self._selector = selectors.DefaultSelector()
        self._watched: dict[int, Watched] = {}
        self._calls: deque[Callable[[], None]] = deque()
        self._wake_in, self._wake_out = socket.socketpair()
        self._wake_in.setblocking(False)
        self._wake_out.setblocking(False)
        self._selector.register(self._wake_out, READ, None)
        self._running = True
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def call(self, callback: Callable[[], None]) -> None:
        """Run `callback` on the thread, soon. From any thread."""
        self._calls.append(callback)
        # A pipe full of wake-ups that have not been seen yet is as good as one more.
        with contextlib.suppress(BlockingIOError):
            self._wake_in.send(b"\0")

    def stop(self, last: Callable[[], None]) -> None:
        """Run `last` on the thread, end it and wait for it. Not from the thread itself."""

        def end() -> None:
            last()
            self._running = False

        if self._thread.ident is not None:
            self.call(end)
            self._thread.join()
        self._selector.close()
        self._wake_in.close()
        self._wake_out.close()

    # ------------------------------------------------------------------ on the thread only

    def watch(self, owner: Watched, events: int) -> None:
        """Watch for `events` from now on, or for others than before."""
        number = owner.sock.fileno()
        if number in self._watched:
            self._selector.modify(owner.sock, events, owner)
        else:
            self._selector.register(owner.sock, events, owner)
            self._watched[number] = owner

    def forget(self, owner: Watched) -> None:
        """Stop watching. The socket must still be open. Harmless when it is not watched."""
        if self._watched.pop(owner.sock.fileno(), None) is not None:
            self._selector.unregister(owner.sock)

    def _run(self) -> None:
        next_check_ns = 0
        while self._running:
            # Without sockets there is no deadline to look after, so only a call wakes the thread.
            for key, events in self._selector.select(self._tick_s if self._watched else None):
                owner: Watched | None = key.data
                if owner is None:
                    self._run_calls()
                elif self._watched.get(key.fd) is owner:
                    _guard(owner, events)
            now_ns = time.monotonic_ns()
            if now_ns >= next_check_ns:
                next_check_ns = now_ns + int(self._tick_s * 1e9)
                self._expire(now_ns)

    def _expire(self, now_ns: int) -> None:
        for number, owner in list(self._watched.items()):
            # The end of one may have been the end of others in this list.
            if 0 < owner.deadline_ns <= now_ns and self._watched.get(number) is owner:
                owner.fail(TIMED_OUT)

    def _run_calls(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while self._wake_out.recv(4096):
                pass
        while self._calls:
            callback = self._calls.popleft()
            try:
                callback()
            except Exception:
                _log.exception("call on the transport's thread failed")


def _guard(owner: Watched, events: int) -> None:
    """Let `owner` handle `events`; a failure is its owner's alone."""
    try:
        owner.ready(events)
    except OSError as error:
        owner.fail(error.strerror or str(error))
    except Exception as error:
        _log.exception("transport connection failed")
        owner.fail(f"internal error: {error!r}")
