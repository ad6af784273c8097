"""Looking a loaded model over: does all its attention go through ours, and of what shape is it?

One forward pass of two tokens shows what no configuration file says reliably.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from twofold.device.attention import CONTEXT


class Shape(NamedTuple):
    """What the KV cache of a model looks like."""

    layers: int
    kv_heads: int
    head_dim: int


class Probe:
    """A `Context` that attends plainly over the batch as one sequence and notes the shapes."""

    def __init__(self) -> None:
        self.seen: dict[int, tuple[int, int]] = {}

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
        """See `Context.attend`. Raises ValueError on shapes that the pool cannot hold."""
        if layer in self.seen:
            raise ValueError(f"layer {layer} attends twice")
        if value.shape != key.shape:
            raise ValueError("keys and values of different sizes (as in MLA) are not supported")
        if query.shape[-1] != key.shape[-1] or query.shape[0] % key.shape[0]:
            raise ValueError(f"queries {tuple(query.shape)} do not go with {tuple(key.shape)} keys")
        self.seen[layer] = (key.shape[0], key.shape[2])
        repeats = query.shape[0] // key.shape[0]
        attended = torch.nn.functional.scaled_dot_product_attention(
            query,
            key.repeat_interleave(repeats, 0),
            value.repeat_interleave(repeats, 0),
            is_causal=True,
            scale=scaling,
        )
        return attended.transpose(0, 1)


@torch.inference_mode()
def probe(model: Any, layers: int, device: torch.device) -> Shape:
    """The shape of `model`'s KV cache.

    Raises ValueError when not every one of its `layers` layers attends, once, with the same
    numbers of KV heads and head dimensions, through our attention.
    """
    context = Probe()
    tokens = torch.zeros((1, 2), dtype=torch.int64, device=device)
    positions = torch.arange(2, device=device)[None]
    model(input_ids=tokens, position_ids=positions, use_cache=False, **{CONTEXT: context})
    if sorted(context.seen) != list(range(layers)):
        raise ValueError(
            f"only {len(context.seen)} of {layers} layers use transformers' attention interface"
        )
    shapes = sorted(set(context.seen.values()))
    if len(shapes) != 1:
        raise ValueError(f"layers of different KV shapes (heads, head dim) {shapes}")
    return Shape(layers, *shapes[0])
