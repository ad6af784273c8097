"""What both directions of the TCP transport share: one connection to a peer's data port."""

from __future__ import annotations

import errno
import os
import socket
import time
from collections.abc import Callable
from typing import Any, Final, Generic, Protocol, TypeVar

from twofold.transport import wire
from twofold.transport.memory import PoolMemory
from twofold.transport.reactor import READ, TIMED_OUT, WRITE, Reactor
from twofold.types import seconds_to_ns

TURN_BYTES: Final = 8 * 1024 * 1024
"""Most bytes moved on one connection before the others have a turn."""


class Task(Protocol):
    """The part of one transfer that goes over one connection.

    `on_end` is called once, with the reason if it failed.
    """

    on_end: Callable[[str], None]


_T = TypeVar("_T", bound=Task)


class Connection(Generic[_T]):
    """A connection that carries one task after another. Raises OSError when connecting fails.

    Without a task it is idle: `on_idle_end` is called when it closes then. Subclasses say how a
    task begins and goes on.
    """

    def __init__(
        self,
        reactor: Reactor,
        memory: PoolMemory,
        host: str,
        port: int,
        *,
        timeout_s: float,
        idle_s: float,
        on_idle_end: Callable[[Any], None],
    ) -> None:
        self._reactor = reactor
        self._memory = memory
        self._timeout_s = timeout_s
        self._timeout_ns = seconds_to_ns(timeout_s)
        self._idle_ns = seconds_to_ns(idle_s)
        self._on_idle_end = on_idle_end
        self._task: _T | None = None
        self.deadline_ns = 0
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self.sock = socket.socket(family, socket.SOCK_STREAM)
        try:
            self.sock.setblocking(False)
            self.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            code = self.sock.connect_ex((host, port))
            if code not in (0, errno.EINPROGRESS):
                raise OSError(code, os.strerror(code))
        except BaseException:
            self.sock.close()
            raise
        self._connecting = True

    def start(self, task: _T) -> None:
        """Carry `task`. The connection must be idle."""
        self._task = task
        self._begin(task)
        self._moved()
        self._reactor.watch(self, WRITE)

    def ready(self, events: int) -> None:
        """Go on with connecting or with the task."""
        if self._connecting:
            code = self.sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
            if code:
                self.fail(os.strerror(code))
                return
            self._connecting = False
        if self._task is None:
            # Nothing is due on an idle connection, so this is its end or not our protocol.
            self.fail("closed while idle")
            return
        try:
            self._go_on(self._task, events)
        except wire.FrameError as error:
            self.fail(str(error))

    def fail(self, reason: str) -> None:
        """Close, and end the task with `reason`."""
        if reason == TIMED_OUT:
            reason = f"timed out: {self._silence()} for {self._timeout_s:g} s"
        task = self._task
        self.close()
        if task is None:
            self._on_idle_end(self)
        else:
            task.on_end(reason)

    def close(self) -> None:
        """Close without a word to the task. May be called again."""
        self._task = None
        self._drop()
        if self.sock.fileno() >= 0:
            self._reactor.forget(self)
            self.sock.close()

    # ------------------------------------------------------- what subclasses do

    def _begin(self, task: _T) -> None:
        raise AssertionError("a direction defines this")

    def _go_on(self, task: _T, events: int) -> None:
        raise AssertionError("a direction defines this")

    def _drop(self) -> None:
        """Let go of our blocks' memory."""

    def _silence(self) -> str:
        return "the peer sent nothing"

    # ------------------------------------------------------------------ common

    def _moved(self) -> None:
        """Bytes have passed: the peer has its time again."""
        self.deadline_ns = time.monotonic_ns() + self._timeout_ns

    def _rest(self, task: _T) -> None:
        """The task is done; the connection is free for another."""
        self._task = None
        self.deadline_ns = time.monotonic_ns() + self._idle_ns
        self._reactor.watch(self, READ)
        task.on_end("")
