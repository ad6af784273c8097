"""The workers as the router sees them: who is up, who fits whom, what each has to do and how fast.

Everything here follows from the router's own messages: what it sent and has not heard the end
of, and how long what it has heard of took.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final, Protocol

from twofold.core.estimates import Line, Rate
from twofold.core.handoff.layout import incompatibility
from twofold.core.routed_prefixes import RoutedPrefixes
from twofold.messages import WorkerSeen
from twofold.policy.lengths import N_BUCKETS, bucket
from twofold.policy.views import DecodeView, PrefillView, WholeView, work_ns
from twofold.types import NS_PER_S, ceil_div

PRIOR_TOKENS_PER_S: Final = 10_000
"""Prompt tokens per second of workers before the first prompt has been read anywhere.

Alike for all, so it favours none of them. It sets only what waiting weighs against a handoff.
"""


class Load(Protocol):
    """What a request is to the worker that it is sent to."""

    number: int
    weight: int
    uncached: int
    need_blocks: int
    output_tokens: int
    predicted_tokens: int
    block_keys: tuple[int, ...]
    block_tokens: int
    model: str


class RouterWorker:
    """A worker, with what it has been sent and not answered.

    `tokens` and `requests` are of all legs under way. `queued_tokens` are prompt tokens not yet
    computed; `sequences`, `used_blocks`, `output_left` and `by_length` are of answers.
    """

    __slots__ = (
        "by_length",
        "handing",
        "idle_since_ns",
        "output_left",
        "queued_tokens",
        "reading",
        "requests",
        "seen",
        "sequences",
        "steps",
        "tokens",
        "up",
        "used_blocks",
    )

    def __init__(self, seen: WorkerSeen) -> None:
        self.seen = seen
        self.up = True
        self.tokens = 0
        self.requests = 0
        self.queued_tokens = 0
        self.sequences = 0
        self.used_blocks = 0
        self.output_left = 0
        self.by_length = [0] * N_BUCKETS
        self.idle_since_ns = 0  # when the last prompt sent there was read or given up
        self.reading = Rate()
        self.handing = Rate()
        self.steps = Line()


class Fleet:
    """All workers, by name. `track_prefixes`: whether views tell what is cached where."""

    def __init__(self, *, track_prefixes: bool, budget_tokens: int, most_keys: int) -> None:
        self.workers: dict[str, RouterWorker] = {}
        self._prefixes = RoutedPrefixes()
        self._most_keys = most_keys
        self._track = track_prefixes
        self._budget_tokens = budget_tokens
        self._reading = Rate()
        self._handing = Rate()
        self._steps = Line()
        self._pairs: dict[str, list[str]] | None = None
        self.coming = 0  # requests at prefill workers, and the blocks that decode will need
        self.coming_blocks = 0

    # ----------------------------------------------------------------- presence

    def seen(self, message: WorkerSeen) -> None:
        """A worker answers; one in a new life has an empty cache."""
        known = self.workers.get(message.worker)
        self._pairs = None
        if known is None:
            self.workers[message.worker] = RouterWorker(message)
            return
        if known.seen.engine_id != message.engine_id:
            self._prefixes.forget(message.worker)
        known.seen, known.up = message, True

    def gone(self, worker: str) -> None:
        """Nothing new goes to `worker` until it is seen again."""
        known = self.workers.get(worker)
        if known is not None:
            known.up = False
            self._pairs = None

    def up(self, role: str) -> list[str]:
        """Workers of a role that are up."""
        return [n for n, worker in self.workers.items() if worker.up and worker.seen.role == role]

    def partners(self, prefill: str) -> list[str]:
        """Decode workers that can read what `prefill` writes."""
        return [name for name in self._matches(prefill) if self.workers[name].up]

    def _matches(self, prefill: str) -> list[str]:
        if self._pairs is None:
            self._pairs = {p: self._readers(p) for p in self.up("prefill")}
        return self._pairs[prefill] if prefill in self._pairs else self._readers(prefill)

    def _readers(self, prefill: str) -> list[str]:
        ours = self.workers[prefill].seen.layout
        return [
            decode
            for decode in self.up("decode")
            if (theirs := self.workers[decode].seen.layout) is not None
            and ours is not None
            and incompatibility(ours, theirs) is None
        ]

    def pair_fault(self) -> str | None:
        """Why no prefill and decode worker can be paired now, or None when some can."""
        fault: str | None = None
        for prefill in self.up("prefill"):
            if self.partners(prefill):
                return None
            for decode in self.up("decode"):
                a = self.workers[prefill].seen.layout
                b = self.workers[decode].seen.layout
                differs = incompatibility(a, b) if a and b else "a layout is not known"
                fault = fault or f"{prefill} and {decode}: {differs}"
        for role in ("prefill", "decode"):
            if not self.up(role):
                return f"no {role} worker is up"
        return fault

    # -------------------------------------------------------------------- views

    def uncached(self, worker: str, load: Load) -> int:
        """Tokens of a prompt that `worker` has to compute, as far as is known."""
        if not (self._track and load.block_keys):
            return load.weight
        cached = self._prefixes.hits(worker, load.block_keys) * load.block_tokens
        return max(min(load.weight, 1), load.weight - cached)

    def need_blocks(self, weight: int, output_tokens: int) -> int:
        """KV blocks that prompt and answer take on a decode worker; 0 when no block size is known.

        Workers that can be paired have blocks of one size.
        """
        for worker in self.workers.values():
            if worker.seen.layout is not None:
                return ceil_div(weight + output_tokens, worker.seen.layout.block_size)
        return 0

    def prefill_views(self, load: Load) -> list[PrefillView]:
        """Prefill workers of its model that are up and have a decode worker to hand over to."""
        return [
            self._prefill_view(n, load)
            for n in self.up("prefill")
            if self._matches(n) and self._serves(n, load)
        ]

    def unserved(self, load: Load) -> str | None:
        """Why nobody can serve its model, where others are served; None where somebody can."""
        if any(
            w.up and w.seen.role == "mixed" and self._serves(n, load)
            for n, w in self.workers.items()
        ):
            return None
        if any(self._matches(n) and self._serves(n, load) for n in self.up("prefill")):
            return None
        return f"no workers that serve {load.model} can be paired now"

    def _serves(self, worker: str, load: Load) -> bool:
        return not load.model or self.workers[worker].seen.model in ("", load.model)

    def _prefill_view(self, name: str, load: Load) -> PrefillView:
        worker = self.workers[name]
        handing = worker.handing.per_s or self._handing.per_s
        return PrefillView(
            name,
            worker.up,
            worker.requests,
            worker.queued_tokens,
            self.uncached(name, load),
            self._tokens_per_s(worker),
            load.weight * NS_PER_S // handing if handing else 0,
            self._budget_tokens,
            self._prefixes.kept(name) if self._track else 0,
        )

    def decode_views(self, names: Iterable[str]) -> list[DecodeView]:
        """These workers, as those that write an answer."""
        return [self._decode_view(name) for name in names]

    def _decode_view(self, name: str) -> DecodeView:
        worker = self.workers[name]
        # One that is new is taken to be like the rest, lest it look free and be flooded.
        steps = worker.steps if worker.steps.known else self._steps
        tpot_ns, tpot_rise_ns = steps.at(worker.sequences)
        return DecodeView(
            name,
            worker.up,
            worker.sequences,
            worker.tokens,
            worker.output_left,
            worker.used_blocks,
            worker.seen.kv_blocks,
            worker.seen.max_num_seqs,
            tpot_ns,
            tpot_rise_ns,
            tuple(worker.by_length),
        )

    def whole_views(self, load: Load) -> tuple[WholeView, ...]:
        """All workers of its model that are up, as those that do both halves."""
        return tuple(
            [
                WholeView(
                    name,
                    worker.seen.role,
                    worker.up,
                    worker.queued_tokens,
                    self.uncached(name, load),
                    self._tokens_per_s(worker),
                    worker.sequences,
                    worker.tokens,
                    worker.requests,
                    worker.used_blocks,
                    worker.seen.kv_blocks,
                    worker.seen.max_num_seqs,
                )
                for name, worker in self.workers.items()
                if worker.up and self._serves(name, load)
            ]
        )

    def _tokens_per_s(self, worker: RouterWorker) -> int:
        return worker.reading.per_s or self._reading.per_s or PRIOR_TOKENS_PER_S

    def reading_ns(self, worker: str, load: Load) -> int:
        """Time until `worker` has read the prompt, after those that wait there."""
        known = self.workers[worker]
        tokens = known.queued_tokens + self.uncached(worker, load)
        return work_ns(tokens, self._tokens_per_s(known))

    # -------------------------------------------------------------------- loads

    def come(self, load: Load, sign: int) -> None:
        """A request will be handed to decode (+1), or has been or never will be (-1)."""
        self.coming += sign
        self.coming_blocks += sign * load.need_blocks

    def leg(self, worker: str, load: Load, sign: int) -> None:
        """A leg is sent to `worker` (+1) or is over (-1)."""
        known = self.workers[worker]
        known.tokens += sign * load.weight
        known.requests += sign

    def prompt(self, worker: str, load: Load, sign: int, now_ns: int) -> None:
        """`worker` has a prompt to read (+1), or has no longer (-1)."""
        known = self.workers[worker]
        known.queued_tokens += sign * load.uncached
        if sign < 0:
            known.idle_since_ns = now_ns
        elif self._track:
            self._remember(known, load)

    def answer(self, worker: str, load: Load, sign: int) -> None:
        """`worker` has an answer to write (+1), or has no longer (-1)."""
        known = self.workers[worker]
        known.sequences += sign
        known.used_blocks += sign * load.need_blocks
        known.output_left += sign * load.output_tokens
        known.by_length[bucket(load.predicted_tokens)] += sign
        if sign > 0 and self._track:
            self._remember(known, load)

    def _remember(self, worker: RouterWorker, load: Load) -> None:
        """No more is remembered than the worker's pool holds: the rest it has evicted for sure."""
        most, seen = self._most_keys, worker.seen
        if seen.kv_blocks and seen.layout is not None and load.block_tokens:
            most = min(most, seen.kv_blocks * seen.layout.block_size // load.block_tokens)
        if load.block_keys:
            self._prefixes.add(seen.worker, load.block_keys, most)

    # ----------------------------------------------------------------- measures

    def was_read(self, worker: str, tokens: int, sent_ns: int, now_ns: int) -> None:
        """A prompt of `tokens` uncached tokens is read; call before `prompt(..., -1)`.

        Prompts are read one after another, so it took the time since it was sent or since the
        one before it ended, whichever is later: waiting is not part of the rate.
        """
        known = self.workers[worker]
        took_ns = now_ns - max(sent_ns, known.idle_since_ns)
        known.reading.add(tokens, took_ns)
        self._reading.add(tokens, took_ns)

    def was_handed(self, prefill: str, tokens: int, took_ns: int) -> None:
        """From KV made at `prefill` to the answer's start it took `took_ns`."""
        self.workers[prefill].handing.add(tokens, took_ns)
        self._handing.add(tokens, took_ns)

    def was_written(self, worker: str, n_tokens: int, took_ns: int) -> None:
        """An answer of `n_tokens` was written in `took_ns` from its start; call before its end."""
        if n_tokens > 1:
            known = self.workers[worker]
            for steps in (known.steps, self._steps):
                steps.add(known.sequences, took_ns // (n_tokens - 1))
