"""Which workers a simulated deployment has: "2P1D" and the like, as plans for single workers."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final, Literal

import msgspec

from twofold.cost.step import StepTime

Role = Literal["prefill", "decode", "mixed"]

_ROLES: Final[Mapping[str, Role]] = {"P": "prefill", "D": "decode", "M": "mixed"}
_SPEC: Final = re.compile(r"(?:\d+[PDM])+", re.IGNORECASE)


class PoolsError(ValueError):
    """A pool spec that names no workers, in one line."""


class WorkerPlan(msgspec.Struct, frozen=True, kw_only=True):
    """One worker to simulate. `settings` are the keyword arguments of its `WorkerCore`."""

    name: str
    role: Role
    settings: Mapping[str, Any]
    step: StepTime


def plan_pools(
    spec: str,
    settings: Mapping[str, Any],
    step: StepTime,
    by_role: Mapping[Role, Mapping[str, Any]] | None = None,
) -> list[WorkerPlan]:
    """Workers named prefill-0, decode-0, mixed-0 and so on, all alike but for `by_role`.

    `by_role` gives settings that override `settings` for one role. Raises PoolsError unless
    `spec` counts prefill (P), decode (D) or mixed (M) workers, with P and D only together.
    """
    if not _SPEC.fullmatch(spec):
        raise PoolsError(f"pools {spec!r}: counts of P, D and M are right, as in 2P1D or 3M")
    counts: dict[Role, int] = {}
    for digits, letter in re.findall(r"(\d+)([A-Z])", spec.upper()):
        role = _ROLES[letter]
        counts[role] = counts.get(role, 0) + int(digits)
    if not sum(counts.values()):
        raise PoolsError(f"pools {spec!r}: no workers")
    if bool(counts.get("prefill")) != bool(counts.get("decode")):
        raise PoolsError(f"pools {spec!r}: prefill and decode workers need each other")
    return [
        WorkerPlan(
            name=f"{role}-{number}",
            role=role,
            settings={**settings, **(by_role or {}).get(role, {})},
            step=step,
        )
        for role, count in counts.items()
        for number in range(count)
    ]
