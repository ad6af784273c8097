"""The command line: usage, exit codes, `explain`, and `serve` over a process that stands in."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from twofold.cli import gateway, serve, serving, worker
from twofold.cli.command import Parser, sources
from twofold.cli.console import Status
from twofold.cli.ledger_view import ledger_of_answer
from twofold.cli.main import main
from twofold.cli.serving import Wish
from twofold.config import (
    EngineSettings,
    GatewayLimits,
    ServeSettings,
    as_flags,
    read_gateway,
    read_worker,
)
from twofold.live.deployment import SHM_VARIABLES, Deployment, plan_deployment
from twofold.live.ports import free_ports, is_free
from twofold.live.supervisor import Child
from twofold.metrics.ledger import PHASES
from twofold.policy.split import SPLIT_CHOICES

DEADLINE_S = 20.0
FAKE = Path(__file__).with_name("fake_gateway.py")
ENGINE = EngineSettings(model="m")


def run_command(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of a command run in this process."""
    try:
        code = main(words)
    except SystemExit as ended:
        code = int(ended.code or 0)
    captured = capsys.readouterr()
    return code, captured.out, captured.err


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (
            "",
            "twofold: name a command: serve, worker, gateway, size, replay, plan, explain; "
            "see twofold --help",
        ),
        ("serve --prot 3", "twofold serve: --prot: unknown argument; did you mean --port?"),
        ("serve --port", "twofold serve: --port: expected one argument"),
        (
            "serve --port 99999",
            "twofold serve: --port 99999: must be a whole number from 0 to 65535",
        ),
        (
            "serve nodir",
            "twofold serve: MODEL nodir: no such directory; builtin is always there",
        ),
        ("serve --config x.toml", "twofold serve: --config x.toml: no such file or directory"),
        (
            "worker m --name a --role b",
            "twofold worker: --role b: must be one of decode, mixed, prefill",
        ),
        (
            "explain foo bar",
            "twofold explain: URL foo: must be like http://127.0.0.1:8001",
        ),
        (
            "explain http://x:99999 bar",
            "twofold explain: URL http://x:99999: must be like http://127.0.0.1:8001",
        ),
    ],
)
def test_bad_usage_is_one_line_and_exit_code_2(
    capsys: pytest.CaptureFixture[str], words: str, line: str
) -> None:
    assert run_command(capsys, *words.split()) == (2, "", line + "\n")


