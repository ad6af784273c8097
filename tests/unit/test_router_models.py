"""Several models behind one gateway: a request goes to workers of its model, and to no other."""

from __future__ import annotations

from typing import Literal

import msgspec
import pytest

from tests.unit.harness import LAYOUT
from twofold.core.router import Router
from twofold.messages import (
    Arrive,
    PrefillDone,
    Reply,
    RouterEffect,
    SendDecode,
    SendPrefill,
    WorkerGone,
    WorkerSeen,
)
from twofold.policy.prefill import PREFILL_CHOICES
from twofold.policy.split import SPLIT_CHOICES


def seen(worker: str, role: Literal["prefill", "decode", "mixed"], model: str) -> WorkerSeen:
    layout = msgspec.structs.replace(LAYOUT, model_digest=model or "m")
    return WorkerSeen(worker=worker, role=role, engine_id=f"{worker}-1", layout=layout, model=model)


def sent_to(effects: list[RouterEffect]) -> str:
    (sent,) = [e for e in effects if isinstance(e, SendPrefill | SendDecode)]
    return sent.worker


@pytest.mark.parametrize("prefill_policy", sorted(PREFILL_CHOICES))
def test_pairs_are_of_the_requests_model(prefill_policy: str) -> None:
    router = Router(max_inflight=99, prefill_policy=prefill_policy)
    for model in ("a", "b"):
        router.handle(seen(f"p-{model}", "prefill", model), 0)
        router.handle(seen(f"d-{model}", "decode", model), 0)
    for number in range(20):
        model = "aab"[number % 3]
        assert sent_to(router.handle(Arrive(request_id=number, weight=9, model=model), 0)) == (
            f"p-{model}"
        )
        assert sent_to(router.handle(PrefillDone(number, 0), 1)) == f"d-{model}"


@pytest.mark.parametrize("split_policy", sorted(SPLIT_CHOICES))
def test_mixed_workers_are_too(split_policy: str) -> None:
    router = Router(max_inflight=99, split_policy=split_policy)
    for model in ("a", "b"):
        router.handle(seen(f"m-{model}", "mixed", model), 0)
    for number in range(10):
        model = "aab"[number % 3]
        sent = sent_to(router.handle(Arrive(request_id=number, weight=9, model=model), 0))
        assert sent == f"m-{model}"


def test_a_model_whose_workers_are_gone_is_unready_while_others_are_served() -> None:
    router = Router(max_inflight=99)
    for model in ("a", "b"):
        router.handle(seen(f"p-{model}", "prefill", model), 0)
        router.handle(seen(f"d-{model}", "decode", model), 0)
    router.handle(WorkerGone("p-b"), 0)
    reply = router.handle(Arrive(request_id=1, weight=9, model="b"), 0)[0]
    assert isinstance(reply, Reply)
    assert (reply.status, reply.code) == (503, "not_ready")
    assert reply.reason == "no workers that serve b can be paired now"
    assert sent_to(router.handle(Arrive(request_id=2, weight=9, model="a"), 0)) == "p-a"


def test_who_names_no_model_goes_anywhere_and_a_worker_without_one_takes_all() -> None:
    router = Router(max_inflight=99)
    router.handle(seen("m", "mixed", ""), 0)
    assert sent_to(router.handle(Arrive(request_id=1, weight=9, model="b"), 0)) == "m"
    router = Router(max_inflight=99)
    router.handle(seen("m", "mixed", "a"), 0)
    assert sent_to(router.handle(Arrive(request_id=1, weight=9), 0)) == "m"
