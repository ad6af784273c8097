"""Failure policies at the gateway, over real sockets and scripted workers."""

from __future__ import annotations

from typing import Any

import pytest

from tests.live import fakes
from tests.live.fakes import Asked, Behaviour, FakeWorker, get, until
from tests.live.gateway_rig import BODY, Rig, with_rig
from twofold.metrics.ledger import parse_server_timing
from twofold.metrics.prometheus import RECOVERIES

PAIRS = ("prefill", "prefill", "decode", "decode")


async def counted(made: Rig) -> dict[str, int]:
    """What the metrics say of legs that failed."""
    text = (await get(made.admin.port, "/metrics")).body.decode()
    name = "twofold_recoveries_total"
    found = {
        result: int(float(line.rpartition(" ")[2]))
        for line in text.splitlines()
        for result in RECOVERIES
        if line.startswith(f'{name}{{result="{result}"}}')
    }
    assert set(found) == set(RECOVERIES), "a label is missing or new"
    return {result: n for result, n in found.items() if n}


def params(asked: Asked) -> Any:
    return asked.json.get("kv_transfer_params")


def of_role(made: Rig, role: str) -> list[FakeWorker]:
    return [worker for worker in made.workers if worker.role == role]


def break_first(made: Rig, role: str, behaviour: Behaviour) -> None:
    """The first request that reaches any worker of `role` fares so; later ones are served."""
    broken: list[Asked] = []

    def once(asked: Asked) -> Any:
        if broken:
            return (fakes.prefill if role == "prefill" else fakes.decode)(asked)
        broken.append(asked)
        return behaviour(asked)

    for worker in of_role(made, role):
        worker.behaviour = once


BROKEN = [
    ("prefill", fakes.status(500)),
    ("prefill", fakes.cut),
    ("prefill", fakes.no_params),
    ("decode", fakes.status(500)),
    ("decode", fakes.status(503)),
    ("decode", fakes.cut),
    ("decode", fakes.status(200, b"")),
]


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize(("where", "behaviour"), BROKEN)
def test_a_retry_is_invisible_but_for_its_count_and_its_time(
    where: str, behaviour: Behaviour, stream: bool
) -> None:
    async def test(made: Rig) -> None:
        break_first(made, where, behaviour)
        reply = await made.post(BODY | {"stream": stream}, "x-request-id: r\r\n")
        assert (reply.status, reply.whole) == (200, True)
        assert reply.headers["x-twofold-attempts"] == "2"
        timing = parse_server_timing(reply.headers["server-timing"])
        assert timing["recovery"] > 0
        assert abs(sum(timing.values()) - 2 * timing["ttft"]) < 10_000
        assert (timing["prefill"], timing["transfer"]) == (3_000, 2_000), "of one attempt"
        assert await counted(made) == {"retried": 1}
        found = await made.ledger("r")
        assert (found["outcome"], found["generation"]) == ("finished", 1)
        assert [line.split(" since ")[0] for line in found["recoveries"]] == ["retried"]
        assert any("retried since" in line for line in found["routed"])
        generations = [
            asked.headers["x-twofold-generation"]
            for worker in of_role(made, where)
            for asked in worker.asked
        ]
        assert sorted(generations) == ["0", "1"]
        again = next(w for w in of_role(made, where) if w.asked[-1:] and _generation(w) == "1")
        if behaviour is fakes.cut:
            assert found[f"{where}_worker"] == again.name
        if where == "decode":
            await until(lambda: bool(_released(made)))
            assert _released(made) == [{"request_id": 7, "generation": 0}]
        await made.canary()

    with_rig(test, *PAIRS, failure_policy="retry-pair")


def _generation(worker: FakeWorker) -> str:
    return worker.asked[-1].headers["x-twofold-generation"]


def _released(made: Rig) -> list[Any]:
    return [r for worker in of_role(made, "prefill") for r in worker.releases]


def test_a_retry_avoids_the_worker_that_failed() -> None:
    async def test(made: Rig) -> None:
        for worker in of_role(made, "prefill")[:1]:
            worker.behaviour = fakes.status(500)
        for _ in range(4):
            assert (await made.post()).status == 200
        assert (await counted(made))["retried"] >= 1
        assert "exhausted" not in await counted(made)
        await made.canary()

    with_rig(test, *PAIRS, failure_policy="retry-pair")


