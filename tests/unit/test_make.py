"""What `make docs` renders and checks, and what `make bench` runs."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
from benchmarks import quick

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def site() -> ModuleType:
    spec = importlib.util.spec_from_file_location("docs_build", ROOT / "docs" / "build.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_documents_render_and_every_link_leads_somewhere(
    site: ModuleType, tmp_path: Path
) -> None:
    written = site.build(ROOT, tmp_path)
    assert site.broken(ROOT, tmp_path, written) == []
    assert {page.relative_to(tmp_path).as_posix() for page in written} >= {
        "README.html",
        "ARCHITECTURE.html",
        "docs/reference/replay.html",
    }
    index = (tmp_path / "docs/README.html").read_text()
    assert "<title>Documentation</title>" in index
    assert '<a href="explanation/published-results.html">' in index
    assert "<table>" in (tmp_path / "docs/reference/replay.html").read_text()


def test_links_that_lead_nowhere_are_found(site: ModuleType, tmp_path: Path) -> None:
    root, out = tmp_path / "root", tmp_path / "out"
    (root / "docs").mkdir(parents=True)
    (root / "Makefile").touch()
    (root / "docs" / "README.md").write_text("# Index\n")
    (root / "README.md").write_text(
        "# A title\n\n## Same\n\n## Same\n\n"
        "[a](#a-title) [b](docs/x.md#y) [c](Makefile) [d](#same-1)\n"
        "[e](none.md) [f](docs/x.md#z) [g](#same-2) [h](https://x.example/y.md)\n"
    )
    (root / "docs" / "x.md").write_text("# X & `Y`\n\n## Y\n\n[up](../README.md) [i](../none)\n")
    written = site.build(root, out)
    assert site.broken(root, out, written) == [
        "README.html: none.html",
        "README.html: docs/x.html#z",
        "README.html: #same-2",
        "docs/x.html: ../none",
    ]
    page = (out / "docs" / "x.html").read_text()
    assert "<title>X &amp; Y</title>" in page
    assert '<a href="../docs/README.html">documentation</a>' in page
    assert 'href="https://x.example/y.md"' in (out / "README.html").read_text()


def test_every_benchmark_has_a_quick_form() -> None:
    there = {path.stem for path in (ROOT / "benchmarks").glob("*.py")} - {"__init__", "quick"}
    assert {one.name for one in quick.ALL} == {*there, "published"}
    for name, words in quick.commands(Path("o"), Path("d"), ()).items():
        assert words is not None
        source = (ROOT / "benchmarks" / f"{name}.py") if name in there else None
        text = (source or ROOT / "benchmarks/published/__main__.py").read_text()
        for flag in re.findall(r"--[a-z-]+", " ".join(words)):
            assert f'"{flag}"' in text, f"{name} has no {flag}"


def test_without_published_data_the_rest_still_runs() -> None:
    found = quick.commands(Path("o"), None, ())
    assert [name for name, words in found.items() if words] == ["transport", "relay", "device"]
    assert list(quick.commands(Path("o"), None, ["relay"])) == ["relay"]


def test_a_benchmark_that_fails_is_told_and_kept(tmp_path: Path) -> None:
    program = [sys.executable, "-c", "print('words'); raise SystemExit(3)"]
    assert not quick.run("one", program, tmp_path)
    assert quick.run("two", [sys.executable, "-c", "print('well')"], tmp_path)
    assert (tmp_path / "one.txt").read_text() == "words\n"
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.quick", "best", "--out", str(tmp_path)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    assert "no benchmark 'best'; there are transport, relay," in done.stderr
