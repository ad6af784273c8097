"""Shapes of models: what a token costs in memory, weights and arithmetic."""

from __future__ import annotations

import math
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

import msgspec

from twofold.cost.errors import CostError
from twofold.types import ceil_div


class Mla(msgspec.Struct, frozen=True, kw_only=True):
    """Multi-head latent attention: one latent per token and layer, not split over ranks."""

    kv_lora_rank: int
    q_lora_rank: int
    qk_rope_head_dim: int
    qk_nope_head_dim: int
    v_head_dim: int


class Moe(msgspec.Struct, frozen=True, kw_only=True):
    """Experts of a layer. The first `dense_layers` layers have none."""

    experts: int
    top_k: int
    expert_intermediate: int
    shared_experts: int = 0
    dense_layers: int = 0


class ModelShape(msgspec.Struct, frozen=True, kw_only=True):
    """A decoder's shape. `head_dim` is 0 with MLA.

    `sliding_window` tokens bound the context of all but `full_attention_layers` layers; 0: none
    do. `weight_item_bytes` and `expert_item_bytes` are bytes per parameter as checkpoints store
    them, scales included. Biases, norms and speculative layers are left out of parameter counts.
    """

    name: str
    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    max_position: int
    source: str
    gated_mlp: bool = True
    tie_embeddings: bool = False
    weight_item_bytes: float = 2.0
    expert_item_bytes: float = 2.0
    sliding_window: int = 0
    full_attention_layers: int = 0
    mla: Mla | None = None
    moe: Moe | None = None

    @property
    def sliding_layers(self) -> int:
        """Layers whose context a window bounds."""
        return self.layers - self.full_attention_layers if self.sliding_window else 0

    @property
    def _kv_items_per_layer(self) -> int:
        if self.mla is not None:
            return self.mla.kv_lora_rank + self.mla.qk_rope_head_dim
        return 2 * self.kv_heads * self.head_dim

    def kv_bytes_per_token(self, item_bytes: float = 2.0) -> int:
        """Bytes that one more token of a long context takes, all ranks of a replica together
        (counted once where MLA keeps a copy on each). Full-attention layers alone: layers with a
        window take no more once it is full.
        """
        return round((self.layers - self.sliding_layers) * self._kv_items_per_layer * item_bytes)

    def kv_bytes(self, tokens: int, item_bytes: float = 2.0) -> int:
        """Bytes of a context of `tokens`, sliding windows bounded."""
        per_layer = self._kv_items_per_layer * item_bytes
        full = (self.layers - self.sliding_layers) * tokens
        return round(per_layer * (full + self.sliding_layers * min(tokens, self.sliding_window)))

    def kv_bytes_per_rank(self, tokens: int, tp: int, item_bytes: float = 2.0) -> int:
        """Bytes on each of `tp` ranks: heads are split, at least one each; a latent is copied."""
        return round(self.kv_bytes(tokens, item_bytes) * self._rank_share(tp))

    def _rank_share(self, tp: int) -> float:
        if self.mla is not None:
            return 1.0
        return ceil_div(self.kv_heads, tp) / self.kv_heads

    @property
    def _attention_params(self) -> int:
        if self.mla is None:
            return self.hidden * self.head_dim * (2 * self.heads + 2 * self.kv_heads)
        mla = self.mla
        qk = mla.qk_nope_head_dim + mla.qk_rope_head_dim
        query = (
            self.hidden * mla.q_lora_rank + mla.q_lora_rank * self.heads * qk
            if mla.q_lora_rank
            else self.hidden * self.heads * qk
        )
        latent = self.hidden * (mla.kv_lora_rank + mla.qk_rope_head_dim)
        up = mla.kv_lora_rank * self.heads * (mla.qk_nope_head_dim + mla.v_head_dim)
        return query + latent + up + self.heads * mla.v_head_dim * self.hidden

    @property
    def _dense_mlp_params(self) -> int:
        return (3 if self.gated_mlp else 2) * self.hidden * self.intermediate

    @property
    def _expert_params(self) -> int:
        """Parameters of one expert of one layer."""
        return 3 * self.hidden * self.moe.expert_intermediate if self.moe else 0

    @property
    def _moe_layers(self) -> int:
        return self.layers - self.moe.dense_layers if self.moe else 0

    def _params(self, experts: float) -> float:
        """Parameters with `experts` routed experts counted in each expert layer."""
        total: float = self.layers * self._attention_params
        total += (self.layers - self._moe_layers) * self._dense_mlp_params
        if self.moe is not None:
            shared = self.moe.shared_experts * self._expert_params
            router = self.hidden * self.moe.experts
            total += self._moe_layers * (shared + router + experts * self._expert_params)
        return total + self.vocab * self.hidden

    @property
    def total_params(self) -> int:
        """All parameters."""
        extra = 0 if self.tie_embeddings else self.vocab * self.hidden
        return round(self._params(self.moe.experts if self.moe else 0)) + extra

    @property
    def active_params(self) -> int:
        """Parameters that one token is multiplied with; the input embedding is looked up."""
        return round(self._params(self.moe.top_k if self.moe else 0))

    @property
    def weights_bytes(self) -> int:
        """Bytes of all weights as stored."""
        routed = self._moe_layers * self._expert_params * (self.moe.experts if self.moe else 0)
        dense = self.total_params - routed
        return round(dense * self.weight_item_bytes + routed * self.expert_item_bytes)

    def touched_weight_bytes(self, tokens: int) -> float:
        """Weight bytes that a step of `tokens` tokens reads: experts as if chosen evenly."""
        routed, dense = 0.0, self._params(0)
        if self.moe is not None:
            share = 1.0 - (1.0 - self.moe.top_k / self.moe.experts) ** tokens
            routed = self._moe_layers * self._expert_params * self.moe.experts * share
        return dense * self.weight_item_bytes + routed * self.expert_item_bytes

    @property
    def decode_flops_per_pair(self) -> float:
        """Operations for one decoding token and one key token, all heads and layers.

        MLA decodes in the latent space.
        """
        if self.mla is not None:
            return (
                2.0
                * self.layers
                * self.heads
                * (2 * self.mla.kv_lora_rank + self.mla.qk_rope_head_dim)
            )
        return 4.0 * self.layers * self.heads * self.head_dim

    @property
    def prefill_flops_per_pair(self) -> float:
        """Operations for one prompt token and one key token; MLA expands heads for prompts."""
        if self.mla is not None:
            qk = self.mla.qk_nope_head_dim + self.mla.qk_rope_head_dim
            return 2.0 * self.layers * self.heads * (qk + self.mla.v_head_dim)
        return self.decode_flops_per_pair

    def attention_tokens(self, context: float) -> float:
        """Tokens of context that a token meets, averaged over layers with and without a window."""
        if not self.sliding_window:
            return context
        sliding = self.sliding_layers
        full = self.layers - sliding
        return (full * context + sliding * min(context, self.sliding_window)) / self.layers

    def kv_read_bytes(self, context: float, tp: int, item_bytes: float = 2.0) -> float:
        """Bytes of KV that one rank reads for one sequence's token."""
        per_layer = self._kv_items_per_layer * item_bytes * self._rank_share(tp)
        return per_layer * self.layers * self.attention_tokens(context)

    def windowed_pairs(self, new: int, before: int) -> float:
        """Query-key pairs of `new` tokens after `before`, summed over layers."""
        full = new * (before + new / 2.0)
        window = self.sliding_window
        if not window:
            return self.layers * full
        ramp = min(max(window - before, 0), new)
        bounded = ramp * (before + ramp / 2.0) + (new - ramp) * window
        return (self.layers - self.sliding_layers) * full + self.sliding_layers * bounded


