"""Work on other processes: answers by number, failures, lost processes and Ray."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
import types
from typing import Any

import pytest

from twofold.plan.execute import Processes, _undisturbed, executor, run_all
from twofold.plan.ray import RayExecutor, RayMissing


def work(task: int) -> int:
    """Squares; 13 is an error, 99 the end of the process, and 1,000 takes for ever."""
    if task == 13:
        raise ValueError("unlucky")
    if task == 99:
        os._exit(7)
    if task == 1000:
        time.sleep(600)
    return task * task


def lost(task: int, reason: str) -> int:
    return -task if "code 7" in reason or "node died" in reason else 0


@pytest.mark.parametrize("jobs", [1, 2])
def test_answers_come_back_in_the_order_of_their_tasks(jobs: int) -> None:
    with executor(work, jobs, lost) as where:
        ticks: list[int] = []
        assert run_all([3, 1, 2, 5], where, lambda: ticks.append(1)) == [9, 1, 4, 25]
    assert len(ticks) == 4


def test_an_error_is_raised_here_and_a_lost_process_is_an_answer() -> None:
    with Processes(work, 1, lost) as where:
        where.submit(0, 13)
        with pytest.raises(ValueError, match="unlucky"):
            where.take()
        assert run_all([99, 4], where) == [-99, 16]


def test_what_is_left_undone_is_dropped_with_its_processes() -> None:
    with Processes(work, 2, lost) as where:
        for number, task in enumerate((1000, 2, 3, 1000, 4)):
            where.submit(number, task)
        where.take()
        processes = list(where._processes.values())
        assert len(processes) == 2
    assert not any(process.is_alive() for process in processes)


def test_ctrl_c_waits_until_a_process_has_been_told_all() -> None:
    """It may reach a thread that does not block it; Python handles it in the first one."""
    stop, done = threading.Event(), list[str]()

    def told() -> None:
        with _undisturbed():
            assert other.ident is not None
            signal.pthread_kill(other.ident, signal.SIGINT)
            for _ in range(1000):  # long enough for Python to look at signals
                time.sleep(0)
            done.append("told all")

    other = threading.Thread(target=stop.wait)
    other.start()
    # Ignored where whoever started the tests did so in the background.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            told()
    finally:
        stop.set()
        other.join()
        after = signal.signal(signal.SIGINT, before)
    assert done == ["told all"]
    assert after is signal.default_int_handler
    assert signal.SIGINT not in signal.pthread_sigmask(signal.SIG_BLOCK, [])


class FakeRay(types.ModuleType):
    """As much of Ray as is used."""

    def __init__(self) -> None:
        super().__init__("ray")
        self.calls: list[str] = []
        self.exceptions = types.SimpleNamespace(RayError=KeyError)

    def init(self, address: str, log_to_driver: bool) -> None:
        if address == "nowhere:1":
            raise ConnectionError("cannot reach nowhere:1\nand more")
        self.calls.append(f"init {address}")

    def remote(self, call: Any) -> Any:
        def begin(task: int) -> tuple[str, int]:
            return call.__name__, task

        return types.SimpleNamespace(remote=begin)

    def cluster_resources(self) -> dict[str, float]:
        return {"CPU": 6.0}

    def wait(self, references: list[Any], num_returns: int) -> tuple[list[Any], list[Any]]:
        return references[-num_returns:], references[:-num_returns]

    def get(self, reference: tuple[str, int]) -> int:
        if reference[1] == 99:
            raise self.exceptions.RayError("node died")
        return work(reference[1])

    def cancel(self, reference: Any, force: bool) -> None:
        self.calls.append(f"cancel {reference[1]}")

    def shutdown(self) -> None:
        self.calls.append("shutdown")


def test_ray_does_the_same_work(monkeypatch: pytest.MonkeyPatch) -> None:
    ray = FakeRay()
    monkeypatch.setitem(sys.modules, "ray", ray)
    with RayExecutor(work, "auto", lost) as where:
        assert where.jobs == 6
        assert run_all([2, 99, 3], where) == [4, -99, 9]
        where.submit(0, 5)
    assert ray.calls == ["init auto", "cancel 5", "shutdown"]


def test_ray_that_is_missing_or_out_of_reach_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(RayMissing, match=r"^--ray needs Ray: pip install ray$"):
        RayExecutor(work, "auto", lost)
    monkeypatch.setitem(sys.modules, "ray", FakeRay())
    with pytest.raises(RayMissing, match=r"^--ray nowhere:1: cannot reach nowhere:1$"):
        RayExecutor(work, "nowhere:1", lost)
