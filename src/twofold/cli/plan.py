"""`twofold plan`: should I split, at what ratio, and with what uncertainty."""

from __future__ import annotations

import argparse
import sys
from typing import Final

from twofold.cli.command import EXIT_DONE
from twofold.cli.replay_flags import (
    add,
    add_engine,
    add_goals_and_output,
    add_hardware,
    add_trace,
)

NAME: Final = "plan"
SUMMARY: Final = "say whether to split, and how, against the best unsplit set-up of the same GPUs"
EXAMPLE: Final = (
    "twofold plan trace.csv --model Qwen3-8B --accelerator h100 --gpus 4 "
    "--slo-ttft 0.5 --slo-tpot 0.03"
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    add_trace(parser)
    add(parser, "--gpus", "N", "accelerators that there are (of the first kind named)")
    add(parser, "--rate-scale", "X", "the load to be held, times the trace's rate (default 1)")
    parser.add_argument(
        "--equal",
        choices=("gpus", "cost", "power"),
        default="gpus",
        help="what set-ups of several kinds of accelerator must have alike (default gpus)",
    )
    parser.add_argument(
        "--judge",
        choices=("load", "capacity"),
        default="load",
        help="by the load, or by the highest rate held per GPU (default load)",
    )
    add(parser, "--resamples", "N", "resamples of the trace for the interval (default 8)")
    add(parser, "--nodes", "N", "machines that the accelerators are in")
    parser.add_argument(
        "--quick", action="store_true", help="smaller samples of the trace, and fewer finalists"
    )
    parser.add_argument("--thorough", action="store_true", help="the whole trace, no samples")
    add_hardware(parser)
    add_engine(parser)
    add_goals_and_output(parser)


def run(args: argparse.Namespace) -> int:
    """Search, show and write the verdict; the exit code."""
    # Loaded here, so that help and the other commands need none of it.
    from twofold.cli.plan_run import make_plan, read_wish
    from twofold.cli.replay_output import check_output, hand_out
    from twofold.cli.replay_setting import read_setting

    check_output(args)
    setting = read_setting(args)
    wish = read_wish(args, setting)
    for note in (*setting.notes, *wish.notes):
        print(note, file=sys.stderr, flush=True)
    hand_out(args, make_plan(wish))
    return EXIT_DONE