@cache
def known_models() -> dict[str, ModelShape]:
    """Shapes shipped with the package, by name. Treat as read-only."""
    text = resources.files("twofold.cost").joinpath("data/models.json").read_bytes()
    return {shape.name: shape for shape in msgspec.json.decode(text, type=_ModelFile).models}


class _ModelFile(msgspec.Struct):
    models: list[ModelShape]


def model_shape(name_or_folder: str | Path) -> ModelShape:
    """A shipped shape by name (case does not matter, an owner before a slash neither) or the
    shape of a Hugging Face folder. Raises CostError.
    """
    path = Path(name_or_folder)
    if (path / "config.json").is_file():
        return read_hf_config(path / "config.json")
    wanted = str(name_or_folder).split("/")[-1].lower()
    for shape in known_models().values():
        name = shape.name.lower()
        if wanted in (name, f"meta-{name}", f"{name}-instruct", f"meta-{name}-instruct"):
            return shape
    raise CostError(
        f"{name_or_folder}: not a known model and no folder with a config.json; known are "
        + ", ".join(sorted(known_models()))
    )


def read_hf_config(path: str | Path) -> ModelShape:
    """The shape in a Hugging Face config.json. Raises CostError naming the file and field."""
    path = Path(path)
    try:
        config: dict[str, Any] = msgspec.json.decode(path.read_bytes(), type=dict)
    except OSError as error:
        raise CostError(f"{path}: cannot read: {error.strerror}") from None
    except msgspec.DecodeError as error:
        raise CostError(f"{path}: not JSON: {error}") from None
    nested = config.get("text_config")
    config = nested if isinstance(nested, dict) and nested else config
    return _Hf(path, config).shape()


