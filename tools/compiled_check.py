"""Check that a compiled copy (see `compiled`) gives the records that the sources give.

    python tools/compiled_check.py [DIR]

Runs the same simulations in a process each, with the sources and with DIR (build/compiled), and
compares their digests: every handoff, crashes, admission, steps one by one, faults and observers.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import twofold.core.engine
from twofold.cost.step import LinearStep
from twofold.metrics.digest import digest
from twofold.sim import Audit, Cluster, plan_pools
from twofold.sim.faults import Crash, Pause, SeededFaults
from twofold.trace import RequestClass, Tokens, TraceRequest, poisson, synthetic
from twofold.types import NS_PER_MS, NS_PER_S, PROTOCOL_VERSION, KVLayout

ROOT: Final = Path(__file__).resolve().parents[1]
DEFAULT: Final = ROOT / "build" / "compiled"
N_REQUESTS: Final = 400
RATE_RPS: Final = 12.0
SEED: Final = 7
BLOCK_TOKENS: Final = 16
STEP: Final = (6 * NS_PER_MS, 35_000.0, 20_000.0, 15.0)
MIX: Final = (
    RequestClass(
        klass="chat",
        weight=3,
        input=Tokens("lognormal", 60, 900),
        output=Tokens("lognormal", 40, 300),
        prefixes=5,
        prefix_tokens=160,
    ),
    RequestClass(
        klass="code", weight=1, input=Tokens("uniform", 1, 1500), output=Tokens("fixed", 9)
    ),
)
CRASHES: Final = (
    Crash(worker="decode-0", at_ns=9 * NS_PER_S, down_ns=2 * NS_PER_S),
    Pause(worker="prefill-1", at_ns=15 * NS_PER_S, for_ns=NS_PER_S),
    Crash(worker="prefill-0", at_ns=20 * NS_PER_S),
)
FAULTS: Final = SeededFaults(
    seed=SEED, drop=0.01, duplicate=0.01, delay=0.05, most_ns=NS_PER_S, fail_read=0.02, flip=0.02
)
GOALS: Final = {
    "prefill_policy": "projected_ttft",
    "decode_policy": "projected_tpot",
    "split_policy": "projected",
    "admission": "joint",
    "ttft_goal_ns": NS_PER_S,
}
CASES: Final[dict[str, tuple[str, str, dict[str, Any]]]] = {
    "pull": ("2P2D", "pull", {}),
    "pull, crashes": ("2P2D", "pull", {"crashes": CRASHES}),
    "pull, step by step": ("2P2D", "pull", {"singly": True}),
    "pull, goals": ("2P2D1M", "pull", {"router": GOALS}),
    "pull, faults": ("2P2D", "pull", {"faults": FAULTS, "crashes": CRASHES}),
    "push, crashes": ("2P2D", "push", {"crashes": CRASHES}),
    "layerwise": ("2P2D", "layerwise", {}),
    "layerwise, deadlines": ("2P2D", "layerwise", {"time_left_ns": NS_PER_S // 2}),
    "unsplit": ("3M", "pull", {}),
}


def requests() -> Iterator[TraceRequest]:
    """The requests of every case."""
    return poisson(synthetic(MIX, N_REQUESTS, SEED, BLOCK_TOKENS), RATE_RPS, SEED)


def simulate(pools: str, handoff: str, settings: dict[str, Any]) -> str:
    """The digest of one simulation, with the package that is imported."""
    layout = KVLayout(
        protocol=PROTOCOL_VERSION,
        engine="twofold",
        model_digest="00",
        tokenizer_digest="00",
        dtype="bfloat16",
        block_size=BLOCK_TOKENS,
        layers=32,
        kv_heads=8,
        head_dim=128,
        rope="",
    )
    engine = {
        "layout": layout,
        "n_blocks": 300,
        "max_num_seqs": 24,
        "max_num_batched_tokens": 512,
        "max_model_len": 3000,
        "max_waiting": 64,
        "handoff": handoff,
    }
    if "faults" in settings:
        settings = {**settings, "observers": (Audit(),), "track_contents": True}
    plans = plan_pools(pools, engine, LinearStep(*STEP))
    return digest(Cluster(plans, **settings).run(requests()))


def run(path: Path) -> dict[str, Any]:
    """Digests by case, and whether it was compiled, in a process that imports from `path`."""
    done = subprocess.run(
        [sys.executable, __file__, "--one"],
        env={**os.environ, "PYTHONPATH": str(path)},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise SystemExit(f"{path}: {(done.stderr.strip().splitlines() or ['it failed'])[-1]}")
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def main(words: Sequence[str]) -> int:
    """Print a line for each case; 1 if any differs."""
    if words == ["--one"]:
        said: dict[str, Any] = {name: simulate(*case) for name, case in CASES.items()}
        said["compiled"] = not twofold.core.engine.__file__.endswith(".py")
        print(json.dumps(said))
        return 0
    target = Path(words[0]).resolve() if words else DEFAULT
    plain, fast = run(ROOT / "src"), run(target)
    if not fast.pop("compiled"):
        raise SystemExit(f"{target} is not compiled; make compiled makes one that is")
    plain.pop("compiled")
    for name in CASES:
        print(f"{name:22} {plain[name][:16]} {'same' if plain[name] == fast[name] else 'DIFFERS'}")
    return 0 if plain == fast else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
