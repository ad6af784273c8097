"""Running steps: one flattened batch through the model, one sampled token per row that asks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple

import numpy as np
import torch

from twofold.device.attention import CONTEXT
from twofold.device.batch import Span, StepBatch, Workspace
from twofold.device.pool import DTYPES, KVPool
from twofold.device.sampling import Sampled, sample
from twofold.device.weights import LoadedModel
from twofold.types import BlockId, SamplingParams, ceil_div

__all__ = ["Row", "Runner", "Sampled"]


_LAYER_GROUPS: Final = 4
"""Parts of a step after which progress is told, the last excepted."""


class Row(NamedTuple):
    """One sequence's part in a step.

    `tokens` are the ids to compute, at positions from `start` on; the KV of all positions before
    is in `blocks`, the block table, which covers `start + len(tokens)` tokens. With `sample`, the
    last token's logits are sampled by `params`: `history` is the prompt and the output so far, of
    which the first `n_prompt` are the prompt, and `forbid` are ids that may not come now.
    """

    tokens: Sequence[int]
    start: int
    blocks: Sequence[BlockId]
    sample: bool
    params: SamplingParams = SamplingParams()
    history: Sequence[int] = ()
    n_prompt: int = 0
    forbid: Sequence[int] = ()


class Runner:
    """A model and its KV pool. Between steps it keeps nothing but the pool.

    `buffer` is host memory for the pool (see `KVPool`), at least `num_blocks * bytes_per_block`
    bytes. `threads` is the number of CPU threads for torch, in the whole process; 0 leaves it.
    Raises ValueError for a buffer that does not do. Calls must not overlap.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        *,
        num_blocks: int,
        block_size: int,
        buffer: memoryview | None = None,
        staged: bool = False,
        threads: int = 0,
    ) -> None:
        if threads:
            torch.set_num_threads(threads)
        self._model: Any = loaded.model
        self._vocab_size = loaded.vocab_size
        self._device = loaded.device
        self._pool = KVPool(
            num_blocks=num_blocks,
            layers=loaded.shape.layers,
            block_size=block_size,
            kv_heads=loaded.shape.kv_heads,
            head_dim=loaded.shape.head_dim,
            dtype=DTYPES[loaded.dtype],
            device=loaded.device,
            buffer=buffer,
            staged=staged,
        )
        self._workspace = Workspace(self._pool.blocks)
        self.bytes_per_block: Final = self._pool.bytes_per_block

    @property
    def in_place(self) -> bool:
        """Whether the pool lies in the host buffer, so that nothing is exported or imported."""
        return not self._pool.staged

    @torch.inference_mode()
    def run(
        self, rows: Sequence[Row], on_layers: Callable[[int], None] | None = None
    ) -> list[Sampled | None]:
        """Compute `rows` in one pass. The answer goes with them, None where `sample` is false.

        `on_layers(n)` is called a few times meanwhile, in this thread: the KV of the first `n`
        layers is as it will be. For a pool that is `in_place` only.

        Raises ValueError for a row that cannot be run, before anything is written, and
        ArithmeticError when logits are not finite.
        """
        if not rows:
            return []
        tokens = self._checked(rows)
        spans = [Span(row.start, len(row.tokens), row.blocks) for row in rows]
        ends = np.cumsum([span.length for span in spans])
        asked = [i for i, row in enumerate(rows) if row.sample]
        on_layer = self._telling(on_layers) if on_layers is not None else None
        batch = StepBatch(spans, self._pool, self._workspace, on_layer)
        output = self._model(
            input_ids=torch.from_numpy(tokens)[None].to(self._device),
            position_ids=batch.positions()[None],
            use_cache=False,
            logits_to_keep=torch.from_numpy(ends[asked] - 1).to(self._device),
            **{CONTEXT: batch},
        )
        answer: list[Sampled | None] = [None] * len(rows)
        drawn = sample(output.logits[0], [rows[i] for i in asked])
        for i, sampled in zip(asked, drawn, strict=True):
            answer[i] = sampled
        return answer

    def _telling(self, on_layers: Callable[[int], None]) -> Callable[[int], None]:
        """Makes of each layer's end the end of a group of layers."""
        layers = self._pool.layers
        ends = frozenset(layers * i // _LAYER_GROUPS for i in range(1, _LAYER_GROUPS))

        def on_layer(layer: int) -> None:
            if layer + 1 in ends:
                on_layers(layer + 1)

        return on_layer

    def export_blocks(self, ids: Sequence[BlockId]) -> None:
        """Make the host buffer hold these blocks as they are on the device."""
        self._pool.export_blocks(ids)

    def import_blocks(self, ids: Sequence[BlockId]) -> None:
        """Make the device hold these blocks as they are in the host buffer."""
        self._pool.import_blocks(ids)

    def close(self) -> None:
        """Let go of the caller's buffer. The runner is unusable from then on."""
        self._pool.close()

    def _checked(self, rows: Sequence[Row]) -> np.ndarray:
        """All rows' tokens in order, `[T]` int64. On an accelerator a bad index is fatal."""
        size, limit = self._pool.block_size, self._pool.num_blocks
        for row in rows:
            end = row.start + len(row.tokens)
            if not row.tokens or row.start < 0:
                raise ValueError(
                    f"row of {len(row.tokens)} tokens from {row.start}: nothing to run"
                )
            if len(row.blocks) * size < end:
                raise ValueError(f"{len(row.blocks)} blocks of {size} cannot hold {end} tokens")
            used = row.blocks[: ceil_div(end, size)]
            if min(used) < 0 or max(used) >= limit:
                raise ValueError(f"block ids must be from 0 to {limit - 1}")
        tokens = np.concatenate([np.asarray(row.tokens, dtype=np.int64) for row in rows])
        if tokens.min() < 0 or tokens.max() >= self._vocab_size:
            raise ValueError(f"token ids must be from 0 to {self._vocab_size - 1}")
        return tokens