def test_retries_end_and_say_so() -> None:
    async def test(made: Rig) -> None:
        for worker in of_role(made, "decode"):
            worker.behaviour = fakes.status(500)
        reply = await made.post(headers="x-request-id: r\r\n")
        assert (reply.status, reply.error["code"]) == (502, "decode_failed")
        text = "decode worker answered 500; retry-pair: sent again 2 of 2 times"
        assert reply.error["message"] == text
        assert await counted(made) == {"retried": 2, "exhausted": 1}
        found = await made.ledger("r")
        assert (found["why"], found["generation"]) == (text, 2)
        assert len(found["recoveries"]) == 3
        await until(lambda: len(_released(made)) == 3)
        assert sorted(r["generation"] for r in _released(made)) == [0, 1, 2]
        await made.canary()

    with_rig(test, *PAIRS, failure_policy="retry-pair", retries=2)


@pytest.mark.parametrize("policy", ["fail", "retry-pair", "recompute-on-decode", "mixed-pool"])
@pytest.mark.parametrize("where", ["prefill", "decode"])
@pytest.mark.parametrize("status", [400, 429, 504])
def test_what_is_no_fault_of_the_worker_passes_as_it_is(
    policy: str, where: str, status: int
) -> None:
    async def test(made: Rig) -> None:
        break_first(made, where, fakes.status(status))
        assert (await made.post()).status == status
        assert await counted(made) == {}
        await made.canary()

    with_rig(test, *PAIRS, "mixed", failure_policy=policy)


@pytest.mark.parametrize("where", ["prefill", "decode"])
@pytest.mark.parametrize(
    ("policy", "result"), [("recompute-on-decode", "recomputed"), ("mixed-pool", "moved")]
)
def test_one_worker_does_all_and_gets_the_clients_own_body(
    where: str, policy: str, result: str
) -> None:
    async def test(made: Rig) -> None:
        break_first(made, where, fakes.status(500))
        reply = await made.post(headers="x-request-id: r\r\n")
        assert reply.status == 200
        assert await counted(made) == {result: 1}
        found = await made.ledger("r")
        assert (found["outcome"], found["prefill_worker"]) == ("finished", "")
        writer = next(w for w in made.workers if w.name == found["decode_worker"])
        assert writer.role in (("mixed",) if policy == "mixed-pool" else ("decode", "mixed"))
        assert params(writer.asked[-1]) is None, "it waits for KV that nobody makes"
        assert _generation(writer) == "1"
        if where == "decode":
            await until(lambda: _released(made) == [{"request_id": 7, "generation": 0}])
        await made.canary()

    with_rig(test, *PAIRS, "mixed", failure_policy=policy)


def test_recomputing_over_its_budget_fails_with_its_own_reason() -> None:
    async def test(made: Rig) -> None:
        for worker in of_role(made, "prefill"):
            worker.behaviour = fakes.status(500)
        replies = [await made.post(BODY | {"prompt": "word " * 400}) for _ in range(6)]
        assert replies[0].status == 200
        lost = [reply for reply in replies if reply.status != 200]
        assert len(lost) == 5
        for reply in lost:
            assert (reply.status, reply.error["code"]) == (502, "prefill_failed")
            assert reply.error["message"].endswith("the budget for recomputed prompts is used up")
        assert await counted(made) == {"recomputed": 1, "over_budget": 5}
        await made.canary()

    with_rig(test, *PAIRS, failure_policy="recompute-on-decode", recompute_tokens_per_s=1)


@pytest.mark.parametrize("where", ["prefill", "decode"])
def test_both_legs_are_sent_anew_under_another_transfer(where: str) -> None:
    async def test(made: Rig) -> None:
        break_first(made, where, fakes.status(500))
        if where == "prefill":  # decode waits, as it does for KV that is pushed
            for worker in of_role(made, "decode"):
                worker.behaviour = lambda asked: (
                    fakes.hang(asked)
                    if asked.headers["x-twofold-generation"] == "0"
                    else fakes.decode(asked)
                )
        assert (await made.post()).status == 200
        assert await counted(made) == {"retried": 1}
        sent: dict[str, list[Any]] = {}
        for worker in made.workers:
            for asked in worker.asked:
                generation = asked.headers["x-twofold-generation"]
                sent.setdefault(generation, []).append(params(asked)["transfer_id"])
        assert len(set(sent["0"])) == len(set(sent["1"])) == 1, "two legs, two names"
        assert set(sent["0"]) != set(sent["1"])
        first = [w.asked[0] for w in of_role(made, "decode") if w.asked]
        if where == "prefill":
            stuck = next(a for a in first if a.headers["x-twofold-generation"] == "0")
            await until(lambda: stuck.connection.lost)
        await made.canary()

    async def pushed(made: Rig) -> None:
        for worker in made.workers:
            worker.layout["handoff"] = "push"
        await test(made)

    with_rig(pushed, *PAIRS, failure_policy="retry-pair", handoff="push")
