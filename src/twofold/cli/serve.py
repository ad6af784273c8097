"""`twofold serve`: a gateway, its workers and their supervisor on this machine."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Final

import msgspec

from twofold.cli.command import CommandError, add_config, add_json, add_options, sources
from twofold.cli.models import with_local_model
from twofold.config import ServeSettings, options, read_serve

if TYPE_CHECKING:
    from twofold.cli.serving import Wish

NAME: Final = "serve"
SUMMARY: Final = "serve a model from separate prefill and decode workers on this machine"
EXAMPLE: Final = "twofold serve --prefill 1 --decode 2 --ask 'Why is the sky blue?'"
_OPTIONS: Final = (
    *options("engine"),
    *options("serve"),
    *(option for option in options("gateway") if option.is_limit),
)
_PORTS_TRIED: Final = 100


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    add_options(parser, _OPTIONS)
    add_config(parser)
    # Several times, the first question counts, so that `make serve` can add a bare --ask.
    parser.add_argument(
        "--ask",
        action="append",
        nargs="?",
        const="",
        default=[],
        metavar="QUESTION",
        help="once ready, ask a question and show the answer and where its time went",
    )
    parser.add_argument(
        "--once", action="store_true", help="ask, and stop after the answer; 1 if it failed"
    )
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    """Serve until told to stop, or with `--once` until the answer is there; the exit code."""
    settings, given = read_serve(sources(args, _OPTIONS))
    from twofold.transport.choose import unusable

    if reason := unusable(settings.engine.transport, settings.engine.handoff):
        raise CommandError(reason)
    settings, moved = _with_free_port(settings, is_explicit="port" in given)
    settings = msgspec.structs.replace(settings, engine=with_local_model(settings.engine))
    from twofold.cli.serving import serve

    return serve(settings, _wish(args), notes=[moved] if moved else [])


def _wish(args: argparse.Namespace) -> Wish | None:
    """What to ask, if anything."""
    from twofold.cli.ask import DEFAULT_QUESTION
    from twofold.cli.serving import Wish

    if not args.ask and not args.once and not args.json:
        return None
    question = next((text for text in args.ask if text), DEFAULT_QUESTION)
    return Wish(question=question, once=args.once, json=args.json)


def _with_free_port(settings: ServeSettings, *, is_explicit: bool) -> tuple[ServeSettings, str]:
    """Settings whose port is free, and a note when it is not the one they had.

    Raises CommandError when somebody asked for that very port, or the host is wrong.
    """
    from twofold.live.ports import is_free

    port = settings.port
    try:
        if port == 0 or is_free(settings.host, port):
            return settings, ""
        if is_explicit:
            raise CommandError(f"--port {port}: is taken; name another, or 0 for any free one")
        for other in range(port + 1, port + _PORTS_TRIED):
            if is_free(settings.host, other):
                note = f"port {port} is taken, so this serves on port {other}"
                return msgspec.structs.replace(settings, port=other), note
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        raise CommandError(f"--host {settings.host}: cannot listen there: {reason}") from None
    raise CommandError(f"--port {port}: it and the {_PORTS_TRIED} after it are taken")
