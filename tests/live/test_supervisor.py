"""The supervisor, over tiny processes that stand in for workers and gateway."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
from msgspec import structs

from twofold.live.backoff import Backoff
from twofold.live.ports import free_ports
from twofold.live.supervisor import Child, GivenUpError, Supervisor
from twofold.types import NS_PER_MS, NS_PER_S

DEADLINE_S = 20.0
READY = "print('ready', flush=True)\n"
SERVE = "import signal\n" + READY + "signal.pause()\n"


def child(name: str, script: str, *arguments: str, stage: int = 0) -> Child:
    command = (sys.executable, "-I", "-S", "-c", script, *arguments)
    return Child(name=name, command=command, stage=stage)


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline, "the condition did not come true in time"
        time.sleep(0.01)


async def aio_until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(DEADLINE_S):
        while not condition():
            await asyncio.sleep(0.01)


def supervised(
    children: list[Child],
    test: Callable[[Supervisor], Awaitable[None]],
    *,
    backoff: Backoff | None = None,
    grace_s: float = DEADLINE_S,
    ready_at: tuple[str, int] | None = None,
) -> list[str]:
    """Run `test` on a started supervisor and stop it; the lines that it wrote."""
    lines: list[str] = []

    async def run() -> None:
        supervisor = Supervisor(
            children, emit=lines.append, backoff=backoff, grace_s=grace_s, ready_at=ready_at
        )
        await supervisor.start()
        try:
            await test(supervisor)
        finally:
            await supervisor.stop()
        assert supervisor.pids() == {}

    asyncio.run(run())
    return lines


def is_alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state != "Z"


def test_backoff_starts_at_zero_doubles_and_is_capped() -> None:
    backoff = Backoff()
    waits_ms = [backoff.wait_ns(failures) // NS_PER_MS for failures in range(1, 9)]
    assert waits_ms == [0, 500, 1000, 2000, 4000, 8000, 10_000, 10_000]
    assert backoff.wait_ns(10_000) == 10 * NS_PER_S


def test_backoff_begins_anew_after_a_healthy_while() -> None:
    backoff = Backoff()
    assert backoff.count(5, 30 * NS_PER_S - 1) == 6
    assert backoff.count(5, 30 * NS_PER_S) == 1


def test_a_killed_process_is_back_at_once_and_the_others_are_left_alone() -> None:
    async def test(supervisor: Supervisor) -> None:
        await supervisor.wait_ready(DEADLINE_S)
        before = supervisor.pids()
        os.kill(before["decode-0"], signal.SIGKILL)
        await aio_until(lambda: supervisor.pids().get("decode-0", 0) not in (0, before["decode-0"]))
        await supervisor.wait_ready(DEADLINE_S)
        assert supervisor.pids()["prefill-0"] == before["prefill-0"]

    lines = supervised([child("prefill-0", SERVE), child("decode-0", SERVE)], test)
    assert [line for line in lines if "decode-0 ended with killed by SIGKILL" in line]


def test_variables_are_given_unless_they_are_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TWOFOLD_TEST_SET", "by the user")
    monkeypatch.delenv("TWOFOLD_TEST_UNSET", raising=False)
    script = (
        "import os, signal\n"
        "print(os.environ['TWOFOLD_TEST_SET'], os.environ['TWOFOLD_TEST_UNSET'], flush=True)\n"
        + READY
        + "signal.pause()\n"
    )
    names = ("TWOFOLD_TEST_SET", "TWOFOLD_TEST_UNSET")
    made = structs.replace(child("w", script), variables=tuple((name, "given") for name in names))

    async def test(supervisor: Supervisor) -> None:
        await supervisor.wait_ready(DEADLINE_S)

    lines = supervised([made], test)
    assert [line for line in lines if "by the user given" in line]


def test_a_new_life_is_not_ready_because_the_last_one_was(tmp_path: Path) -> None:
    script = (
        "import signal, sys\nfile = open(sys.argv[1], 'a')\n"
        "if file.tell() == 0: print('ready', flush=True)\n"
        "file.write('x')\nfile.close()\nsignal.pause()\n"
    )
    marker = tmp_path / "lives"

    async def test(supervisor: Supervisor) -> None:
        await supervisor.wait_ready(DEADLINE_S)
        assert supervisor.waiting_for() == []
        os.kill(supervisor.pids()["w"], signal.SIGKILL)
        await aio_until(lambda: len(marker.read_text()) == 2)
        assert supervisor.waiting_for() == ["w"]

    supervised([child("w", script, str(marker))], test)


def test_a_process_that_was_ready_once_is_tried_for_ever_with_longer_waits(tmp_path: Path) -> None:
    marker = tmp_path / "lives"
    script = (
        "import sys\nfile = open(sys.argv[1], 'a')\nfirst = file.tell() == 0\n"
        "file.write('x')\nfile.close()\nif first: print('ready', flush=True)\nsys.exit(1)\n"
    )
    backoff = Backoff(first_ns=5 * NS_PER_MS, most_ns=20 * NS_PER_MS, give_up_after=2)

    async def test(supervisor: Supervisor) -> None:
        await aio_until(lambda: marker.exists() and len(marker.read_text()) >= 6)

    lines = supervised([child("w", script, str(marker))], test, backoff=backoff)
    when = [line.partition("starting again ")[2] for line in lines if "starting again" in line]
    assert when[:5] == ["now", "in 0.005 s", "in 0.01 s", "in 0.02 s", "in 0.02 s"]


def test_a_process_that_never_starts_is_given_up_with_its_last_words() -> None:
    script = "import sys\nprint('cannot open the pod bay', file=sys.stderr)\nsys.exit(3)\n"
    backoff = Backoff(first_ns=NS_PER_MS, give_up_after=3)

    async def test(supervisor: Supervisor) -> None:
        with pytest.raises(GivenUpError, match="bad could not be started: exit code 3") as caught:
            await supervisor.wait_ready(DEADLINE_S)
        assert caught.value.last_lines == ("cannot open the pod bay",) * 3
        assert (await supervisor.wait_given_up()) is caught.value
        assert list(supervisor.pids()) == ["good"]

    supervised([child("good", SERVE), child("bad", script)], test, backoff=backoff)


def test_bad_settings_are_not_tried_twice() -> None:
    async def test(supervisor: Supervisor) -> None:
        with pytest.raises(GivenUpError) as caught:
            await supervisor.wait_ready(DEADLINE_S)
        assert caught.value.last_lines == ("no such model",)

    supervised([child("w", "print('no such model')\nraise SystemExit(2)\n")], test)


def test_a_command_that_is_not_there_is_given_up() -> None:
    async def test(supervisor: Supervisor) -> None:
        with pytest.raises(GivenUpError, match="exit code 127"):
            await supervisor.wait_ready(DEADLINE_S)

    backoff = Backoff(first_ns=NS_PER_MS)
    supervised([Child(name="w", command=("./no-such-program",))], test, backoff=backoff)


def test_ready_waits_for_the_gateway_to_say_so(tmp_path: Path) -> None:
    [port] = free_ports(1)
    asked = tmp_path / "asked"
    script = (
        "import sys, http.server\n"
        "class H(http.server.BaseHTTPRequestHandler):\n"
        "    def do_GET(self):\n"
        "        with open(sys.argv[2], 'a') as f: f.write(self.path + ' ')\n"
        "        n = open(sys.argv[2]).read().count('/ready')\n"
        "        self.send_response(200 if n >= 3 else 503); self.end_headers()\n"
        "    def log_message(self, *a): pass\n"
        "server = http.server.HTTPServer(('127.0.0.1', int(sys.argv[1])), H)\n"
        "print('ready', flush=True)\nserver.serve_forever()\n"
    )

    async def test(supervisor: Supervisor) -> None:
        await supervisor.wait_ready(DEADLINE_S)
        assert asked.read_text().split() == ["/ready"] * 3

    gateway = child("gateway", script, str(port), str(asked))
    supervised([gateway], test, ready_at=("127.0.0.1", port))


def test_not_being_ready_in_time_names_who_is_late() -> None:
    async def test(supervisor: Supervisor) -> None:
        with pytest.raises(TimeoutError, match=r"not ready after 0\.2 s: late"):
            await supervisor.wait_ready(0.2)

    supervised([child("late", "import signal\nsignal.pause()\n")], test)


def test_stop_drains_the_gateway_before_the_workers_hear_of_it(tmp_path: Path) -> None:
    log = tmp_path / "log"
    script = (
        "import signal, sys, time\n"
        "def note(text):\n"
        "    with open(sys.argv[1], 'a') as f: f.write(sys.argv[2] + text + '\\n')\n"
        "def term(*_):\n"
        "    note(' told'); time.sleep(float(sys.argv[3])); note(' gone'); sys.exit(0)\n"
        "signal.signal(signal.SIGTERM, term)\n" + READY + "while True: signal.pause()\n"
    )
    children = [
        child("worker", script, str(log), "worker", "0"),
        child("gateway", script, str(log), "gateway", "0.2", stage=1),
    ]

    async def test(supervisor: Supervisor) -> None:
        await supervisor.wait_ready(DEADLINE_S)

    supervised(children, test)
    assert log.read_text().splitlines() == [
        "gateway told",
        "gateway gone",
        "worker told",
        "worker gone",
    ]


def test_a_process_that_will_not_stop_is_killed_after_the_grace() -> None:
    script = (
        "import signal\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        + READY
        + "while True: signal.pause()\n"
    )
    pids: dict[str, int] = {}

    async def test(supervisor: Supervisor) -> None:
        await supervisor.wait_ready(DEADLINE_S)
        pids.update(supervisor.pids())

    started = time.monotonic()
    supervised([child("deaf", script)], test, grace_s=0.2)
    assert 0.2 <= time.monotonic() - started < DEADLINE_S
    assert not is_alive(pids["deaf"])


def test_stop_does_not_wait_for_a_restart_that_is_due_later() -> None:
    hour_ns = 3600 * NS_PER_S
    backoff = Backoff(first_ns=hour_ns, most_ns=hour_ns, give_up_after=9)
    lines: list[str] = []

    async def run() -> None:
        doomed = child("w", "raise SystemExit(1)")
        supervisor = Supervisor([doomed], emit=lines.append, backoff=backoff)
        await supervisor.start()
        await aio_until(lambda: any("in 3600 s" in line for line in lines))
        async with asyncio.timeout(DEADLINE_S):
            await supervisor.stop()

    asyncio.run(run())


def test_output_of_children_is_put_into_the_one_format() -> None:
    script = (
        "import sys\nprint('12:00:00 w          info    hello')\nprint('a bare line')\n"
        "sys.stdout.write('x' * 40_000 + '\\n')\n" + SERVE
    )

    async def test(supervisor: Supervisor) -> None:
        await supervisor.wait_ready(DEADLINE_S)

    lines = supervised([child("w", script)], test)
    assert lines[0] == "12:00:00 w          info    hello"
    assert lines[1][8:] == " w          info    a bare line"
    long_parts = [line.rpartition(" ")[2] for line in lines if "xxx" in line]
    assert "".join(long_parts) == "x" * 40_000
    assert max(map(len, lines)) < 40_000


_SUPERVISE = """
import asyncio, sys
from twofold.live.supervisor import Child, Supervisor

