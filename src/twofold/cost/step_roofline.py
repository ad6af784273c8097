"""Step times from a model's shape and an accelerator's data sheet: an estimate, and called one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import msgspec

from twofold.cost.accelerators import Accelerator
from twofold.cost.errors import CostError
from twofold.cost.linear import Pieces
from twofold.cost.models import ModelShape
from twofold.cost.step import DecodeRuns, PrefillPart, work
from twofold.types import NS_PER_S


class RooflineFactors(msgspec.Struct, frozen=True, kw_only=True):
    """What keeps real engines below the data sheet. Assumed, not fitted per model.

    Shares of peak arithmetic (dense layers and attention) and of peak bandwidth; ns per layer for
    launches; ns per all-reduce (two a layer when tp > 1) beside its bytes at the link's share.
    """

    compute: float = 0.65
    attention_compute: float = 0.4
    bandwidth: float = 0.8
    layer_ns: int = 10_000
    allreduce_ns: int = 8_000
    link: float = 0.7


DEFAULT_FACTORS: Final = RooflineFactors()


class RooflineStep(DecodeRuns):
    """max(arithmetic, bytes) for the weights plus max(arithmetic, bytes) for attention, plus
    launches and all-reduces, on `tp` accelerators. `kv_item_bytes`: bytes of one cached element.
    Raises CostError if the weights do not fit or a figure is missing.
    """

    def __init__(
        self,
        model: ModelShape,
        accelerator: Accelerator,
        *,
        tp: int = 1,
        kv_item_bytes: float = 2.0,
        factors: RooflineFactors = DEFAULT_FACTORS,
    ) -> None:
        super().__init__(
            f"{model.name} on {tp} x {accelerator.name} (roofline, an estimate)", self._pieces
        )
        self.estimate = True
        if tp < 1:
            raise CostError(f"tp is {tp}; a whole number from 1 on is right")
        if model.weights_bytes > tp * accelerator.memory_bytes:
            raise CostError(
                f"{model.name} has {model.weights_bytes / 1e9:.0f} GB of weights, more than "
                f"{tp} x {accelerator.name} hold; more accelerators are needed"
            )
        self._model = model
        flops = accelerator.flops(model.weight_item_bytes)
        self._weight_flops_ns = NS_PER_S / (flops * factors.compute * tp)
        self._pair_flops_ns = NS_PER_S / (accelerator.flops(2.0) * factors.attention_compute * tp)
        self._byte_ns = NS_PER_S / (accelerator.bandwidth_bytes_per_s * factors.bandwidth)
        self._tp = tp
        self._kv_item = kv_item_bytes
        self._fixed_ns = float(model.layers * factors.layer_ns)
        self._token_link_ns = 0.0
        if tp > 1:
            link = accelerator.link_bytes_per_s * factors.link
            self._fixed_ns += 2.0 * model.layers * factors.allreduce_ns
            ring = 2.0 * (tp - 1) / tp * model.hidden * 2.0
            self._token_link_ns = 2.0 * model.layers * ring / link * NS_PER_S

    def _tokens_ns(self, tokens: int) -> float:
        """Everything but attention for a step of `tokens` tokens."""
        model = self._model
        flops = 2.0 * model.active_params * tokens * self._weight_flops_ns
        weights = model.touched_weight_bytes(tokens) / self._tp * self._byte_ns
        return max(flops, weights) + self._fixed_ns + self._token_link_ns * tokens

    def _read_ns(self, batch: int, context: int) -> float:
        """Attention of a decode step."""
        each = context / batch
        model = self._model
        pairs = model.attention_tokens(each) * batch
        flops = model.decode_flops_per_pair * pairs * self._pair_flops_ns
        return max(
            flops, model.kv_read_bytes(each, self._tp, self._kv_item) * batch * self._byte_ns
        )

    def _pieces(self, batch: int) -> tuple[Pieces, int | None]:
        base = self._tokens_ns(batch)
        window = self._model.sliding_window
        # Linear in the context, with a bend where every window is full.
        xs = [0, batch * window, batch * window * 2] if window else [0, batch]
        ys = [base + self._read_ns(batch, x) for x in xs]
        return Pieces(xs, ys, (ys[-1] - ys[-2]) / (xs[-1] - xs[-2])), None

    def step_ns(self, prefill: Sequence[PrefillPart], batch: int, context: int) -> int:
        """See StepTime."""
        if not prefill:
            return self.decode_ns(batch, context) if batch else 0
        model = self._model
        new, pairs = work(prefill)
        ns = self._tokens_ns(new + batch)
        if model.sliding_window:
            pairs = sum(model.windowed_pairs(tokens, before) for tokens, before in prefill)
            pairs /= model.layers
        flops = model.prefill_flops_per_pair * pairs * self._pair_flops_ns
        # Each chunk reads the keys and values before it once more.
        read = sum(model.kv_read_bytes(b + n, self._tp, self._kv_item) for n, b in prefill)
        ns += max(flops, read * self._byte_ns)
        return round(ns + self._read_ns(batch, context)) if batch else round(ns)
