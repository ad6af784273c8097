"""One step's flattened batch: where each row's KV is written and what each row may read.

All of it follows from the rows' positions and block tables, so it is worked out once per step and
per distinct sliding window, and then used by every layer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

import numpy as np
import torch

from twofold.device.pool import KVPool
from twofold.types import ceil_div

_SLACK_BLOCKS: Final = 8
"""Decode rows whose contexts differ by no more than this are always read together."""


class Span(NamedTuple):
    """A row of the batch: `length` tokens of one sequence, from position `start` on.

    `blocks` is the sequence's block table, covering at least `start + length` tokens.
    """

    start: int
    length: int
    blocks: Sequence[int]

    @property
    def end(self) -> int:
        """Position behind the last token."""
        return self.start + self.length


class Workspace:
    """Memory for gathered KV that is used again each layer and step, since fresh pages cost."""

    def __init__(self, like: torch.Tensor) -> None:
        self._like = like
        self._kept: dict[str, torch.Tensor] = {}

    def take(self, name: str, rows: int, width: int) -> torch.Tensor:
        """A `[rows, width]` tensor of unspecified content, valid until `name` is taken again."""
        kept = self._kept.get(name)
        if kept is None or kept.numel() < rows * width:
            kept = self._like.new_empty(rows * width + rows * width // 2)
            self._kept[name] = kept
        return kept[: rows * width].view(rows, width)


class _Chunk(NamedTuple):
    """A row of several tokens. `rows` is None when all that it may read is in the batch itself."""

    begin: int
    end: int
    rows: torch.Tensor | None
    mask: torch.Tensor | None


class _Group(NamedTuple):
    """Rows of one token each whose contexts are read at once, padded to the longest."""

    places: torch.Tensor
    rows: torch.Tensor
    mask: torch.Tensor


class _Plan(NamedTuple):
    chunks: tuple[_Chunk, ...]
    groups: tuple[_Group, ...]


class StepBatch:
    """Paged attention for one step; the `Context` that a forward pass carries.

    Keys and values are written to the pool first. Then rows of one token are attended in groups,
    each row of several tokens by itself.

    Masked slots get a weight of exactly zero, which removes them only if what they hold is finite.
    So when a row enters a block without filling it, the rest of the block is zeroed: no slot
    is ever read that was not written or zeroed for its present owner, whatever a broken transfer
    left there.

    `on_layer(i)` is called once the keys and values of layers 0 to `i` are all written.
    """

    def __init__(
        self,
        spans: Sequence[Span],
        pool: KVPool,
        workspace: Workspace,
        on_layer: Callable[[int], None] | None = None,
    ) -> None:
        self._spans = spans
        self._pool = pool
        self._workspace = workspace
        self._on_layer = on_layer
        self._device = pool.blocks.device
        self._plans: dict[int | None, _Plan] = {}
        self._slots = self._to_device(self._slot_numbers())
        for span in spans:
            self._zero_tail(span)

    def _to_device(self, array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(array).to(self._device)

    def _slot_numbers(self) -> np.ndarray:
        """Row of `KVPool.slots` that takes each token's key in layer 0."""
        size, per_block = self._pool.block_size, 2 * self._pool.layers * self._pool.block_size
        parts = []
        for span in self._spans:
            positions = np.arange(span.start, span.end)
            first = span.start // size
            table = np.asarray(span.blocks[first : ceil_div(span.end, size)], dtype=np.int64)
            parts.append(table[positions // size - first] * per_block + positions % size)
        return np.concatenate(parts)

    def _zero_tail(self, span: Span) -> None:
        last, used = divmod(span.end, self._pool.block_size)
        if used and span.start <= last * self._pool.block_size:
            self._pool.blocks[span.blocks[last], :, :, used:].zero_()

    def positions(self) -> torch.Tensor:
        """Position of every token, `[T]` int64."""
        return self._to_device(np.concatenate([np.arange(s.start, s.end) for s in self._spans]))

    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *,
        scaling: float | None,
        window: int | None,
    ) -> torch.Tensor:
        """See `Context.attend`."""
        slots = self._slots + layer * 2 * self._pool.block_size
        self._pool.slots.index_copy_(0, slots, key.transpose(0, 1))
        self._pool.slots.index_copy_(0, slots + self._pool.block_size, value.transpose(0, 1))
        if self._on_layer is not None:
            self._on_layer(layer)
        if window not in self._plans:
            self._plans[window] = self._plan(window, query.dtype)
        plan = self._plans[window]
        output = query.new_empty(query.shape[1], query.shape[0], query.shape[2])
        for group in plan.groups:
            self._decode(layer, group, query, scaling, output)
        for chunk in plan.chunks:
            self._prefill(layer, chunk, query, key, value, scaling, output)
        return output

    # ------------------------------------------------------------------------------ attention

    def _gather(self, layer: int, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of blocks, each `[len(rows), block_size * kv_heads * head_dim]`."""
        pool = self._pool.rows
        keys = self._workspace.take("keys", len(rows), pool.shape[1])
        values = self._workspace.take("values", len(rows), pool.shape[1])
        index = rows + 2 * layer
        torch.index_select(pool, 0, index, out=keys)
        torch.index_select(pool, 0, index + 1, out=values)
        return keys, values

    def _decode(
        self,
        layer: int,
        group: _Group,
        query: torch.Tensor,
        scaling: float | None,
        output: torch.Tensor,
    ) -> None:
        """One token per row: the query heads of a KV head are the rows of one small product."""
        count, kv_heads, head_dim = len(group.places), self._pool.kv_heads, self._pool.head_dim
        keys, values = self._gather(layer, group.rows)
        queries = query.transpose(0, 1)[group.places].view(count, kv_heads, -1, head_dim)
        attended = torch.nn.functional.scaled_dot_product_attention(
            queries,
            keys.view(count, -1, kv_heads, head_dim).transpose(1, 2),
            values.view(count, -1, kv_heads, head_dim).transpose(1, 2),
            attn_mask=group.mask,
            scale=scaling,
        )
        output[group.places] = attended.reshape(count, -1, head_dim)

    def _prefill(
        self,
        layer: int,
        chunk: _Chunk,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scaling: float | None,
        output: torch.Tensor,
    ) -> None:
        """Several tokens of one sequence, `[kv_heads, group, n, head_dim]` by KV head."""
        begin, end, kv_heads, head_dim = *chunk[:2], self._pool.kv_heads, self._pool.head_dim
        if chunk.rows is None:
            keys, values = key[:, begin:end], value[:, begin:end]
        else:
            gathered = self._gather(layer, chunk.rows)
            keys, values = (g.view(-1, kv_heads, head_dim).transpose(0, 1) for g in gathered)
        queries = query[:, begin:end].view(kv_heads, -1, end - begin, head_dim)
        groups = queries.shape[1]
        # Expanded, not repeated: the heads of a group read the same keys in place.
        attended = torch.nn.functional.scaled_dot_product_attention(
            queries,
            keys.unsqueeze(1).expand(-1, groups, -1, -1),
            values.unsqueeze(1).expand(-1, groups, -1, -1),
            attn_mask=chunk.mask,
            is_causal=chunk.mask is None,
            scale=scaling,
        )
        output[begin:end] = attended.flatten(0, 1).transpose(0, 1)

    # --------------------------------------------------------------------------------- plans

    def _plan(self, window: int | None, dtype: torch.dtype) -> _Plan:
        chunks, singles, begin = [], [], 0
        for span in self._spans:
            if span.length == 1:
                singles.append((begin, span))
            else:
                chunks.append(self._chunk(begin, span, window, dtype))
            begin += span.length
        groups = tuple(self._group(g, window, dtype) for g in self._grouped(singles, window))
        return _Plan(tuple(chunks), groups)

    def _first_block(self, start: int, window: int | None) -> int:
        """Index, in its table, of the first block that the token at `start` may read."""
        return 0 if window is None else max(0, start - window + 1) // self._pool.block_size

    def _chunk(self, begin: int, span: Span, window: int | None, dtype: torch.dtype) -> _Chunk:
        fresh = span.start == 0
        if fresh and (window is None or span.length <= window):
            return _Chunk(begin, begin + span.length, None, None)
        if fresh:
            rows, origin, length = None, 0, span.length
        else:
            size = self._pool.block_size
            first, last = self._first_block(span.start, window), ceil_div(span.end, size)
            table = np.asarray(span.blocks[first:last], dtype=np.int64)
            rows = self._to_device(table * (2 * self._pool.layers))
            origin, length = first * size, (last - first) * size
        seen = torch.arange(origin, origin + length)
        at = torch.arange(span.start, span.end)[:, None]
        hidden = seen > at
        if window is not None:
            hidden |= seen <= at - window
        return _Chunk(begin, begin + span.length, rows, self._additive(hidden, dtype))

    def _grouped(
        self, singles: list[tuple[int, Span]], window: int | None
    ) -> list[list[tuple[int, Span]]]:
        """Rows in order of context, cut where padding would more than double what is read."""
        size = self._pool.block_size

        def width(item: tuple[int, Span]) -> int:
            return ceil_div(item[1].end, size) - self._first_block(item[1].start, window)

        groups: list[list[tuple[int, Span]]] = []
        longest = 0
        for item in sorted(singles, key=width, reverse=True):
            if not groups or longest > max(2 * width(item), width(item) + _SLACK_BLOCKS):
                groups.append([])
                longest = width(item)
            groups[-1].append(item)
        return groups

    def _group(
        self, group: list[tuple[int, Span]], window: int | None, dtype: torch.dtype
    ) -> _Group:
        size = self._pool.block_size
        firsts = [self._first_block(span.start, window) for _, span in group]
        tables = [
            span.blocks[first : ceil_div(span.end, size)]
            for first, (_, span) in zip(firsts, group, strict=True)
        ]
        most = max(len(table) for table in tables)
        rows = np.empty((len(group), most), dtype=np.int64)
        for i, table in enumerate(tables):
            rows[i, : len(table)] = table
            # Padding repeats a block of the row's own, whose slots are all finite.
            rows[i, len(table) :] = table[-1]
        at = torch.tensor([span.start for _, span in group])[:, None]
        seen = torch.tensor(firsts)[:, None] * size + torch.arange(most * size)
        hidden = seen > at
        if window is not None:
            hidden |= seen <= at - window
        return _Group(
            self._to_device(np.array([begin for begin, _ in group], dtype=np.int64)),
            self._to_device(rows.reshape(-1) * (2 * self._pool.layers)),
            self._additive(hidden, dtype)[:, None, None, :],
        )

    def _additive(self, hidden: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        mask = torch.zeros(hidden.shape, dtype=dtype)
        return mask.masked_fill_(hidden, float("-inf")).to(self._device)
