"""The KV pool: one run of bytes per block, over all layers, in device and in host memory.

Shape `[num_blocks, layers, 2, block_size, kv_heads, head_dim]`, C-contiguous; index 0 of the
third axis holds keys, 1 values. Block i is bytes `i * bytes_per_block` to
`(i + 1) * bytes_per_block` of the host buffer, which is what transports copy.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

import torch

DTYPES: Final[dict[str, torch.dtype]] = {
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
}


class KVPool:
    """KV blocks on `device`, and the host buffer that peers read and write.

    On the CPU the pool lies in the buffer itself, unless `staged`: then, as on any other device,
    blocks pass between pool and buffer only by `export_blocks` and `import_blocks`. Without a
    buffer there is nothing to export to.

    Raises ValueError when the buffer is read-only or too small, and MemoryError when the device has
    too little memory.
    """

    def __init__(
        self,
        *,
        num_blocks: int,
        layers: int,
        block_size: int,
        kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
        buffer: memoryview | None = None,
        staged: bool = False,
    ) -> None:
        shape = (num_blocks, layers, 2, block_size, kv_heads, head_dim)
        if min(shape) < 1:
            raise ValueError(f"KV pool of shape {shape}: every size must be at least 1")
        self.num_blocks: Final = num_blocks
        self.layers: Final = layers
        self.block_size: Final = block_size
        self.kv_heads: Final = kv_heads
        self.head_dim: Final = head_dim
        self.bytes_per_block: Final = 2 * layers * block_size * kv_heads * head_dim * dtype.itemsize
        host = self._over(buffer, shape, dtype) if buffer is not None else None
        if host is not None and device.type == "cpu" and not staged:
            self.blocks = host
            self._host = None
        else:
            # Zeroed, since attention multiplies the masked slots of a block by zero, and that
            # needs them to be numbers (see `StepBatch`).
            self.blocks = self._zeros(shape, dtype, device)
            self._host = host

    def _over(self, buffer: memoryview, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        need = self.num_blocks * self.bytes_per_block
        if buffer.readonly:
            raise ValueError("the KV buffer is read-only")
        if buffer.nbytes < need:
            raise ValueError(f"the KV buffer has {buffer.nbytes} bytes, the pool needs {need}")
        count = need // dtype.itemsize
        return torch.frombuffer(buffer, dtype=dtype, count=count).view(shape)

    @staticmethod
    def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        try:
            return torch.zeros(shape, dtype=dtype, device=device)
        except RuntimeError as error:
            # Of memory that it cannot have, torch says so with this class or one below it.
            n_bytes = math.prod(shape) * dtype.itemsize
            reason = str(error).partition("\n")[0]
            raise MemoryError(f"needs {n_bytes} bytes of memory on {device}: {reason}") from error

    @property
    def staged(self) -> bool:
        """Whether blocks pass between pool and host buffer only by export and import."""
        return self._host is not None

    @property
    def rows(self) -> torch.Tensor:
        """The pool as `[num_blocks * layers * 2, block_size * kv_heads * head_dim]`."""
        return self.blocks.view(-1, self.block_size * self.kv_heads * self.head_dim)

    @property
    def slots(self) -> torch.Tensor:
        """The pool as `[num_blocks * layers * 2 * block_size, kv_heads, head_dim]`."""
        return self.blocks.view(-1, self.kv_heads, self.head_dim)

    @torch.inference_mode()
    def export_blocks(self, ids: Sequence[int]) -> None:
        """Copy blocks from the device to the host buffer, if they are not one and the same."""
        if self._host is None or not ids:
            return
        index = torch.tensor(ids)
        self._host.index_copy_(
            0, index, self.blocks.index_select(0, index.to(self.blocks.device)).cpu()
        )

    @torch.inference_mode()
    def import_blocks(self, ids: Sequence[int]) -> None:
        """Copy blocks from the host buffer to the device, if they are not one and the same."""
        if self._host is None or not ids:
            return
        index = torch.tensor(ids)
        device = self.blocks.device
        self.blocks.index_copy_(0, index.to(device), self._host.index_select(0, index).to(device))

    def close(self) -> None:
        """Let go of the caller's buffer, so that it can be closed. The pool is unusable then."""
        self.blocks = torch.empty(0)
        self._host = None
