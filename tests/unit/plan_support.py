"""A small trace and a small profile for `replay` and `plan`, and what runs them."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import msgspec

from twofold.cli.main import main
from twofold.cost.profile import DecodeRow, PrefillRow, Profile, save_profile
from twofold.metrics.slo import Slo
from twofold.plan.hardware import Hardware
from twofold.plan.scenario import Engine, Scenario, Workload
from twofold.sim.pools import parse_pools
from twofold.trace import TraceRequest, poisson, write_trace
from twofold.trace.hashing import hash64
from twofold.trace.request import Lengths

MODEL: Final = "Llama-3.1-8B"


def profile(tp: int = 1, *, model: str = MODEL, accelerator: str = "h100") -> Profile:
    """20,000 prompt tokens/s and 8 to 20 ms a decode step; `tp` makes both that much quicker."""
    return Profile(
        model=model,
        accelerator=accelerator,
        engine="made up",
        tp=tp,
        measured=True,
        prefill=tuple(
            PrefillRow(new_tokens=n, ms=(5 + n / 20) / tp) for n in (1, 256, 1024, 4096, 16384)
        ),
        decode=tuple(
            DecodeRow(batch=b, context_tokens=c, ms=(8 + b / 16 + b * c / 2**17) / tp)
            for b in (1, 32, 128)
            for c in (128, 2048, 32768)
        ),
    )


def write_profile(folder: Path, tp: int = 1, *, accelerator: str = "h100") -> Path:
    """The profile as a file."""
    path = folder / f"{accelerator}-tp{tp}.json"
    save_profile(path, profile(tp, accelerator=accelerator))
    return path


def requests(
    n: int, *, rate: float, input_tokens: int, output_tokens: int, seed: int = 1
) -> list[TraceRequest]:
    """`n` Poisson arrivals with lengths between half and one and a half of those given."""
    lengths = [
        Lengths(
            input_tokens // 2 + hash64(seed, i, 1) % input_tokens + 1,
            output_tokens // 2 + hash64(seed, i, 2) % output_tokens + 1,
        )
        for i in range(n)
    ]
    return list(poisson(lengths, rate, seed))


def write_requests(folder: Path, found: Sequence[TraceRequest], name: str = "t.jsonl") -> Path:
    """The requests as a trace file."""
    path = folder / name
    write_trace(path, found)
    return path


def scenario(
    trace: Path,
    profile: Path,
    pools: str,
    *,
    slo: Slo | None = None,
    engine: Engine | None = None,
    rate_scale: float = 1.0,
) -> Scenario:
    """A scenario whose pools are all alike."""
    parsed = parse_pools(pools)
    return Scenario(
        workload=Workload(trace=str(trace)),
        pools=parsed,
        hardware=(Hardware(profile=str(profile)),) * len(parsed),
        engine=engine or Engine(max_num_seqs=128),
        slo=slo or Slo(ttft_ms=1000, tpot_ms=30),
        rate_scale=rate_scale,
    )


def command(*words: object) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of a command run in this process."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            code = main([str(word) for word in words])
        except SystemExit as ended:
            code = int(ended.code or 0)
    return code, out.getvalue(), err.getvalue()


def decoded(text: str) -> dict[str, object]:
    """JSON that must be an object."""
    return msgspec.json.decode(text, type=dict[str, object])
