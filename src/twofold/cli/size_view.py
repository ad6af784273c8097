"""A sizing for people: each figure with its arithmetic, then the rules."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Final, NamedTuple

from twofold.plan.rules import AGAINST, slots_needed
from twofold.plan.size import GB, SizeInputs, Sizing, Verdict, link_bytes, needs
from twofold.plan.words import (
    binary_bytes,
    count,
    decimal_bytes,
    figure,
    joined,
    percent,
    plain,
)

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

_GIBI: Final = 1024
_HOLDS: Final = {True: "yes", False: "no", None: "?"}
_SPEAKS: Final = {
    "split": "Against a split",
    "pull": "Against pull that prepares on decode's loop",
    "push": "Against push",
}
_STYLES: Final = {True: "bold", False: "", None: "dim"}


def show_sizing(
    console: Console, inputs: SizeInputs, sizing: Sizing, kv_dtype: str, notes: list[str]
) -> None:
    """Print the figures, what they lack, the rules and `notes`, at most 100 columns wide."""
    title = f"{inputs.model.name or 'the model'}, KV cache in {kv_dtype}, TP {inputs.tp}"
    parts: list[Table | str] = [title, "", _figures(inputs, sizing), "", _verdicts(sizing), ""]
    parts += [_summary(sizing.verdicts), *(f"note: {note}" for note in notes)]
    for part in parts:
        console.print(part, highlight=False, markup=False)


class _Row(NamedTuple):
    """A figure: its name, what it is computed from, and its value and arithmetic as text.

    `missing` names the facts that it takes, as a rule's does.
    """

    name: str
    missing: tuple[str, ...]
    show: Callable[[SizeInputs, Sizing], tuple[str, str] | None]


def _figures(inputs: SizeInputs, sizing: Sizing) -> Table:
    table = _table("figure", "value", "arithmetic")
    for row in _ROWS:
        shown = row.show(inputs, sizing)
        if shown is None:
            lacking = tuple((fact,) for fact in row.missing)
            table.add_row(row.name, "-", needs(inputs, lacking), style=_STYLES[None])
        else:
            table.add_row(row.name, *shown)
    return table


def _kv_per_token(inputs: SizeInputs, sizing: Sizing) -> tuple[str, str]:
    shape, item = inputs.model, plain(inputs.kv_item_bytes)
    layers = shape.layers - shape.sliding_layers
    total = f"{sizing.kv_bytes_per_token:,} B"
    if shape.mla is not None:
        each = f"({shape.mla.kv_lora_rank} + {shape.mla.qk_rope_head_dim})"
        how = f"{layers} layers x {each} x {item} B = {total}"
    else:
        how = f"2 x {layers} layers x {shape.kv_heads} KV heads x {shape.head_dim} x {item} B"
        how += f" = {total}"
    if shape.sliding_layers:
        how += f"; {shape.sliding_layers} layers more up to {shape.sliding_window:,} tokens"
    return binary_bytes(sizing.kv_bytes_per_token), how


def _kv_of_prompt(inputs: SizeInputs, sizing: Sizing) -> tuple[str, str] | None:
    if sizing.kv_bytes is None or inputs.prompt_tokens is None:
        return None
    how = f"{count(inputs.prompt_tokens, 'token')} x {sizing.kv_bytes_per_token:,} B"
    bounded = sizing.kv_bytes - inputs.prompt_tokens * sizing.kv_bytes_per_token
    if bounded:
        how += f" + {bounded:,} B in windows"
    return _both(sizing.kv_bytes), f"{how} = {sizing.kv_bytes:,} B"


def _kv_rate(inputs: SizeInputs, sizing: Sizing) -> tuple[str, str] | None:
    if sizing.kv_bytes is None or inputs.rate is None:
        return None
    per_s = sizing.kv_bytes * inputs.rate
    gigabits, gibibits = figure(per_s * 8 / GB), figure(per_s * 8 / _GIBI**3)
    return f"{decimal_bytes(per_s)}/s", (
        f"{plain(inputs.rate)} req/s x {decimal_bytes(sizing.kv_bytes)} = {gigabits} Gbit/s "
        f"({binary_bytes(per_s)}/s = {gibibits} Gibit/s)"
    )


def _transfer(inputs: SizeInputs, sizing: Sizing) -> tuple[str, str] | None:
    if sizing.transfer_ms is None or inputs.prompt_tokens is None:
        return None
    how = f"{decimal_bytes(link_bytes(inputs, inputs.prompt_tokens))} a card / {_speed(inputs)}"
    return f"{figure(sizing.transfer_ms)} ms", how


def _link_share(inputs: SizeInputs, sizing: Sizing) -> tuple[str, str] | None:
    if sizing.link_share is None or sizing.transfer_ms is None or inputs.rate is None:
        return None
    how = f"{plain(inputs.rate)} req/s x {figure(sizing.transfer_ms)} ms, if one pair moves all"
    return percent(sizing.link_share), how


def _prefill(inputs: SizeInputs, sizing: Sizing) -> tuple[str, str] | None:
    if sizing.prefill_ms is None or inputs.prompt_tokens is None:
        return None
    how = (
        f"{count(inputs.prompt_tokens, 'token')} / {plain(inputs.prefill_tokens_per_s or 0)} tok/s"
    )
    return f"{figure(sizing.prefill_ms)} ms", how


def _slots_held(inputs: SizeInputs, sizing: Sizing) -> tuple[str, str] | None:
    if sizing.decode_slots is None:
        return None
    how = f"{plain(inputs.rate or 0)} req/s x {count(inputs.output_tokens or 0, 'token')}"
    return figure(sizing.decode_slots), f"{how} x {plain(inputs.ms_per_token or 0)} ms"


def _slots_used(inputs: SizeInputs, sizing: Sizing) -> tuple[str, str] | None:
    if sizing.slot_utilisation is None or sizing.decode_slots is None:
        return None
    how = f"{figure(sizing.decode_slots)} / {count(inputs.slots or 0, 'slot')}; "
    how += f"80 % or less takes {count(slots_needed(sizing.decode_slots), 'slot')}"
    return percent(sizing.slot_utilisation), how


def _kv_in_decode(inputs: SizeInputs, sizing: Sizing) -> tuple[str, str] | None:
    if sizing.decode_kv_bytes is None or sizing.decode_slots is None:
        return None
    tokens = (inputs.prompt_tokens or 0) + (inputs.output_tokens or 0)
    how = f"{figure(sizing.decode_slots)} sequences of up to {count(tokens, 'token')}"
    return _both(sizing.decode_kv_bytes), how


def _loop_lost(inputs: SizeInputs, sizing: Sizing) -> tuple[str, str] | None:
    if sizing.loop_time_lost is None:
        return None
    how = f"{plain(inputs.rate or 0)} req/s x {plain(inputs.prepare_ms or 0)} ms"
    if sizing.decode_workers is not None and sizing.decode_workers > 1:
        each = percent(sizing.loop_time_lost / sizing.decode_workers)
        how += f" if one worker takes all; {each} on each of {sizing.decode_workers}"
    return percent(sizing.loop_time_lost), how


def _prefill_workers(inputs: SizeInputs, sizing: Sizing) -> tuple[str, str] | None:
    return _workers(
        inputs, sizing.prefill_workers, inputs.prompt_tokens, inputs.prefill_tokens_per_s
    )


def _decode_workers(inputs: SizeInputs, sizing: Sizing) -> tuple[str, str] | None:
    return _workers(inputs, sizing.decode_workers, inputs.output_tokens, inputs.decode_tokens_per_s)


def _workers(
    inputs: SizeInputs, workers: int | None, tokens: int | None, tokens_per_s: float | None
) -> tuple[str, str] | None:
    if workers is None or inputs.rate is None or tokens is None or tokens_per_s is None:
        return None
    load = inputs.rate * tokens / (tokens_per_s * inputs.target_utilisation)
    return f"{workers:,}", (
        f"{plain(inputs.rate)} req/s x {count(tokens, 'token')} / ({plain(tokens_per_s)} tok/s "
        f"x {plain(inputs.target_utilisation)}) = {figure(load)}, rounded up"
    )


_STEP: Final = ("rate_rps", "output_tokens", "ms_per_token")
_ROWS: Final = (
    _Row("KV per token", (), _kv_per_token),
    _Row("KV of a prompt", ("prompt_tokens",), _kv_of_prompt),
    _Row("KV made a second", ("rate_rps", "prompt_tokens"), _kv_rate),
    _Row("transfer", ("transfer_ms",), _transfer),
    _Row("link in use", ("rate_rps", "transfer_ms"), _link_share),
    _Row("prefill", ("prefill_ms",), _prefill),
    _Row("decode slots held", _STEP, _slots_held),
    _Row("slots in use", (*_STEP, "slots"), _slots_used),
    _Row("KV held in decode", (*_STEP, "prompt_tokens"), _kv_in_decode),
    _Row("decode loop lost", ("rate_rps", "prepare_ms"), _loop_lost),
    _Row("prefill workers", ("prefill_workers",), _prefill_workers),
    _Row("decode workers", ("decode_workers",), _decode_workers),
)


def _verdicts(sizing: Sizing) -> Table:
    """The rules: those that hold first, then those that do not, then those not judged."""
    table = _table("holds", "rule", "because")
    for holds, word in _HOLDS.items():
        for verdict in sizing.verdicts:
            if verdict.holds is holds:
                table.add_row(word, verdict.rule, verdict.because, style=_STYLES[holds])
    return table


def _summary(verdicts: tuple[Verdict, ...]) -> str:
    text = ""
    for against, what in _SPEAKS.items():
        rules = [v.rule for v in verdicts if v.holds and AGAINST.get(v.rule, "split") == against]
        if rules:
            text += f"{what}: {joined(rules)}. "
    unknown = sum(verdict.holds is None for verdict in verdicts)
    if unknown == len(verdicts):
        return "No rule could be judged: give what they need."
    if not text:
        text = "No rule that could be judged speaks against a split. "
    if unknown:
        text += f"{count(unknown, 'rule')} could not be judged. "
    return text + "The rules need no simulation and replace none."


def _table(*names: str) -> Table:
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="dim")
    for name in names[:-1]:
        table.add_column(name, no_wrap=name == "value")
    table.add_column(names[-1], overflow="fold")
    return table


def _both(n_bytes: int) -> str:
    return f"{decimal_bytes(n_bytes)} ({binary_bytes(n_bytes)})"


def _speed(inputs: SizeInputs) -> str:
    gigabytes = (inputs.link_bytes_per_s or 0.0) / GB
    return f"{figure(gigabytes)} GB/s ({figure(gigabytes * 8)} Gbit/s)"
