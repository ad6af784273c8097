"""Schedules for the search for faults: a deployment, its requests and what goes wrong, as data."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, Literal, TypeVar

import msgspec

from twofold.core.recovery import FAILURE_POLICIES
from twofold.sim.faults import Again, Crash, Fate, Jump, Pause, SeededFaults, Sever, Stray, Trouble
from twofold.sim.pools import Pool, parse_pools
from twofold.trace import TraceRequest
from twofold.trace.hashing import hash64
from twofold.types import NS_PER_MS, NS_PER_S

Mode = Literal["pull", "push", "layerwise"]

ALL_MODES: Final[tuple[Mode, ...]] = ("pull", "push", "layerwise")
TIME_LEFT_NS: Final = 3 * NS_PER_S
QUIET_NS: Final = 9 * NS_PER_S
"""When faults stop. By then every request is over: its deadline is `TIME_LEFT_NS`."""

CANARY_NS: Final = 21 * NS_PER_S
"""When one more request comes, after every lease: it must be served by whoever is alive."""

_SPAN_MS: Final = 150
_LEASES: Final[tuple[Mapping[str, int], ...]] = (
    {},
    {
        "lease_ns": 8 * NS_PER_MS,
        "heartbeat_ns": 4 * NS_PER_MS,
        "lost_grace_ns": NS_PER_MS,
        "claim_timeout_ns": 20 * NS_PER_MS,
        "verify_timeout_ns": 15 * NS_PER_MS,
        "repeat_ns": 3 * NS_PER_MS,
    },
    {  # heartbeats that come too late: leases run out in the middle of reads
        "lease_ns": 8 * NS_PER_MS,
        "heartbeat_ns": 30 * NS_PER_MS,
        "repeat_ns": 3 * NS_PER_MS,
    },
)

_T = TypeVar("_T")


class Asked(msgspec.Struct, frozen=True):
    """One client's request. `gone_ns` after its arrival the client leaves, 0: never.

    `shared` is the number of its first blocks that other prompts begin with, too.
    """

    at_ns: int
    input_tokens: int
    output_tokens: int
    shared: int = 0
    gone_ns: int = 0


class Schedule(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """All that a run depends on. `fates` by message name take the place of `rates` once known.

    `settings` are those of every worker's core, `network` those of the cluster, `failures` the
    router's that say what becomes of legs that fail.
    """

    seed: int
    mode: Mode
    pools: str
    block_size: int
    settings: dict[str, int]
    network: dict[str, int]
    requests: tuple[Asked, ...]
    troubles: tuple[Trouble, ...] = ()
    rates: SeededFaults | None = None
    fates: dict[str, Fate] = {}
    failures: dict[str, str | int] = {}

    @property
    def loses_leases(self) -> bool:
        """Whether leases may run out when nothing else goes wrong."""
        return self.settings.get("heartbeat_ns", 0) > self.settings.get("lease_ns", 0)

    def trace(self) -> list[TraceRequest]:
        """Its requests and the canary, as a trace."""
        size = self.block_size
        found = [
            TraceRequest(
                asked.at_ns,
                asked.input_tokens,
                asked.output_tokens,
                _hashes(index, asked, size) if asked.shared else None,
                size if asked.shared else 0,
            )
            for index, asked in enumerate(self.requests)
        ]
        return [*found, TraceRequest(CANARY_NS, 2 * size + 1, 3)]


def _hashes(index: int, asked: Asked, size: int) -> tuple[int, ...]:
    n = -(-asked.input_tokens // size)
    return tuple([b if b < asked.shared else 1000 + 100 * index + b for b in range(n)])


def encode(schedule: Schedule) -> bytes:
    """As JSON, to be kept as a regression test."""
    return msgspec.json.format(msgspec.json.encode(schedule), indent=1)


def decode(data: bytes) -> Schedule:
    """What `encode` wrote. Raises msgspec.ValidationError for anything else."""
    return msgspec.json.decode(data, type=Schedule)


class _Draws:
    """Numbers and choices that are hashes of (seed, what for, the how-manyth draw)."""

    def __init__(self, seed: int, purpose: int = 11) -> None:
        self._seed = seed
        self._purpose = purpose
        self._n = 0

    def below(self, n: int) -> int:
        self._n += 1
        return hash64(self._seed, self._purpose, self._n) % n

    def of(self, choices: Sequence[_T]) -> _T:
        return choices[self.below(len(choices))]


def draw(seed: int, mode: Mode, n_requests: int = 50) -> Schedule:
    """The schedule of `seed`; each is of a few kinds of faults, some of none."""
    draws = _Draws(seed)
    pools = draws.of(("1P1D", "1P1D", "2P1D", "1P2D", "2P2D", "1P1D1M"))
    block_size = draws.of((4, 16))
    names = [name for pool in parse_pools(pools) for name in _names(pool)]
    settings = {
        "n_blocks": draws.of((12, 20, 64)),
        "max_num_seqs": draws.of((2, 4, 16)),
        "max_num_batched_tokens": draws.of((32, 256)),
        "max_waiting": draws.of((4, 64, 64)),
        "prefix_caching": draws.of((1, 1, 1, 0)),
        "min_layerwise_tokens": draws.of((0, 20)),
        **draws.of(_LEASES),
        "pipeline_stages": _Draws(seed, 13).of((1, 1, 1, 2, 3)),
    }
    network = {
        "link_bytes_per_s": draws.of((10**9, 2 * 10**6, 10**5)),
        "digest_ns": draws.of((0, 0, NS_PER_MS, 20 * NS_PER_MS)),
        "layer_groups": draws.of((2, 4)),
    }
    return Schedule(
        seed=seed,
        mode=mode,
        pools=pools,
        block_size=block_size,
        settings=settings,
        network=network,
        requests=_requests(draws, n_requests, block_size, settings["n_blocks"]),
        troubles=_troubles(draws, names),
        rates=_rates(draws, seed),
        failures=_failures(seed),
    )


def _failures(seed: int) -> dict[str, str | int]:
    """Drawn apart, as stages are, so that the rest of a schedule is what it was without them."""
    draws = _Draws(seed, 12)
    return {
        "failure_policy": draws.of(FAILURE_POLICIES),
        "retries": draws.of((1, 2, 5)),
        "recompute_tokens_per_s": draws.of((20, 200, 2_000)),
    }


def _names(pool: Pool) -> list[str]:
    return [f"{pool.role}-{number}" for number in range(pool.count)]


def _rates(draws: _Draws, seed: int) -> SeededFaults:
    """Half of the schedules are calm, so that most requests get far; some know troubles only."""
    level = draws.of((0.0, 0.1, 0.3, 1.0))
    rates = [level * rate for rate in (0.0, 0.0, 0.02, 0.1, 0.3)]
    return SeededFaults(
        seed=seed,
        drop=draws.of(rates),
        duplicate=draws.of(rates),
        delay=draws.of(rates),
        most_ns=draws.of((NS_PER_MS, 50 * NS_PER_MS, 2 * NS_PER_S)),
        cut_leg=draws.of(rates) / 3,
        fail_read=draws.of(rates),
        fail_step=draws.of(rates) / 10,
        flip=draws.of(rates),
    )


def _requests(draws: _Draws, n: int, size: int, n_blocks: int) -> tuple[Asked, ...]:
    """Prompts of any length, half of them around multiples of a block, half with a known head."""
    longest = min(6, n_blocks // 2) * size
    gap_ns = draws.of((NS_PER_MS // 2, 2 * NS_PER_MS, 6 * NS_PER_MS))
    leaves = draws.of((0, 1, 3))
    found: list[Asked] = []
    at_ns = 0
    for _ in range(n):
        at_ns += draws.below(2 * gap_ns)
        n_in = 1 + draws.below(longest)
        if draws.below(2):
            n_in = max(1, size * (1 + draws.below(4)) + draws.below(3) - 1)
        gone_ns = 1 + draws.below(60 * NS_PER_MS) if draws.below(8) < leaves else 0
        found.append(Asked(at_ns, n_in, 1 + draws.below(9), draws.of((0, 0, 1, 2)), gone_ns))
    return tuple(found)


def _troubles(draws: _Draws, names: Sequence[str]) -> tuple[Trouble, ...]:
    """Up to a handful of troubles, of kinds drawn for the whole schedule."""
    kinds: tuple[Callable[[_Draws, Sequence[str], dict[str, Any]], Trouble], ...] = (
        _crash,
        _pause,
        _jump,
        _sever,
        _again,
        _stray,
    )
    found: list[Trouble] = []
    for kind in kinds:
        for _ in range(draws.of((0, 0, 0, 1, 2))):
            at = {"worker": draws.of(names), "at_ns": draws.below(_SPAN_MS * NS_PER_MS)}
            found.append(kind(draws, names, at))
    return tuple(found)


def _crash(draws: _Draws, names: Sequence[str], at: dict[str, Any]) -> Crash:
    return Crash(**at, down_ns=draws.of((None, 50_000, NS_PER_MS, 5 * NS_PER_MS, 40 * NS_PER_MS)))


def _pause(draws: _Draws, names: Sequence[str], at: dict[str, Any]) -> Pause:
    return Pause(**at, for_ns=draws.of((NS_PER_MS, 12 * NS_PER_MS, 100 * NS_PER_MS, NS_PER_S)))


def _jump(draws: _Draws, names: Sequence[str], at: dict[str, Any]) -> Jump:
    return Jump(**at, by_ns=draws.of((NS_PER_MS, 30 * NS_PER_MS, 60 * NS_PER_S)))


def _sever(draws: _Draws, names: Sequence[str], at: dict[str, Any]) -> Sever:
    return Sever(**at, other=draws.of([name for name in names if name != at["worker"]]))


def _again(draws: _Draws, names: Sequence[str], at: dict[str, Any]) -> Again:
    return Again(**at, pick=draws.below(64), stale=draws.of((0, 0, 1)))


def _stray(draws: _Draws, names: Sequence[str], at: dict[str, Any]) -> Stray:
    return Stray(**at, request_id=draws.below(40), release=bool(draws.below(2)))
