"""The flags that `replay` and `plan` share. Loads nothing heavy: help must be quick."""

from __future__ import annotations

import argparse
from typing import Any, Final

from twofold.cli.command import add_json

DEFAULT_SEQS: Final = 256
KV_DTYPES: Final = ("bfloat16", "float16", "float32", "float8_e4m3fn")


def add_trace(parser: argparse.ArgumentParser) -> None:
    """TRACE and what is done to it."""
    group = parser.add_argument_group("trace")
    parser.add_argument("trace", metavar="TRACE", help="a request trace of any known format")
    add(group, "--window", "A:B", "seconds of the trace to use, such as 600:1200")
    add(group, "--requests", "N", "the first N requests only")
    add(group, "--class", "NAME", "requests of this class only")
    add(group, "--length-divide", "N", "divide all lengths by N")
    add(group, "--jitter", "S", "spread arrivals over ticks of S seconds (3 for Mooncake's)")
    add(group, "--rate", "R", "requests/s of arrivals drawn anew, for a trace without times")
    add(group, "--cv", "X", "coefficient of variation of their gaps (default 1: Poisson)")
    for flag, text in (
        ("--drop-hashes", "forget which prompts share a prefix"),
        ("--sort", "sort the trace by arrival"),
        ("--skip-bad", "count bad rows and requests that fit no worker instead of stopping"),
    ):
        group.add_argument(flag, action="store_true", help=text)


def add_hardware(parser: argparse.ArgumentParser) -> None:
    """What workers run on."""
    group = parser.add_argument_group("hardware")
    add(group, "--profile", "FILE", "step times: a twofold profile or a published table", True)
    add(group, "--profile-select", "NAME", "which of a file that holds several", True)
    add(group, "--model", "NAME|DIR", "without a profile: a known model or a Hugging Face folder")
    add(group, "--accelerator", "NAME", "without a profile: what to estimate for", True)
    add(group, "--tp", "N", "without a profile: accelerators of a worker (default 1)", True)
    add(group, "--pp", "N", "pipeline stages of a worker, --tp accelerators each (default 1)", True)
    add(group, "--link-gbytes-per-s", "X", "of each accelerator (default: as usually built)", True)
    group.add_argument(
        "--link-sharing",
        choices=("worker", "pair"),
        default="worker",
        help="who shares a link: all transfers of a worker (default), or only those of a pair",
    )
    add(group, "--host-bounce", "X", "KV passes through host memory, copied at X GB/s at each end")
    add(group, "--prepare-ms", "X", "preparing a handoff: on decode's loop in pull, else beside it")
    add(group, "--usd-per-hour", "NAME=X", "price of an accelerator", True)
    group.add_argument(
        "--extrapolate", action="store_true", help="go on beyond what a profile measured"
    )


def add_engine(parser: argparse.ArgumentParser) -> None:
    """Settings of every worker."""
    group = parser.add_argument_group("workers")
    add(group, "--handoff", "MODE", "how KV is handed over (default pull)", True)
    add(
        group,
        "--policy",
        "KIND=NAME",
        "such as prefill=jsq,decode=free_blocks or chunk=capped",
        True,
    )
    add(group, "--chunk", "N", "tokens of a step: max_num_batched_tokens", True)
    add(group, "--chunk-cap", "N", "prompt tokens of a step, at most, with --policy chunk=capped")
    add(group, "--max-num-seqs", "N", f"sequences of a step (default {DEFAULT_SEQS})", True)
    add(group, "--block-size", "N", "tokens of a KV block (default 16)", True)
    add(group, "--kv-blocks", "N", "KV blocks of a worker (default: what fits its memory)", True)
    add(group, "--memory-share", "X", "share of the memory for weights and KV (default 0.9)")
    group.add_argument(
        "--kv-dtype",
        choices=KV_DTYPES,
        default="bfloat16",
        help="type of the KV cache (default bfloat16)",
    )
    group.add_argument(
        "--no-prefix-caching", action="store_true", help="do not keep prompts for later ones"
    )


def add_goals_and_output(parser: argparse.ArgumentParser) -> None:
    """Goals, how to run, and where results go."""
    group = parser.add_argument_group("goals")
    add(group, "--slo-ttft", "S", "goal for the time to first token, in seconds")
    add(group, "--slo-tpot", "S", "goal for the time per output token, in seconds")
    add(group, "--attainment", "X", "share of requests that must meet them (default 0.9)")
    add(parser, "--seed", "N", "of everything that is drawn (default 0)")
    add(parser, "--jobs", "N", "processes (default: one for each core)")
    add(parser, "--ray", "ADDRESS", "run on a Ray cluster instead, such as auto")
    add_json(parser)
    add(parser, "--html", "FILE", "write a report that needs no other file")
    add(parser, "--plot", "FILE", "draw attainment and goodput as .png or .svg")


def add(where: Any, flag: str, metavar: str, text: str, repeat: bool = False) -> None:
    """Declare a flag whose value stays text until it is read with all others."""
    where.add_argument(
        flag,
        metavar=metavar,
        action="append" if repeat else "store",
        help=text + ("; repeatable" if repeat else ""),
    )
