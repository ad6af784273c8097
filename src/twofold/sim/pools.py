"""Which workers a simulated deployment has: "2P1D" and the like, as plans for single workers.

A spec counts workers by role. With commas each part may say what it runs on and over how many
accelerators: "2P:h100,2D:h200", "1P:tp4,4D:tp1", or "1P:tp2:pp2,4D:tp1" with stages of two each.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, Literal

import msgspec

from twofold.cost.pipeline import Pipeline
from twofold.cost.step import StepTime

Role = Literal["prefill", "decode", "mixed"]

_ROLES: Final[Mapping[str, Role]] = {"P": "prefill", "D": "decode", "M": "mixed"}
_LETTERS: Final[Mapping[Role, str]] = {"prefill": "P", "decode": "D", "mixed": "M"}
_COUNTS: Final = re.compile(r"(?:\d{1,6}[PDM])+", re.IGNORECASE)
_DEGREE: Final = re.compile(r"([tp])p(\d{1,4})", re.IGNORECASE)
_MOST_WORKERS: Final = 100_000


class PoolsError(ValueError):
    """A pool spec that names no workers, in one line."""


class Pool(msgspec.Struct, frozen=True, kw_only=True):
    """Workers of one kind. `accelerator` "", `tp` and `pp` 0: whatever the deployment has."""

    role: Role
    count: int
    accelerator: str = ""
    tp: int = 0
    pp: int = 0

    @property
    def says_what(self) -> bool:
        """Whether it says what it runs on."""
        return bool(self.accelerator or self.tp or self.pp)


class WorkerPlan(msgspec.Struct, frozen=True, kw_only=True):
    """One worker to simulate. `settings` are the keyword arguments of its `WorkerCore`.

    `nic_bytes_per_s` is its own link, in each direction; 0: the deployment's. `pipeline` None:
    as many stages as `settings` say, with nothing on the way from one to the next.
    """

    name: str
    role: Role
    settings: Mapping[str, Any]
    step: StepTime
    nic_bytes_per_s: int = 0
    pipeline: Pipeline | None = None


def parse_pools(spec: str) -> tuple[Pool, ...]:
    """The pools that `spec` names, in its order, without empty ones.

    Raises PoolsError unless it counts prefill (P), decode (D) or mixed (M) workers, with P and D
    only together.
    """
    pools = [pool for part in spec.split(",") for pool in _part(spec, part.strip())]
    pools = [pool for pool in pools if pool.count]
    if not pools:
        raise PoolsError(f"pools {spec!r}: no workers")
    if sum(pool.count for pool in pools) > _MOST_WORKERS:
        raise PoolsError(f"pools {spec!r}: more than {_MOST_WORKERS:,} workers")
    roles = [pool.role for pool in pools]
    if ("prefill" in roles) != ("decode" in roles):
        raise PoolsError(f"pools {spec!r}: prefill and decode workers need each other")
    return tuple(pools)


def _part(spec: str, part: str) -> list[Pool]:
    counts, *kinds = part.split(":")
    if not _COUNTS.fullmatch(counts):
        raise PoolsError(f"pools {spec!r}: counts of P, D and M are right, as in 2P1D or 3M")
    accelerator, degrees = "", {"t": 0, "p": 0}
    for kind in kinds:
        if match := _DEGREE.fullmatch(kind):
            degrees[match[1].lower()] = int(match[2])
            if not int(match[2]):
                raise PoolsError(f"pools {spec!r}: {match[1].lower()}p is 1 or more, as in 2P:tp2")
        elif kind and not accelerator:
            accelerator = kind.lower()
        else:
            raise PoolsError(
                f"pools {spec!r}: {part!r} is not COUNT, role and what it runs on, "
                "as in 2P:h100, 2P:h100:tp2 or 2P:tp2:pp2"
            )
    tp, pp = degrees.values()
    return [
        Pool(role=_ROLES[letter], count=int(digits), accelerator=accelerator, tp=tp, pp=pp)
        for digits, letter in re.findall(r"(\d+)([A-Z])", counts.upper())
    ]


def pools_name(pools: Sequence[Pool]) -> str:
    """The shortest spec of `pools`: "2P1D" where nothing is said of what they run on."""
    parts = [
        f"{pool.count}{_LETTERS[pool.role]}"
        + (f":{pool.accelerator}" if pool.accelerator else "")
        + (f":tp{pool.tp}" if pool.tp else "")
        + (f":pp{pool.pp}" if pool.pp else "")
        for pool in pools
    ]
    return ("," if any(":" in part for part in parts) else "").join(parts)


def plan_workers(
    pools: Sequence[Pool],
    make: Callable[[Pool], tuple[Mapping[str, Any], StepTime]],
    nic_bytes_per_s: Callable[[Pool], int] = lambda pool: 0,
    pipeline: Callable[[Pool], Pipeline | None] = lambda pool: None,
) -> list[WorkerPlan]:
    """Workers named prefill-0, decode-0, mixed-0 and so on; `make` settles those of one pool."""
    made: dict[Role, list[WorkerPlan]] = {}
    for pool in pools:
        settings, step = make(pool)
        workers = made.setdefault(pool.role, [])
        for _ in range(pool.count):
            name = f"{pool.role}-{len(workers)}"
            workers.append(
                WorkerPlan(
                    name=name,
                    role=pool.role,
                    settings=settings,
                    step=step,
                    nic_bytes_per_s=nic_bytes_per_s(pool),
                    pipeline=pipeline(pool),
                )
            )
    return [plan for workers in made.values() for plan in workers]


def plan_pools(
    spec: str,
    settings: Mapping[str, Any],
    step: StepTime,
    by_role: Mapping[Role, Mapping[str, Any]] | None = None,
) -> list[WorkerPlan]:
    """Workers of `spec`, all alike but for `by_role`, which overrides `settings` for a role.

    Raises PoolsError as `parse_pools` does, and where the spec names what workers run on.
    """
    pools = parse_pools(spec)
    if any(pool.says_what for pool in pools):
        raise PoolsError(f"pools {spec!r}: these workers are all alike; leave out what follows :")
    return plan_workers(
        pools, lambda pool: ({**settings, **(by_role or {}).get(pool.role, {})}, step)
    )
