"""Starts the processes of a deployment, watches them, restarts them, and stops them in order."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Final

import msgspec

from twofold.live.backoff import Backoff
from twofold.live.clock import Clock, LoopClock
from twofold.live.logs import adopt, log_line, message_of
from twofold.types import NS_PER_S

EXIT_BAD_SETTINGS: Final = 2
EXIT_NOT_FOUND: Final = 127
_KEPT_LINES: Final = 20
_LONGEST_LINE_BYTES: Final = 16 * 1024
_POLL_S: Final = 0.05
_LAST_OUTPUT_S: Final = 1.0


class Child(msgspec.Struct, frozen=True, kw_only=True):
    """A process to keep running. A higher `stage` is stopped before a lower one.

    It says that it serves by a log line whose message begins with "ready". `variables` are added
    to its environment where they are not set there.
    """

    name: str
    command: tuple[str, ...]
    stage: int = 0
    variables: tuple[tuple[str, str], ...] = ()


class GivenUpError(Exception):
    """A process cannot be started: its name, its last exit code and the last lines it wrote."""

    def __init__(self, name: str, exit_code: int, last_lines: tuple[str, ...]) -> None:
        super().__init__(f"{name} could not be started: {describe_exit(exit_code)}")
        self.name = name
        self.exit_code = exit_code
        self.last_lines = last_lines


def describe_exit(code: int) -> str:
    """An exit code in words; negative ones are signals."""
    if code >= 0:
        return f"exit code {code}"
    try:
        return f"killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"killed by signal {-code}"


class Supervisor:
    """Keeps processes running until it is told to stop them.

    Every method runs in one event loop, in the main thread: the kernel ties the children's
    lives to the thread that started them.
    """

    def __init__(
        self,
        children: Sequence[Child],
        *,
        ready_at: tuple[str, int] | None = None,
        emit: Callable[[str], None],
        backoff: Backoff | None = None,
        clock: Clock | None = None,
        grace_s: float = 10.0,
    ) -> None:
        """`ready_at`: host and port whose `/ready` must answer 200. `emit` takes log lines."""
        self._ready_at = ready_at
        self._grace_s = grace_s
        self._stopping = asyncio.Event()
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._given_up: asyncio.Future[GivenUpError] | None = None
        clock = clock or LoopClock()
        self._kept = {
            child.name: _Kept(child, emit, backoff or Backoff(), clock, self._stopping)
            for child in children
        }

    async def start(self) -> None:
        """Start every process, without waiting for any to be ready."""
        self._given_up = asyncio.get_running_loop().create_future()
        for name, kept in self._kept.items():
            self._tasks[name] = asyncio.create_task(self._keep(kept), name=f"keep {name}")
        await asyncio.sleep(0)

    async def wait_ready(self, timeout_s: float) -> None:
        """Return once all processes are ready and the gateway says so too.

        Raises GivenUpError when one cannot be started, TimeoutError naming what is not ready.
        """
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout_s
        while not await self._all_ready():
            if self._given_up is not None and self._given_up.done():
                raise self._given_up.result()
            if loop.time() >= deadline:
                late = self.waiting_for() or ["the gateway"]
                raise TimeoutError(f"not ready after {timeout_s:g} s: {', '.join(late)}")
            await asyncio.sleep(_POLL_S)

    async def wait_given_up(self) -> GivenUpError:
        """Return when some process cannot be started; for ever, while all can."""
        assert self._given_up is not None, "not started"
        return await asyncio.shield(self._given_up)

    def waiting_for(self) -> list[str]:
        """Names of the processes that are not ready now."""
        return [name for name, kept in self._kept.items() if not kept.is_ready]

    def pids(self) -> dict[str, int]:
        """Process ids of what runs now, by name."""
        return {name: kept.pid for name, kept in self._kept.items() if kept.pid is not None}

    async def stop(self) -> None:
        """Stop everything, the highest stage first: SIGTERM, and SIGKILL after the grace."""
        self._stopping.set()
        stages = sorted({kept.child.stage for kept in self._kept.values()}, reverse=True)
        for stage in stages:
            group = [kept for kept in self._kept.values() if kept.child.stage == stage]
            tasks = [self._tasks[kept.child.name] for kept in group if self._tasks]
            for kept in group:
                kept.send(signal.SIGTERM)
            if not tasks:
                continue
            _, late = await asyncio.wait(tasks, timeout=self._grace_s)
            if late:
                for kept in group:
                    kept.send(signal.SIGKILL)
                await asyncio.wait(tasks)

    def kill(self) -> None:
        """Kill everything now. A `stop` that is under way then ends soon."""
        self._stopping.set()
        for kept in self._kept.values():
            kept.send(signal.SIGKILL)

    async def _keep(self, kept: _Kept) -> None:
        try:
            await kept.run()
        except GivenUpError as error:
            if self._given_up is not None and not self._given_up.done():
                self._given_up.set_result(error)

    async def _all_ready(self) -> bool:
        if self.waiting_for():
            return False
        return self._ready_at is None or await _answers_ready(*self._ready_at)


class _Kept:
    """One process and its restarts."""

    def __init__(
        self,
        child: Child,
        emit: Callable[[str], None],
        backoff: Backoff,
        clock: Clock,
        stopping: asyncio.Event,
    ) -> None:
        self.child = child
        self._emit = emit
        self._backoff = backoff
        self._clock = clock
        self._stopping = stopping
        self._process: asyncio.subprocess.Process | None = None
        self._ready_at_ns: int | None = None
        self._was_ready = False
        self._last_lines: deque[str] = deque(maxlen=_KEPT_LINES)

    @property
    def is_ready(self) -> bool:
        return self._ready_at_ns is not None

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process is not None else None

    def send(self, number: signal.Signals) -> None:
        """Signal the process, if it runs."""
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                self._process.send_signal(number)

    async def run(self) -> None:
        """Run the process, again and again, until told to stop. Raises GivenUpError."""
        failures = 0
        while not self._stopping.is_set():
            code = await self._run_once()
            if self._stopping.is_set():
                return
            ready_for_ns = 0
            if self._ready_at_ns is not None:
                ready_for_ns = self._clock.now_ns() - self._ready_at_ns
            self._ready_at_ns = None
            failures = self._backoff.count(failures, ready_for_ns)
            self._give_up_if_useless(failures, code)
            wait_ns = self._backoff.wait_ns(failures)
            when = f"in {wait_ns / NS_PER_S:g} s" if wait_ns else "now"
            self._say("warning", f"ended with {describe_exit(code)}; starting again {when}")
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._stopping.wait(), wait_ns / NS_PER_S)

    def _give_up_if_useless(self, failures: int, code: int) -> None:
        if self._was_ready:
            return
        if code == EXIT_BAD_SETTINGS or failures >= self._backoff.give_up_after:
            self._say("error", f"ended with {describe_exit(code)}; not starting it again")
            raise GivenUpError(self.child.name, code, tuple(self._last_lines))

    async def _run_once(self) -> int:
        """The exit code of one life. Its output, both streams, becomes log lines."""
        # A session of its own: Ctrl-C at the terminal reaches the supervisor alone.
        try:
            process = await asyncio.create_subprocess_exec(
                *self.child.command,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.STDOUT,
                start_new_session=True,
                env=dict(self.child.variables) | os.environ,
            )
        except OSError as error:
            self._take(f"{self.child.command[0]}: {error.strerror}")
            return EXIT_NOT_FOUND
        self._process = process
        if self._stopping.is_set():
            self.send(signal.SIGTERM)
        assert process.stdout is not None
        reading = asyncio.create_task(self._read(process.stdout))
        try:
            code = await process.wait()
            # What is still in the pipe; a process that has inherited it may hold it open.
            await asyncio.wait((reading,), timeout=_LAST_OUTPUT_S)
            return code
        finally:
            reading.cancel()
            self._process = None

    async def _read(self, stream: asyncio.StreamReader) -> None:
        async for line in _lines(stream):
            self._take(line)

    def _take(self, line: str) -> None:
        self._last_lines.append(line)
        if message_of(line).startswith("ready"):
            self._ready_at_ns = self._clock.now_ns()
            self._was_ready = True
        self._emit(adopt(self.child.name, line))

    def _say(self, level: str, message: str) -> None:
        self._emit(log_line("supervisor", level, f"{self.child.name} {message}"))


async def _lines(stream: asyncio.StreamReader) -> AsyncIterator[str]:
    """Lines of `stream` as text; very long ones in pieces."""
    rest = b""
    while data := await stream.read(_LONGEST_LINE_BYTES):
        *whole, rest = (rest + data).split(b"\n")
        if len(rest) >= _LONGEST_LINE_BYTES:
            whole, rest = [*whole, rest], b""
        for line in whole:
            yield line.decode(errors="replace").rstrip()
    if rest:
        yield rest.decode(errors="replace").rstrip()


async def _answers_ready(host: str, port: int) -> bool:
    """Whether `GET /ready` is answered with 200 within a second."""
    request = f"GET /ready HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n"
    try:
        async with asyncio.timeout(1.0):
            reader, writer = await asyncio.open_connection(host, port)
            try:
                writer.write(request.encode())
                status_line = await reader.readline()
            finally:
                writer.close()
    except (OSError, TimeoutError):
        return False
    return status_line.split()[1:2] == [b"200"]
