"""Checksums of KV blocks: xxh3, 64 bits. It guards against mistakes and faults, not attackers.

`xxhash` lets go of the interpreter lock while it hashes a block of some tens of KiB or more, so a
background thread that checks blocks does not hold up the others.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from typing import Final

import xxhash

_of_message: Final = xxhash.xxh3_64_intdigest


def message_checksum(message: bytes) -> int:
    """xxh3_64 of a message between workers, whether or not blocks have checksums."""
    digest: int = _of_message(message)
    return digest


def block_checksum(block: memoryview) -> int:
    """xxh3_64 of a block's bytes."""
    digest: int = xxhash.xxh3_64_intdigest(block)
    return digest


def checksums(buffer: memoryview, blocks: Iterable[int], block_bytes: int) -> tuple[int, ...]:
    """xxh3_64 of each of `blocks` in `buffer`, in their order.

    `buffer` is bytes, block i at i * block_bytes. Raises IndexError for a block outside it.
    """
    n_blocks = len(buffer) // block_bytes
    found = []
    for block in blocks:
        if not 0 <= block < n_blocks:
            raise IndexError(f"block {block} is outside a pool of {n_blocks} blocks")
        found.append(block_checksum(buffer[block * block_bytes : (block + 1) * block_bytes]))
    return tuple(found)


def unhashed(n_blocks: int) -> tuple[int, ...]:
    """What stands for the checksums of `n_blocks` blocks where none are computed.

    One for each, so that a transfer of which a part is missing still differs from a whole one.
    """
    return (0,) * n_blocks


def combined(sums: Sequence[int]) -> int:
    """One checksum for several blocks, made of theirs, so that no byte is hashed twice."""
    digest: int = xxhash.xxh3_64_intdigest(struct.pack(f"<{len(sums)}Q", *sums))
    return digest
