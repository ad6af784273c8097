"""`twofold gateway`: the gateway process."""

from __future__ import annotations

import argparse
from typing import Final

from twofold.cli.command import add_config, add_options, sources
from twofold.config import GATEWAY_DEFAULTS, options, read_gateway

NAME: Final = "gateway"
SUMMARY: Final = "run the gateway, for a deployment over several machines"
EXAMPLE: Final = (
    "twofold gateway --host 0.0.0.0 --port 8000"
    " --worker prefill-0=prefill@10.0.0.5:9000 --worker decode-0=decode@10.0.0.6:9000"
)
_OPTIONS: Final = options("gateway")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    add_options(parser, _OPTIONS, GATEWAY_DEFAULTS)
    add_config(parser)
    parser.add_argument("--parent-pid", type=int, default=0, help=argparse.SUPPRESS)


def run(args: argparse.Namespace) -> int:
    """Serve until told to stop; the exit code."""
    settings = read_gateway(sources(args, _OPTIONS))
    if args.parent_pid:
        from twofold.live.lifeline import die_with_parent

        die_with_parent(args.parent_pid)
    from twofold.live.gateway_process import run_gateway
    from twofold.live.logs import set_up_logs

    set_up_logs(NAME)
    return run_gateway(settings)
