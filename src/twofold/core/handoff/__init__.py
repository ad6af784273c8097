"""Handing a request's KV from the worker that read the prompt to the one that answers.

The modes share one set of messages. What differs between them is who moves the bytes and when:

    pull       prefill ends, decode reserves, reads, asks whether what it read was still valid
    push       decode reserves on arrival, prefill writes (not built yet)
    layerwise  push by ranges of layers while later ones compute (not built yet)

`MODES` names the pair of state machines of each mode: one for the worker that has the KV, one
for the worker that wants it. A mode is chosen for a whole deployment, so pairs always agree.
"""

from __future__ import annotations

from typing import Final, NamedTuple

from twofold.core.handoff.pull_reader import PullReader
from twofold.core.handoff.pull_source import PullSource


class Mode(NamedTuple):
    """The two sides of a handoff."""

    source: type[PullSource]
    reader: type[PullReader]


MODES: Final[dict[str, Mode]] = {"pull": Mode(PullSource, PullReader)}
