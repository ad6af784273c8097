"""The `twofold` command: finds the command asked for and turns what it raises into exit codes."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import Final, cast

from twofold import __version__
from twofold.cli import explain, gateway, plan, replay, serve, size, worker
from twofold.cli.command import (
    EXIT_BAD_INPUT,
    EXIT_DONE,
    EXIT_INTERRUPTED,
    Command,
    CommandError,
    Parser,
)
from twofold.config import SettingsError

_COMMANDS: Final = tuple(
    cast(Command, module) for module in (serve, worker, gateway, size, replay, plan, explain)
)
_DESCRIPTION: Final = "Serve a language model with prefill and decode on separate workers."


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line `argv`, or the process's own; the exit code.

    0 done, 1 a check failed, 2 bad input or usage, 130 interrupted.
    """
    parser, parsers = _parsers()
    args, rest = parser.parse_known_args(argv)
    if args.command is None:
        parser.error(f"name a command: {', '.join(parsers)}; see twofold --help")
    parsers[args.command].refuse_unknown(rest)
    try:
        return cast(int, args.run(args))
    except (CommandError, SettingsError) as error:
        print(f"twofold {args.command}: {error}", file=sys.stderr)
        return error.code if isinstance(error, CommandError) else EXIT_BAD_INPUT
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        # Whoever read our output has gone; Python would complain once more as it ends.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_DONE


def _parsers() -> tuple[Parser, dict[str, Parser]]:
    """The parser of the command line, and those of the commands by name."""
    parser = Parser(
        prog="twofold",
        description=_DESCRIPTION,
        epilog="example: twofold serve --once",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"twofold {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", title="commands")
    found: dict[str, Parser] = {}
    for command in _COMMANDS:
        found[command.NAME] = commands.add_parser(
            command.NAME,
            help=command.SUMMARY,
            description=command.SUMMARY[0].upper() + command.SUMMARY[1:] + ".",
            epilog=f"example: {command.EXAMPLE}",
            allow_abbrev=False,
        )
        command.add_arguments(found[command.NAME])
        found[command.NAME].set_defaults(run=command.run)
    return parser, found
