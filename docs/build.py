"""Render the documents to HTML, and check that every link in what comes out leads somewhere.

    python docs/build.py [FOLDER]

All Markdown of the repository's root and of docs/ goes to FOLDER (build/docs), each page beside
where it was. Links to files that are no pages are followed in the repository.
"""

from __future__ import annotations

import html
import re
import sys
from itertools import pairwise
from pathlib import Path
from typing import Final

from markdown_it import MarkdownIt
from markdown_it.token import Token

ROOT: Final = Path(__file__).resolve().parents[1]
_STYLE: Final = (
    "body{max-width:60rem;margin:2rem auto;padding:0 1rem;font:16px/1.5 system-ui,sans-serif}"
    "pre{overflow-x:auto;background:#f5f5f5;padding:.75rem}code{background:#f5f5f5}"
    "table{border-collapse:collapse;display:block;overflow-x:auto}"
    "td,th{border:1px solid #ccc;padding:.25rem .5rem;text-align:left;vertical-align:top}"
)
_ID: Final = re.compile(r'<h[1-6] id="([^"]+)"')
_HREF: Final = re.compile(r'<a href="([^"]+)"')


def pages(root: Path) -> list[Path]:
    """All pages, relative to `root`."""
    found = [*root.glob("*.md"), *(root / "docs").rglob("*.md")]
    return sorted(path.relative_to(root) for path in found)


def anchor(title: str, taken: set[str]) -> str:
    """The anchor that GitHub gives a heading: a repeated one gets a number."""
    plain = re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-")
    name, number = plain, 0
    while name in taken:
        number += 1
        name = f"{plain}-{number}"
    taken.add(name)
    return name


def rendered(text: str, depth: int) -> str:
    """One page of Markdown as a whole HTML document; `depth` folders below the root."""
    parser = MarkdownIt("commonmark").enable("table")
    tokens = parser.parse(text)
    taken: set[str] = set()
    title = ""
    for token, following in pairwise(tokens):
        if token.type == "heading_open":
            words = "".join(child.content for child in following.children or [])
            title = title or words
            token.attrSet("id", anchor(words, taken))
    for token in tokens:
        for child in token.children or []:
            _lead_to_html(child)
    body = parser.renderer.render(tokens, parser.options, {})
    home = "../" * depth
    return (
        f'<!doctype html>\n<html lang="en">\n<meta charset="utf-8">\n'
        f"<title>{html.escape(title)}</title>\n<style>{_STYLE}</style>\n"
        f'<nav><a href="{home}README.html">twofold</a> | '
        f'<a href="{home}docs/README.html">documentation</a></nav>\n{body}'
    )


def _lead_to_html(token: Token) -> None:
    href = token.attrGet("href")
    if token.type == "link_open" and isinstance(href, str) and "://" not in href:
        token.attrSet("href", re.sub(r"\.md(?=$|#)", ".html", href))


def build(root: Path, out: Path) -> list[Path]:
    """Render all pages of `root` into `out`; the files written."""
    written = []
    for page in pages(root):
        target = out / page.with_suffix(".html")
        target.parent.mkdir(parents=True, exist_ok=True)
        text = (root / page).read_text(encoding="utf-8")
        target.write_text(rendered(text, len(page.parts) - 1), encoding="utf-8")
        written.append(target)
    return written


def broken(root: Path, out: Path, written: list[Path]) -> list[str]:
    """Links of `written` that lead nowhere, as PAGE: TARGET."""
    found = []
    for page in written:
        for target in map(html.unescape, _HREF.findall(page.read_text(encoding="utf-8"))):
            if "://" in target or target.startswith("mailto:"):
                continue
            name, _, part = target.partition("#")
            path = (page.parent / name).resolve() if name else page
            other = (
                root / path.relative_to(out.resolve()) if out.resolve() in path.parents else path
            )
            there = path.exists() or other.exists()
            if part and path.suffix == ".html" and path.exists():
                there = part in _ID.findall(path.read_text(encoding="utf-8"))
            if not there:
                found.append(f"{page.relative_to(out)}: {target}")
    return found


def main(argv: list[str]) -> int:
    """Build and check; the exit code."""
    out = Path(argv[0]) if argv else ROOT / "build" / "docs"
    written = build(ROOT, out)
    wrong = broken(ROOT, out, written)
    for line in wrong:
        print(f"broken link: {line}", file=sys.stderr)
    print(f"{len(written)} pages in {out}, {len(wrong)} broken links")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
