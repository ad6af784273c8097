"""Runs the checks with progress, and writes the results as JSON and the table as Markdown."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context
from pathlib import Path
from typing import Final

import msgspec

from benchmarks.published.checks import CHECKS
from benchmarks.published.data import DataError, data_root
from benchmarks.published.rows import counts
from benchmarks.published.run import Result, run_check
from benchmarks.published.table import markdown
from twofold import __version__

REPO: Final = Path(__file__).resolve().parents[2]
JSON: Final = REPO / "benchmarks" / "published" / "results.json"
TABLE: Final = REPO / "docs" / "explanation" / "published-results.md"


class Results(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that is written."""

    version: str
    results: list[Result]


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.published", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="shorter runs, for a look")
    parser.add_argument(
        "--only", default="", metavar="WORDS", help="checks whose name has one of WORDS (by commas)"
    )
    parser.add_argument("--jobs", type=int, default=1, help="checks run at once (default 1)")
    parser.add_argument("--json", type=Path, default=JSON, help=f"default {JSON.name}")
    parser.add_argument("--table", type=Path, default=TABLE, help=f"default {TABLE.name}")
    parser.add_argument("--render", action="store_true", help="only write the table anew from JSON")
    return parser.parse_args(argv)


def _merge(path: Path, new: dict[str, Result]) -> Results:
    """The results of this run over those that were there, in the table's order."""
    found: dict[str, Result] = {}
    if path.exists():
        old = msgspec.json.decode(path.read_bytes(), type=Results)
        found = {result.check: result for result in old.results}
    found.update(new)
    kept = [found[name] for name in CHECKS if name in found]
    return Results(version=__version__, results=kept)


def _write(results: Results, json: Path, table: Path) -> None:
    json.parent.mkdir(parents=True, exist_ok=True)
    table.parent.mkdir(parents=True, exist_ok=True)
    json.write_bytes(msgspec.json.format(msgspec.json.encode(results), indent=1) + b"\n")
    rows = [row for result in results.results for row in result.rows]
    table.write_text(markdown(rows))


def _results(names: Sequence[str], root: str, quick: bool, jobs: int) -> Iterator[Result]:
    """The checks as they end: in this process one after the other, or in `jobs` of them."""
    if jobs <= 1:
        yield from (run_check(name, root, quick) for name in names)
        return
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool:
        try:
            for future in as_completed([pool.submit(run_check, n, root, quick) for n in names]):
                yield future.result()
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


def main(argv: Sequence[str]) -> int:
    """Returns the exit code: 0, also where rows differ, 2 without data."""
    args = _parse(argv)
    if args.render:
        old = msgspec.json.decode(args.json.read_bytes(), type=Results)
        _write(old, args.json, args.table)
        return 0
    words = args.only.split(",")
    names = [name for name in CHECKS if any(word in name for word in words)]
    if not names:
        print(f"--only {args.only}: no such check; {', '.join(CHECKS)} are", file=sys.stderr)
        return 2
    try:
        root = data_root()
    except DataError as error:
        print(error, file=sys.stderr)
        return 2
    done: dict[str, Result] = {}
    try:
        for result in _results(names, str(root), args.quick, args.jobs):
            done[result.check] = result
            told = ", ".join(f"{n} {verdict}" for verdict, n in counts(result.rows).items())
            place = f"[{len(done)}/{len(names)}]"
            print(f"{place} {result.check}: {told} ({result.seconds} s)", flush=True)
            _write(_merge(args.json, done), args.json, args.table)
    except KeyboardInterrupt:
        print("stopped; what is done is written", file=sys.stderr)
        return 130
    print(f"wrote {args.json} and {args.table}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
