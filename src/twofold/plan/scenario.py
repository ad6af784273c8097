"""One simulated run in full: what it needs travels to another process as this one value."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any, Literal

import msgspec

from twofold.metrics.slo import Slo
from twofold.plan.hardware import Hardware
from twofold.sim import Crash
from twofold.sim.pools import Pool, pools_name

LinkSharing = Literal["worker", "pair"]


class Workload(msgspec.Struct, frozen=True, kw_only=True):
    """A trace and what is done to it before anything is simulated, in this order.

    Read (bad rows left out with `skip_bad`, rows sorted with `sort`), one class, a window in
    seconds, the first `requests` (0: all), lengths divided by `length_divide`, hashes dropped,
    arrivals spread over ticks of `jitter_s` seconds (0: as they are), arrivals drawn anew at
    `rate_rps` where `arrivals` asks for it, then a sample of about `sample` requests (0: all),
    which resample number `resample` draws anew (0: none). `sha256` is the trace file's.
    """

    trace: str
    sha256: str = ""
    skip_bad: bool = False
    sort: bool = False
    klass: str = ""
    window_s: tuple[float, float] | None = None
    requests: int = 0
    length_divide: int = 1
    drop_hashes: bool = False
    jitter_s: float = 0.0
    arrivals: Literal["", "poisson", "gamma"] = ""
    rate_rps: float = 0.0
    cv: float = 1.0
    sample: int = 0
    resample: int = 0


class Engine(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of every worker. `kv_blocks` 0: what fits in `memory_share` of its memory.

    `chunk_cap_tokens` is what the chunk policy `capped` keeps prompts to in a step.
    """

    block_size: int = 16
    kv_blocks: int = 0
    memory_share: float = 0.9
    kv_dtype: str = "bfloat16"
    max_num_seqs: int = 256
    chunk_tokens: int = 2048
    chunk_cap_tokens: int = 0
    max_waiting: int = 1_000_000
    prefix_caching: bool = True
    handoff: str = "pull"


class Scenario(msgspec.Struct, frozen=True, kw_only=True):
    """One run. `hardware` has one entry for each of `pools`.

    `link_bytes_per_s` is of each accelerator's link, 0 for what such machines usually have; all
    transfers of a worker share its links, or (`pair`) only those with one other worker.
    `bounce_bytes_per_s` is of copies through host memory, for each accelerator, 0 for none.
    `prepare_ns` is what each handoff takes of decode's loop in pull, and beside it otherwise.
    `faults` are a seed and the rate of each kind of fault. `policies` are (which, name) pairs in
    order of which; `retries` and `recompute_tokens_per_s` bound those of failure.
    """

    workload: Workload
    pools: tuple[Pool, ...]
    hardware: tuple[Hardware, ...]
    engine: Engine = Engine()
    rate_scale: float = 1.0
    link_bytes_per_s: int = 0
    link_sharing: LinkSharing = "worker"
    bounce_bytes_per_s: int = 0
    prepare_ns: int = 0
    slo: Slo = Slo()
    attainment: float = 0.9
    policies: tuple[tuple[str, str], ...] = ()
    retries: int = 1
    recompute_tokens_per_s: int = 2_000
    crashes: tuple[Crash, ...] = ()
    faults: tuple[int, float] | None = None
    seed: int = 0

    @property
    def name(self) -> str:
        """The set-up in a few words, for messages."""
        words = [pools_name(self.pools), f"chunk {self.engine.chunk_tokens}"]
        words += [name for _, name in self.policies]
        if self.workload.resample:
            words.append(f"resample {self.workload.resample}")
        return f"{' '.join(words)} at {self.rate_scale:.6g}x"

    @property
    def chunk_policy(self) -> str:
        """How much of a step prompts get."""
        return dict(self.policies).get("chunk", "fixed")

    @property
    def gpus(self) -> int:
        """Accelerators of all workers together."""
        return sum(p.count * h.gpus for p, h in zip(self.pools, self.hardware, strict=True))

    @property
    def split(self) -> bool:
        """Whether prefill has workers of its own."""
        return any(pool.role == "prefill" for pool in self.pools)


def config_of(scenarios: Sequence[Scenario], **more: Any) -> dict[str, Any]:
    """What decides the outcome of `scenarios` beside the files, which have hashes of their own.

    Paths are left out: the same run from another folder is the same run.
    """
    return {**more, "scenarios": [_config(scenario) for scenario in scenarios]}


def _config(scenario: Scenario) -> dict[str, Any]:
    fields: dict[str, Any] = msgspec.to_builtins(scenario)
    del fields["workload"]["trace"]
    for hardware in fields["hardware"]:
        del hardware["profile"]
    return fields


def config_sha256(scenarios: Sequence[Scenario], **more: Any) -> str:
    """Hex SHA-256 over the canonical JSON of `config_of`."""
    canonical = msgspec.json.encode(config_of(scenarios, **more), order="deterministic")
    return hashlib.sha256(canonical).hexdigest()
