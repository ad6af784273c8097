"""One request as its client sees it: every token, and how it ended."""

from __future__ import annotations

import asyncio
import json
import time

from tests.live.stack import HOST


class Client:
    """Sends one request, streamed or not, with `logprobs`, so that each token can be compared.

    `want` are the tokens of the right answer, as text. With `most_reads` it leaves after so many
    reads.
    """

    def __init__(self, want: list[str], most_reads: int | None = None) -> None:
        self.want = want
        self.got = b""
        self.first = asyncio.Event()
        self.left = False
        self.ended_at = 0.0
        self._most_reads = most_reads
        self._writer: asyncio.StreamWriter | None = None

    async def run(self, port: int, data: bytes, within_s: float = 60.0) -> None:
        """Send `data`, read until the end. Raises TimeoutError when none comes."""
        n_reads = 0
        try:
            reader, self._writer = await asyncio.open_connection(HOST, port)
            self._writer.write(data)
            while self._most_reads is None or n_reads < self._most_reads:
                piece = await asyncio.wait_for(reader.read(65536), within_s)
                if not piece:
                    return
                n_reads += 1
                self.got += piece
                if b"data: " in self.got:
                    self.first.set()
            self.left = True
        except ConnectionError:
            pass
        finally:
            self.ended_at = time.monotonic()
            self.leave()

    def leave(self) -> None:
        """Close the connection."""
        if self._writer is not None:
            self._writer.transport.abort()

    @property
    def status(self) -> int:
        """0 before there is one."""
        return int(self.got[9:12]) if len(self.got) > 12 else 0

    def end(self, *, may_be_cut: bool = False) -> str:
        """How it ended: "whole", "error" or, where that may be, "cut" or "left".

        Fails for wrong tokens, and for anything but exactly one end.
        """
        head, _, body = self.got.partition(b"\r\n\r\n")
        assert self.tokens() == self.want[: len(self.tokens())], f"wrong text: {self.tokens()}"
        if self.left:
            return "left"
        if self.status not in (0, 200):
            assert self.status >= 400, f"no answer: {self.got!r}"
            length = int(head.lower().partition(b"content-length: ")[2].split(b"\r\n")[0])
            assert may_be_cut or len(body) == length, self.got
            assert json.loads(body)["error"]["message"], self.got
            return "error"
        if b"text/event-stream" not in head:
            whole = bool(body) and len(self.tokens()) == len(self.want)
            assert whole or may_be_cut, f"cut: {self.got!r}"
            return "whole" if whole else "cut"
        ends = self.got.count(b"data: [DONE]"), self.got.count(b'data: {"error"')
        if ends == (1, 0):
            assert self.got.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")
            assert self.tokens() == self.want, "an answer that ended well is not whole"
            return "whole"
        if ends == (0, 0) and may_be_cut:
            return "cut"
        assert ends == (0, 1), f"ends {ends}: {self.got[-300:]!r}"
        return "error"

    def tokens(self) -> list[str]:
        """The tokens that have come; the last event, or the body, may be half."""
        lines = self.got.partition(b"\r\n\r\n")[2].split(b"\n")
        found: list[str] = []
        for line in lines:
            line = line.removeprefix(b"data: ")
            if line.startswith(b"{") and line.endswith(b"}"):
                for choice in json.loads(line).get("choices", []):
                    found += (choice.get("logprobs") or {}).get("tokens", [])
        return found
