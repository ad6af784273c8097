"""`twofold replay`: simulate one or many set-ups on a trace, deterministically."""

from __future__ import annotations

import argparse
import sys
from typing import Final

from twofold.cli.command import (
    EXIT_DONE,
    EXIT_FAILED,
    EXIT_INTERRUPTED,
)
from twofold.cli.replay_flags import (
    add,
    add_engine,
    add_goals_and_output,
    add_hardware,
    add_trace,
)

NAME: Final = "replay"
SUMMARY: Final = "simulate one or many set-ups on a request trace, the same figures every time"
EXAMPLE: Final = "twofold replay trace.csv --model Qwen3-8B --accelerator h100 --pools 1P1D"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    add_trace(parser)
    add(parser, "--pools", "SPEC", "workers: 2P1D, 3M, or 2P:h100,2D:h200:tp2", True)
    add(parser, "--rate-scale", "A:B:STEP", "the trace's rate times this (default 1)", True)
    add(parser, "--crash", "W@S[:D]", "worker W dies at S seconds, for D seconds or for good", True)
    add(parser, "--faults", "SEED[:RATE]", "lose, repeat, delay and fail at RATE (default 0.001)")
    group = parser.add_argument_group("failures")
    add(group, "--failure-policy", "NAME", "what becomes of a request whose leg fails", True)
    add(group, "--retries", "N", "with retry-pair: retries of a request (default 1)")
    add(
        group,
        "--recompute-tokens-per-s",
        "N",
        "with recompute-on-decode: prompt tokens a second, at most (default 2000)",
    )
    add_hardware(parser)
    add_engine(parser)
    add_goals_and_output(parser)
    add(parser, "--chrome-trace", "FILE", "where the time of one run went, for Perfetto")


def run(args: argparse.Namespace) -> int:
    """Simulate every combination, show and write what came out; the exit code."""
    # Loaded here, so that help and the other commands need none of it.
    from twofold.cli.replay_jobs import jobs_of, result_of, run_all
    from twofold.cli.replay_output import check_output, hand_out
    from twofold.cli.replay_setting import read_setting

    check_output(args)
    setting = read_setting(args)
    jobs = jobs_of(args, setting)
    n = len(setting.requests.rows)
    for note in setting.notes:
        print(note, file=sys.stderr)
    print(f"runs: {len(jobs):,}, of {n:,} requests each", file=sys.stderr, flush=True)
    runs, problems, interrupted = run_all(args.ray, jobs, setting.jobs)
    for problem in problems:
        print(f"twofold replay: {problem.scenario}: {problem.reason}", file=sys.stderr)
    if interrupted:
        print(f"interrupted: {len(runs):,} of {len(jobs):,} runs are done", file=sys.stderr)
    if runs:
        hand_out(args, result_of(jobs, setting, runs))
    if interrupted:
        return EXIT_INTERRUPTED
    return EXIT_FAILED if problems else EXIT_DONE
