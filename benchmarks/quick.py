"""All benchmarks in a quick form, one after another: do they run, and roughly what do they say.

    python -m benchmarks.quick [--out FOLDER] [NAME ...]

What each prints is shown and kept in FOLDER (benchmarks/results/quick) as NAME.txt; figures worth
quoting need the full forms. Those that read published traces are left out, and said to be, where
the folder of published data (TWOFOLD_DATA, or ../shared/data) is absent. The exit code is 1 if
any failed.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final, NamedTuple

from benchmarks.published.data import DataError, data_root

HERE: Final = Path(__file__).resolve().parent
TIMEOUT_S: Final = 1200


class Quick(NamedTuple):
    """`words` are Python's arguments: {out} is for results, {data} has the published data."""

    name: str
    words: tuple[str, ...]

    @property
    def needs_data(self) -> bool:
        return any("{data}" in word for word in self.words)


ALL: Final = (
    Quick(
        "transport",
        ("transport.py", "--rounds", "3", "--mib", "16", "--json", "{out}/transport.json"),
    ),
    Quick("relay", ("relay.py", "--rounds", "1", "--out", "{out}/relay.json")),
    Quick("device", ("device.py", "--rounds", "1", "--prompt-tokens", "32")),
    Quick(
        "sim_speed",
        (
            *("sim_speed.py", "{data}/traces/mooncake_conversation_trace.jsonl"),
            *("--rounds", "1", "--most", "1", "--out", "{out}/sim_speed.json"),
        ),
    ),
    Quick(
        "azure_live",
        (
            *("azure_live.py", "{data}/traces/azure2023_conv.csv", "--requests", "20"),
            *("--repeat", "1", "--name", "quick/azure_live"),
        ),
    ),
    Quick(
        "published",
        (
            *("-m", "benchmarks.published", "--quick"),
            *("--json", "{out}/published.json", "--table", "{out}/published.md"),
        ),
    ),
)


def commands(out: Path, data: Path | None, names: Sequence[str]) -> dict[str, list[str] | None]:
    """The command line of each benchmark of `names` (all if none); None: its data is absent."""
    found: dict[str, list[str] | None] = {}
    for quick in ALL:
        if names and quick.name not in names:
            continue
        if data is None and (quick.needs_data or quick.name == "published"):
            found[quick.name] = None
            continue
        words = [word.format(out=out, data=data) for word in quick.words]
        if words[0].endswith(".py"):
            words[0] = str(HERE / words[0])
        found[quick.name] = [sys.executable, *words]
    return found


def run(name: str, words: list[str], out: Path) -> bool:
    """Run one, show what it prints and keep it; whether it went well."""
    began = time.monotonic()
    print(f"== {name}: {' '.join(words[1:])}", flush=True)
    try:
        done = subprocess.run(
            words, cwd=HERE.parent, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            timeout=TIMEOUT_S,
        )  # fmt: skip
        text, code = done.stdout, done.returncode
    except subprocess.TimeoutExpired:
        text, code = f"no end within {TIMEOUT_S} s\n", 1
    (out / f"{name}.txt").write_text(text, encoding="utf-8")
    print(text, end="")
    print(f"== {name}: exit {code} after {time.monotonic() - began:.0f} s\n", flush=True)
    return code == 0


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(q.name for q in ALL))
    parser.add_argument("--out", type=Path, default=HERE / "results" / "quick")
    args = parser.parse_args(argv)
    unknown = [name for name in args.names if name not in [quick.name for quick in ALL]]
    if unknown:
        parser.error(f"no benchmark {unknown[0]!r}; there are {', '.join(q.name for q in ALL)}")
    try:
        data: Path | None = Path(data_root())
    except DataError:
        data = None
    out = args.out.resolve()
    for folder in (out, HERE / "results" / "quick"):  # azure_live knows the second alone
        folder.mkdir(parents=True, exist_ok=True)
    failed, left_out = [], []
    for name, words in commands(out, data, args.names).items():
        if words is None:
            left_out.append(name)
        elif not run(name, words, out):
            failed.append(name)
    if left_out:
        print(f"left out, as the published data is absent: {', '.join(left_out)}")
    print(f"failed: {', '.join(failed)}" if failed else f"all done; results in {out}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
