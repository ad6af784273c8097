"""Handing a request's KV from the worker that read the prompt to the one that answers.

The modes share one set of messages. What differs between them is who moves the bytes and when:

    pull       prefill ends, decode reserves, reads, asks whether what it read was still valid
    push       decode reserves on arrival, prefill writes once it ends
    layerwise  push, of longer prompts while later chunks and layers compute

`MODES` names the pair of state machines of each mode: one for the worker that has the KV, one
for the worker that wants it. A mode is chosen for a whole deployment, so pairs always agree.
"""

from __future__ import annotations

from typing import Final, NamedTuple

from twofold.core.handoff.pull_reader import PullReader
from twofold.core.handoff.pull_source import PullSource
from twofold.core.handoff.push_reader import PushReader
from twofold.core.handoff.push_source import PushSource


class Mode(NamedTuple):
    """The two sides of a handoff; whether decode is asked at once, and KV sent by the layer."""

    source: type[PullSource | PushSource]
    reader: type[PullReader | PushReader]
    at_once: bool
    by_layer: bool


MODES: Final[dict[str, Mode]] = {
    "pull": Mode(PullSource, PullReader, at_once=False, by_layer=False),
    "push": Mode(PushSource, PushReader, at_once=True, by_layer=False),
    "layerwise": Mode(PushSource, PushReader, at_once=True, by_layer=True),
}
