"""`twofold explain`: where one request's time went."""

from __future__ import annotations

import argparse
import http.client
from typing import Final
from urllib.parse import quote, urlsplit

import msgspec

from twofold.cli.ask import error_text
from twofold.cli.command import EXIT_DONE, EXIT_FAILED, CommandError, add_json, write_json
from twofold.cli.ledger_view import Ledger, show_ledger

NAME: Final = "explain"
SUMMARY: Final = "show where one request's time went and why it was routed so"
EXAMPLE: Final = "twofold explain http://127.0.0.1:8001 req-123"
_TIMEOUT_S: Final = 10.0
_NOT_FOUND: Final = "is this the gateway's admin address?"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument("url", metavar="URL", help="the gateway's admin address")
    parser.add_argument("request_id", metavar="REQUEST_ID", help="the answer's x-request-id")
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    """Fetch the ledger and show it; the exit code."""
    ledger = _fetch(args.url, args.request_id)
    if args.json != "-":
        from twofold.cli.console import out

        show_ledger(out(), ledger)
    write_json(args.json, ledger)
    return EXIT_DONE


def _fetch(url: str, request_id: str) -> Ledger:
    connection, base = _connection(url)
    path = f"{base}/admin/requests/{quote(request_id, safe='')}"
    try:
        connection.request("GET", path)
        answer = connection.getresponse()
        status, body = answer.status, answer.read()
    except (OSError, http.client.HTTPException) as error:
        raise CommandError(f"{url}: no answer: {error}", EXIT_FAILED) from None
    finally:
        connection.close()
    if status == 404:
        reason = error_text(body, _NOT_FOUND)
        raise CommandError(f"{url}: has no ledger of {request_id}: {reason}", EXIT_FAILED)
    if status != 200:
        raise CommandError(f"{url}: answered with status {status}", EXIT_FAILED)
    try:
        return msgspec.json.decode(body, type=Ledger)
    except msgspec.DecodeError as error:
        raise CommandError(
            f"{url}: answered with something else than a ledger: {error}", EXIT_FAILED
        ) from None


def _connection(url: str) -> tuple[http.client.HTTPConnection, str]:
    """A connection to the server of `url`, and the path before the API's own."""
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port
    except ValueError:
        host, port = None, None
    if host is None or parts.scheme not in ("http", "https"):
        raise CommandError(f"URL {url}: must be like http://127.0.0.1:8001")
    kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
    return kind(host, port, timeout=_TIMEOUT_S), parts.path.rstrip("/")
