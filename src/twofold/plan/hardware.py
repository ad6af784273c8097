"""What a simulated worker runs on: its step times, its memory for KV, its price and power."""

from __future__ import annotations

import hashlib
import math
from functools import lru_cache
from typing import Final

import msgspec

from twofold.cost.accelerators import Accelerator, accelerator
from twofold.cost.errors import CostError
from twofold.cost.models import ModelShape, fits_tokens, known_models, model_shape
from twofold.cost.pipeline import Pipeline
from twofold.cost.profile import Profile
from twofold.cost.readers import read_profile
from twofold.cost.step import StepTime
from twofold.cost.step_profile import step_time
from twofold.cost.step_roofline import RooflineStep
from twofold.types import NS_PER_US, PROTOCOL_VERSION, KVLayout, ceil_div

NODE_GPUS: Final = 8
ACTIVATION_BYTES: Final = 2
"""Of each of a token's hidden values between stages, whatever weights and KV are kept in."""
HOP_LATENCY_NS: Final = 10 * NS_PER_US
"""Before activations arrive at the next stage: a launch and a message, by order of magnitude."""
KV_ITEM_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4, "float8_e4m3fn": 1}


class Hardware(msgspec.Struct, frozen=True, kw_only=True):
    """One kind of worker: a profile (a file, and which part of it), or else an estimate.

    `model` says the shape where there is no profile or its model is not known. `accelerator` is
    "" for the profile's. `tp` accelerators make one stage, and `pp` stages one worker.
    `usd_per_hour` 0: the published price.
    """

    profile: str = ""
    select: str = ""
    model: str = ""
    accelerator: str = ""
    tp: int = 1
    extrapolate: bool = False
    usd_per_hour: float = 0.0
    pp: int = 1

    @property
    def gpus(self) -> int:
        """Accelerators of one worker."""
        return self.tp * self.pp


