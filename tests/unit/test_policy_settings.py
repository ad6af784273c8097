"""The settings offer exactly the policies that there are."""

from __future__ import annotations

from typing import Any

import pytest

from twofold.config import GatewayLimits, options
from twofold.config.values import SettingsError, read_value
from twofold.core.recovery import FAILURE_POLICIES, MOST_RETRIES
from twofold.core.router import Router
from twofold.policy.admit import ADMISSIONS
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


@pytest.mark.parametrize("setting", TABLES)
def test_every_policy_can_be_set_and_no_other(setting: str) -> None:
    option = next(option for option in options("gateway") if option.key == setting)
    for name in TABLES[setting]:
        assert read_value(name, option.type, is_text=True, where="x") == name
    with pytest.raises(SettingsError) as caught:
        read_value("best", option.type, is_text=True, where=option.flag)
    assert str(caught.value) == f"{option.flag}: must be one of {', '.join(TABLES[setting])}"


def test_the_defaults_are_the_routers() -> None:
    limits = GatewayLimits()
    assert limits.prefill_policy == next(iter(PREFILL_CHOICES))
    defaults = Router.__init__.__kwdefaults__ or {}
    assert {name: getattr(limits, name) for name in TABLES} == {
        name: defaults[name] for name in TABLES
    }
    for name in ("retries", "recompute_tokens_per_s"):
        assert getattr(limits, name) == defaults[name]


def test_retries_are_as_many_as_the_router_takes() -> None:
    option = next(option for option in options("gateway") if option.key == "retries")
    assert read_value(str(MOST_RETRIES), option.type, is_text=True, where="x") == MOST_RETRIES
    for text in ("0", str(MOST_RETRIES + 1), "some"):
        with pytest.raises(
            SettingsError, match=rf"x: must be a whole number from 1 to {MOST_RETRIES}"
        ):
            read_value(text, option.type, is_text=True, where="x")
