"""Thousands of requests through real processes while clients leave and processes are killed.

    python -m tests.live.soak [--requests 2000] [--pools 1P1D,2P2D] [--seed 1] [--json FILE]

Answers are compared token by token with transformers' own. After the last one: every block and
gauge at its baseline, right answers, and, once stopped, no process and no memory left behind.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from tests import tiny
from tests.device.reference import expected, prompt_of
from tests.live.client import Client
from tests.live.cluster import GAUGES, is_empty
from tests.live.stack import HOST, get, request_bytes
from twofold.config import EngineSettings, ServeSettings
from twofold.live.backoff import Backoff
from twofold.live.deployment import Deployment, plan_deployment
from twofold.live.supervisor import Supervisor
from twofold.live.tokeniser import Tokeniser
from twofold.types import NS_PER_S

FAMILY: Final = "llama"
MODEL: Final = "tiny"
B: Final = 16
N_OUTPUT: Final = 40
LENGTHS: Final = (1, B - 1, B, B + 1, 2 * B, 3 * B + 5, 100, 150)
AT_ONCE: Final = 12
ABORTED: Final = 0.2
KILL_EVERY_S: Final = (3.0, 8.0)
"""Between kills, counted from when all processes were ready again: else few would ever meet."""
BACK_WITHIN_S: Final = 60.0


class Memory:
    """The pools' anonymous memory, as the kernel shows it in processes' maps."""

    def __init__(self) -> None:
        self.inodes: set[str] = set()

    def mapped(self, pids: list[int]) -> set[str]:
        """Pools that any of `pids` has mapped; they are remembered."""
        found = {inode for pid in pids for inode in _pools_of(pid)}
        self.inodes |= found
        return found

    def left(self) -> set[str]:
        """Remembered pools that some process, whichever, still has."""
        pids = [int(name) for name in os.listdir("/proc") if name.isdigit()]
        return {inode for pid in pids for inode in _pools_of(pid)} & self.inodes


def _pools_of(pid: int) -> set[str]:
    with contextlib.suppress(OSError):
        lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
        return {line.split()[4] for line in lines if "/memfd:twofold-kv" in line}
    return set()


def _running(parent: int) -> list[str]:
    """Processes that were started for a supervisor in process `parent`."""
    found = []
    for name in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            command = Path(f"/proc/{name}/cmdline").read_bytes().split(b"\0")
            if f"--parent-pid={parent}".encode() in command:
                found.append(f"{name} {command[4:6]}")
    return found


class Soak:
    """One run over one deployment. `on_end(ended, of)` is told of progress."""

    def __init__(
        self,
        deployment: Deployment,
        supervisor: Supervisor,
        *,
        n_requests: int,
        seed: int,
        kill_every_s: tuple[float, float],
        kill_every_ends: tuple[int, int] | None,
        on_end: Callable[[int, int], None],
    ) -> None:
        self.deployment = deployment
        self.supervisor = supervisor
        self.memory = Memory()
        self.ends: Counter[str] = Counter()
        self.kills: Counter[str] = Counter()
        self.n_tries = 0
        self._n = n_requests
        self._rng = random.Random(seed)
        self._on_end = on_end
        self._kill_every_s = kill_every_s
        self._kill_every_ends = kill_every_ends
        self._gateway_kills = 0
        self._killed: dict[int, str] = {}
        tokeniser = Tokeniser(tiny.cached_model(FAMILY))
        self._want = {
            n: [tokeniser.token_text(t) for t in expected(FAMILY, n, 0, N_OUTPUT).tokens]
            for n in LENGTHS
        }

    async def run(self) -> dict[str, Any]:
        """All requests, then all checks but those that come after the stop."""
        began = time.monotonic()
        await self._canary()
        numbers = iter(range(self._n))
        clients = [asyncio.create_task(self._client(numbers)) for _ in range(AT_ONCE)]
        killer = asyncio.create_task(self._kill_now_and_then())
        try:
            await asyncio.gather(*clients)
        finally:
            killer.cancel()
            for task in clients:
                task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await killer
        took_s = time.monotonic() - began
        back_s = await self._back()
        await self._canary()
        await self._back()
        assert sum(self.ends.values()) == self._n, self.ends
        return {
            "requests": self._n,
            "ends": dict(sorted(self.ends.items())),
            "tried_again": self.n_tries - self._n,
            "kills": dict(sorted(self.kills.items())),
            "took_s": round(took_s, 1),
            "at_baseline_after_s": round(back_s, 2),
        }

    # ------------------------------------------------------------------ requests

    async def _client(self, numbers: Any) -> None:
        for _ in numbers:
            n_prompt = self._rng.choice(LENGTHS)
            n_output = self._rng.randint(1, N_OUTPUT)
            leave = self._rng.randint(0, 12) if self._rng.random() < ABORTED else None
            stream = self._rng.random() < 0.75
            salt = f"{self._rng.randrange(40)}"
            # One that was not taken in, since whoever would serve it is down, is tried again.
            end = "refused"
            while end == "refused":
                self.n_tries += 1
                end = await self._one(n_prompt, n_output, leave, stream, salt)
                if end == "refused":
                    await asyncio.sleep(0.25)
            self.ends[end] += 1
            self._on_end(sum(self.ends.values()), self._n)

    async def _one(
        self, n_prompt: int, n_output: int, leave: int | None, stream: bool, salt: str
    ) -> str:
        client = Client(self._want[n_prompt][:n_output], leave)
        kills, was_down = self._gateway_kills, self._gateway_is_down()
        data = json.dumps(
            {
                "model": MODEL,
                "prompt": prompt_of(n_prompt),
                "max_tokens": n_output,
                "temperature": 0,
                "ignore_eos": True,
                "logprobs": 0,
                "cache_salt": salt,
                "stream": stream,
            }
        ).encode()
        port = self.deployment.gateway.port
        await client.run(port, request_bytes("POST", "/v1/completions", data))
        # Only a gateway that dies leaves a client without an end, or without any answer.
        may_be_cut = was_down or self._gateway_kills > kills
        end = client.end(may_be_cut=may_be_cut)
        if not client.got and not client.left:
            assert may_be_cut, "no answer, though the gateway lives"
            return "refused"
        return "refused" if client.status in (429, 503) else end

    def _gateway_is_down(self) -> bool:
        pid = self.supervisor.pids().get("gateway")
        return pid in self._killed or "gateway" in self.supervisor.waiting_for()

    async def _canary(self) -> None:
        """Every length is answered right, one at a time."""
        for n in LENGTHS:
            end = await self._one(n, N_OUTPUT, None, True, f"canary {time.monotonic_ns()}")
            assert end == "whole", (n, end)

    # ------------------------------------------------------------------ kills

    async def _kill_now_and_then(self) -> None:
        """kill -9 of one process or two, every few seconds of all being ready."""
        while True:
            while self.supervisor.waiting_for():
                await asyncio.sleep(0.05)
            await self._between_kills()
            pids = self.supervisor.pids()
            self.memory.mapped(list(pids.values()))
            for name in self._rng.sample(sorted(pids), self._rng.choice((1, 1, 1, 2))):
                self._gateway_kills += name == "gateway"
                self.kills[name] += 1
                self._killed[pids[name]] = name
                os.kill(pids[name], signal.SIGKILL)

    async def _between_kills(self) -> None:
        if self._kill_every_ends is None:
            await asyncio.sleep(self._rng.uniform(*self._kill_every_s))
            return
        due = sum(self.ends.values()) + self._rng.randint(*self._kill_every_ends)
        while sum(self.ends.values()) < due:
            await asyncio.sleep(0.005)

    # ------------------------------------------------------------------ afterwards

    async def _back(self) -> float:
        """Wait until nothing is held anywhere; gives the seconds that took."""
        began = time.monotonic()
        fault = "not looked at"
        while fault:
            assert time.monotonic() - began < BACK_WITHIN_S, fault
            await asyncio.sleep(0.05)
            try:
                fault = await self._held()
            except (OSError, ValueError, IndexError) as error:
                fault = f"does not answer: {error}"
        return time.monotonic() - began

    async def _held(self) -> str:
        """What is not at its baseline, or nothing."""
        if self.supervisor.waiting_for():
            return f"not ready: {self.supervisor.waiting_for()}"
        if (await get(self.deployment.gateway.port, "/ready")).status != 200:
            return "the gateway is not ready"
        admin = self.deployment.gateway.admin_port
        account = (await get(admin, "/admin/conservation")).json
        if not account["holds"] or account["requests"]["in_flight"]:
            return f"gateway: {account['requests']}"
        pages = {"gateway": admin} | {w.name: w.port for w in self.deployment.workers}
        for name, port in pages.items():
            for line in (await get(port, "/metrics")).body.decode().splitlines():
                gauge = line.startswith((*GAUGES, "twofold_requests_in_flight"))
                if gauge and float(line.rsplit(" ", 1)[1]):
                    return f"{name}: {line}"
        for name, state in account["workers"].items():
            if not is_empty(state):
                return f"{name}: {state}"
        pools = self.memory.mapped(list(self.supervisor.pids().values()))
        if len(pools) != len(self.deployment.workers):
            return f"{len(pools)} pools are mapped by {len(self.deployment.workers)} workers"
        return ""


async def soak(
    pools: str,
    n_requests: int,
    seed: int,
    *,
    handoff: str = "pull",
    transport: str = "shm",
    kill_every_s: tuple[float, float] = KILL_EVERY_S,
    kill_every_ends: tuple[int, int] | None = None,
    on_end: Callable[[int, int], None] = lambda ended, of: None,
) -> dict[str, Any]:
    """Run one soak over `pools`, such as "1P1D", and check what must hold. Raises
    AssertionError.

    With `kill_every_ends` kills come after so many requests more, however fast the machine is.
    """
    engine: Any = {"handoff": handoff, "transport": transport, "served_model_name": MODEL}
    deployment = plan_deployment(
        ServeSettings(
            engine=EngineSettings(
                model=str(tiny.cached_model(FAMILY)),
                kv_blocks=96,
                block_size=B,
                lease_s=3.0,
                layerwise_min_tokens=B,
                max_num_batched_tokens=64,
                **engine,
            ),
            port=0,
            prefill=int(pools[0]),
            decode=int(pools[2]),
        )
    )
    log: list[str] = []
    supervisor = Supervisor(
        deployment.children(),
        ready_at=(HOST, deployment.gateway.port),
        emit=lambda line: log.append(line) if len(log) < 20_000 else None,
        # Killed this often, a process would wait longer and longer before it starts again.
        backoff=Backoff(most_ns=NS_PER_S // 4, first_ns=NS_PER_S // 4),
    )
    await supervisor.start()
    run = Soak(
        deployment,
        supervisor,
        n_requests=n_requests,
        seed=seed,
        kill_every_s=kill_every_s,
        kill_every_ends=kill_every_ends,
        on_end=on_end,
    )
    try:
        await supervisor.wait_ready(120)
        found = await run.run()
    except BaseException:
        print("\n".join(log[-30:]), file=sys.stderr)
        raise
    finally:
        await supervisor.stop()
    assert not _running(os.getpid()), _running(os.getpid())
    assert run.memory.inodes, "no pool was ever seen"
    assert not run.memory.left(), run.memory.left()
    return {
        "pools": pools,
        "handoff": handoff,
        "transport": transport,
        "seed": seed,
        **found,
        "pools_of_all_lives": len(run.memory.inodes),
        "processes_left": 0,
        "memory_left": 0,
    }


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--pools", default="1P1D,2P2D")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--handoff", default="pull")
    parser.add_argument("--transport", default="shm")
    parser.add_argument("--note", default="", help="what else ran on this machine")
    parser.add_argument("--json", type=Path, help="file for the figures")
    args = parser.parse_args()
    runs = []
    began = time.monotonic()
    for pools in args.pools.split(","):

        def on_end(ended: int, of: int, pools: str = pools) -> None:
            text = f"{pools} {ended}/{of}, {time.monotonic() - began:.0f} s"
            if sys.stderr.isatty():
                bar = "#" * (30 * ended // of)
                print(f"\r[{bar:<30}] {text}", end="", file=sys.stderr, flush=True)
            elif ended % max(1, of // 10) == 0:
                print(text, file=sys.stderr, flush=True)

        load = os.getloadavg()[0]
        run = soak(
            pools,
            args.requests,
            args.seed,
            handoff=args.handoff,
            transport=args.transport,
            on_end=on_end,
        )
        runs.append(asyncio.run(run) | {"load_before": round(load, 1)})
        print(json.dumps(runs[-1]))
    conditions: dict[str, Any] = {
        "model": f"tiny {FAMILY}",
        "cores": os.cpu_count(),
        "at_once": AT_ONCE,
    }
    conditions |= {"kill_every_s": KILL_EVERY_S, "share_aborted": ABORTED, "note": args.note}
    if args.json:
        args.json.write_text(json.dumps({"conditions": conditions, "runs": runs}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
