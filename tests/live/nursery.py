"""Worker processes that start in a moment: forked from a process that has imported everything.

They are processes like any other: killed with SIGKILL, stopped with SIGSTOP, gone with the test.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
from typing import Any

from twofold.config import WorkerSettings

PRELOAD = (__name__, "transformers.models.llama.modeling_llama", "twofold.live.worker", "uvloop")


def context() -> Any:
    """What starts processes for `live`; its own process ends with this one."""
    found = multiprocessing.get_context("forkserver")
    found.set_forkserver_preload(list(PRELOAD))
    return found


def live(settings: WorkerSettings, log: str) -> None:
    """Be a worker. What it says goes to the file `log`."""
    from twofold.live.lifeline import die_with_parent
    from twofold.live.logs import set_up_logs
    from twofold.live.worker import run_worker

    die_with_parent(os.getppid())
    with open(log, "ab") as file:
        for number in (1, 2):
            os.dup2(file.fileno(), number)
    set_up_logs(settings.name)
    sys.exit(run_worker(settings))
