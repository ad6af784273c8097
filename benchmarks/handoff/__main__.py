"""What a handoff costs, in parts; results as JSON and as a table in Markdown.

bandwidth     GB/s of each transport against one memcpy and one raw loopback socket
residual      from the end of prefill to decode-ready, 16 to 8,192 tokens, by mode and transport
slots         slots and blocks that decode holds for KV that is still to come, at one rate
loop          CPU time on the decode worker's event loop, per handoff
interference  decode step time with and without handoffs that arrive at a rate
fragments     ranges per handoff as the pools of both workers age
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

from msgspec import structs

from benchmarks.handoff import fragments, interference, residual
from benchmarks.handoff.conditions import Progress, conditions, make_bench_model
from benchmarks.handoff.table import write_tables
from benchmarks.transport import MIB, run_as_workers
from benchmarks.transport import measure as measure_transports

REPO: Final = Path(__file__).resolve().parents[2]
JSON: Final = REPO / "benchmarks" / "results" / "handoff.json"
PAGE: Final = REPO / "docs" / "explanation" / "handoff-cost.md"
GROUPS: Final = (
    ("bandwidth",),
    ("residual", "slots"),
    ("loop",),
    ("interference",),
    ("fragments",),
)
"""Parts that share their processes."""

PARTS: Final = tuple(part for group in GROUPS for part in group)
EXAMPLE: Final = """example:
  python -m benchmarks.handoff residual slots --json /tmp/handoff.json
  python -m benchmarks.handoff --also "nothing else" --docs    (all, and the page anew)"""


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.handoff",
        description=__doc__,
        epilog=EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("part", nargs="*", help=f"any of {', '.join(PARTS)}; none: all")
    parser.add_argument(
        "--json", type=Path, default=JSON, metavar="FILE", help=f"default {JSON.relative_to(REPO)}"
    )
    parser.add_argument("--quick", action="store_true", help="few and short runs, for a look")
    parser.add_argument(
        "--rounds",
        type=int,
        default=0,
        help="rounds of residual and interference (default 3 and 5)",
    )
    parser.add_argument(
        "--also", default="not said", metavar="WORDS", help="what else runs on the machine, noted"
    )
    parser.add_argument(
        "--docs", action="store_true", help=f"write the tables of {PAGE.relative_to(REPO)} anew"
    )
    parser.add_argument("--render", action="store_true", help="with --docs: from JSON, no runs")
    arguments = parser.parse_args(argv)
    for part in arguments.part:
        if part not in PARTS:
            parser.error(f"part {part!r}: must be one of {', '.join(PARTS)}")
    if arguments.rounds < 0:
        parser.error(f"--rounds {arguments.rounds}: must be at least 1")
    return arguments


def _bandwidth(quick: bool) -> dict[str, Any]:
    sizes, rounds = ((64,), 3) if quick else ((64, 256), 5)
    progress = Progress("bandwidth", len(sizes))
    found = []
    for mib in sizes:
        found.append(measure_transports(mib * MIB, rounds, 2))
        progress.step()
    progress.end()
    return {"rounds": rounds, "sizes": found}


def _measure(
    group: Sequence[str], parts: list[str], model: Path, quick: bool, rounds: int
) -> dict[str, Any]:
    """Results of those `parts` that are in `group`, whose parts share their processes."""
    wanted = [part for part in group if part in parts]
    if "residual" in group:
        extent = residual.QUICK if quick else residual.FULL
        extent = structs.replace(extent, rounds=rounds or extent.rounds)
        return residual.measure(model, extent, wanted)
    if "loop" in group or "interference" in group:
        sizes = interference.QUICK if quick else interference.FULL
        sizes = structs.replace(sizes, rounds=rounds or sizes.rounds)
        return interference.measure(model, sizes, wanted)
    if "bandwidth" in group:
        return {"bandwidth": _bandwidth(quick)}
    return {"fragments": fragments.measure(quick)}


def _run(arguments: argparse.Namespace, keep: Callable[[dict[str, Any]], None]) -> None:
    """Give `keep` the results by part, with the conditions as they were before and after."""
    parts = arguments.part or list(PARTS)
    with tempfile.TemporaryDirectory(prefix="twofold-bench-") as folder:
        model, shape = make_bench_model(Path(folder))
        for group in GROUPS:
            if not any(part in parts for part in group):
                continue
            before, began = conditions(arguments.also), time.monotonic()
            found = _measure(group, parts, model, arguments.quick, arguments.rounds)
            noted = before | {
                "load_average_after": conditions(arguments.also)["load_average"],
                "seconds": round(time.monotonic() - began, 1),
                "quick": arguments.quick,
            }
            # The others move blocks of no model.
            what = shape if group[0] in ("residual", "loop", "interference") else None
            keep(
                {
                    part: {"conditions": noted, "model": what, "result": result}
                    for part, result in found.items()
                }
            )


def main(argv: Sequence[str]) -> int:
    """Returns the exit code: 0 done, 1 a part failed, 130 interrupted; what is done is kept."""
    arguments = _parse(argv)
    kept: dict[str, Any] = {}
    if arguments.json.exists():
        kept = json.loads(arguments.json.read_text())

    def keep(found: dict[str, Any]) -> None:
        kept.update(found)
        ordered = {part: kept[part] for part in PARTS if part in kept}
        arguments.json.write_text(json.dumps(ordered, indent=1) + "\n")

    if not arguments.render:
        try:
            _run(arguments, keep)
        except KeyboardInterrupt:
            return 130
        except (RuntimeError, TimeoutError, OSError) as error:
            print(f"handoff: {error}", file=sys.stderr)
            return 1
    if arguments.docs:
        write_tables(PAGE, kept)
    return 0


if __name__ == "__main__":
    run_as_workers()
    sys.exit(main(sys.argv[1:]))
