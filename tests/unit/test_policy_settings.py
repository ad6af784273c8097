"""The settings offer exactly the policies that there are."""

from __future__ import annotations

from typing import Any

import pytest

from twofold.config import (
    EngineSettings,
    GatewayLimits,
    Sources,
    read_serve,
    read_worker,
)
from twofold.config.options import all_options
from twofold.config.values import SettingsError, read_value
from twofold.core.recovery import FAILURE_POLICIES, MOST_RETRIES
from twofold.core.router import Router
from twofold.core.worker import WorkerCore
from twofold.policy.admit import ADMISSIONS
from twofold.policy.chunk import CHUNK_BUDGETS
from twofold.policy.decode import DECODE_CHOICES
from twofold.policy.prefill import PREFILL_CHOICES
from twofold.policy.split import SPLIT_CHOICES

TABLES: dict[str, dict[str, Any]] = {
    "prefill_policy": PREFILL_CHOICES,
    "decode_policy": DECODE_CHOICES,
    "split_policy": SPLIT_CHOICES,
    "admission": ADMISSIONS,
    "failure_policy": dict.fromkeys(FAILURE_POLICIES),
}


@pytest.mark.parametrize("setting", [*TABLES, "chunk_policy"])
def test_every_policy_can_be_set_and_no_other(setting: str) -> None:
    table = TABLES.get(setting, CHUNK_BUDGETS)
    option = next(option for option in all_options() if option.key == setting)
    for name in table:
        assert read_value(name, option.type, is_text=True, where="x") == name
    with pytest.raises(SettingsError) as caught:
        read_value("best", option.type, is_text=True, where=option.flag)
    assert str(caught.value) == f"{option.flag}: must be one of {', '.join(table)}"


@pytest.mark.parametrize(
    ("policy", "flag"), [("capped", "--chunk-cap-tokens"), ("tpot_goal", "--chunk-tpot-s")]
)
def test_a_chunk_policy_needs_its_limit(policy: str, flag: str) -> None:
    flags: dict[str, Any] = {"model": "builtin", "name": "w", "role": "mixed"}
    flags |= {"chunk_policy": policy}
    with pytest.raises(SettingsError) as caught:
        read_worker(Sources(flags=flags))
    assert str(caught.value) == f"--chunk-policy {policy}: needs {flag} above 0"
    with pytest.raises(SettingsError):
        read_serve(Sources(flags={"model": "builtin", "chunk_policy": policy}))
    limit = flag.removeprefix("--").replace("-", "_")
    assert read_worker(Sources(flags=flags | {limit: "3"})).engine.chunk_policy == policy


def test_the_defaults_are_the_cores() -> None:
    engine = WorkerCore.__init__.__kwdefaults__ or {}
    assert EngineSettings(model="m").chunk_policy == engine["chunk_policy"] == "fixed"
    limits = GatewayLimits()
    assert limits.prefill_policy == next(iter(PREFILL_CHOICES))
    defaults = Router.__init__.__kwdefaults__ or {}
    assert {name: getattr(limits, name) for name in TABLES} == {
        name: defaults[name] for name in TABLES
    }
    for name in ("retries", "recompute_tokens_per_s"):
        assert getattr(limits, name) == defaults[name]


def test_retries_are_as_many_as_the_router_takes() -> None:
    option = next(option for option in all_options() if option.key == "retries")
    assert read_value(str(MOST_RETRIES), option.type, is_text=True, where="x") == MOST_RETRIES
    for text in ("0", str(MOST_RETRIES + 1), "some"):
        with pytest.raises(
            SettingsError, match=rf"x: must be a whole number from 1 to {MOST_RETRIES}"
        ):
            read_value(text, option.type, is_text=True, where="x")
