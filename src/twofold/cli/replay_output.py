"""Where the results of `replay` and `plan` go, checked before any work is done."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from twofold.cli.command import CommandError, write_json
from twofold.cli.console import out
from twofold.report.results import Plan, Replay


def check_output(args: argparse.Namespace) -> None:
    """Raise CommandError for a file that could not be written."""
    for flag, target in (("--html", args.html), ("--json", args.json), ("--plot", args.plot)):
        if target and target != "-" and not Path(target).parent.is_dir():
            raise CommandError(f"{flag} {target}: no such directory")
    if args.plot:
        from twofold.report.plot import PlotError, check_plot

        try:
            check_plot(args.plot)
        except PlotError as error:
            raise CommandError(str(error)) from None


def hand_out(args: argparse.Namespace, result: Replay | Plan) -> None:
    """Show `result` (not beside JSON on stdout) and write the files asked for."""
    if args.json != "-":
        from twofold.report.terminal import show_plan, show_replay

        console = out()
        if isinstance(result, Replay):
            show_replay(console, result)
        else:
            show_plan(console, result)
    if args.html:
        from twofold.report.html import html_page

        _write("--html", args.html, html_page(result))
    if args.plot:
        from twofold.report.plot import save_plot

        try:
            save_plot(args.plot, result)
        except OSError as error:
            raise CommandError(f"--plot {args.plot}: {error.strerror or error}") from None
    write_json(args.json, result)


def _write(flag: str, target: str, text: str) -> None:
    try:
        if target == "-":
            sys.stdout.write(text)
        else:
            Path(target).write_text(text, encoding="utf-8")
    except OSError as error:
        raise CommandError(f"{flag} {target}: {(error.strerror or 'failed').lower()}") from None
