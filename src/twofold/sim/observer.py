"""What may be watched in a simulated run: every life of a core and every message it handles."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol, TypeAlias

from twofold.core.router import Router
from twofold.core.worker import WorkerCore
from twofold.messages import RouterEffect, RouterMessage, WorkerEffect, WorkerMessage

Core: TypeAlias = WorkerCore | Router
Message: TypeAlias = WorkerMessage | RouterMessage
Effects: TypeAlias = Sequence[WorkerEffect] | Sequence[RouterEffect]


class Observer(Protocol):
    """Told of what happens, in order. `name` is "router" or a worker's engine id."""

    def born(self, name: str, core: Core, settings: Mapping[str, Any]) -> None:
        """A core was made with the keyword arguments `settings`."""

    def handled(
        self, name: str, core: Core, now_ns: int, message: Message, effects: Effects
    ) -> None:
        """`core.handle(message, now_ns)` returned `effects`, which are not carried out yet."""

    def died(self, name: str) -> None:
        """A worker's process was killed: its core is gone."""
