"""Ties a process to the one that started it, so that none is left behind."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from typing import Final

_PR_SET_PDEATHSIG: Final = 1


def die_with_parent(parent_pid: int) -> None:
    """Have the kernel kill this process when process `parent_pid`, its parent, ends.

    SIGKILL, so that even a process that hangs goes. Exits at once, with code 1, when the parent
    has ended already. Raises OSError when the kernel refuses.
    """
    if sys.platform == "linux":
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
            raise OSError(ctypes.get_errno(), "cannot be tied to the parent process")
    # The parent may have ended before the call above, which then never fires.
    if os.getppid() != parent_pid:
        raise SystemExit(1)
