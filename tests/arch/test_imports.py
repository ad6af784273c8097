"""Imports point down only, and the pure layers touch neither time, chance, I/O nor tensors."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from .source import PACKAGE, Module, imports, modules, parse

# From the top down; a layer may import any that stands below its own row, and its own modules.
ROWS: Final = (
    ("cli",),
    ("plan", "bench", "report"),
    ("live", "sim"),
    ("transport", "device", "engines"),
    ("core",),
    ("policy",),
    ("cost",),
    ("config", "trace", "metrics", "messages"),
    ("types",),
)
RANK: Final = {layer: row for row, layers in enumerate(ROWS) for layer in layers}
PURE: Final = frozenset({"core", "policy", "cost"})
CONCURRENCY: Final = frozenset({"asyncio", "concurrent", "multiprocessing", "threading", "uvloop"})
TIME_AND_CHANCE: Final = frozenset({"datetime", "time", "random", "secrets", "uuid"})
INPUT_OUTPUT: Final = frozenset(
    {"httptools", "logging", "os", "select", "selectors", "signal", "socket", "ssl", "subprocess"}
)
TENSORS: Final = frozenset({"torch", "transformers"})
NOT_PURE: Final = CONCURRENCY | TIME_AND_CHANCE | INPUT_OUTPUT | TENSORS
# Below its row, and barred all the same.
APART: Final = {
    "sim": {"device", "transport", "engines"},
    "core": {"config"},
    "policy": {"config"},
    "cost": {"config"},
}
ONLY_IN: Final = {"torch": "device"}


def violations(found: Iterable[Module]) -> list[str]:
    """Every import that breaks a rule, as "file:line imports what"."""
    broken: list[str] = []
    for module in found:
        layer = module.layer
        for node, name in imports(module):
            top, _, rest = name.partition(".")
            if not _allowed(layer, top, rest.partition(".")[0]):
                broken.append(f"{module.at(node)} imports {name}")
    return broken


def _allowed(layer: str, top: str, target: str) -> bool:
    if top == PACKAGE:
        if target == "__version__":
            return True
        return layer == target or (
            RANK[layer] < RANK[target] and target not in APART.get(layer, ())
        )
    if layer in PURE and top in NOT_PURE:
        return False
    return ONLY_IN.get(top, layer) == layer


def test_imports_keep_to_the_layers() -> None:
    assert violations(modules()) == []


def test_every_part_of_the_package_is_in_a_layer() -> None:
    assert {module.layer for module in modules()} <= set(RANK)


def test_the_rule_catches_each_kind_of_violation() -> None:
    planted = [
        ("policy/a.py", "import time", "time"),
        ("core/a.py", "def f():\n    import os.path", "os.path"),
        ("cost/a.py", "from random import choice", "random"),
        ("policy/a.py", "from twofold.core import engine", "twofold.core"),
        ("policy/a.py", "from twofold import core", "twofold.core"),
        ("policy/a.py", "from ..core.engine import Engine", "twofold.core.engine"),
        ("core/handoff/a.py", "from ...live import clock", "twofold.live"),
        ("sim/a.py", "from twofold.live.clock import Clock", "twofold.live.clock"),
        ("live/a.py", "import twofold.sim", "twofold.sim"),
        ("sim/a.py", "from twofold.device import runner", "twofold.device"),
        ("sim/a.py", "from twofold.transport import tcp", "twofold.transport"),
        ("live/a.py", "import torch", "torch"),
        ("core/a.py", "from twofold.config import EngineSettings", "twofold.config"),
        ("messages/a.py", "from twofold.trace import reader", "twofold.trace"),
        ("types.py", "from twofold.messages import Wake", "twofold.messages"),
        ("metrics/a.py", "from twofold.config import Role", "twofold.config"),
        ("transport/a.py", "from twofold.device import pool", "twofold.device"),
    ]
    for path, text, name in planted:
        caught = violations([parse(path, text)])
        assert len(caught) == 1, text
        assert caught[0].endswith(f" imports {name}"), text


def test_the_rule_lets_what_is_right_pass() -> None:
    right = [
        ("core/a.py", "from .blocks import Pool\nimport math\nfrom twofold.types import KVLayout"),
        ("sim/a.py", "from twofold.core import engine\nfrom twofold.trace import reader"),
        ("device/a.py", "import torch"),
        ("cli/a.py", "from twofold import __version__\nfrom twofold.live import clock"),
        ("__main__.py", "from twofold.cli.main import main"),
    ]
    assert violations(parse(path, text) for path, text in right) == []
