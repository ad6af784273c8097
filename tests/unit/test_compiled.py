"""The optional compiled build: what it compiles, and what it says when it cannot."""

from __future__ import annotations

import ast
import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
from tools import compiled

from tests.arch.source import modules


def test_each_module_to_compile_is_there_and_named_once() -> None:
    source = compiled.ROOT / "src" / "twofold"
    assert [name for name in compiled.MODULES if not (source / name).is_file()] == []
    assert list(compiled.MODULES) == sorted(set(compiled.MODULES))


def test_what_a_simulated_request_passes_through_is_compiled() -> None:
    source = compiled.ROOT / "src" / "twofold"
    for layer in ("core", "policy"):
        files = {str(path.relative_to(source)) for path in (source / layer).rglob("*.py")}
        left_out = files - set(compiled.MODULES)
        assert left_out <= {
            "core/__init__.py",
            "core/handoff/__init__.py",
            "core/handoff/transfer.py",
            "core/journal.py",
            "core/routed.py",
            "policy/__init__.py",
        }


def test_no_class_left_as_it_is_derives_from_a_compiled_one() -> None:
    classes = {
        node.name
        for module in modules()
        if module.path.as_posix() in compiled.MODULES
        for node in ast.walk(module.tree)
        if isinstance(node, ast.ClassDef)
    }
    found = [
        (module.path.as_posix(), node.name)
        for module in modules()
        if module.path.as_posix() not in compiled.MODULES
        for node in ast.walk(module.tree)
        if isinstance(node, ast.ClassDef)
        and {base.id for base in node.bases if isinstance(base, ast.Name)} & classes
    ]
    assert found == []


def test_without_a_c_compiler_it_says_so_in_one_line(tmp_path: Path) -> None:
    target = tmp_path / "compiled"
    done = subprocess.run(
        [sys.executable, compiled.__file__, str(target)],
        env={**os.environ, "CC": "no-such-compiler -O2"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == (
        "compiled: no C compiler: no-such-compiler is not there; install one or name it as CC\n"
    )
    assert not target.exists()


def test_without_mypyc_it_says_where_that_comes_from(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    fault = compiled.missing()
    assert fault is not None
    assert "make install" in fault
