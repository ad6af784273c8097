"""What the simulated network knows of a worker."""

from __future__ import annotations

from typing import Protocol

from twofold.messages import WorkerMessage
from twofold.sim.contents import Contents
from twofold.sim.leg import Leg
from twofold.types import RequestId


class Node(Protocol):
    """A worker, as far as the network knows it. `engine_id` changes with each life."""

    name: str
    number: int
    engine_id: str
    contents: Contents | None
    peers: dict[str, None]

    @property
    def block_bytes(self) -> int:
        """Bytes of one KV block."""

    def feed(self, engine_id: str, message: WorkerMessage) -> None:
        """Handle `message`, unless the life it was meant for is over."""

    def awaited_from(self, request_id: RequestId) -> str:
        """The engine id of the peer that fills the blocks of this request."""

    def hang_up(self, engine_id: str, leg: Leg) -> None:
        """The gateway's end of `leg` has gone."""
