"""Both sides of handoffs without a gateway: a replaying prefill process and a real decode process.

The caller plays the gateway: it sends the two legs as `live/gateway_legs.py` makes them.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import random
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import msgspec
from tests.live.stack import Answer, post

from benchmarks.handoff.conditions import BLOCK_SIZE, HOST, Config
from benchmarks.handoff.host import MODEL, Order
from benchmarks.handoff.live import random_ids
from twofold.live.gateway_legs import prefill_body


class Host:
    """A process of `host.py`."""

    def __init__(self, order: Order) -> None:
        self._child = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.handoff.host"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        self._write(msgspec.json.encode(order))

    def _write(self, line: bytes) -> None:
        assert self._child.stdin is not None
        self._child.stdin.write(line + b"\n")
        self._child.stdin.flush()

    def _read(self) -> Any:
        assert self._child.stdout is not None
        line = self._child.stdout.readline()
        if not line:
            raise RuntimeError(f"a host of workers ended with code {self._child.wait()}")
        return json.loads(line)

    def identities(self) -> list[dict[str, Any]]:
        """Who its workers are; waits until they serve."""
        return list(self._read())

    def cpu_ns(self) -> tuple[int, int]:
        """CPU time so far: of the event loop's thread, and of all threads."""
        self._write(b"")
        loop_ns, process_ns = self._read()
        return loop_ns, process_ns

    def stop(self) -> None:
        """End it."""
        assert self._child.stdin is not None
        assert self._child.stdout is not None
        self._child.stdin.close()
        try:
            self._child.wait(20)
        except subprocess.TimeoutExpired:
            self._child.kill()
            self._child.wait()
        self._child.stdout.close()


class Pairs:
    """A prefill and a decode worker for each of `configs`."""

    def __init__(self, model: Path, configs: list[Config], *, kv_blocks: int) -> None:
        orders = [
            Order(
                model=str(model),
                role=role,
                configs=[(config.handoff, config.transport) for config in configs],
                kv_blocks=kv_blocks,
                replay=role == "prefill",
            )
            for role in ("prefill", "decode")
        ]
        self._hosts = [Host(order) for order in orders]
        prefill, decode = (host.identities() for host in self._hosts)
        self._prefill = dict(zip(configs, prefill, strict=True))
        self._decode = dict(zip(configs, decode, strict=True))
        self._transfers = itertools.count(1)
        self.configs = configs
        self.rng = random.Random(3)

    def decode_cpu_ns(self) -> tuple[int, int]:
        """CPU time of the decode process: its event loop's thread, and all threads."""
        return self._hosts[1].cpu_ns()

    def decode_port(self, config: Config) -> int:
        """HTTP port of a decode worker."""
        return int(self._decode[config]["http_port"])

    def stop(self) -> None:
        """End both processes."""
        for host in self._hosts:
            host.stop()

    def body(self, prompt: list[int], max_tokens: int = 1, **more: Any) -> dict[str, Any]:
        """A completion of exactly `max_tokens`, greedy."""
        return {
            "model": MODEL,
            "prompt": prompt,
            "max_tokens": max_tokens,
            "temperature": 0,
            "ignore_eos": True,
            **more,
        }

    async def local(self, config: Config, prompt: list[int], *, cached: bool = False) -> None:
        """Ask the decode worker alone for one token. Raises RuntimeError where its prefix cache
        should have the prompt and has not.
        """
        answer = _checked(await self._post(self._decode[config], self.body(prompt)))
        found = answer.json["usage"]["prompt_tokens_details"]["cached_tokens"]
        if cached and found < (len(prompt) - 1) // BLOCK_SIZE * BLOCK_SIZE:
            raise RuntimeError(f"{found} of {len(prompt)} tokens were in decode's cache")

    async def handoff(self, config: Config, n_tokens: int) -> None:
        """One prompt that nobody has read, handed over; decode writes one token."""
        prompt = random_ids(self.rng, n_tokens)
        body, prefill, decode = self.body(prompt), self._prefill[config], self._decode[config]
        if config.handoff == "pull":
            answer = await self._post(prefill, prefill_body(body, 0))
            params = _checked(answer).json["kv_transfer_params"]
            _moved(await self._post(decode, body | {"kv_transfer_params": params}))
            return
        transfer = next(self._transfers)
        params = {
            "do_remote_prefill": True,
            "remote_engine_id": prefill["engine_id"],
            "remote_host": prefill["handoff_host"],
            "remote_port": prefill["handoff_port"],
            "transfer_id": transfer,
        }
        answers = await asyncio.gather(
            self._post(prefill, prefill_body(body, transfer)),
            self._post(decode, body | {"kv_transfer_params": params}),
        )
        _checked(answers[0])
        _moved(answers[1])

    @staticmethod
    async def _post(worker: dict[str, Any], body: Any) -> Answer:
        data = body if isinstance(body, bytes) else msgspec.json.encode(body)
        return await post(worker["http_port"], "/v1/completions", data)


