"""The device of a simulated worker: one stage or several, each computing one step at a time."""

from __future__ import annotations

from twofold.cost.pipeline import Pipeline
from twofold.cost.step import PrefillPart
from twofold.messages import RunStep


class Stages:
    """Stages of one worker in one life. Steps go through all of them, in the order asked for."""

    def __init__(self, pipeline: Pipeline) -> None:
        self._pipeline = pipeline
        self._free_ns = [0] * pipeline.stages

    def ends_ns(self, start_ns: int, step_ns: int, step: RunStep) -> list[int]:
        """When each stage is through with `step`, which may begin at `start_ns`.

        `step_ns` is its time on all layers. It enters a stage when that has been through with the
        step before it, and what the stage before makes has arrived.
        """
        if len(self._free_ns) == 1:  # no other step is in flight
            return [start_ns + step_ns]
        tokens = sum([n for _, _, n in step.work])
        stage_ns = self._pipeline.stage_ns(step_ns)
        hop_ns = self._pipeline.hop_ns(tokens)
        for i, free_ns in enumerate(self._free_ns):
            end_ns = max(start_ns, free_ns) + stage_ns
            self._free_ns[i] = end_ns
            start_ns = end_ns + hop_ns
        return list(self._free_ns)


def layer_marks(layers: int, groups: int, now_ns: int, ends_ns: list[int]) -> list[tuple[int, int]]:
    """(layers, when so many of them have been computed) of a step, all of them excepted.

    One stage says it of `groups` groups, a pipeline when a stage is through with its own.
    """
    if len(ends_ns) == 1:
        took_ns = ends_ns[0] - now_ns
        return [(layers * i // groups, now_ns + took_ns * i // groups) for i in range(1, groups)]
    return [(layers * (i + 1) // len(ends_ns), ns) for i, ns in enumerate(ends_ns[:-1])]


def parts_of(step: RunStep) -> tuple[list[PrefillPart], int, int]:
    """What a step computes, as step times are asked for: (prefill, batch, context)."""
    prefill, batch, context = list[PrefillPart](), 0, 0
    for _, start, n in step.work:
        if n == 1:
            batch += 1
            context += start + 1
        else:
            prefill.append((n, start))
    return prefill, batch, context
