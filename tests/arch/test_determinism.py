"""No state hides in modules, and nothing in the pure layers depends on the order of a set.

Best effort on syntax: what it cannot see is left to the tests that compare digests.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from typing import Final

from .source import Module, functions, modules, parse
from .test_imports import PURE

SETS: Final = frozenset({"set", "frozenset"})
# What gives the same whatever the order of its argument.
ORDERLESS: Final = frozenset({"sorted", "len", "any", "all", "set", "frozenset", "min", "max"})
ORDERED: Final = frozenset({"list", "tuple", "iter", "next", "enumerate", "zip", "map", "sum"})
MUTABLE_CALLS: Final = frozenset(
    {"list", "dict", "set", "bytearray", "deque", "defaultdict", "OrderedDict", "Counter", "count"}
)
GROWERS: Final = frozenset(
    {"append", "appendleft", "extend", "insert", "add", "update", "setdefault"}
)
SHRINKERS: Final = frozenset({"pop", "popitem", "popleft", "remove", "clear", "discard"})
MUTATORS: Final = GROWERS | SHRINKERS | {"sort", "reverse"}


def set_iterations(module: Module) -> list[str]:
    """Every place that goes through a set in the set's own order."""
    names = _set_names(module)
    harmless = {
        id(argument)
        for node in ast.walk(module.tree)
        if isinstance(node, ast.Call) and _name(node.func) in ORDERLESS
        for argument in node.args
    }
    return [
        f"{module.at(place)} goes through a set"
        for place, iterated in _iterated(module.tree)
        if id(place) not in harmless and _is_set(iterated, names)
    ]


def _iterated(tree: ast.Module) -> Iterator[tuple[ast.stmt | ast.expr, ast.expr]]:
    """Each loop, comprehension or call that goes through something, with that something."""
    for node in ast.walk(tree):
        if isinstance(node, ast.For):
            yield node, node.iter
        elif isinstance(node, ast.ListComp | ast.GeneratorExp | ast.DictComp):
            for generator in node.generators:
                yield node, generator.iter
        elif isinstance(node, ast.Starred):
            yield node, node.value
        elif isinstance(node, ast.Call) and _name(node.func) in ORDERED:
            for argument in node.args:
                yield node, argument
        elif isinstance(node, ast.Call) and not node.args and isinstance(node.func, ast.Attribute):
            # `some_set.pop()` takes whichever comes first; no other method goes through one.
            yield from [(node, node.func.value)] * (node.func.attr == "pop")


def _set_names(module: Module) -> frozenset[str]:
    """Names of variables, attributes and arguments that the file says are sets."""
    found: set[str] = set()
    for node in ast.walk(module.tree):
        if isinstance(node, ast.AnnAssign) and _is_set_type(node.annotation):
            found.add(_name(node.target))
        elif isinstance(node, ast.arg) and node.annotation and _is_set_type(node.annotation):
            found.add(node.arg)
        elif isinstance(node, ast.Assign) and _is_set(node.value, frozenset()):
            found.update(_name(target) for target in node.targets)
    return frozenset(found - {""})


def _is_set_type(annotation: ast.expr) -> bool:
    base = annotation.value if isinstance(annotation, ast.Subscript) else annotation
    return _name(base) in SETS | {"AbstractSet", "MutableSet", "Set"}


def _is_set(node: ast.expr, names: frozenset[str]) -> bool:
    if isinstance(node, ast.Set | ast.SetComp):
        return True
    if isinstance(node, ast.BinOp):
        return _is_set(node.left, names) or _is_set(node.right, names)
    if isinstance(node, ast.Call):
        return isinstance(node.func, ast.Name) and node.func.id in SETS
    return bool(_name(node)) and _name(node) in names


def _name(node: ast.AST) -> str:
    """The last part of a name or attribute, else nothing."""
    if isinstance(node, ast.Name):
        return node.id
    return node.attr if isinstance(node, ast.Attribute) else ""