def test_a_directory_without_a_model_is_refused(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    code, _, err = run_command(capsys, "serve", str(tmp_path))
    assert code == 2
    assert err.endswith("holds no config.json, so it is not a model\n")


@pytest.mark.parametrize(
    "command", ["serve", "worker", "gateway", "size", "replay", "plan", "explain"]
)
def test_help_ends_with_an_example(capsys: pytest.CaptureFixture[str], command: str) -> None:
    code, out, _ = run_command(capsys, command, "--help")
    assert code == 0
    assert f"example: twofold {command} " in out
    assert out.rstrip().rpartition("\n\n")[2].startswith("example: ")


def test_help_loads_nothing_heavy() -> None:
    script = (
        "import sys\nfrom twofold.cli.main import main\n"
        "try: main(['serve', '--help'])\nexcept SystemExit: pass\n"
        "heavy = {'torch', 'transformers', 'numpy', 'uvloop', 'asyncio', 'rich'}\n"
        "sys.exit(' '.join(sorted(heavy & set(sys.modules))) or 0)\n"
    )
    command = [sys.executable, "-c", script]
    ended = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert (ended.returncode, ended.stderr) == (0, "")


def test_an_interrupted_command_exits_with_130(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(serve, "read_serve", interrupted)
    assert run_command(capsys, "serve") == (130, "", "")


def parse(command: Any, words: list[str]) -> argparse.Namespace:
    parser = Parser()
    command.add_arguments(parser)
    return parser.parse_args(words)


def test_the_command_lines_of_children_read_back_as_their_settings() -> None:
    plan = plan_deployment(ServeSettings(engine=ENGINE, prefill=2, decode=1, mixed=1))
    for settings in plan.workers:
        args = parse(worker, as_flags(settings))
        assert read_worker(sources(args, worker._OPTIONS)) == settings
    args = parse(gateway, as_flags(plan.gateway))
    assert read_gateway(sources(args, gateway._OPTIONS)) == plan.gateway


def test_a_deployment_gives_every_process_ports_of_its_own() -> None:
    plan = plan_deployment(ServeSettings(engine=ENGINE, prefill=2, decode=2, port=0))
    ports = [port for w in plan.workers for port in (w.port, w.handoff_port)]
    ports += [plan.gateway.port, plan.gateway.admin_port]
    assert len(set(ports)) == 10
    assert [w.name for w in plan.workers] == ["prefill-0", "prefill-1", "decode-0", "decode-1"]
    assert [(a.name, a.port) for a in plan.gateway.workers] == [
        (w.name, w.port) for w in plan.workers
    ]
    stages = {child.name: child.stage for child in plan.children()}
    assert stages["gateway"] > max(stage for name, stage in stages.items() if name != "gateway")


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_workers_that_share_memory_copy_past_the_caches(transport: str) -> None:
    engine = msgspec.structs.replace(ENGINE, transport=transport)
    children = plan_deployment(ServeSettings(engine=engine, prefill=1, decode=1)).children()
    variables = {child.name: child.variables for child in children}
    assert variables.pop("gateway") == ()
    assert set(variables.values()) == {SHM_VARIABLES if transport == "shm" else ()}


def test_ports_to_avoid_are_not_given_out() -> None:
    [first] = free_ports(1)
    assert first not in free_ports(3, avoid=[first])


def test_a_taken_port_moves_unless_it_was_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        settings = ServeSettings(engine=ENGINE, port=port)
        moved, note = serve._with_free_port(settings, is_explicit=False)
        assert moved.port > port
        assert is_free("127.0.0.1", moved.port)
        assert note == f"port {port} is taken, so this serves on port {moved.port}"
        code, _, err = run_command(capsys, "serve", "--port", str(port))
        assert code == 2
        assert err == (
            f"twofold serve: --port {port}: is taken; name another, or 0 for any free one\n"
        )


def test_a_host_that_is_not_this_machine_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = run_command(capsys, "serve", "--host", "192.0.2.1")
    assert code == 2
    assert err.startswith("twofold serve: --host 192.0.2.1: cannot listen there: ")


def test_what_the_client_waited_on_top_is_unattributed() -> None:
    headers = {
        "server-timing": "queue;dur=1, prefill;dur=2, unattributed;dur=0.5, ttft;dur=3.5",
        "x-twofold-transferred": "64",
    }
    ledger = ledger_of_answer(headers, ttft_ms=5.0, e2e_ms=9.0)
    assert ledger.phases_ms["unattributed"] == 2.0
    assert sum(ledger.phases_ms.values()) == ledger.ttft_ms == 5.0
    assert (set(ledger.phases_ms), ledger.transferred_bytes) == (set(PHASES), 64)


@pytest.fixture
def fake_port() -> Iterator[int]:
    [port] = free_ports(1)
    command = [sys.executable, str(FAKE), str(port), "split"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        process.stdout.readline()
        yield port
        process.terminate()


def test_explain_shows_phases_bytes_workers_and_why(
    capsys: pytest.CaptureFixture[str], fake_port: int, tmp_path: Path
) -> None:
    target = tmp_path / "ledger.json"
    url = f"http://127.0.0.1:{fake_port}/"
    code, out, err = run_command(capsys, "explain", url, "req/1", "--json", str(target))
    assert (code, err) == (0, "")
    assert re.search(r"^prefill +1\.50 +50\.0%$", out, re.MULTILINE)
    assert re.search(r"^sum +3\.00 +100\.0%$", out, re.MULTILINE)
    assert "transferred 4096 KV bytes (0.00 MiB), prefill-0 -> decode-0" in out
    assert "least loaded" in out
    assert max(len(line) for line in out.splitlines()) <= 100
    assert json.loads(target.read_text())["phases_ms"]["transfer"] == 1.0
    code, out, _ = run_command(capsys, "explain", url, "req/1", "--json", "-")
    assert (code, json.loads(out)["ttft_ms"]) == (0, 3.0)


@pytest.mark.parametrize(
    ("request_id", "reason"),
    [
        ("nobody", "has no ledger of nobody: the request has not ended yet"),
        ("odd", "something else than a ledger"),
    ],
)
def test_explain_fails_in_one_line(
    capsys: pytest.CaptureFixture[str], fake_port: int, request_id: str, reason: str
) -> None:
    url = f"http://127.0.0.1:{fake_port}"
    code, out, err = run_command(capsys, "explain", url, request_id)
    assert (code, out) == (1, "")
    assert reason in err
    assert err.count("\n") == 1


def test_explain_of_a_gateway_that_is_not_there(capsys: pytest.CaptureFixture[str]) -> None:
    [port] = free_ports(1)
    code, _, err = run_command(capsys, "explain", f"http://127.0.0.1:{port}", "x")
    assert code == 1
    assert f"http://127.0.0.1:{port}: no answer" in err


def serve_fake(
    monkeypatch: pytest.MonkeyPatch,
    how: str,
    wish: Wish | None,
    split_policy: str = "always",
) -> int:
    """`twofold serve` of one process that answers as a gateway, from start to stop."""
    [port] = free_ports(1)
    limits = GatewayLimits(split_policy=split_policy)
    settings = ServeSettings(engine=ENGINE, port=port, limits=limits)
    command = (sys.executable, str(FAKE), str(port), how)
    fake = [Child(name="gateway", command=command)]
    monkeypatch.setattr(Deployment, "children", lambda self: fake)
    with kept_signal_handlers():
        return serving.serve(settings, wish)


@contextlib.contextmanager
def kept_signal_handlers() -> Iterator[None]:
    kept = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in kept.items():
            signal.signal(number, handler)


def test_once_streams_the_answer_and_shows_where_its_time_went(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    target = tmp_path / "answer.json"
    wish = Wish(question="Where?", once=True, json=str(target))
    assert serve_fake(monkeypatch, "split", wish) == 0
    out, err = capsys.readouterr()
    assert "> Where?\n\nParis, of course.\n" in out
    assert re.search(r"^transferred 4096 KV bytes", out, re.MULTILINE)
    assert re.search(r"curl .*/v1/chat/completions", out)
    assert "gateway    info    ready on port" in err
    ledger = json.loads(target.read_text())["ledger"]
    assert sum(ledger["phases_ms"].values()) == pytest.approx(ledger["ttft_ms"])
    # The fake sends its first text 10 ms after its headers, which say 3.5 ms.
    assert ledger["ttft_ms"] > 10.0
    assert ledger["phases_ms"]["unattributed"] > 6.0


@pytest.mark.parametrize(
    ("how", "reason"),
    [
        ("local", "no KV bytes were transferred"),
        ("broken", "the question failed: "),
        ("refusing", "status 429: too many requests"),
        ("failing", "the question failed: decode-0 is gone"),
    ],
)
def test_once_fails_when_the_answer_does_or_nothing_was_transferred(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, how: str, reason: str
) -> None:
    assert serve_fake(monkeypatch, how, Wish(question="Where?", once=True, json="")) == 1
    assert reason in capsys.readouterr().err


@pytest.mark.parametrize("policy", [name for name in SPLIT_CHOICES if name != "always"])
def test_a_policy_that_may_keep_a_prompt_local_needs_no_transfer(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, policy: str
) -> None:
    wish = Wish(question="Where?", once=True, json="")
    assert serve_fake(monkeypatch, "local", wish, policy) == 0
    assert "no KV bytes" not in capsys.readouterr().err


def test_json_to_stdout_is_alone_there(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert serve_fake(monkeypatch, "split", Wish(question="Where?", once=True, json="-")) == 0
    out, err = capsys.readouterr()
    assert json.loads(out)["text"] == "Paris, of course."
    assert "Paris, of course." in err


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 0)])
def test_serving_goes_on_until_told_to_stop(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    number: signal.Signals,
    code: int,
) -> None:
    def tell() -> None:
        deadline = time.monotonic() + DEADLINE_S
        while "serving on http" not in "".join(said) and time.monotonic() < deadline:
            time.sleep(0.01)
        os.kill(os.getpid(), number)

    said: list[str] = []
    line = Status.line

    def overheard(status: Status, text: str) -> None:
        said.append(text)
        line(status, text)

    monkeypatch.setattr(Status, "line", overheard)
    thread = threading.Thread(target=tell)
    thread.start()
    assert serve_fake(monkeypatch, "split", None) == code
    thread.join()
    assert "supervisor info    stopping" in capsys.readouterr().err


def test_a_deployment_that_cannot_start_shows_the_childs_last_lines(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    script = "print('no such device: cuda')\nraise SystemExit(2)\n"
    doomed = [Child(name="decode-0", command=(sys.executable, "-c", script))]
    monkeypatch.setattr(Deployment, "children", lambda self: doomed)
    [port] = free_ports(1)
    with kept_signal_handlers():
        assert serving.serve(ServeSettings(engine=ENGINE, port=port), None) == 2
    err = capsys.readouterr().err
    assert "decode-0 could not be started: exit code 2" in err
    assert "\n  no such device: cuda\n" in err