SCRIPT = '''
import signal, sys
signal.signal(signal.SIGTERM, signal.SIG_IGN)
from twofold.live.lifeline import die_with_parent
die_with_parent(int(sys.argv[1]))
print("ready", flush=True)
while True: signal.pause()
'''

async def main():
    import os
    command = (sys.executable, "-c", SCRIPT, str(os.getpid()))
    children = [Child(name=name, command=command) for name in ("a", "b")]
    supervisor = Supervisor(children, emit=lambda line: None)
    await supervisor.start()
    await supervisor.wait_ready(20)
    print(*supervisor.pids().values(), flush=True)
    await asyncio.sleep(3600)

asyncio.run(main())
"""


def test_kill_9_of_the_supervisor_leaves_no_child() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", _SUPERVISE], stdout=subprocess.PIPE, text=True
    ) as supervisor:
        assert supervisor.stdout is not None
        pids = [int(word) for word in supervisor.stdout.readline().split()]
        try:
            assert len(pids) == 2
            assert all(is_alive(pid) for pid in pids)
        finally:
            supervisor.kill()
    try:
        until(lambda: not any(is_alive(pid) for pid in pids))
    finally:
        for pid in pids:
            if is_alive(pid):
                os.kill(pid, signal.SIGKILL)


def test_a_child_whose_parent_has_gone_already_ends_at_once() -> None:
    script = "from twofold.live.lifeline import die_with_parent\ndie_with_parent(1 << 22)\n"
    ended = subprocess.run([sys.executable, "-c", script], timeout=DEADLINE_S, check=False)
    assert ended.returncode == 1
