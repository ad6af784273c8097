"""Pages of shared mappings: had from the kernel, and mapped, before they are used.

The first use of a page that is not mapped yet stops for a fault: a first pass over a pool is two to
four times slower than later ones, and so would be a worker's first handoffs. The kernel maps
many pages in one call for a fraction of that.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
from collections.abc import Callable
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt

_PAGE: Final = mmap.PAGESIZE
SLICE_BYTES: Final = 8 * 1024 * 1024
"""Most bytes mapped in one call, half a millisecond: a copy that has come meanwhile waits so long,
and so does another thread's mmap."""

_CHUNK_BYTES: Final = 64 * 1024 * 1024
"""Memory taken between two looks at what is left."""

# MADV_POPULATE_READ and _WRITE of Linux 5.14. Not by `mmap.madvise`, which has no names for them
# and, like `mmap.mmap` with MAP_POPULATE, keeps the interpreter lock all the while.
_POPULATE_READ: Final = 22
_POPULATE_WRITE: Final = 23
_madvise: Final = ctypes.CDLL(None, use_errno=True).madvise
_madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)

_CGROUPS: Final = (
    ("memory.max", "memory.current", "inactive_file"),
    ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "total_inactive_file"),
)
"""Limit, use and the part of it that can be had back, by cgroups of version 2 and 1."""


def populate(address: int, n_bytes: int, *, writable: bool) -> bool:
    """Map the pages of `n_bytes` bytes from `address` on, which is the first byte of a page.

    No byte changes. False where the kernel cannot do that: the pages then come when they are used.
    Other threads run meanwhile.
    """
    advice = _POPULATE_WRITE if writable else _POPULATE_READ
    return bool(_madvise(address, n_bytes, advice) == 0)


class Pages:
    """The pages of a mapping, which are mapped as they are needed or in slices when there is time.

    The mapping is `n_bytes` bytes from `address` on. Calls are made from one thread.
    """

    def __init__(self, address: int, n_bytes: int, *, writable: bool) -> None:
        self._address = address
        self._n_bytes = n_bytes
        self._writable = writable
        self._upto = 0  # all before is mapped

    @property
    def whole(self) -> bool:
        """Whether nothing is left to do."""
        return self._upto >= self._n_bytes

    def need(self, first: int, end: int) -> None:
        """Map the pages of bytes `first` to `end` now, if they may not be."""
        if end > self._upto:
            self._map(max(first, self._upto) // _PAGE * _PAGE, end)

    def more(self) -> None:
        """Map the next slice."""
        first = self._upto
        self._upto = min(first + SLICE_BYTES, self._n_bytes)
        self._map(first, self._upto)

    def _map(self, first: int, end: int) -> None:
        if not populate(self._address + first, end - first, writable=self._writable):
            self._upto = self._n_bytes  # nor will it another time


def take(fd: int, n_bytes: int, available: Callable[[], int] | None = None) -> None:
    """Have the kernel set memory aside for all of a file in memory, so that no use of it can fail.

    Raises OSError with the number of bytes when there is too little. What is `available` is looked
    at on the way too, since other processes may be taking memory at the same time: without that
    the kernel would end one of them.
    """
    look = available or available_bytes
    for first in range(0, n_bytes, _CHUNK_BYTES):
        size = min(_CHUNK_BYTES, n_bytes - first)
        left = look()
        # At first all of it has to be there: nothing is taken that would only be given back.
        if left < (size if first else n_bytes):
            raise _short(n_bytes, first + left)
        try:
            os.posix_fallocate(fd, first, size)
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.ENOMEM):
                raise
            raise _short(n_bytes, first) from error


def touch(cells: npt.NDArray[np.uint8]) -> None:
    """Map all pages of a new mapping, which is all zeros, for writing."""
    address = int(cells.ctypes.data)
    for first in range(0, cells.size, _CHUNK_BYTES):
        size = min(_CHUNK_BYTES, cells.size - first)
        if not populate(address + first, size, writable=True):
            cells[first : first + size : _PAGE] = 0


def available_bytes(cgroup: Path = Path("/sys/fs/cgroup")) -> int:
    """Memory that processes here can still have: of the machine, and of a container's limit."""
    left = _field(Path("/proc/meminfo"), "MemAvailable:") * 1024
    for limit, used, inactive in _CGROUPS:
        try:
            most, now = int((cgroup / limit).read_text()), int((cgroup / used).read_text())
            stat = (cgroup / limit).parent / "memory.stat"
            left = min(left, most - now + _field(stat, inactive))
        except (OSError, ValueError):
            continue  # no such limit
    return max(0, left)


def _field(path: Path, name: str) -> int:
    for line in path.read_text().splitlines():
        words = line.split()
        if words[:1] == [name]:
            return int(words[1])
    raise ValueError(f"{path} has no {name}")


def _short(n_bytes: int, left: int) -> OSError:
    return OSError(errno.ENOMEM, f"needs {n_bytes} bytes of memory, and {left} can be had")