def module_state(module: Module) -> list[str]:
    """Every module-level value that changes, or that nothing says will not."""
    broken: list[str] = []
    constants: set[str] = set()
    for node in module.tree.body:
        if not isinstance(node, ast.Assign | ast.AnnAssign) or node.value is None:
            continue
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        is_final = isinstance(node, ast.AnnAssign) and "Final" in ast.unparse(node.annotation)
        for name in map(_name, targets):
            if name.isupper() or is_final:
                constants.add(name)
            elif name != "__all__" and _is_mutable(node.value):
                broken.append(f"{module.at(node)} {name} can change")
    for function in functions(module):
        broken += [
            f"{module.at(node)} changes {name}"
            for node, name in _changes(function)
            if name in constants or isinstance(node, ast.Global)
        ]
    return broken


def _is_mutable(value: ast.expr) -> bool:
    if isinstance(value, ast.Call):
        return _name(value.func) in MUTABLE_CALLS
    return isinstance(
        value, ast.List | ast.Dict | ast.Set | ast.ListComp | ast.DictComp | ast.SetComp
    )


def _changes(function: ast.AST) -> Iterator[tuple[ast.stmt | ast.expr, str]]:
    """Where a function changes the contents of a plain name, or claims a global one."""
    for node in ast.walk(function):
        if isinstance(node, ast.Global):
            yield node, ", ".join(node.names)
        elif isinstance(node, ast.Subscript) and not isinstance(node.ctx, ast.Load):
            if isinstance(node.value, ast.Name):
                yield node, node.value.id
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            owner = _name(node.func.value) if isinstance(node.func.value, ast.Name) else ""
            if node.func.attr in MUTATORS:
                yield node, owner


def pure(found: Iterable[Module]) -> list[Module]:
    """The modules of the pure layers."""
    return [module for module in found if module.layer in PURE]


def test_pure_layers_never_go_through_a_set() -> None:
    assert [place for module in pure(modules()) for place in set_iterations(module)] == []


def test_no_module_keeps_state() -> None:
    assert [place for module in modules() for place in module_state(module)] == []


def test_the_rule_on_sets_catches_each_way_to_go_through_one() -> None:
    for text in (
        "for x in {1, 2}: pass",
        "for x in set(y): pass",
        "a = {1}\nfor x in a: pass",
        "a = [x for x in {y for y in z}]",
        "class A:\n    def __init__(self):\n        self.s: set[int] = set()\n"
        "    def f(self):\n        return list(self.s)",
        "def f(s: frozenset[int]): return next(iter(s))",
        "def f(s: set[int]): return [*s]",
        "def f(s: set[int]): return s.pop()",
        "def f(s: set[int], t: list[int]):\n    for x in s - {1}: pass",
        "def f(s: set[int]): return {x: 1 for x in s}",
    ):
        assert set_iterations(parse("core/a.py", text)), text


def test_the_rule_on_sets_lets_orderless_uses_pass() -> None:
    for text in (
        "def f(s: set[int]): return sorted(s), len(s), 1 in s",
        "def f(s: set[int]): return sorted(x + 1 for x in s)",
        "def f(s: set[int]): return any(x > 1 for x in s)",
        "def f(s: list[int]): return [x for x in s if x in {1, 2}]",
        "def f(s: dict[int, int]): return s.pop(1)",
    ):
        assert set_iterations(parse("core/a.py", text)) == [], text


def test_the_rule_on_state_catches_each_kind() -> None:
    for text in (
        "cache = {}",
        "from collections import deque\nqueue: deque[int] = deque()",
        "n = 0\ndef f():\n    global n\n    n += 1",
        "CACHE = {}\ndef f(x):\n    CACHE[x] = 1",
        "from typing import Final\nSEEN: Final[list[int]] = []\ndef f(x):\n    SEEN.append(x)",
        "class A:\n    def f(self, x):\n        SEEN.append(x)\nSEEN = []",
    ):
        assert module_state(parse("live/a.py", text)), text


def test_the_rule_on_state_lets_constants_pass() -> None:
    for text in (
        "__all__ = ['a']",
        "from typing import Final\nTABLE: Final = {'a': 1}\ndef f(x):\n    return TABLE[x]",
        "LIMIT = 3",
        "def f():\n    found = []\n    found.append(1)\n    return found",
    ):
        assert module_state(parse("live/a.py", text)) == [], text
