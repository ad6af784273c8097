"""A fault at every message between workers, a client that leaves or kill -9 at every phase.

What is here is a part of `python -m tests.live.cross` that covers each pair of them. After every
case: one end for the client, no wrong token ever, blocks and gauges at the baseline, and the next
request answered right over both workers.
"""

from __future__ import annotations

import asyncio
from itertools import product

import pytest

from tests.live import cross
from tests.live.cross import ACTS, MODES, PHASES, POINTS, Case, Report
from tests.live.fault_proxy import FATES


@pytest.mark.parametrize("mode", MODES)
def test_a_fault_at_a_message_or_a_death_in_a_phase_harms_nothing_else(mode: str) -> None:
    report = Report()
    cases = cross.covering(mode)
    asyncio.run(cross.run(mode, cases, report))
    assert not report.failed
    assert sum(report.ends.values()) == len(cases)
    # Faults were met, and what was not harmed was served.
    assert min(report.ends[end] for end in ("whole", "error", "left")) > 0, report.ends


def test_the_part_that_runs_here_covers_every_pair() -> None:
    for modes in (("pull",), ("push", "layerwise")):
        cases = [case for mode in modes for case in cross.covering(mode)]
        points = POINTS[modes[0]]
        fates = [fate for fate in FATES if fate not in ("drop", "delay")]
        assert {(c.at, c.fate) for c in cases} >= set(product(points, fates))
        assert {(c.at, c.act) for c in cases} >= set(product((*points, *PHASES), ACTS[1:]))
        assert {c.length for c in cases} >= set(cross.LENGTHS) - ({1} if "push" in modes else set())
        everything = set(cross.whole(modes))
        assert set(cases) <= everything, set(cases) - everything


def test_a_damaged_token_of_the_prompt_is_never_decoded() -> None:
    """Prompt ids travel with the Grant: its last one is not in the KV that was handed over."""
    places = [-200.0 - i for i in range(0, 40, 2)]  # within 40 bytes of where the ids end
    cases = [Case("pull", "Grant", "corrupt", "none", 32, at) for at in places]
    report = Report()
    asyncio.run(cross.run("pull", cases, report))
    assert not report.failed
    assert report.ends == {"error": len(cases)}
