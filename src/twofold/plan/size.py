"""The sizing of one workload on one model: every figure that its inputs allow, and the rules."""

from __future__ import annotations

import contextlib
import difflib
from pathlib import Path
from typing import Final

import msgspec

from twofold.cost import sizing
from twofold.cost.accelerators import known_accelerators
from twofold.cost.errors import CostError
from twofold.cost.models import ModelShape, known_models, model_shape
from twofold.plan.facts import Facts, Prompt
from twofold.plan.rules import Missing, judge
from twofold.plan.words import joined, plain

GB: Final = 10**9


_RATE: Final = ("rate", "--rate")
_PROMPT: Final = ("prompt_tokens", "--prompt-tokens")
_OUTPUT: Final = ("output_tokens", "--output-tokens")
_SOURCES: Final[dict[str, tuple[tuple[str, str], ...]]] = {
    "gpus": (("gpus", "--gpus"),),
    "nodes": (("nodes", "--nodes"),),
    "slo_ttft_ms": (("slo_ttft_s", "--slo-ttft"),),
    "slo_tpot_ms": (("slo_tpot_s", "--slo-tpot"),),
    "no_goal": (("no_slo", "--no-slo"),),
    "rate_rps": (_RATE,),
    "prompt_tokens": (_PROMPT,),
    "output_tokens": (_OUTPUT,),
    "prefill_ms": (_PROMPT, ("prefill_tokens_per_s", "--prefill-tokens-per-s")),
    "transfer_ms": (_PROMPT, ("link_bytes_per_s", "--link-gbytes-per-s")),
    "ms_per_token": (("ms_per_token", "--ms-per-token"),),
    "slots": (("slots", "--slots"),),
    "prepare_ms": (("prepare_ms", "--prepare-ms"),),
    "prefill_workers": (_RATE, _PROMPT, ("prefill_tokens_per_s", "--prefill-tokens-per-s")),
    "decode_workers": (_RATE, _OUTPUT, ("decode_tokens_per_s", "--decode-tokens-per-s")),
    "prefix_hit_share": (("prefix_hit", "--prefix-hit"),),
}
"""Which inputs, by field and flag, a fact comes from."""


class SizeInputs(msgspec.Struct, frozen=True, kw_only=True):
    """A workload and what it would run on; None: not given.

    `link_bytes_per_s` is one card's, `slots` the whole decode pool's, tokens/s one worker's.
    `no_slo` says that no latency is asked for.
    """

    model: ModelShape
    kv_item_bytes: float = 2.0
    prompt_tokens: int | None = None
    prompt_p95_tokens: int | None = None
    output_tokens: int | None = None
    rate: float | None = None
    tp: int = 1
    link_bytes_per_s: float | None = None
    ms_per_token: float | None = None
    slots: int | None = None
    prefill_tokens_per_s: float | None = None
    decode_tokens_per_s: float | None = None
    target_utilisation: float = 0.8
    prepare_ms: float | None = None
    gpus: int | None = None
    nodes: int | None = None
    slo_ttft_s: float | None = None
    slo_tpot_s: float | None = None
    no_slo: bool = False
    prefix_hit: float | None = None


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """A rule, whether it holds (None: cannot be judged) and why."""

    rule: str
    holds: bool | None
    because: str


class Sizing(msgspec.Struct, frozen=True, kw_only=True):
    """What `size` computes; None where an input is missing.

    `kv_bytes` is one prompt's, all ranks together. `transfer_ms` is one transfer alone on its
    links. `link_share` is the share of time that arrivals keep the links of one pair of workers
    busy, and `loop_time_lost` that of one decode worker's loop, if one serves all arrivals.
    `decode_kv_bytes` is what the sequences in decode hold when each is at its longest.
    """

    kv_bytes_per_token: int
    kv_bytes: int | None
    transfer_ms: float | None
    link_share: float | None
    prefill_ms: float | None
    decode_slots: float | None
    slot_utilisation: float | None
    decode_kv_bytes: int | None
    loop_time_lost: float | None
    prefill_workers: int | None
    decode_workers: int | None
    verdicts: tuple[Verdict, ...]


