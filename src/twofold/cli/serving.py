"""The life of `twofold serve`: start, wait until ready, ask if wished, serve, stop."""

from __future__ import annotations

import asyncio
import json
import shlex
import signal
import sys
from collections.abc import Awaitable, Sequence
from typing import IO, Final, TypeVar

import msgspec

from twofold.cli.ask import Answer, AskError, ask, chat_body
from twofold.cli.command import (
    EXIT_BAD_INPUT,
    EXIT_DONE,
    EXIT_FAILED,
    EXIT_INTERRUPTED,
    CommandError,
    write_json,
)
from twofold.cli.console import Status, out
from twofold.cli.ledger_view import show_ledger
from twofold.config import ServeSettings
from twofold.live.deployment import LOOPBACK, Deployment, plan_deployment
from twofold.live.logs import coloured, log_line
from twofold.live.supervisor import EXIT_BAD_SETTINGS, GivenUpError, Supervisor

_READY_TIMEOUT_S: Final = 900.0
_NEXT_QUESTION: Final = "Why is the sky blue?"
_ANY_HOST: Final = ("0.0.0.0", "::", "")
_NAME: Final = "supervisor"

T = TypeVar("T")


class Wish(msgspec.Struct, frozen=True):
    """A question to ask once all is ready; `once`: stop after it; `json`: where to put it."""

    question: str
    once: bool
    json: str


class Told(Exception):
    """Somebody told the service to stop, by this signal."""

    def __init__(self, number: signal.Signals) -> None:
        super().__init__(number.name)
        self.code = EXIT_INTERRUPTED if number == signal.SIGINT else EXIT_DONE


def serve(settings: ServeSettings, wish: Wish | None, notes: Sequence[str] = ()) -> int:
    """Serve as `settings` say, until told to stop; the exit code.

    `notes` are told to the user first. Raises CommandError when it cannot be started.
    """
    status = Status(coloured)
    for note in notes:
        status.line(log_line(_NAME, "warning", note))
    try:
        deployment = plan_deployment(settings)
    except OSError as error:
        raise CommandError(str(error), EXIT_FAILED) from None
    return asyncio.run(_Service(deployment, settings, wish, status).run())


class _Service:
    """One run of a deployment. A second signal while it stops kills what is left."""

    def __init__(
        self,
        deployment: Deployment,
        settings: ServeSettings,
        wish: Wish | None,
        status: Status,
    ) -> None:
        self._gateway = deployment.gateway
        # Any other split policy may leave a prompt where its answer is written.
        self._must_transfer = settings.prefill > 0 and settings.limits.split_policy == "always"
        self._wish = wish
        self._status = status
        host = self._gateway.host
        self._host = LOOPBACK if host in _ANY_HOST else host
        self._told: asyncio.Future[signal.Signals] | None = None
        self._supervisor = Supervisor(
            deployment.children(),
            ready_at=(self._host, self._gateway.port),
            emit=status.line,
        )

    async def run(self) -> int:
        """From start to stop; the exit code."""
        loop = asyncio.get_running_loop()
        self._told = loop.create_future()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._tell, number)
        await self._supervisor.start()
        try:
            return await self._serve()
        except Told as told:
            return told.code
        except GivenUpError as error:
            return self._explain(error)
        except TimeoutError as error:
            raise CommandError(str(error), EXIT_FAILED) from None
        finally:
            self._say("info", "stopping")
            await self._supervisor.stop()

    async def _serve(self) -> int:
        with self._status.waiting(self._waiting_text):
            await self._unless_told(self._supervisor.wait_ready(_READY_TIMEOUT_S))
        self._say("info", f"serving on {self._url}, admin on {self._admin_url}, Ctrl-C to stop")
        if self._wish is not None:
            code = await self._unless_told(asyncio.to_thread(self._ask, self._wish))
            if self._wish.once:
                return code
        raise await self._unless_told(self._supervisor.wait_given_up())

    async def _unless_told(self, work: Awaitable[T]) -> T:
        """The result of `work`. Raises Told, without waiting for it, when told to stop."""
        assert self._told is not None
        task = asyncio.ensure_future(work)
        await asyncio.wait((task, self._told), return_when=asyncio.FIRST_COMPLETED)
        if self._told.done():
            # A thread that waits for an answer ends when the gateway does.
            task.cancel()
            raise Told(self._told.result())
        return await task

    def _tell(self, number: signal.Signals) -> None:
        assert self._told is not None
        if self._told.done():
            self._supervisor.kill()
        else:
            self._told.set_result(number)

    def _ask(self, wish: Wish) -> int:
        """Ask, show answer and ledger; the exit code. Runs in a thread of its own."""
        shown = sys.stderr if wish.json == "-" else sys.stdout
        print(f"\n> {wish.question}\n", file=shown, flush=True)

        def on_text(piece: str) -> None:
            print(piece, end="", file=shown, flush=True)

        with self._status.held():
            try:
                answer = ask(self._host, self._gateway.port, wish.question, on_text)
            except AskError as error:
                print(file=shown, flush=True)
                if self._told is None or not self._told.done():
                    self._say("error", f"the question failed: {error}")
                return EXIT_FAILED
            self._show(answer, shown)
        write_json(wish.json, answer)
        if self._must_transfer and answer.ledger.transferred_bytes == 0:
            self._say("error", "no KV bytes were transferred, although prefill has its own worker")
            return EXIT_FAILED
        return EXIT_DONE

    def _show(self, answer: Answer, shown: IO[str]) -> None:
        console = out(shown)
        print("\n", file=shown)
        show_ledger(console, answer.ledger)
        body = json.dumps(chat_body(answer.model, _NEXT_QUESTION))
        explain = f"twofold explain {self._admin_url} {answer.ledger.request_id}"
        curl = (
            f"curl -N {self._url}/v1/chat/completions -H 'Content-Type: application/json'"
            f" -d {shlex.quote(body)}"
        )
        if self._wish is not None and not self._wish.once:
            print(f"\ntry next:\n  {curl}\n  {explain}\n", file=shown, flush=True)
        else:
            print(f"\ntry next, while it serves:\n  {curl}\n", file=shown, flush=True)

    def _explain(self, error: GivenUpError) -> int:
        """Show why a process cannot be started; the exit code."""
        self._say("error", f"{error}; its last lines:")
        for line in error.last_lines:
            self._status.line(f"  {line}")
        return EXIT_BAD_INPUT if error.exit_code == EXIT_BAD_SETTINGS else EXIT_FAILED

    def _say(self, level: str, message: str) -> None:
        self._status.line(log_line(_NAME, level, message))

    def _waiting_text(self) -> str:
        names = self._supervisor.waiting_for()
        return f"loading: {', '.join(names)}" if names else "waiting for the gateway"

    @property
    def _url(self) -> str:
        return f"http://{_in_url(self._host)}:{self._gateway.port}"

    @property
    def _admin_url(self) -> str:
        return f"http://{self._gateway.admin_host}:{self._gateway.admin_port}"


def _in_url(host: str) -> str:
    return f"[{host}]" if ":" in host else host
