"""Runs many pieces of work on the processes of this machine: give one out, take an answer in.

The order of answers depends on the machine; what they are does not. Whoever uses this puts them
back in order by their number.
"""

from __future__ import annotations

import multiprocessing
import signal
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any, Generic, Protocol, TypeVar

Task = TypeVar("Task", contravariant=True)
Answer = TypeVar("Answer", covariant=True)
T = TypeVar("T")
A = TypeVar("A")


class Executor(Protocol[Task, Answer]):
    """Where work is done. Used as a context: what is left undone at its end is dropped."""

    @property
    def jobs(self) -> int:
        """Pieces of work done at once."""

    def submit(self, number: int, task: Task) -> None:
        """Give out a piece of work under a number."""

    def take(self) -> tuple[int, Answer]:
        """Wait for one answer. Raises what the work raised."""

    def __enter__(self) -> Executor[Task, Answer]: ...

    def __exit__(self, *about: object) -> None: ...


class Here(Generic[T, A]):
    """Work done in this process, when its answer is asked for."""

    jobs = 1

    def __init__(self, work: Callable[[T], A]) -> None:
        self._work = work
        self._waiting: deque[tuple[int, T]] = deque()

    def submit(self, number: int, task: T) -> None:
        """See `Executor`."""
        self._waiting.append((number, task))

    def take(self) -> tuple[int, A]:
        """See `Executor`."""
        number, task = self._waiting.popleft()
        return number, self._work(task)

    def __enter__(self) -> Here[T, A]:
        return self

    def __exit__(self, *about: object) -> None:
        self._waiting.clear()


class Processes(Generic[T, A]):
    """`jobs` processes, started when there is work for them, each doing one piece at a time.

    They are started afresh (not forked), so that nothing of this process is in them, and leave
    Ctrl-C to this one. `lost(task, reason)` is the answer where a process ended in the middle of
    its work.
    """

    def __init__(self, work: Callable[[T], A], jobs: int, lost: Callable[[T, str], A]) -> None:
        self.jobs = jobs
        self._work = work
        self._lost = lost
        self._context = multiprocessing.get_context("spawn")
        self._waiting: deque[tuple[int, T]] = deque()
        self._idle: list[Connection] = []
        self._busy: dict[Connection, tuple[int, T]] = {}
        self._processes: dict[Connection, BaseProcess] = {}

    def submit(self, number: int, task: T) -> None:
        """See `Executor`."""
        self._waiting.append((number, task))
        self._give_out()

    def take(self) -> tuple[int, A]:
        """See `Executor`."""
        assert self._busy, "no work was given out"
        ready = wait(list(self._busy))
        connection = min(
            (c for c in ready if isinstance(c, Connection)), key=lambda c: self._busy[c][0]
        )
        number, task = self._busy.pop(connection)
        try:
            ok, answer = connection.recv()
        except (EOFError, OSError):
            process = self._processes.pop(connection)
            process.join()
            connection.close()
            self._give_out()
            reason = f"its process ended with code {process.exitcode}; memory may have run out"
            return number, self._lost(task, reason)
        self._idle.append(connection)
        self._give_out()
        if not ok:
            raise answer
        return number, answer

    def _give_out(self) -> None:
        while self._waiting and (self._idle or len(self._processes) < self.jobs):
            connection = self._idle.pop() if self._idle else self._start()
            number, task = self._waiting.popleft()
            self._busy[connection] = number, task
            connection.send(task)

    def _start(self) -> Connection:
        ours, theirs = self._context.Pipe()
        process = self._context.Process(target=_serve, args=(theirs, self._work), daemon=True)
        with _undisturbed():
            process.start()
        theirs.close()
        self._processes[ours] = process
        return ours

    def __enter__(self) -> Processes[T, A]:
        return self

    def __exit__(self, *about: object) -> None:
        self._waiting.clear()
        for connection, process in self._processes.items():
            process.terminate()
            connection.close()
        for process in self._processes.values():
            process.join()
        self._processes.clear()


@contextmanager
def _undisturbed() -> Iterator[None]:
    """Ctrl-C waits until the end of this: a process that was told half of what it is complains.

    Blocked in a new process from its first instruction on, as it is this one's to handle. Here that
    is not enough: another thread may get the signal, and Python handles it in the first one.
    """
    kept = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    handler, came = signal.getsignal(signal.SIGINT), list[int]()
    ours = callable(handler) and threading.current_thread() is threading.main_thread()
    if ours:
        signal.signal(signal.SIGINT, lambda number, frame: came.append(number))
    try:
        yield
    finally:
        if ours:
            signal.signal(signal.SIGINT, handler)
        signal.pthread_sigmask(signal.SIG_SETMASK, kept)
    if came and callable(handler):
        handler(signal.SIGINT, None)


def _serve(connection: Connection, work: Callable[[Any], Any]) -> None:
    """What a process does: one piece of work after the other, until the other end is closed."""
    while True:
        try:
            task = connection.recv()
        except (EOFError, OSError):
            return
        answer: tuple[bool, Any]
        try:
            answer = True, work(task)
        except Exception as error:  # carried to whoever waits for the answer
            answer = False, error
        try:
            connection.send(answer)
        except (BrokenPipeError, OSError):
            return


def executor(
    work: Callable[[T], A], jobs: int, lost: Callable[[T, str], A]
) -> Here[T, A] | Processes[T, A]:
    """This process for one job, else as many processes. `work` must be a module's function."""
    return Here(work) if jobs <= 1 else Processes(work, jobs, lost)


def run_all(
    tasks: Sequence[T], where: Executor[T, A], tick: Callable[[], Any] = lambda: None
) -> list[A]:
    """The answer to every task, in their order; `tick` is called after each."""
    found: dict[int, A] = {}
    for number, task in enumerate(tasks):
        where.submit(number, task)
    while len(found) < len(tasks):
        number, answer = where.take()
        found[number] = answer
        tick()
    return [found[number] for number in range(len(tasks))]
