"""Files and functions stay small, and everything public says what it is."""

from __future__ import annotations

import ast
from collections.abc import Iterable
from typing import Final

from .source import Module, functions, modules, parse

MOST_FILE_LINES: Final = 400
MOST_FUNCTION_LINES: Final = 60


def too_long(found: Iterable[Module]) -> list[str]:
    """Every file and function that is too long."""
    broken: list[str] = []
    for module in found:
        n_lines = len(module.text.splitlines())
        if n_lines >= MOST_FILE_LINES:
            broken.append(f"{module.path} has {n_lines} lines")
        for function in functions(module):
            assert function.end_lineno is not None
            n_lines = function.end_lineno - function.lineno + 1
            if n_lines >= MOST_FUNCTION_LINES:
                broken.append(f"{module.at(function)} {function.name} has {n_lines} lines")
    return broken


def undocumented(found: Iterable[Module]) -> list[str]:
    """Every module, public class and public function without a docstring."""
    broken: list[str] = []
    for module in found:
        if not ast.get_docstring(module.tree):
            broken.append(f"{module.path} says nothing")
        silent = [node for node in _public(module.tree) if not ast.get_docstring(node)]
        broken += [f"{module.at(node)} {node.name} says nothing" for node in silent]
    return broken


_Named = ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


def _public(tree: ast.Module) -> list[_Named]:
    """Public classes and functions of a module, and the public methods of those classes.

    A protocol that only names what it needs of a documented class says so once, for itself.
    """
    found: list[_Named] = []
    for node in tree.body:
        if isinstance(node, _Named) and not node.name.startswith("_"):
            found.append(node)
            found += [
                child
                for child in node.body
                if isinstance(node, ast.ClassDef)
                and isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef)
                and not child.name.startswith("_")
                and not (_is_protocol(node) and _is_bare(child))
            ]
    return found


def _is_protocol(node: ast.ClassDef) -> bool:
    return any(isinstance(base, ast.Name) and base.id == "Protocol" for base in node.bases)


def _is_bare(function: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    """Whether its body is nothing but an ellipsis."""
    return [ast.unparse(statement) for statement in function.body] == ["..."]


def test_files_and_functions_are_short() -> None:
    assert too_long(modules()) == []


def test_everything_public_says_what_it_is() -> None:
    assert undocumented(modules()) == []


def test_the_rule_on_length_catches_what_is_too_long() -> None:
    body = "    x = 1\n"
    function = "def f():\n" + body * (MOST_FUNCTION_LINES - 2)
    assert too_long([parse("a.py", function)]) == []
    assert too_long([parse("a.py", function + body)]) == ["a.py:1 f has 60 lines"]
    method = "class A:\n    async def f(self):\n" + "        x = 1\n" * 60
    assert too_long([parse("a.py", method)]) == ["a.py:2 f has 61 lines"]
    assert too_long([parse("a.py", "x = 1\n" * 399)]) == []
    assert too_long([parse("a.py", "x = 1\n" * 400)]) == ["a.py has 400 lines"]


def test_the_rule_on_docstrings_catches_what_says_nothing() -> None:
    text = (
        '"""A module."""\nclass A:\n    """A."""\n    def f(self): pass\n    def _g(self): pass\n'
        "def h(): pass\nclass _B:\n    def i(self): pass\n"
        'class P(Protocol):\n    """P."""\n    def j(self): ...\n'
    )
    assert undocumented([parse("a.py", text)]) == ["a.py:4 f says nothing", "a.py:6 h says nothing"]
    assert undocumented([parse("a.py", "x = 1\n")]) == ["a.py says nothing"]
