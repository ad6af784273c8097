"""An unsplit engine that reads every waiting prompt before it decodes, as vLLM did before it mixed
the two in a step. A reference of a few lines, to tell the scheduler's part in a difference; none of
the deployed cores is in it.
"""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.published.sim import Times
from twofold.cost.step import StepTime
from twofold.trace import TraceRequest
from twofold.types import NS_PER_MS


class PromptFirst:
    """One worker with `kv_tokens` of KV and steps of up to `budget` prompt tokens."""

    def __init__(self, step: StepTime, *, kv_tokens: int, budget: int = 16384) -> None:
        self._step = step
        self._kv_tokens = kv_tokens
        self._budget = budget

    def run(self, requests: Sequence[TraceRequest]) -> list[Times]:
        """The times of `requests`, which come in order of arrival."""
        self._requests = requests
        self._waiting: list[int] = []
        self._running: list[tuple[int, int, int]] = []  # request, tokens written, time of the first
        self._used = 0
        times: dict[int, Times] = {}
        now_ns = come = 0
        while come < len(requests) or self._waiting or self._running:
            while come < len(requests) and requests[come].arrival_ns <= now_ns:
                self._waiting.append(come)
                come += 1
            if not self._waiting and not self._running:
                now_ns = requests[come].arrival_ns
                continue
            now_ns = self._read(now_ns) or self._write(now_ns)
            self._end(now_ns, times)
        return [times[i] for i in range(len(requests))]

    def _read(self, now_ns: int) -> int:
        """A step of prompts; when it ends, 0 where none fits."""
        batch: list[int] = []
        tokens = 0
        while self._waiting:
            n = self._requests[self._waiting[0]].input_tokens
            if tokens + n > self._budget or self._used + n + 1 > self._kv_tokens:
                break
            tokens, self._used = tokens + n, self._used + n + 1
            batch.append(self._waiting.pop(0))
        if not batch:
            return 0
        parts = [(self._requests[i].input_tokens, 0) for i in batch]
        now_ns += self._step.step_ns(parts, 0, 0)
        self._running += [(i, 1, now_ns) for i in batch]
        return now_ns

    def _write(self, now_ns: int) -> int:
        """A step of decodes; the youngest give way when KV runs out, and begin again."""
        while len(self._running) > 1 and self._used + len(self._running) > self._kv_tokens:
            i, written, _ = self._running.pop()
            self._used -= self._requests[i].input_tokens + written
            self._waiting.insert(0, i)
        context = sum(self._requests[i].input_tokens + n for i, n, _ in self._running)
        now_ns += self._step.step_ns((), len(self._running), context)
        self._used += len(self._running)
        self._running = [(i, written + 1, first_ns) for i, written, first_ns in self._running]
        return now_ns

    def _end(self, now_ns: int, times: dict[int, Times]) -> None:
        left = []
        for i, written, first_ns in self._running:
            request = self._requests[i]
            if written < request.output_tokens:
                left.append((i, written, first_ns))
                continue
            self._used -= request.input_tokens + written
            times[i] = Times(
                (first_ns - request.arrival_ns) / NS_PER_MS,
                (now_ns - first_ns) / max(1, written - 1) / NS_PER_MS,
                (now_ns - request.arrival_ns) / NS_PER_MS,
            )
        self._running = left
