"""Token ids to text, one token at a time: whole characters only, stop strings never shown."""

from __future__ import annotations

from collections.abc import Callable, Sequence

_INCOMPLETE = "\ufffd"


class Detokeniser:
    """Turns an answer's tokens into pieces of text that join to the text of all of them.

    `decode` gives the text of ids. A piece ends where a character does, and before anything that
    may be the start of a stop string. When one is complete, `stopped` is set and the text ends
    before it. Stop strings count once `min_tokens` tokens have come.
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
        self._ids: list[int] = []
        # Ids before `_start` are out; those from there to `_read` are decoded again as context,
        # because a token's text can depend on the one before it.
        self._start = 0
        self._read = 0
        self._pending = ""
        self.stopped = False

    def feed(self, token: int) -> str:
        """Take a token; returns the text that is certain by now."""
        self._ids.append(token)
        known = self._decode(self._ids[self._start : self._read])
        text = self._decode(self._ids[self._start :])
        if text.endswith(_INCOMPLETE) or len(text) <= len(known):
            return ""
        self._start, self._read = self._read, len(self._ids)
        return self._release(text[len(known) :])

    def flush(self) -> str:
        """The rest: what was held back, and characters that will never be complete."""
        if self.stopped:
            return ""
        known = self._decode(self._ids[self._start : self._read])
        rest = self._decode(self._ids[self._start :])[len(known) :]
        self._start = self._read = len(self._ids)
        text = self._release(rest) if rest else ""
        # Empty after a stop string; otherwise what might have been the start of one is not.
        text, self._pending = text + self._pending, ""
        return text

    def _release(self, piece: str) -> str:
        text = self._pending + piece
        if not self._stop or len(self._ids) <= self._min_tokens:
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
