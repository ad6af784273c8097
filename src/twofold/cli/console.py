"""What a command writes to the terminal while it works."""

from __future__ import annotations

import contextlib
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import IO, Final

from rich.console import Console
from rich.live import Live
from rich.spinner import Spinner
from rich.text import Text

_WIDTH: Final = 100
_HELD_LINES: Final = 1000


def out(file: IO[str] | None = None) -> Console:
    """A console on `file` or stdout, at most 100 columns wide."""
    console = Console(file=file or sys.stdout)
    console.width = min(_WIDTH, console.width) if console.is_terminal else _WIDTH
    return console


class Status:
    """Lines on stderr, with a spinner below them while there is something to wait for."""

    def __init__(self, colour: Callable[[str], str]) -> None:
        """`colour` is what a line goes through when stderr is a terminal."""
        self._console = Console(file=sys.stderr, soft_wrap=True)
        self._colour = colour
        self._held: deque[str] | None = None

    def line(self, text: str) -> None:
        """Write a line, now or when lines are no longer held back."""
        if self._held is not None:
            self._held.append(text)
            return
        # A reader of stderr that has gone must not end the service.
        with contextlib.suppress(OSError):
            if self._console.is_terminal:
                self._console.print(Text.from_ansi(self._colour(text)))
            else:
                print(text, file=sys.stderr, flush=True)

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Keep lines back, the latest thousand, so that they do not break up what is written."""
        held: deque[str] = deque(maxlen=_HELD_LINES)
        self._held = held
        try:
            yield
        finally:
            self._held = None
            for text in held:
                self.line(text)

    @contextlib.contextmanager
    def waiting(self, what: Callable[[], str]) -> Iterator[None]:
        """Show `what()` and the seconds waited; as one line when stderr is no terminal."""
        if not self._console.is_terminal:
            self.line(what())
            yield
            return
        started = time.monotonic()
        spinner = Spinner("dots")

        def frame() -> Spinner:
            spinner.update(text=Text(f"{what()} ({time.monotonic() - started:.0f} s)"))
            return spinner

        with Live(
            get_renderable=frame,
            console=self._console,
            refresh_per_second=10,
            transient=True,
            redirect_stdout=False,
            redirect_stderr=False,
        ):
            yield