class _Hf:
    """Reads the field names that Hugging Face families use for the same things."""

    def __init__(self, path: Path, config: dict[str, Any]) -> None:
        self._path = path
        self._config = config

    def _whole(self, *names: str, default: int | None = None) -> int:
        for name in names:
            value = self._config.get(name)
            if value is None:
                continue
            if type(value) is not int or value < 0:
                raise CostError(f"{self._path}:{name}: {value!r} is not a whole number from 0 on")
            return value
        if default is None:
            raise CostError(f"{self._path}:{names[0]}: missing; a decoder's config has it")
        return default

    def shape(self) -> ModelShape:
        config = self._config
        layers = self._whole("num_hidden_layers", "n_layer", "num_layers")
        hidden = self._whole("hidden_size", "n_embd", "d_model")
        heads = self._whole("num_attention_heads", "n_head")
        if not (layers and hidden and heads):
            raise CostError(f"{self._path}: layers, hidden size and heads must be above 0")
        intermediate = self._whole("intermediate_size", "ffn_dim", "n_inner", default=4 * hidden)
        window, full = self._windows(layers)
        item = self._item_bytes()
        mla = self._mla()
        kind = str(config.get("model_type", ""))
        return ModelShape(
            name=str(config.get("_name_or_path") or self._path.parent.name),
            layers=layers,
            hidden=hidden,
            intermediate=intermediate,
            heads=heads,
            kv_heads=self._whole("num_key_value_heads", default=heads),
            head_dim=0 if mla else self._whole("head_dim", default=hidden // heads),
            vocab=self._whole("vocab_size"),
            max_position=self._whole("max_position_embeddings", "n_positions", default=0),
            source=str(self._path.name),
            gated_mlp=kind not in ("opt", "bloom", "gpt2", "gpt_neox", "falcon", "phi"),
            tie_embeddings=bool(
                config.get("tie_word_embeddings", kind in ("opt", "bloom", "gpt2"))
            ),
            weight_item_bytes=item,
            expert_item_bytes=item,
            sliding_window=window,
            full_attention_layers=full,
            mla=mla,
            moe=self._moe(intermediate),
        )

    def _windows(self, layers: int) -> tuple[int, int]:
        window = self._whole("sliding_window", default=0)
        kinds = self._config.get("layer_types")
        if not window or self._config.get("use_sliding_window") is False:
            return 0, 0
        if isinstance(kinds, list):
            full = sum(kind == "full_attention" for kind in kinds)
        else:
            pattern = self._whole("sliding_window_pattern", default=0)
            full = layers // pattern if pattern > 1 else 0
            if "max_window_layers" in self._config:
                full = min(self._whole("max_window_layers"), layers)
        return (0, 0) if full == layers else (window, full)

    def _item_bytes(self) -> float:
        quantised = self._config.get("quantization_config")
        if isinstance(quantised, dict):
            method = str(quantised.get("quant_method", ""))
            bits = quantised.get("bits", quantised.get("w_bit"))
            if isinstance(bits, int) and bits:
                return bits / 8.0
            if "fp8" in method:
                return 1.0
            if "mxfp4" in method:
                return 4.25 / 8.0
        kind = str(self._config.get("dtype") or self._config.get("torch_dtype") or "bfloat16")
        return 4.0 if "float32" in kind else 2.0

    def _mla(self) -> Mla | None:
        if not self._whole("kv_lora_rank", default=0):
            return None
        return Mla(
            kv_lora_rank=self._whole("kv_lora_rank"),
            q_lora_rank=self._whole("q_lora_rank", default=0),
            qk_rope_head_dim=self._whole("qk_rope_head_dim"),
            qk_nope_head_dim=self._whole("qk_nope_head_dim"),
            v_head_dim=self._whole("v_head_dim"),
        )

    def _moe(self, intermediate: int) -> Moe | None:
        experts = self._whole("num_local_experts", "n_routed_experts", "num_experts", default=0)
        if experts < 2:
            return None
        return Moe(
            experts=experts,
            top_k=self._whole("num_experts_per_tok", "experts_per_token"),
            expert_intermediate=self._whole("moe_intermediate_size", default=intermediate),
            shared_experts=self._whole("n_shared_experts", "num_shared_experts", default=0),
            dense_layers=self._whole("first_k_dense_replace", default=0),
        )


def fits_tokens(
    model: ModelShape, memory_bytes: int, tp: int, item_bytes: float = 2.0, pp: int = 1
) -> int:
    """Tokens of KV that fit beside the weights on `tp` ranks of each of `pp` stages with
    `memory_bytes` each, long contexts assumed; 0 if the weights alone do not fit.

    Stages have even shares of layers, so each rank has 1/pp of what a rank of one stage has.
    """
    left = memory_bytes - model.weights_bytes / (tp * pp)
    each = model.kv_bytes_per_token(item_bytes) * model._rank_share(tp) / pp
    return max(math.floor(left / each), 0) if each else 0
