"""One request to a worker and what may come back of it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Literal, Protocol

from twofold.live.clock import Timer

State = Literal["connecting", "waiting", "streaming", "over"]


class Carrier(Protocol):
    """What a leg needs of the connection that carries it."""

    leg: Leg | None

    def cut(self) -> None:
        """Close at once."""
        ...

    def set_reading(self, reading: bool) -> None:
        """Take bytes from the worker, or leave them where they are."""
        ...

    def ends_here(self) -> bool:
        """Whether a stream could end after what has been passed on."""
        ...


class Head:
    """Status and headers of an answer; names are lower case."""

    __slots__ = ("headers", "status")

    def __init__(self) -> None:
        self.status = 0
        self.headers: dict[str, str] = {}

    def get(self, name: str) -> str:
        """A header's value, or an empty string."""
        return self.headers.get(name, "")


class Leg:
    """One request to a worker. Exactly one of these is called last, and nothing after `cancel`:

    - `on_whole(head, body)`: the answer is complete and was not streamed;
    - `on_end()`: a stream is complete;
    - `on_broken(reason, reached)`: no complete answer will come; `reached` says whether the
      worker was connected.

    Before `on_end` come `on_stream(head)`, once and with the first bytes of the body, and
    `on_raw(data)` with the body in its chunked framing. Only an answer with status 200 in chunks
    to a leg with the three callbacks of a stream is a stream. Once a stream is cut short,
    `between_chunks` says whether what was passed on ends with a whole chunk. With `unframed`,
    `on_raw` gets the body without the framing.
    """

    __slots__ = (
        "_connection",
        "_dial",
        "_timer",
        "between_chunks",
        "on_broken",
        "on_end",
        "on_raw",
        "on_stream",
        "on_whole",
        "state",
        "stream",
        "unframed",
    )

    def __init__(
        self,
        *,
        on_whole: Callable[[Head, bytes], None],
        on_broken: Callable[[str, bool], None],
        on_stream: Callable[[Head], None] | None = None,
        on_raw: Callable[[bytes], None] | None = None,
        on_end: Callable[[], None] | None = None,
        unframed: bool = False,
    ) -> None:
        self.on_whole = on_whole
        self.on_broken = on_broken
        self.on_stream = on_stream
        self.on_raw = on_raw
        self.on_end = on_end
        self.stream = on_stream is not None and on_raw is not None and on_end is not None
        self.state: State = "connecting"
        self.between_chunks = False
        self.unframed = unframed
        self._connection: Carrier | None = None
        self._dial: asyncio.Task[None] | None = None
        self._timer: Timer | None = None

    def cancel(self) -> None:
        """Stop: cut the connection, so that the worker knows. No callback follows."""
        connection, dial = self._connection, self._dial
        self._look_at_the_cut()
        self.over()
        if dial is not None:
            dial.cancel()
        if connection is not None:
            connection.leg = None
            connection.cut()

    def pause(self) -> None:
        """Take no more bytes from the worker until `resume`."""
        if self._connection is not None:
            self._connection.set_reading(False)

    def resume(self) -> None:
        """Take bytes again."""
        if self._connection is not None:
            self._connection.set_reading(True)

    def broken(self, reason: str, reached: bool) -> None:
        """For the pool: end the leg with `on_broken`, unless it is over."""
        if self.state != "over":
            self._look_at_the_cut()
            self.over()
            self.on_broken(reason, reached)

    def begin(self, connection: Carrier) -> None:
        """For the connection: it carries this leg from now on."""
        self._connection = connection
        self._dial = None
        self.state = "waiting"

    def dialling(self, task: asyncio.Task[None]) -> None:
        """For the pool: `task` makes a connection for this leg."""
        self._dial = task

    def ends_by(self, timer: Timer) -> None:
        """For the pool: `timer` ends this leg unless it is over before."""
        self._timer = timer

    def _look_at_the_cut(self) -> None:
        if self.state == "streaming" and self._connection is not None:
            self.between_chunks = self._connection.ends_here()

    def over(self) -> None:
        """For the connection: nothing more comes of this leg."""
        self.state = "over"
        self._connection = None
        self._dial = None
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
