"""The device in a thread of its own, answered by messages, so that the event loop never waits.

Jobs run one at a time and in order. What a job returns or raises is given to its callback in the
event loop.
"""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
from collections.abc import Callable
from typing import Any

_log = logging.getLogger("twofold.device")

Job = tuple[Callable[[], Any], Callable[[Any, BaseException | None], None]]


class DeviceThread:
    """Runs jobs for one event loop. At most `max_jobs` may wait; the engine has one step at a time.

    Made inside the running loop. `close` waits for the job that runs.
    """

    def __init__(self, *, max_jobs: int = 1024) -> None:
        self._loop = asyncio.get_running_loop()
        self._jobs: queue.Queue[Job | None] = queue.Queue(max_jobs)
        self._thread = threading.Thread(target=self._run, name="device", daemon=True)
        self._thread.start()

    def submit(
        self, job: Callable[[], Any], done: Callable[[Any, BaseException | None], None]
    ) -> None:
        """Run `job` in the thread, then `done(result, error)` in the loop."""
        self._jobs.put_nowait((job, done))

    def close(self) -> None:
        """End the thread once it has run what was submitted."""
        self._jobs.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (entry := self._jobs.get()) is not None:
            job, done = entry
            result: Any = None
            failure: BaseException | None = None
            try:
                result = job()
            except Exception as error:
                # Whatever the device's libraries raise is one failed step, not a dead worker.
                failure = error
                _log.warning("device job failed: %s: %s", type(error).__name__, error)
            try:
                self._loop.call_soon_threadsafe(done, result, failure)
            except RuntimeError:
                return  # the loop is closed: nobody is left to answer
