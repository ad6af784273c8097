"""What the commands share: their parser, their flags, their errors and their results."""

from __future__ import annotations

import argparse
import difflib
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, NoReturn, Protocol

import msgspec

from twofold.config import Option, Sources

EXIT_DONE: Final = 0
EXIT_FAILED: Final = 1
EXIT_BAD_INPUT: Final = 2
EXIT_INTERRUPTED: Final = 130


class CommandError(Exception):
    """A command cannot go on. The message is one line; `code` becomes the exit code."""

    def __init__(self, message: str, code: int = EXIT_BAD_INPUT) -> None:
        super().__init__(message)
        self.code = code


class Command(Protocol):
    """A module of this package that is a command."""

    NAME: str
    SUMMARY: str
    EXAMPLE: str

    @staticmethod
    def add_arguments(parser: argparse.ArgumentParser) -> None:
        """Declare the command's own arguments."""
        ...

    @staticmethod
    def run(args: argparse.Namespace) -> int:
        """Do it; the exit code. Raises CommandError or SettingsError for what the user can mend."""
        ...


class Parser(argparse.ArgumentParser):
    """A parser whose errors are one line."""

    def error(self, message: str) -> NoReturn:
        """Exit with code 2 and one line that begins with the command's name."""
        self.exit(EXIT_BAD_INPUT, f"{self.prog}: {message.removeprefix('argument ')}\n")

    def flags(self) -> list[str]:
        """Every flag that it knows."""
        return list(self._option_string_actions)

    def refuse_unknown(self, words: list[str]) -> None:
        """Exit with code 2 when there are `words` that no argument took."""
        if not words:
            return
        flag = words[0].partition("=")[0]
        near = difflib.get_close_matches(flag, self.flags(), n=1)
        hint = f"did you mean {near[0]}?" if near else f"see {self.prog} --help"
        self.error(f"{flag}: unknown argument; {hint}")


def add_options(
    parser: argparse.ArgumentParser,
    options: tuple[Option, ...],
    defaults: Mapping[str, Any] | None = None,
) -> None:
    """Declare a flag for each of `options`, and MODEL for the model.

    Values stay text: they are checked with those from the environment and the file. `defaults`
    are the command's own, by key.
    """
    for option in options:
        if defaults and option.key in defaults:
            option = msgspec.structs.replace(option, default=defaults[option.key])
        text = option.description.replace("%", "%%")
        if option.key == "model":
            parser.add_argument(
                "model", metavar="MODEL", nargs="?", default=argparse.SUPPRESS, help=text
            )
        elif option.is_bool:
            parser.add_argument(
                option.flag,
                dest=option.key,
                action=argparse.BooleanOptionalAction,
                default=argparse.SUPPRESS,
                help=f"{text}{_default(option)}",
            )
        else:
            parser.add_argument(
                option.flag,
                dest=option.key,
                action="append" if option.is_list else "store",
                default=argparse.SUPPRESS,
                metavar=_metavar(option),
                help=f"{text}{_default(option)}",
            )


def add_config(parser: argparse.ArgumentParser) -> None:
    """Declare `--config`."""
    parser.add_argument(
        "--config",
        metavar="FILE",
        default="",
        help="TOML file of settings; flags and TWOFOLD_* variables go before it",
    )


def add_json(parser: argparse.ArgumentParser) -> None:
    """Declare `--json`."""
    parser.add_argument(
        "--json", metavar="FILE", default="", help="write the result as JSON; - for stdout"
    )


def sources(args: argparse.Namespace, options: tuple[Option, ...]) -> Sources:
    """Where the settings of this run come from."""
    given = vars(args)
    flags = {option.key: given[option.key] for option in options if option.key in given}
    return Sources(flags=flags, environ=os.environ, file=args.config)


def write_json(target: str, result: object) -> None:
    """Write `result` to the file named `target`, or to stdout for `-`; nowhere when empty.

    Raises CommandError when the file cannot be written.
    """
    if not target:
        return
    text = msgspec.json.format(msgspec.json.encode(result), indent=2).decode() + "\n"
    if target == "-":
        sys.stdout.write(text)
        sys.stdout.flush()
        return
    try:
        Path(target).write_text(text, encoding="utf-8")
    except OSError as error:
        raise CommandError(f"--json {target}: {(error.strerror or 'failed').lower()}") from None


def _default(option: Option) -> str:
    value = option.default
    if isinstance(value, str | int | float) and value != "" and not option.is_bool:
        return f" (default {value})"
    if option.is_bool:
        return f" (default {'yes' if value else 'no'})"
    return ""


def _metavar(option: Option) -> str:
    if option.is_list:
        return "WORKER"
    if option.key.endswith("_s"):
        return "S"
    if isinstance(option.default, int) or option.key.rpartition("_")[2] == "port":
        return "N"
    return option.key.upper().rpartition("_")[2]
