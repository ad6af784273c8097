"""`twofold worker`: one worker process."""

from __future__ import annotations

import argparse
from typing import Final

import msgspec

from twofold.cli.command import CommandError, add_config, add_options, sources
from twofold.cli.models import needs_device, with_local_model
from twofold.config import WORKER_DEFAULTS, options, read_worker

NAME: Final = "worker"
SUMMARY: Final = "run one worker, for a deployment over several machines"
EXAMPLE: Final = (
    "twofold worker models/llama --name prefill-0 --role prefill --host 10.0.0.5 --port 9000"
)
_OPTIONS: Final = (*options("engine"), *options("worker"))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    add_options(parser, _OPTIONS, WORKER_DEFAULTS)
    add_config(parser)
    parser.add_argument("--parent-pid", type=int, default=0, help=argparse.SUPPRESS)


def run(args: argparse.Namespace) -> int:
    """Serve until told to stop; the exit code."""
    settings = read_worker(sources(args, _OPTIONS))
    if args.parent_pid:
        from twofold.live.lifeline import die_with_parent

        die_with_parent(args.parent_pid)
    settings = msgspec.structs.replace(settings, engine=with_local_model(settings.engine))
    from twofold.live.logs import set_up_logs

    set_up_logs(settings.name)
    try:
        from twofold.live.worker import run_worker
    except ImportError as error:
        raise needs_device(error) from None
    try:
        return run_worker(settings)
    except ValueError as error:
        raise CommandError(str(error)) from error