def size(inputs: SizeInputs) -> Sizing:
    """Every figure that `inputs` allow. Raises CostError for a value that cannot be."""
    transfer_ms = _transfer_ms(inputs, inputs.prompt_tokens)
    slots_held = _slots_held(inputs)
    rate = inputs.rate
    facts = _facts(inputs)
    return Sizing(
        kv_bytes_per_token=inputs.model.kv_bytes_per_token(inputs.kv_item_bytes),
        kv_bytes=_kv_bytes(inputs),
        transfer_ms=transfer_ms,
        link_share=None if rate is None or transfer_ms is None else rate * transfer_ms / 1e3,
        prefill_ms=_prefill_ms(inputs, inputs.prompt_tokens),
        decode_slots=slots_held,
        slot_utilisation=None
        if slots_held is None or inputs.slots is None
        else slots_held / inputs.slots,
        decode_kv_bytes=_decode_kv_bytes(inputs, slots_held),
        loop_time_lost=None
        if rate is None or inputs.prepare_ms is None
        else sizing.loop_time_lost(rate, inputs.prepare_ms),
        prefill_workers=facts.prefill_workers,
        decode_workers=facts.decode_workers,
        verdicts=tuple(
            Verdict(
                rule=rule.rule,
                holds=rule.holds,
                because=needs(inputs, rule.missing) if rule.missing else rule.because,
            )
            for rule in judge(facts)
        ),
    )


def link_bytes(inputs: SizeInputs, tokens: int) -> int:
    """Bytes of a prompt's cache that cross one card's link.

    Heads are shared out over the cards; a latent (MLA) or a head that has fewer copies than
    there are cards goes to each card that needs it.
    """
    return inputs.model.kv_bytes_per_rank(tokens, inputs.tp, inputs.kv_item_bytes)


def notes(inputs: SizeInputs) -> list[str]:
    """What in the inputs a reader should look at again."""
    found: list[str] = []
    shape = inputs.model
    longest = max(inputs.prompt_tokens or 0, inputs.prompt_p95_tokens or 0)
    total = longest + (inputs.output_tokens or 0)
    if shape.max_position and total > shape.max_position:
        found.append(
            f"prompt and output are {total:,} tokens, and {shape.name} has "
            f"{shape.max_position:,} positions"
        )
    nics = [entry.nic_gb_per_s for entry in known_accelerators().values()]
    given = (inputs.link_bytes_per_s or 0.0) / GB
    if given > max(nics):
        found.append(
            f"{plain(given)} GB/s a card is {plain(given * 8)} Gbit/s, beyond network cards of "
            f"{plain(max(nics) * 8)} Gbit/s: right for NVLink; "
            f"else give --link-gbits-per-s {plain(given).replace(',', '')}"
        )
    if shape.mla is not None and inputs.tp > 1:
        found.append(
            f"{shape.name} keeps its latent cache on each of {inputs.tp} cards, so TP does not "
            "shorten a transfer"
        )
    elif inputs.tp > shape.kv_heads:
        found.append(
            f"{shape.kv_heads} KV heads over TP {inputs.tp}: heads are copied, so the transfer "
            f"takes as long as with TP {shape.kv_heads}"
        )
    return found


def find_model(name: str) -> ModelShape:
    """The shape of a known model or of a Hugging Face folder. Raises CostError that names the
    nearest known models.
    """
    try:
        is_folder = Path(name).is_dir()
        has_config = (Path(name) / "config.json").is_file()
    except OSError as error:
        raise CostError(f"{name}: cannot read: {(error.strerror or 'failed').lower()}") from None
    if has_config:
        shape = model_shape(name)
        if shape.mla is None and not shape.kv_heads * shape.head_dim:
            raise CostError(f"{name}: a cache needs KV heads and a head size above 0")
        return shape
    known = {model.lower(): model for model in known_models()}
    with contextlib.suppress(CostError):
        return model_shape(name)
    if is_folder:
        raise CostError(f"{name}: holds no config.json, so it is not a model")
    wanted = name.rstrip("/").rpartition("/")[2].lower()
    near = [known[key] for key in difflib.get_close_matches(wanted, known, n=3)]
    if near:
        raise CostError(
            f"{name}: not a known model or a folder; did you mean {joined(near, 'or')}?"
        )
    raise CostError(
        f"{name}: not a known model or a folder; known are {joined(sorted(known_models()))}"
    )


