"""The same work on a Ray cluster. Ray is needed for nothing else, so it is imported here alone."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any, Generic, TypeVar

T = TypeVar("T")
A = TypeVar("A")


class RayMissing(RuntimeError):
    """Ray is not installed or not reached, in one line."""


class RayExecutor(Generic[T, A]):
    """Work on the cluster at `address`. Traces and profiles must lie at the same path there.

    `lost(task, reason)` is the answer where the cluster lost a piece of work.
    """

    def __init__(self, work: Callable[[T], A], address: str, lost: Callable[[T, str], A]) -> None:
        try:
            self._ray: Any = importlib.import_module("ray")
        except ImportError:
            raise RayMissing("--ray needs Ray: pip install ray") from None
        try:
            self._ray.init(address=address, log_to_driver=False)
        except Exception as error:
            reason = str(error).strip().splitlines()
            raise RayMissing(
                f"--ray {address}: {reason[0] if reason else type(error).__name__}"
            ) from None
        self._remote = self._ray.remote(work)
        self._lost = lost
        self._given: dict[Any, tuple[int, T]] = {}

    @property
    def jobs(self) -> int:
        """CPUs of the cluster."""
        return max(1, int(self._ray.cluster_resources().get("CPU", 1)))

    def submit(self, number: int, task: T) -> None:
        """See `Executor`."""
        self._given[self._remote.remote(task)] = number, task

    def take(self) -> tuple[int, A]:
        """See `Executor`."""
        ready, _ = self._ray.wait(list(self._given), num_returns=1)
        number, task = self._given.pop(ready[0])
        try:
            return number, self._ray.get(ready[0])
        except self._ray.exceptions.RayError as error:
            return number, self._lost(task, str(error).strip().splitlines()[0])

    def __enter__(self) -> RayExecutor[T, A]:
        return self

    def __exit__(self, *about: object) -> None:
        for reference in self._given:
            self._ray.cancel(reference, force=True)
        self._ray.shutdown()