def _checked(answer: Answer) -> Answer:
    if answer.status != 200:
        raise RuntimeError(f"{answer.status} {answer.body[:200]!r}")
    return answer


def _moved(answer: Answer) -> None:
    """Raise RuntimeError unless KV was moved: a case must measure what it says."""
    if int(_checked(answer).headers["x-twofold-transferred"]) == 0:
        raise RuntimeError("nothing was handed over")


def tokens_of(line: bytes) -> int:
    """How many tokens a line of a stream with logprobs is of."""
    if not line.startswith(b"data: {"):
        return 0
    choices = json.loads(line.removeprefix(b"data: "))["choices"]
    return sum(len(choice["logprobs"]["tokens"]) for choice in choices)


class Probe:
    """`n` streams that decode together on one worker; when tokens of one of them came is kept.

    Events are no tokens: a model of random weights writes many that make no whole character, and
    their text waits. So logprobs are asked for, and tokens counted by them.
    """

    def __init__(self, pairs: Pairs, config: Config, n: int, prompt: int, output: int) -> None:
        self.times_ns: list[int] = []
        self._pairs, self._config = pairs, config
        self._n, self._prompt, self._output = n, prompt, output
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        """Start the streams and wait until all of them decode."""
        started = [asyncio.Event() for _ in range(self._n)]
        for i, event in enumerate(started):
            self._tasks.append(asyncio.create_task(self._stream(i, event)))
        for event in started:
            await asyncio.wait_for(event.wait(), 60)

    async def stop(self) -> None:
        """Cut the streams, which ends their requests. Raises what one of them ended with."""
        for task in self._tasks:
            if task.done():
                raise RuntimeError("a probe stream ended before its time")
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _stream(self, number: int, started: asyncio.Event) -> None:
        pairs, config = self._pairs, self._config
        prompt = random_ids(pairs.rng, self._prompt)
        body = pairs.body(prompt, self._output, stream=True, logprobs=0)
        data = json.dumps(body).encode()
        head = f"POST /v1/completions HTTP/1.0\r\nhost: {HOST}\r\ncontent-length: {len(data)}\r\n"
        reader, writer = await asyncio.open_connection(HOST, pairs.decode_port(config))
        try:
            writer.write(head.encode() + b"\r\n" + data)
            while line := await reader.readline():
                now_ns = time.monotonic_ns()
                if number > 0 and started.is_set():
                    continue  # only read, so that the stream is not held up
                n_tokens = tokens_of(line)
                if n_tokens:
                    started.set()
                if number == 0:
                    self.times_ns += [now_ns] * n_tokens
        finally:
            writer.close()

    async def has(self, n: int) -> None:
        """Until `n` tokens have come. Raises RuntimeError when a stream ends before."""
        while len(self.times_ns) <= n:
            if any(task.done() for task in self._tasks):
                raise RuntimeError("a probe stream ended before its time")
            await asyncio.sleep(0.005)

    def step_ms(self, first: int, last: int) -> float:
        """Mean time between tokens, from number `first` to number `last`."""
        return mean_step_ms(self.times_ns, first, last)


def mean_step_ms(times_ns: list[int], first: int, last: int) -> float:
    """Time from token `first` to token `last` over the steps between, in milliseconds."""
    return (times_ns[last] - times_ns[first]) / (last - first) / 1e6