class Machine(msgspec.Struct, frozen=True, kw_only=True):
    """A `Hardware` read and understood.

    `most_batch` is the largest decode batch that the profile has (0: any), `most_prefill` the
    most prompt tokens of a step (0: any), `kv_tokens` what fits the memory of one stage that has
    all layers, according to its profile (0: not said). `step` is of all layers on `tp`
    accelerators, which `pp` stages share out.
    """

    hardware: Hardware
    title: str
    sha256: str
    step: StepTime
    shape: ModelShape
    accelerator: Accelerator | None
    tp: int
    most_batch: int = 0
    most_prefill: int = 0
    kv_tokens: int = 0

    @property
    def pp(self) -> int:
        """Stages of one worker."""
        return self.hardware.pp

    @property
    def gpus(self) -> int:
        """Accelerators of one worker."""
        return self.tp * self.pp

    @property
    def words(self) -> str:
        """What it is, for messages."""
        return self.title + (f", a pipeline of {self.pp}" if self.pp > 1 else "")

    @property
    def degree(self) -> str:
        """Its parallelism, as a pool spec has it: tp2, or tp2:pp2."""
        return f"tp{self.tp}" + (f":pp{self.pp}" if self.pp > 1 else "")

    @property
    def pipeline(self) -> Pipeline:
        """Its stages. Activations go from each of `tp` to its next by the links within a node,
        or between nodes for a worker of more accelerators than a node has.
        """
        link = 0.0
        if self.accelerator is not None:
            near = self.gpus <= NODE_GPUS
            link = self.accelerator.link_bytes_per_s if near else self.accelerator.nic_bytes_per_s
        return Pipeline(
            stages=self.pp,
            bytes_per_token=self.shape.hidden * ACTIVATION_BYTES,
            bytes_per_s=round(link) * self.tp,
            latency_ns=HOP_LATENCY_NS,
        )

    def decode_ns(self, batch: int, context: int) -> int:
        """From one token of each of `batch` sequences to the next, spread evenly over stages."""
        each = ceil_div(batch, self.pp)
        return self.step.step_ns((), each, context * each // batch)

    @property
    def names(self) -> tuple[str, ...]:
        """What a pool spec may call its accelerator, in small letters."""
        if self.accelerator is None:
            return (self.hardware.accelerator.lower(),)
        return (self.accelerator.name.lower(), *self.accelerator.aliases)

    @property
    def short_name(self) -> str:
        """The shortest of `names` that a pool spec may use."""
        return min(self.names, key=lambda name: (len(name), name))

    @property
    def usd_per_hour(self) -> float | None:
        """Price of one worker, None where not known."""
        each = self.hardware.usd_per_hour or (
            self.accelerator.usd_per_hour if self.accelerator else None
        )
        return each * self.gpus if each else None

    @property
    def power_w(self) -> float | None:
        """Rated power of one worker's accelerators, None where not known."""
        return float(self.accelerator.tdp_w * self.gpus) if self.accelerator else None

    def kv_blocks(self, block_size: int, memory_share: float, kv_dtype: str) -> int:
        """Blocks that fit beside the weights in `memory_share` of the memory.

        Raises CostError where the weights do not, or the memory is not known.
        """
        if self.kv_tokens:
            return self._profiled_tokens(KV_ITEM_BYTES[kv_dtype]) // block_size
        if self.accelerator is None:
            raise CostError(
                f"{self.title}: the memory of {self.hardware.accelerator!r} is not known; "
                "--kv-blocks says how many KV blocks a worker has"
            )
        memory = int(self.accelerator.memory_bytes * memory_share)
        shape = _with_kv(self.shape)
        tokens = fits_tokens(shape, memory, self.tp, KV_ITEM_BYTES[kv_dtype], self.pp)
        if tokens < block_size:
            raise CostError(
                f"{self.shape.name} has {self.shape.weights_bytes / 1e9:.0f} GB of weights; "
                f"{memory_share:.0%} of the memory of {self.gpus} x {self.accelerator.name} is "
                f"{self.gpus * memory / 1e9:.0f} GB, which leaves no room for KV; a larger --tp, "
                "another accelerator or --kv-blocks is needed"
            )
        return tokens // block_size

    def _profiled_tokens(self, item_bytes: float) -> int:
        """What `kv_tokens` comes to on all stages: of weights there is one set all the same."""
        if self.pp == 1:
            return self.kv_tokens
        weights = (
            self.shape.weights_bytes
            / self.tp
            / self.shape.kv_bytes_per_rank(1, self.tp, item_bytes)
        )
        return self.pp * self.kv_tokens + math.floor((self.pp - 1) * weights)


def read_machine(hardware: Hardware) -> Machine:
    """The machine of `hardware`. Raises CostError. Reading is remembered; the answer is frozen."""
    return _read(hardware)


@lru_cache(maxsize=64)
def _read(hardware: Hardware) -> Machine:
    return _profiled(hardware) if hardware.profile else _estimated(hardware)


def _profiled(hardware: Hardware) -> Machine:
    profile = read_profile(hardware.profile, hardware.select)
    named = hardware.accelerator or profile.accelerator
    hardware = msgspec.structs.replace(hardware, accelerator=named, tp=profile.tp)
    try:
        shape = model_shape(hardware.model or _known_name(profile.model))
    except CostError as error:
        raise CostError(
            f"{hardware.profile}: {error}; --model says the shape of a profile's model"
        ) from None
    try:
        device = accelerator(named)
    except CostError:
        device = None
    return Machine(
        hardware=hardware,
        title=profile.title,
        sha256=profile.sha256,
        step=step_time(profile, extrapolate=hardware.extrapolate),
        shape=shape,
        accelerator=device,
        tp=profile.tp,
        most_batch=_most_batch(profile, hardware.extrapolate),
        most_prefill=_most_prefill(profile, hardware.extrapolate),
        kv_tokens=profile.max_kv_tokens or 0,
    )


def _known_name(model: str) -> str:
    """The known model that `model` is spelled like but for its hyphens: llama2-70b."""
    plain = model.lower().replace("-", "")
    return next((name for name in known_models() if name.lower().replace("-", "") == plain), model)


def _most_batch(profile: Profile, extrapolate: bool) -> int:
    if extrapolate or profile.formula is not None:
        return 0
    return max((row.batch for row in profile.decode), default=0)


def _most_prefill(profile: Profile, extrapolate: bool) -> int:
    if extrapolate:
        return 0
    if profile.formula is not None:
        return profile.formula.max_prefill_tokens or 0
    alone = [row.new_tokens for row in profile.prefill if row.batch == 1]
    return max(alone, default=0)


def _estimated(hardware: Hardware) -> Machine:
    shape, device = model_shape(hardware.model), accelerator(hardware.accelerator)
    step = RooflineStep(shape, device, tp=hardware.tp)
    said = msgspec.json.encode([shape, device, hardware.tp, "roofline"], order="deterministic")
    return Machine(
        hardware=hardware,
        title=step.name,
        sha256=hashlib.sha256(said).hexdigest(),
        step=step,
        shape=shape,
        accelerator=device,
        tp=hardware.tp,
    )


def _with_kv(shape: ModelShape) -> ModelShape:
    """`shape` with a KV cache that grows: where every layer has a window, as if none had."""
    return msgspec.structs.replace(shape, sliding_window=0) if not _growing(shape) else shape


def _growing(shape: ModelShape) -> int:
    return shape.layers - shape.sliding_layers


def layout_of(shape: ModelShape, block_size: int, kv_dtype: str) -> KVLayout:
    """The layout of a whole worker's KV, whatever number of accelerators it is spread over.

    A latent cache (MLA) is laid out as one head. Layers with a sliding window are left out, as
    their cache does not grow with the context, unless all have one.
    """
    heads, dim = shape.kv_heads, shape.head_dim
    if shape.mla is not None:
        heads, dim = 1, (shape.mla.kv_lora_rank + shape.mla.qk_rope_head_dim) // 2
    return KVLayout(
        protocol=PROTOCOL_VERSION,
        engine="simulated",
        model_digest=shape.name,
        tokenizer_digest=shape.name,
        dtype=kv_dtype,
        block_size=block_size,
        layers=_growing(shape) or shape.layers,
        kv_heads=heads,
        head_dim=dim,
        rope="",
    )
