"""What the documents say of commands, flags, files, tests, settings, routes and metrics is so."""

from __future__ import annotations

import re
import shlex
from functools import cache
from pathlib import Path
from typing import Final

import msgspec
import pytest

from tests.unit.harness import LAYOUT
from twofold.cli.main import main
from twofold.config import options
from twofold.config.options import Table
from twofold.core.worker import WorkerCore
from twofold.live.worker_metrics import WorkerMetrics
from twofold.metrics.prometheus import GatewayMetrics

ROOT: Final = Path(__file__).resolve().parents[2]
SOURCE: Final = ROOT / "src" / "twofold"
TABLES: Final[tuple[Table, ...]] = ("engine", "serve", "worker", "gateway")
PAGES: Final = sorted(
    [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")], key=lambda page: page.as_posix()
)
by_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))

_FENCE: Final = re.compile(r"^```[^\n]*\n(.*?)^```", re.MULTILINE | re.DOTALL)
_SPAN: Final = re.compile(r"`([^`\n]+)`")
_LINK: Final = re.compile(r"\]\(([^)\s]+)\)")
_FLAG: Final = re.compile(r"--[a-z][a-z0-9-]*")
_PATH: Final = re.compile(r"((?:src|tests|docs|benchmarks|\.ci)/[\w./-]*)(?:::(\w+))?")
_MODULE: Final = re.compile(r"[a-z_]+(?:/[a-z_]+)+\.py|[a-z_]+/")


# ------------------------------------------------------------------------------------ the program


