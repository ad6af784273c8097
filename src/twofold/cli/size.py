"""`twofold size`: the arithmetic of a split, and which rules speak against one."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from typing import Any, Final

import msgspec

from twofold.cli.command import EXIT_DONE, CommandError, add_json, write_json
from twofold.cost.errors import CostError
from twofold.plan.size import GB, SizeInputs, find_model, notes, size

NAME: Final = "size"
SUMMARY: Final = "work out KV bytes, transfer time, slots and workers, and whether to split at all"
EXAMPLE: Final = "twofold size --model Qwen3-32B --prompt-tokens 16000"
_MOST: Final = 1_000_000_000
_LEAST: Final = 1e-9
_KV_DTYPES: Final = {"bf16": 2.0, "fp16": 2.0, "fp32": 4.0, "fp8": 1.0, "int8": 1.0}


def _whole(text: str) -> int | str:
    """A whole number above 0, or what would be right."""
    try:
        value = int(text)
    except ValueError:
        value = 0
    return value if 1 <= value <= _MOST else f"must be a whole number from 1 to {_MOST:,}"


def _positive(text: str) -> float | str:
    """A number above 0, or what would be right."""
    value = _number(text)
    return value if _LEAST <= value <= _MOST else f"must be a number from 1e-9 to {_MOST:,}"


def _not_negative(text: str) -> float | str:
    """A number from 0 on, or what would be right."""
    value = _number(text)
    return (
        value if value == 0 or value >= _LEAST else f"must be 0 or a number from 1e-9 to {_MOST:,}"
    )


def _utilisation(text: str) -> float | str:
    """A share above 0, or what would be right."""
    value = _number(text)
    return value if _LEAST <= value <= 1 else "must be above 0 and at most 1"


def _share(text: str) -> float | str:
    """A share, or what would be right."""
    value = _number(text)
    return value if 0 <= value <= 1 else "must be from 0 to 1"


def _number(text: str) -> float:
    """The number; -1, that nothing accepts, for what is none."""
    try:
        value = float(text)
    except ValueError:
        return -1.0
    return value if abs(value) <= _MOST else -1.0


class _Flag(msgspec.Struct, frozen=True):
    """A flag, what its value may be, and its help."""

    flag: str
    metavar: str
    read: Callable[[str], float | str]
    text: str

    @property
    def key(self) -> str:
        return self.flag.removeprefix("--").replace("-", "_")


_FLAGS: Final = (
    _Flag("--prompt-tokens", "N", _whole, "tokens of a typical prompt"),
    _Flag("--prompt-p95-tokens", "N", _whole, "tokens of the prompt that 95 %% are shorter than"),
    _Flag("--output-tokens", "N", _whole, "tokens of a typical answer"),
    _Flag("--rate", "R", _positive, "requests per second in the busy hour"),
    _Flag("--tp", "N", _whole, "GPUs of a worker (default 1)"),
    _Flag("--link-gbytes-per-s", "X", _positive, "gigabytes per second of each GPU's link"),
    _Flag("--link-gbits-per-s", "X", _positive, "the same in gigabits, as network cards are named"),
    _Flag("--ms-per-token", "X", _positive, "a decode step at that load, --prepare-ms apart"),
    _Flag("--slots", "N", _whole, "sequences that all decode workers take: max_num_seqs each"),
    _Flag("--prefill-tokens-per-s", "X", _positive, "prompt tokens per second of one worker"),
    _Flag("--decode-tokens-per-s", "X", _positive, "output tokens per second of one worker"),
    _Flag("--target-utilisation", "X", _utilisation, "share of that to plan with (default 0.8)"),
    _Flag("--prepare-ms", "X", _not_negative, "what a handoff takes of decode's loop, per request"),
    _Flag("--gpus", "N", _whole, "GPUs that there are"),
    _Flag("--nodes", "N", _whole, "machines that they are in"),
    _Flag("--slo-ttft", "S", _positive, "goal for the time to first token, in seconds"),
    _Flag("--slo-tpot", "S", _positive, "goal for the time per output token, in seconds"),
    _Flag("--prefix-hit", "X", _share, "share of a prompt cached where it is decoded, 0 to 1"),
)  # fmt: skip


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument(
        "--model", metavar="NAME|DIR", required=True, help="a known model or a Hugging Face folder"
    )
    for flag in _FLAGS:
        parser.add_argument(flag.flag, metavar=flag.metavar, help=flag.text)
    parser.add_argument("--no-slo", action="store_true", help="no latency is asked for")
    parser.add_argument(
        "--kv-dtype",
        choices=sorted(_KV_DTYPES),
        default="bf16",
        help="the KV cache's (default bf16)",
    )
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    """Compute what can be computed, show it and write it; the exit code."""
    inputs = _inputs(args)
    sizing = size(inputs)
    warnings = notes(inputs)
    if args.json == "-":
        for note in warnings:
            print(f"note: {note}", file=sys.stderr)
    else:
        from twofold.cli.console import out
        from twofold.cli.size_view import show_sizing

        show_sizing(out(), inputs, sizing, args.kv_dtype, warnings)
    write_json(args.json, sizing)
    return EXIT_DONE


def _inputs(args: argparse.Namespace) -> SizeInputs:
    """The inputs, checked. Raises CommandError naming the flag."""
    given: dict[str, Any] = {}
    for flag in _FLAGS:
        text = getattr(args, flag.key)
        if text is None:
            continue
        value = flag.read(text)
        if isinstance(value, str):
            raise CommandError(f"{flag.flag} {text}: {value}")
        given[flag.key] = value
    gigabytes, gigabits = given.pop("link_gbytes_per_s", None), given.pop("link_gbits_per_s", None)
    if gigabytes is not None and gigabits is not None:
        raise CommandError(
            "--link-gbytes-per-s and --link-gbits-per-s: give one; 8 gigabits are 1 gigabyte"
        )
    if gigabits is not None:
        gigabytes = gigabits / 8
    if gigabytes is not None:
        given["link_bytes_per_s"] = gigabytes * GB
    for name in ("ttft", "tpot"):
        if (goal := given.pop(f"slo_{name}", None)) is not None:
            given[f"slo_{name}_s"] = goal
    _refuse_contradictions(args.no_slo, given)
    try:
        model = find_model(args.model)
    except CostError as error:
        raise CommandError(f"--model {error}") from None
    return SizeInputs(
        model=model,
        kv_item_bytes=_KV_DTYPES[args.kv_dtype],
        no_slo=args.no_slo,
        **given,
    )


def _refuse_contradictions(no_slo: bool, given: dict[str, Any]) -> None:
    tp, gpus, nodes = given.get("tp", 1), given.get("gpus"), given.get("nodes")
    if no_slo and ("slo_ttft_s" in given or "slo_tpot_s" in given):
        raise CommandError("--no-slo: contradicts --slo-ttft and --slo-tpot; give one or the other")
    if gpus is not None and gpus < tp:
        raise CommandError(f"--gpus {gpus}: fewer than the {tp} of one worker (--tp)")
    if gpus is not None and nodes is not None and gpus < nodes:
        raise CommandError(f"--nodes {nodes}: more than the {gpus} GPUs (--gpus)")
    typical, tail = given.get("prompt_tokens"), given.get("prompt_p95_tokens")
    if typical is not None and tail is not None and tail < typical:
        raise CommandError(f"--prompt-p95-tokens {tail}: below --prompt-tokens {typical}")
