"""Token ids to text, one token at a time: whole characters only, stop strings never shown."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

_INCOMPLETE: Final = "\ufffd"
_MOST_HELD: Final = 8
"""Tokens that may wait for a character to be complete, which has four bytes at most."""


class Detokeniser:
    """Turns an answer's tokens into pieces of text that join to the text of all of them.

    `decode` gives the text of ids. A piece ends where a character does, and before anything that
    may be the start of a stop string. When one is complete, `stopped` is set and the text ends
    before it. Stop strings count once `min_tokens` tokens have come.

    What a token costs does not grow with the answer, whatever the model writes: bytes that are no
    character are let go as U+FFFD, and tokens without any text are not kept.
    """

    def __init__(
        self,
        decode: Callable[[Sequence[int]], str],
        stop: Sequence[str] = (),
        min_tokens: int = 0,
    ) -> None:
        self._decode = decode
        self._stop = tuple(stop)
        self._min_tokens = min_tokens
        self._n_tokens = 0
        # The first `_n_out` ids are out, and only decoded again as context, because a token's text
        # can depend on the one before it.
        self._ids: list[int] = []
        self._n_out = 0
        self._pending = ""
        self.stopped = False

    def feed(self, token: int) -> str:
        """Take a token; returns the text that is certain by now."""
        self._n_tokens += 1
        self._ids.append(token)
        known, text = self._known(), self._decode(self._ids)
        n_held = len(self._ids) - self._n_out
        if text.endswith(_INCOMPLETE):
            if n_held < _MOST_HELD:
                return ""
            text = text[:-1]
        elif len(text) <= len(known) and n_held > _MOST_HELD:
            # The first of them is kept: it may be what the next one's text depends on.
            del self._ids[self._n_out + 1 : -1]
        if len(text) <= len(known):
            return ""
        del self._ids[: self._n_out]
        self._n_out = len(self._ids)
        return self._release(text[len(known) :])

    def flush(self) -> str:
        """The rest: what was held back, and characters that will never be complete."""
        if self.stopped:
            return ""
        rest = self._decode(self._ids)[len(self._known()) :]
        self._ids.clear()
        self._n_out = 0
        text = self._release(rest) if rest else ""
        # Empty after a stop string; otherwise what might have been the start of one is not.
        text, self._pending = text + self._pending, ""
        return text

    def _known(self) -> str:
        """The text that is out of the ids that are kept. An incomplete character at their end
        is not."""
        return self._decode(self._ids[: self._n_out]).removesuffix(_INCOMPLETE)

    def _release(self, piece: str) -> str:
        text = self._pending + piece
        if not self._stop or self._n_tokens <= self._min_tokens:
            self._pending = ""
            return text
        found = [at for at in (text.find(stop) for stop in self._stop) if at >= 0]
        if found:
            self.stopped = True
            self._pending = ""
            return text[: min(found)]
        keep = max(self._overlap(text, stop) for stop in self._stop)
        self._pending = text[len(text) - keep :]
        return text[: len(text) - keep]

    @staticmethod
    def _overlap(text: str, stop: str) -> int:
        """Length of the longest proper start of `stop` that `text` ends with."""
        for n in range(min(len(stop) - 1, len(text)), 0, -1):
            if text.endswith(stop[:n]):
                return n
        return 0
