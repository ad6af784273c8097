"""The package's source as syntax trees, for the rules of this folder."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import Final, NamedTuple

import twofold

PACKAGE: Final = "twofold"
ROOT: Final = Path(twofold.__file__).parent


class Module(NamedTuple):
    """A source file: its path below the package, its text and its tree."""

    path: Path
    text: str
    tree: ast.Module

    @property
    def layer(self) -> str:
        """The package or module right below `twofold` that it is in."""
        first = self.path.parts[0].removesuffix(".py")
        return {"__main__": "cli", "__init__": "types"}.get(first, first)

    def at(self, node: ast.stmt | ast.expr) -> str:
        """The place of `node`, for a message."""
        return f"{self.path}:{node.lineno}"


def modules(root: Path = ROOT) -> list[Module]:
    """Every source file below `root`."""
    paths = sorted(root.rglob("*.py"))
    return [parse(path.relative_to(root), path.read_text(encoding="utf-8")) for path in paths]


def parse(path: Path | str, text: str) -> Module:
    """A source file from its text."""
    return Module(Path(path), text, ast.parse(text))


def imports(module: Module) -> Iterator[tuple[ast.stmt, str]]:
    """Every module imported anywhere in the file, by its full name."""
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node, alias.name
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                here = (PACKAGE, *module.path.parts)[: -node.level]
                base = ".".join(part for part in (*here, base) if part)
            if base == PACKAGE:
                # `from twofold import core`: the layer is in the names.
                for alias in node.names:
                    yield node, f"{base}.{alias.name}"
            else:
                yield node, base


def functions(module: Module) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    """Every function and method of the file."""
    for node in ast.walk(module.tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node
