"""Our attention, registered with transformers under the name `ATTENTION`.

Models are transformers' own. Each of their layers calls `paged_attention`, which hands the
layer's queries, keys and values to whatever the forward pass was given as the keyword `CONTEXT`:
a `StepBatch` when serving, a `Probe` when a model is looked over. Nothing is kept between calls.

No mask function is registered under this name on purpose: transformers then builds no mask at
all, and `StepBatch` masks what it must from the rows' positions.
"""

from __future__ import annotations

from typing import Any, Final, Protocol

import torch

ATTENTION: Final = "twofold_paged"
CONTEXT: Final = "twofold_context"

_UNSUPPORTED: Final = ("softcap", "s_aux", "position_bias")
"""Keywords by which models ask for attention that is more than a scaled softmax."""


class Context(Protocol):
    """What a forward pass carries to every layer's attention."""

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
        """Attention of one layer over a flattened batch of T tokens.

        `query` is `[heads, T, head_dim]`, `key` and `value` are `[kv_heads, T, head_dim]`; the
        answer is `[T, heads, head_dim]`. `window` is the number of latest tokens, itself
        included, that a token may see; None for all.
        """
        ...


def paged_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """transformers' attention function: `[1, heads, T, head_dim]` to `[1, T, heads, head_dim]`.

    Raises ValueError when the pass has no `CONTEXT` or the layer asks for what we do not do.
    """
    context: Context | None = kwargs.get(CONTEXT)
    if context is None:
        raise ValueError(f"{ATTENTION} attention was called without {CONTEXT}")
    for name in _UNSUPPORTED:
        if kwargs.get(name) is not None:
            raise ValueError(f"attention with {name} is not supported")
    if not getattr(module, "is_causal", True):
        raise ValueError("attention that is not causal is not supported")
    layer = getattr(module, "layer_idx", None)
    if not isinstance(layer, int):
        raise ValueError("attention layers that do not know their index are not supported")
    output = context.attend(
        layer, query[0], key[0], value[0], scaling=scaling, window=sliding_window
    )
    return output.unsqueeze(0), None


def register() -> None:
    """Make `ATTENTION` known to transformers. May be called more than once."""
    from transformers import AttentionInterface

    AttentionInterface.register(ATTENTION, paged_attention)