def needs(inputs: SizeInputs, missing: Missing) -> str:
    """The flags that would give the missing facts: "needs --rate and --slots"."""
    flags: list[str] = []
    for either in missing:
        absent = [_absent_flags(inputs, fact) for fact in either]
        if len(absent) == 1:
            flags += absent[0]
        else:
            words = joined([joined(each) for each in absent], "or")
            flags.append(f"({words})" if len(missing) > 1 else words)
    return f"needs {joined(list(dict.fromkeys(flags)))}"


def _absent_flags(inputs: SizeInputs, fact: str) -> list[str]:
    return [flag for field, flag in _SOURCES[fact] if not getattr(inputs, field)]


def _facts(inputs: SizeInputs) -> Facts:
    prompts = []
    named = (("the prompt", inputs.prompt_tokens), ("the P95 prompt", inputs.prompt_p95_tokens))
    for label, tokens in named:
        if tokens is not None:
            prefill_ms, transfer_ms = _prefill_ms(inputs, tokens), _transfer_ms(inputs, tokens)
            prompts.append(
                Prompt(label=label, tokens=tokens, prefill_ms=prefill_ms, transfer_ms=transfer_ms)
            )
    return Facts(
        tp=inputs.tp,
        gpus=inputs.gpus,
        nodes=inputs.nodes,
        no_goal=inputs.no_slo,
        slo_ttft_ms=None if inputs.slo_ttft_s is None else inputs.slo_ttft_s * 1e3,
        slo_tpot_ms=None if inputs.slo_tpot_s is None else inputs.slo_tpot_s * 1e3,
        rate_rps=inputs.rate,
        prompts=tuple(prompts),
        output_tokens=inputs.output_tokens,
        ms_per_token=inputs.ms_per_token,
        slots=inputs.slots,
        prepare_ms=inputs.prepare_ms,
        prefill_workers=_workers(inputs, inputs.prompt_tokens, inputs.prefill_tokens_per_s),
        decode_workers=_workers(inputs, inputs.output_tokens, inputs.decode_tokens_per_s),
        prefix_hit_share=inputs.prefix_hit,
    )


def _kv_bytes(inputs: SizeInputs) -> int | None:
    if inputs.prompt_tokens is None:
        return None
    return inputs.model.kv_bytes(inputs.prompt_tokens, inputs.kv_item_bytes)


def _transfer_ms(inputs: SizeInputs, tokens: int | None) -> float | None:
    if tokens is None or inputs.link_bytes_per_s is None:
        return None
    return sizing.transfer_ms(link_bytes(inputs, tokens), inputs.link_bytes_per_s)


def _prefill_ms(inputs: SizeInputs, tokens: int | None) -> float | None:
    if tokens is None or inputs.prefill_tokens_per_s is None:
        return None
    return tokens / inputs.prefill_tokens_per_s * 1e3


def _slots_held(inputs: SizeInputs) -> float | None:
    if inputs.rate is None or inputs.output_tokens is None or inputs.ms_per_token is None:
        return None
    return sizing.decode_slots(inputs.rate, inputs.output_tokens, inputs.ms_per_token)


def _decode_kv_bytes(inputs: SizeInputs, slots_held: float | None) -> int | None:
    if slots_held is None or inputs.prompt_tokens is None or inputs.output_tokens is None:
        return None
    tokens = inputs.prompt_tokens + inputs.output_tokens
    return round(slots_held * inputs.model.kv_bytes(tokens, inputs.kv_item_bytes))


def _workers(inputs: SizeInputs, tokens: int | None, tokens_per_s: float | None) -> int | None:
    if inputs.rate is None or tokens is None or tokens_per_s is None:
        return None
    return sizing.workers(inputs.rate, tokens, tokens_per_s, inputs.target_utilisation)
