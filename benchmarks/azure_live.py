"""The first requests of a real trace through 1P1D and through 2 mixed workers of the same size.

    python benchmarks/azure_live.py AzureLLMInferenceTrace_conv.csv [--model DIR] [--repeat 3]

Real processes on loopback, the set-ups interleaved; each figure is the median over repeats.
Lengths are divided (16 unless told), gaps are kept; prompts are random token ids. Writes
benchmarks/results/azure_live.json and prints a table in Markdown.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import uvloop

from twofold.bench.drive import Target, drive
from twofold.config import EngineSettings, ServeSettings
from twofold.live.deployment import plan_deployment
from twofold.live.supervisor import Supervisor
from twofold.metrics.record import RequestRecord
from twofold.metrics.slo import Figures, figures
from twofold.trace import TraceRequest, head, length_scale, open_trace

SETUPS = {"1P1D": (1, 1, 0), "2M": (0, 0, 2)}  # prefill, decode, mixed workers
MODEL = "model"
HOST = "127.0.0.1"


def rows_of(path: Path, n: int, divisor: int) -> list[TraceRequest]:
    return list(length_scale(head(open_trace(path), n), divisor))


def prompt_of(number: int, row: TraceRequest) -> list[int]:
    rng = random.Random(number)
    return [rng.randrange(300, 600) for _ in range(row.input_tokens)]


async def run_one(setup: str, model: str, rows: list[TraceRequest]) -> list[RequestRecord]:
    engine = EngineSettings(model=model, served_model_name=MODEL, kv_blocks=2048)
    prefill, decode, mixed = SETUPS[setup]
    deployment = plan_deployment(
        ServeSettings(engine=engine, port=0, prefill=prefill, decode=decode, mixed=mixed)
    )
    port = deployment.gateway.port
    supervisor = Supervisor(
        deployment.children(), ready_at=(HOST, port), emit=lambda line: print(line, file=LOG)
    )
    await supervisor.start()
    try:
        await supervisor.wait_ready(120)
        target = Target(HOST, port, MODEL)
        # Warm up both workers' kernels and connections.
        warm = [TraceRequest(0, 64, 8)] * 4
        await drive(target, warm, prompt_of, time.monotonic_ns)
        ended = 0

        def on_end(record: RequestRecord) -> None:
            nonlocal ended
            ended += 1
            if sys.stderr.isatty():
                print(f"\r{setup} {ended}/{len(rows)}", end="", file=sys.stderr)

        return await drive(target, rows, prompt_of, time.monotonic_ns, on_end)
    finally:
        await supervisor.stop()


def line(setup: str, runs: list[Figures]) -> dict[str, Any]:
    def median(name: str, which: str) -> float:
        return float(statistics.median(getattr(getattr(r, name), which) for r in runs))

    found: dict[str, Any] = {"setup": setup, "runs": len(runs)}
    found["completed"] = statistics.median(r.completed for r in runs)
    found["failed"] = sum(r.failed + r.refused for r in runs)
    for name in ("ttft_ms", "tpot_ms", "itl_ms"):
        found[name] = {p: round(median(name, p), 1) for p in ("p50", "p90", "p95", "p99")}
    found["output_tokens_per_s"] = round(statistics.median(r.output_tokens_per_s for r in runs), 1)
    return found


def table(lines: list[dict[str, Any]]) -> str:
    out = [
        "| set-up | done | TTFT ms p50 / p90 / p99 | TPOT ms p50 / p90 / p99 "
        "| ITL ms p50 / p95 / p99 | tok/s |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    for row in lines:
        ttft, tpot, itl = (
            " / ".join(f"{row[name][p]:g}" for p in which)
            for name, which in (
                ("ttft_ms", ("p50", "p90", "p99")),
                ("tpot_ms", ("p50", "p90", "p99")),
                ("itl_ms", ("p50", "p95", "p99")),
            )
        )
        out.append(
            f"| {row['setup']} | {row['completed']:g} | {ttft} | {tpot} | {itl} "
            f"| {row['output_tokens_per_s']:g} |"
        )
    return "\n".join(out)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("trace", type=Path)
    parser.add_argument("--model", default="")
    parser.add_argument("--requests", type=int, default=200)
    parser.add_argument("--divide", type=int, default=16)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--name", default="azure_live")
    args = parser.parse_args()
    model = args.model
    if not model:
        from twofold.device.builtin import builtin_model

        model = str(builtin_model())
    rows = rows_of(args.trace, args.requests, args.divide)
    found: dict[str, list[Figures]] = {setup: [] for setup in SETUPS}
    for _ in range(args.repeat):
        for setup in SETUPS:
            records = uvloop.run(run_one(setup, model, rows))
            found[setup].append(figures(records))
            ttft = found[setup][-1].ttft_ms
            print(f"{setup}: TTFT p50 {ttft.p50:.0f} p99 {ttft.p99:.0f} ms", file=sys.stderr)
    lines = [line(setup, runs) for setup, runs in found.items()]
    conditions = {
        "model": Path(model).name,
        "requests": len(rows),
        "divide": args.divide,
        "span_s": round(rows[-1].arrival_ns / 1e9, 1),
        "input_tokens": sum(r.input_tokens for r in rows),
        "output_tokens": sum(r.output_tokens for r in rows),
        "cores": os.cpu_count(),
        "load_before": os.getloadavg()[0],
    }
    results = Path(__file__).parent / "results" / f"{args.name}.json"
    results.write_text(json.dumps({"conditions": conditions, "lines": lines}, indent=1) + "\n")
    print(json.dumps(conditions))
    print(table(lines))


LOG = open(os.devnull, "w")  # noqa: SIM115

if __name__ == "__main__":
    main()