def _help(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    with pytest.raises(SystemExit):
        main([*words, "--help"])
    return capsys.readouterr().out


def _commands(capsys: pytest.CaptureFixture[str]) -> list[str]:
    return re.findall(r"^ {4}([a-z]+)(?: |$)", _help(capsys), re.MULTILINE)


def _flags(capsys: pytest.CaptureFixture[str]) -> dict[str, set[str]]:
    """Flags by command; under "" those of the program itself."""
    names = ["", *_commands(capsys)]
    return {
        name: set(_FLAG.findall(_help(capsys, *filter(None, [name])).partition("example:")[0]))
        for name in names
    }


# ---------------------------------------------------------------------------------- the documents


@cache
def _text(page: Path) -> str:
    return page.read_text(encoding="utf-8")


def _spans(page: Path) -> list[str]:
    return _SPAN.findall(_FENCE.sub("", _text(page)))


def _command_lines(text: str) -> list[list[str]]:
    """Every `twofold COMMAND ...` and every `make serve ARGS=...` in `text`, in words."""
    lines = [line for block in _FENCE.findall(text) for line in _joined(block).splitlines()]
    lines += _SPAN.findall(_FENCE.sub("", text))
    found: list[list[str]] = []
    for line in lines:
        try:
            words = shlex.split(re.split(r"[|;&](?=\s|$)", line)[0], comments=True)
        except ValueError:
            continue  # no command line, such as half a sentence with an apostrophe
        if words[:2] == ["make", "serve"]:
            args = [w.removeprefix("ARGS=") for w in words if w.startswith("ARGS=")]
            found.append(["serve", *shlex.split(" ".join(args))])
        elif words and words[0].rpartition("/")[2] == "twofold" and len(words) > 1:
            found.append(words[1:])
    return found


def _joined(block: str) -> str:
    return block.replace("\\\n", " ")


def _wrong_flags(text: str, flags: dict[str, set[str]]) -> list[str]:
    wrong: list[str] = []
    for command, *words in _command_lines(text):
        if command.startswith("-"):
            command, words = "", [command, *words]
        if command not in flags:
            wrong.append(f"there is no twofold {command}")
            continue
        named = [word.partition("=")[0] for word in words if word.startswith("--")]
        wrong += [f"{command} {flag}" for flag in named if flag not in flags[command]]
    known = set().union(*flags.values())
    for span in _SPAN.findall(_FENCE.sub("", text)):
        if span.startswith("--") and span.split()[0].partition("=")[0] not in known:
            wrong.append(span)
    return wrong


def _missing_paths(spans: list[str]) -> list[str]:
    """Paths and tests named in code spans that there are not."""
    missing: list[str] = []
    for span in spans:
        if match := _PATH.fullmatch(span):
            path, name = ROOT / match[1], match[2]
            found = path.exists() and (
                name is None or re.search(rf"^(?:def |class )?{name}\b", path.read_text(), re.M)
            )
        elif _MODULE.fullmatch(span):
            found = (SOURCE / span).exists() or (ROOT / span).exists()
        else:
            continue
        if not found:
            missing.append(span)
    return missing


def _broken_links(page: Path, text: str) -> list[str]:
    broken: list[str] = []
    for target in _LINK.findall(text):
        if target.startswith(("http://", "https://")):
            continue
        name, _, anchor = target.partition("#")
        path = (page.parent / name) if name else page
        if not path.exists() or (anchor and anchor not in _anchors(path)):
            broken.append(target)
    return broken


def _anchors(page: Path) -> set[str]:
    titles = re.findall(r"^#+ (.+)$", _FENCE.sub("", _text(page)), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}


def setting_rows(table: Table) -> list[str]:
    """The rows of a table of settings, as docs/reference/settings.md must have them."""
    rows: list[str] = []
    for option in options(table):
        flag = "MODEL" if option.key == "model" else f"`{option.flag}`"
        if option.is_bool:
            flag += f", `{option.flag.replace('--', '--no-', 1)}`"
        default = option.default
        if default is msgspec.NODEFAULT or default == "":
            shown = ""
        elif option.is_bool:
            shown = "yes" if default else "no"
        else:
            shown = str(default)
        rows.append(f"| {flag} | `{option.variable}` | {shown} | {option.description} |")
    return rows


# -------------------------------------------------------------------------------------- the tests


def test_the_readme_lists_every_command_and_no_other(capsys: pytest.CaptureFixture[str]) -> None:
    section = _text(ROOT / "README.md").partition("## Commands")[2].partition("\n## ")[0]
    named = re.findall(r"^\| `twofold ([a-z]+)", section, re.MULTILINE)
    assert sorted(named) == sorted(_commands(capsys))


@by_page
def test_commands_and_flags_exist(page: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert _wrong_flags(_text(page), _flags(capsys)) == []


@by_page
def test_files_and_tests_exist(page: Path) -> None:
    assert _missing_paths(_spans(page)) == []


@by_page
def test_links_resolve(page: Path) -> None:
    assert _broken_links(page, _text(page)) == []


@by_page
def test_pages_are_finished(page: Path) -> None:
    unfinished = re.compile(r"\bTODO\b|\bFIXME\b|\bTBD\b|@[A-Z]{3,}@|lorem ipsum")
    assert unfinished.findall(_text(page)) == []


def test_the_tree_is_the_package() -> None:
    section = _text(ROOT / "ARCHITECTURE.md").partition("## The tree")[2]
    tree = _FENCE.findall(section)[0]
    named = {line.split()[0].rstrip("/") for line in tree.splitlines() if line}
    there = {path.name for path in SOURCE.iterdir() if path.is_dir()} - {"__pycache__"}
    assert named == there | {"types.py"}


def test_every_decision_is_in_the_index() -> None:
    index = _text(ROOT / "docs" / "adr" / "README.md")
    pages = sorted(page.name for page in (ROOT / "docs" / "adr").glob("0*.md"))
    assert sorted(_LINK.findall(index)) == pages
    for name in pages:
        headings = re.findall(r"^## (\w+)$", _text(ROOT / "docs" / "adr" / name), re.MULTILINE)
        assert headings == ["Context", "Decision", "Consequences"], name


@pytest.mark.parametrize("table", TABLES)
def test_settings_are_described_as_they_are(table: Table) -> None:
    page = _text(ROOT / "docs" / "reference" / "settings.md")
    section = page.partition(f"## [{table}]")[2].partition("\n## ")[0]
    rows = [line for line in section.splitlines() if line.startswith("| ")][1:]
    assert rows == setting_rows(table)


def test_metrics_are_listed_by_their_names() -> None:
    core = WorkerCore(
        layout=LAYOUT,
        n_blocks=4,
        max_num_seqs=1,
        max_num_batched_tokens=4,
        max_model_len=8,
        max_waiting=1,
    )
    rendered = GatewayMetrics([("w", "prefill")]).render().decode()
    rendered += WorkerMetrics(core, {"worker": "w"}).render().decode()
    names = set(re.findall(r"^# TYPE (\S+)", rendered, re.MULTILINE))
    page = _text(ROOT / "docs" / "reference" / "metrics.md")
    listed = re.findall(r"^\| `([^`]+)` \|", page, re.MULTILINE)
    assert sorted(listed) == sorted(name for name in names if not name.endswith("_created"))


@pytest.mark.parametrize(
    ("module", "title"), [("gateway_public", "public port"), ("gateway_admin", "admin port")]
)
def test_routes_of_the_gateway_are_listed(module: str, title: str) -> None:
    code = (SOURCE / "live" / f"{module}.py").read_text()
    routes = re.findall(r'^ +\("(GET|POST)", "([^"]+)"\): ', code, re.MULTILINE)
    page = _text(ROOT / "docs" / "reference" / "http.md")
    section = page.partition(f"## Gateway, {title}")[2].partition("\n## ")[0]
    listed = re.findall(r"^\| `(GET|POST) (\S+)` \|", section, re.MULTILINE)
    assert routes
    assert sorted(listed) == sorted(routes)


def test_the_checks_catch_what_is_wrong() -> None:
    flags = {"": {"--version"}, "serve": {"--once"}, "explain": set[str]()}
    for text in (
        "`twofold fly`",
        "`twofold serve --twice`",
        "```\ntwofold serve m \\\n  --twice\n```",
        "`make serve ARGS=--twice`",
        "`--twice`",
        "`.venv/bin/twofold explain --once`",
    ):
        assert len(_wrong_flags(text, flags)) == 1, text
    assert _wrong_flags("`twofold serve --once` `--version` `make test`", flags) == []
    assert _missing_paths(["core/router.py", "live/", "tests/arch/"]) == []
    for span in ("core/nowhere.py", "nowhere/", "tests/none.py", "tests/conftest.py::test_none"):
        assert _missing_paths([span]) == [span]
    page = ROOT / "README.md"
    assert _broken_links(page, "[a](docs/none.md) [b](#no-such-title) [c](#limits)") == [
        "docs/none.md",
        "#no-such-title",
    ]
