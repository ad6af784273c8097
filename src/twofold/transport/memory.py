"""The memory of one KV pool, in a form that peers on the same host can map.

The region is an anonymous file (memfd): it has no name anywhere, so however its process ends
nothing is left behind. Peers open it through `/proc/<pid>/fd/<fd>`, which the kernel allows to
the same user only.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import struct
from typing import Final

import numpy as np

from twofold.transport.pages import take, touch
from twofold.transport.segment import (
    EPOCH_BYTES,
    MAX_BLOCK_BYTES,
    MAX_BLOCKS,
    ShmSegment,
    format_segment,
)

HEADER_BYTES: Final = 4096
"""One page before the blocks, so that the blocks start on a page."""

MAGIC: Final = b"2FOLDKV\0"
VERSION: Final = 1
HEADER: Final = struct.Struct(f"<8sII{EPOCH_BYTES}sQQ")
"""magic, version, unused, epoch, number of blocks, bytes of a block."""

# A peer that maps the region would get SIGBUS if it shrank, so its size is sealed.
SEALS: Final = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


class PoolMemory:
    """`n_blocks` blocks of `block_bytes` bytes each, shared with peers by `segment`.

    `epoch` is a random token of 16 bytes that names this life of the pool: a peer that holds an
    older one is told "stale segment". `populate` takes all memory from the kernel at once and maps
    it for writing: it makes the start slower, by a second for about 3 GB, and the first use of
    each block much faster. Raises ValueError for sizes or a token out of bounds, and OSError when
    the memory cannot be had: with `populate` at once, without it a write may fail by SIGBUS.
    """

    def __init__(
        self, n_blocks: int, block_bytes: int, epoch: bytes, *, populate: bool = False
    ) -> None:
        if not 1 <= n_blocks <= MAX_BLOCKS:
            raise ValueError(f"n_blocks must be 1 to {MAX_BLOCKS}, not {n_blocks}")
        if not 1 <= block_bytes <= MAX_BLOCK_BYTES:
            raise ValueError(f"block_bytes must be 1 to {MAX_BLOCK_BYTES}, not {block_bytes}")
        if len(epoch) != EPOCH_BYTES or not any(epoch):
            raise ValueError(f"epoch must be {EPOCH_BYTES} random bytes")
        self.n_blocks = n_blocks
        self.block_bytes = block_bytes
        self.epoch = epoch
        self._fd = os.memfd_create("twofold-kv", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            size = HEADER_BYTES + n_blocks * block_bytes
            if populate:
                take(self._fd, size)
            else:
                os.ftruncate(self._fd, size)
            fcntl.fcntl(self._fd, fcntl.F_ADD_SEALS, SEALS)
            self._map = mmap.mmap(self._fd, size, flags=mmap.MAP_SHARED)
            if populate:
                # Not by MAP_POPULATE, which maps as for reading: the first write to each page may
                # then be slow still.
                touch(np.frombuffer(self._map, np.uint8))
        except BaseException:
            os.close(self._fd)
            raise
        self._map[: HEADER.size] = HEADER.pack(MAGIC, VERSION, 0, epoch, n_blocks, block_bytes)
        whole = memoryview(self._map)
        self.buffer: memoryview = whole[HEADER_BYTES:]
        """Writable view of the blocks, `n_blocks * block_bytes` bytes. Empty after `close`."""
        whole.release()
        self.segment = format_segment(
            ShmSegment(
                pid=os.getpid(),
                fd=self._fd,
                epoch=epoch.hex(),
                n_blocks=n_blocks,
                block_bytes=block_bytes,
            )
        )
        """How a peer on this host finds the pool."""

    @property
    def n_bytes(self) -> int:
        """Bytes of all blocks."""
        return self.n_blocks * self.block_bytes

    def close(self) -> None:
        """Withdraw the pool from peers and let go of its memory. May be called again.

        Peers that have it mapped see the epoch gone. Arrays and tensors over `buffer` stay
        usable: the kernel takes the memory back when the last of them is dropped.
        """
        if self._fd < 0:
            return
        self._map[: HEADER.size] = bytes(HEADER.size)
        os.close(self._fd)
        self._fd = -1
        buffer, self.buffer = self.buffer, memoryview(bytearray())
        mapping = self._map
        del self._map
        # Where views are still held elsewhere, the mapping goes with the last of them.
        with contextlib.suppress(BufferError):
            buffer.release()
            mapping.close()
