"""When each handoff began and ended, from what its two workers recorded.

Workers run with `--record`; a journal has the time of every message of a core on CLOCK_MONOTONIC,
which all processes of one machine share. That it does is checked: no message may have been
handled before it was sent.
"""

from __future__ import annotations

from typing import Any

import msgspec

from twofold.core.journal import worker_entries
from twofold.messages import (
    Claim,
    Closed,
    Digested,
    Done,
    Ended,
    FromPeer,
    PeerMessage,
    Read,
    ReadDone,
    RunStep,
    Submit,
    ToPeer,
    Write,
)
from twofold.transport.runs import merge


class Handoff(msgspec.Struct, kw_only=True):
    """One request over its two workers. Times in nanoseconds of the machine's clock.

    `ready_ns`: the KV is committed. `ranges` are runs of blocks that are adjacent on both sides.
    `sent_ns` and so on are steps of pull only: the decode leg came, its claim was answered, the
    copy was done.
    """

    n_tokens: int = 0
    prefill_began_ns: int = 0
    prefilled_ns: int = 0
    placed_ns: int = 0
    ready_ns: int = 0
    stepped_ns: int = 0
    n_blocks: int = 0
    n_ranges: int = 0
    came_ns: int = 0
    granted_ns: int = 0
    copied_ns: int = 0

    @property
    def residual_ns(self) -> int:
        """From the end of prefill until decode could step."""
        return self.ready_ns - self.prefilled_ns

    @property
    def prefill_ns(self) -> int:
        """From the first step of the prompt to the end of its last."""
        return self.prefilled_ns - self.prefill_began_ns

    @property
    def reserved_ns(self) -> int:
        """How long decode's blocks were set aside without KV in them."""
        return self.ready_ns - self.placed_ns


def handoffs(prefill: bytes, decode: bytes) -> list[Handoff]:
    """All handoffs that came to their end, by time; from the journals of the two workers.

    Raises RuntimeError when a message was handled before it was sent: clocks differ then.
    """
    found: dict[int, Handoff] = {}
    sent: dict[tuple[str, int, str], int] = {}
    heard: dict[tuple[str, int, str], int] = {}
    _read_prefill(prefill, found, sent, heard)
    _read_decode(decode, found, sent, heard)
    for key, at_ns in heard.items():
        if at_ns < sent.get(key, at_ns):
            raise RuntimeError(f"{key} was handled before it was sent: clocks differ")
    whole = [h for h in found.values() if h.prefilled_ns and h.placed_ns and h.ready_ns]
    return sorted(whole, key=lambda h: h.prefill_began_ns)


def _name(side: str, message: PeerMessage) -> tuple[str, int, str]:
    return side, getattr(message, "request_id", 0), type(message).__name__


def _note(
    side: str,
    now_ns: int,
    message: Any,
    effects: list[Any],
    sent: dict[tuple[str, int, str], int],
    heard: dict[tuple[str, int, str], int],
) -> None:
    """Remember when messages first left, and first came; `side` is who sends."""
    other = "D" if side == "P" else "P"
    if isinstance(message, FromPeer) and hasattr(message.message, "request_id"):
        heard.setdefault(_name(other, message.message), now_ns)
    for effect in effects:
        if isinstance(effect, ToPeer) and hasattr(effect.message, "request_id"):
            sent.setdefault(_name(side, effect.message), now_ns)


def _read_prefill(
    journal: bytes,
    found: dict[int, Handoff],
    sent: dict[tuple[str, int, str], int],
    heard: dict[tuple[str, int, str], int],
) -> None:
    of: dict[int, Handoff] = {}
    for now_ns, message, effects in worker_entries(journal):
        _note("P", now_ns, message, effects, sent, heard)
        if isinstance(message, Submit) and message.hold:
            handoff = Handoff(n_tokens=len(message.tokens))
            of[message.request_id] = found[message.transfer or message.request_id] = handoff
        for effect in effects:
            if isinstance(effect, RunStep):
                for request_id, _, _ in effect.work:
                    if request_id in of and not of[request_id].prefill_began_ns:
                        of[request_id].prefill_began_ns = now_ns
            elif isinstance(effect, Ended) and effect.held:
                of[effect.request_id].prefilled_ns = now_ns
            elif isinstance(effect, Write) and effect.layers[0] == 0:
                of[effect.request_id].n_ranges += len(merge(effect.pairs, len(effect.pairs)))


def _read_decode(
    journal: bytes,
    found: dict[int, Handoff],
    sent: dict[tuple[str, int, str], int],
    heard: dict[tuple[str, int, str], int],
) -> None:
    of: dict[int, Handoff] = {}
    for now_ns, message, effects in worker_entries(journal):
        _note("D", now_ns, message, effects, sent, heard)
        if isinstance(message, Submit) and message.source and message.source.request_id in found:
            handoff = of[message.request_id] = found[message.source.request_id]
            handoff.came_ns = now_ns
        _committed(now_ns, message, effects, of, found)
        for effect in effects:
            if isinstance(effect, Read) and effect.request_id in of:
                handoff = of[effect.request_id]
                handoff.placed_ns = handoff.granted_ns = now_ns
                handoff.n_blocks = len(effect.pairs)
                handoff.n_ranges = len(merge(effect.pairs, len(effect.pairs)))
            elif isinstance(effect, ToPeer) and isinstance(effect.message, Claim):
                claimed = found.get(effect.message.request_id)
                if claimed is not None and effect.message.blocks:
                    claimed.placed_ns = now_ns
                    claimed.n_blocks = len(effect.message.blocks)
            elif isinstance(effect, RunStep):
                for request_id, _, _ in effect.work:
                    if request_id in of and not of[request_id].stepped_ns:
                        of[request_id].stepped_ns = now_ns


def _committed(
    now_ns: int,
    message: Any,
    effects: list[Any],
    of: dict[int, Handoff],
    found: dict[int, Handoff],
) -> None:
    """Pull believes a copy once it is told Closed(valid); push once its own checksums are equal."""
    if isinstance(message, FromPeer) and isinstance(message.message, Closed):
        handoff = found.get(message.message.request_id)
        # Pushed KV is committed before this comes.
        if handoff is not None and message.message.valid and not handoff.ready_ns:
            handoff.ready_ns = now_ns
        return
    taken = [e.message for e in effects if isinstance(e, ToPeer) and isinstance(e.message, Done)]
    for done in taken:
        handoff = found.get(done.request_id)
        if handoff is None or not done.ok:
            continue
        if isinstance(message, Digested):
            handoff.ready_ns = now_ns
        elif isinstance(message, ReadDone) and not handoff.copied_ns:
            handoff.copied_ns = now_ns
