"""Make a compiled copy of the package in which simulations run faster, with the same results.

    python tools/compiled.py [DIR]              makes DIR (build/compiled) anew; takes a few minutes
    PYTHONPATH=DIR python -m twofold replay ... runs it

The copy holds the same sources; mypyc translates those of `MODULES` to C, and a C compiler makes
extension modules of them, which Python prefers to the sources beside them.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parents[1]
DEFAULT: Final = ROOT / "build" / "compiled"

# What a simulated request passes through. Messages are not among them: msgspec makes these in C.
MODULES: Final = (
    "core/abridged.py",
    "core/blocks.py",
    "core/chunks.py",
    "core/engine.py",
    "core/estimates.py",
    "core/fleet.py",
    "core/handoff/layout.py",
    "core/handoff/pull_reader.py",
    "core/handoff/pull_source.py",
    "core/handoff/push_admission.py",
    "core/handoff/push_reader.py",
    "core/handoff/push_source.py",
    "core/handoff/reader.py",
    "core/handoff/source.py",
    "core/links.py",
    "core/lru.py",
    "core/placement.py",
    "core/places.py",
    "core/prefix.py",
    "core/recovery.py",
    "core/request.py",
    "core/routed_prefixes.py",
    "core/router.py",
    "core/stretch.py",
    "core/timers.py",
    "core/worker.py",
    "cost/linear.py",
    "cost/link.py",
    "cost/step.py",
    "cost/step_formula.py",
    "cost/step_profile.py",
    "cost/step_roofline.py",
    "cost/step_table.py",
    "metrics/ledger.py",
    "policy/admit.py",
    "policy/batch.py",
    "policy/choice.py",
    "policy/chunk.py",
    "policy/decode.py",
    "policy/lengths.py",
    "policy/mixed.py",
    "policy/prefill.py",
    "policy/split.py",
    "policy/views.py",
    "sim/clock.py",
    "sim/cluster.py",
    "sim/events.py",
    "sim/gateway.py",
    "sim/leg.py",
    "sim/link.py",
    "sim/network.py",
    "sim/nics.py",
    "sim/prepare.py",
    "sim/prompts.py",
    "sim/run.py",
    "sim/stages.py",
    "sim/times.py",
    "sim/worker.py",
)
_SHOWN_LINES: Final = 5


def missing() -> str | None:
    """What has to be there before anything can be compiled and is not, or None."""
    if importlib.util.find_spec("mypyc") is None:
        return "mypyc is not installed; it comes with mypy, which `make install` installs"
    words = (os.environ.get("CC") or sysconfig.get_config_var("CC") or "cc").split()
    if shutil.which(words[0]) is None:
        return f"no C compiler: {words[0]} is not there; install one or name it as CC"
    header = Path(sysconfig.get_path("include")) / "Python.h"
    if not header.exists():
        return f"{header} is not there; install the headers of this Python"
    return None


def build(target: Path) -> None:
    """Make `target` anew. Raises SystemExit with mypyc's last lines if it fails."""
    shutil.rmtree(target, ignore_errors=True)
    shutil.copytree(
        ROOT / "src" / "twofold",
        target / "twofold",
        ignore=shutil.ignore_patterns("__pycache__", "*.so"),
    )
    sources = [f"twofold/{module}" for module in MODULES]
    done = subprocess.run(
        [sys.executable, "-m", "mypyc", "--strict", *sources],
        cwd=target,
        env={**os.environ, "PYTHONPATH": "", "MYPYPATH": ""},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    if done.returncode:
        last = done.stdout.strip().splitlines()[-_SHOWN_LINES:]
        raise SystemExit("\n".join(["compiled: mypyc failed:", *last]))
    for left_over in ("build", ".mypy_cache"):
        shutil.rmtree(target / left_over, ignore_errors=True)


def main() -> None:
    """Make the directory that the command line names."""
    target = Path(sys.argv[1]).resolve() if len(sys.argv) > 1 else DEFAULT
    fault = missing()
    if fault is not None:
        print(f"compiled: {fault}", file=sys.stderr)
        raise SystemExit(2)
    print(f"compiling into {target}; this takes a few minutes", file=sys.stderr)
    build(target)
    print(f"PYTHONPATH={target} runs it", file=sys.stderr)


if __name__ == "__main__":
    main()
