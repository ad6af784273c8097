"""How fast the simulator is: requests per second of one core on a Mooncake trace, 4P4D.

The whole trace with its prefix hashes, blocks of 512 tokens, the cores and handoffs that are
deployed. Each run is a process of its own. With `--compiled DIR`, where `make compiled` has put a
compiled copy, that runs in turn with the sources, and must give the same records. With `--dynamo
PYTHON`, an interpreter that has Dynamo installed, its offline replay of the same trace does too:
with the same blocks, and with those that it has by default. Then the trace is repeated, later and
with new hashes each time, up to `--most` requests: the cost of a request should not grow.

    python benchmarks/sim_speed.py TRACE [--compiled DIR] [--dynamo PYTHON] [--rounds N]
                                   [--most N] [--out FILE]
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, Final

import msgspec

import twofold.core.engine
from twofold.cost.step import LinearStep
from twofold.metrics.digest import digest
from twofold.metrics.slo import figures
from twofold.sim import Cluster, plan_pools
from twofold.trace import TraceRequest, open_trace
from twofold.types import NS_PER_MS, NS_PER_S, PROTOCOL_VERSION, KVLayout

POOLS: Final = "4P4D"
BLOCK_TOKENS: Final = 512
LINK_BYTES_PER_S: Final = 50_000_000_000
LIMITS: Final = {"n_blocks": 900, "max_num_seqs": 256, "max_num_batched_tokens": 8192}
# An 8B model on an H100, roughly: a step, a prompt token, a sequence, a token of context.
STEP: Final = (6 * NS_PER_MS, 35_000.0, 20_000.0, 15.0)
LAYOUT: Final = KVLayout(
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
# What runs under the other interpreter: the trace and, for each pool, an engine's arguments.
DYNAMO: Final = """
import json, resource, sys, time
from dynamo.replay import run_trace_replay
trace, shared = sys.argv[1], json.loads(sys.argv[2])
engine = lambda role: {"engine": {"worker_type": role, "kv_transfer_bandwidth": 50.0, **shared}}
cpu, wall = time.process_time(), time.perf_counter()
report = run_trace_replay(
    [trace],
    prefill_engine_args=engine("prefill"),
    decode_engine_args=engine("decode"),
    num_prefill_workers=4,
    num_decode_workers=4,
    trace_block_size=512,
)
cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
summary = report.summary
print(json.dumps({
    "requests": summary["completed_requests"],
    "output_tokens": summary["total_output_tokens"],
    "cpu_s": cpu,
    "wall_s": wall,
    "peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
}))
"""


def repeated(rows: Sequence[TraceRequest]) -> Iterator[TraceRequest]:
    """The trace again and again: each time later, with hashes that were not there before."""
    span_ns = rows[-1].arrival_ns + NS_PER_S
    n_ids = 1 + max(max(row.hash_ids or (0,)) for row in rows)
    turn = 0
    while True:
        for row in rows:
            ids = row.hash_ids
            yield msgspec.structs.replace(
                row,
                arrival_ns=row.arrival_ns + turn * span_ns,
                hash_ids=None if ids is None else tuple([i + turn * n_ids for i in ids]),
            )
        turn += 1


def simulate(trace: str, n: int) -> dict[str, Any]:
    """Run the first `n` requests of the trace, repeated as need be; 0: the trace once."""
    rows = list(open_trace(trace))
    requests = islice(repeated(rows), n) if n else iter(rows)  # made as they are needed
    settings = {"layout": LAYOUT, "max_model_len": 1 << 30, "max_waiting": 1 << 20, **LIMITS}
    cluster = Cluster(
        plan_pools(POOLS, settings, LinearStep(*STEP)), link_bytes_per_s=LINK_BYTES_PER_S
    )
    cpu, wall = time.process_time(), time.perf_counter()
    records = cluster.run(requests)
    cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
    after = time.process_time()
    shown = figures(records)
    after = time.process_time() - after
    return {
        "requests": shown.completed,
        "output_tokens": sum(len(record.token_times_ns) for record in records),
        "cpu_s": cpu,
        "wall_s": wall,
        "figures_cpu_s": after,
        "peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "events": cluster.events.n_run,
        "digest": digest(records) if len(records) <= len(rows) else "",
        "compiled": not twofold.core.engine.__file__.endswith(".py"),
    }


def run(command: Sequence[str], first_path: Path | None = None) -> dict[str, Any]:
    """The JSON line that a process of its own ends with. Raises SystemExit if it fails.

    It imports from `first_path` before all else, if there is one.
    """
    env = dict(os.environ)
    if first_path is not None:
        env["PYTHONPATH"] = os.pathsep.join(filter(None, [str(first_path), env.get("PYTHONPATH")]))
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=env)
    if done.returncode:
        last = done.stderr.strip().splitlines()[-1:] or ["it said nothing"]
        raise SystemExit(f"{command[0]}: {last[0]}")
    found: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return found


def own(trace: str, n: int, compiled: Path | None = None) -> dict[str, Any]:
    """`simulate` in a process of its own, with the compiled copy if one is named."""
    found = run([sys.executable, __file__, trace, "--one", str(n)], compiled)
    if compiled is not None and not found["compiled"]:
        raise SystemExit(f"--compiled {compiled}: nothing compiled there; see make compiled")
    return found


def rounds(
    trace: str, compiled: Path | None, dynamo: str | None, n: int
) -> dict[str, list[dict[str, Any]]]:
    """`n` interleaved runs of each contender on the trace as it is."""
    same = {"num_gpu_blocks": LIMITS["n_blocks"], "block_size": BLOCK_TOKENS}
    found: dict[str, list[dict[str, Any]]] = {}
    for number in range(n):
        turns = {"twofold": own(trace, 0)}
        if compiled is not None:
            turns["twofold, compiled"] = own(trace, 0, compiled)
        if dynamo is not None:
            for name, engine in (("dynamo, blocks of 512", same), ("dynamo, as it comes", {})):
                turns[name] = run([dynamo, "-c", DYNAMO, trace, json.dumps(engine)])
        for name, result in turns.items():
            found.setdefault(name, []).append(result)
            print(f"round {number + 1}  {name:24} {_shown(result)}", flush=True)
    return found


def growth(trace: str, most: int) -> list[dict[str, Any]]:
    """One run each of 1,000 requests, of ten times as many, and so on up to `most`."""
    found: list[dict[str, Any]] = []
    n = 1000
    while n <= most:
        found.append(own(trace, n))
        print(f"{n:>9,} requests {'':22} {_shown(found[-1])}", flush=True)
        n *= 10
    return found


def _shown(result: dict[str, Any]) -> str:
    rate, mib = result["requests"] / result["cpu_s"], result["peak_bytes"] / 2**20
    return f"{rate:8,.0f} requests/s of CPU {mib:8,.0f} MiB"


def _medians(runs: Sequence[dict[str, Any]]) -> dict[str, float]:
    return {
        "requests_per_cpu_s": round(statistics.median(r["requests"] / r["cpu_s"] for r in runs)),
        "requests_per_wall_s": round(statistics.median(r["requests"] / r["wall_s"] for r in runs)),
        "output_tokens_per_cpu_s": round(
            statistics.median(r["output_tokens"] / r["cpu_s"] for r in runs)
        ),
        "peak_mib": round(statistics.median(r["peak_bytes"] for r in runs) / 2**20),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("trace")
    parser.add_argument("--compiled", metavar="DIR", type=Path)
    parser.add_argument("--dynamo", metavar="PYTHON")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--most", type=int, default=100_000)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--one", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one is not None:
        print(json.dumps(simulate(args.trace, args.one)))
        return
    compiled = args.compiled.resolve() if args.compiled is not None else None
    found = rounds(args.trace, compiled, args.dynamo, args.rounds)
    grown = growth(args.trace, args.most)
    ours = [result for name in found if name.startswith("twofold") for result in found[name]]
    assert len({result["digest"] for result in ours}) <= 1, "runs differ"
    report = {
        "trace": Path(args.trace).name,
        "pools": POOLS,
        "block_tokens": BLOCK_TOKENS,
        "rounds": args.rounds,
        "medians": {name: _medians(runs) for name, runs in found.items()},
        "us_of_cpu_per_request": {
            f"{result['requests']:,}": round(1e6 * result["cpu_s"] / result["requests"], 1)
            for result in grown
        },
        "peak_mib": {
            f"{result['requests']:,}": round(result["peak_bytes"] / 2**20) for result in grown
        },
        "all": {**found, "growth": grown},
    }
    text = json.dumps(report, indent=1)
    if args.out is not None:
        args.out.write_text(text + "\n")
    print(json.dumps({k: report[k] for k in ("medians", "us_of_cpu_per_request", "peak_mib")}))


if __name__ == "__main__":
    main()
