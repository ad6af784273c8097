"""The ledger's arithmetic and its header."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from twofold.metrics.ledger import (
    PHASES,
    WORKER_PHASES,
    Leg,
    balance,
    format_server_timing,
    parse_server_timing,
)

_legs = st.lists(
    st.builds(
        lambda elapsed, phases: Leg(elapsed_ns=elapsed, phases_ns=phases),
        st.integers(0, 10**12),
        st.dictionaries(st.sampled_from([*WORKER_PHASES, "total", "x"]), st.integers(0, 10**12)),
    ),
    max_size=2,
)


@given(_legs, st.integers(0, 10**12), st.integers(0, 10**12), st.integers(0, 10**12))
def test_phases_always_sum_to_the_ttft(
    legs: list[Leg], queue_ns: int, rest_ns: int, recovery_ns: int
) -> None:
    ttft_ns = queue_ns + recovery_ns + sum(leg.elapsed_ns for leg in legs) + rest_ns
    ledger = balance(ttft_ns, queue_ns, legs, recovery_ns)
    assert ledger.ttft_ns == ttft_ns
    assert ledger.relay_ns >= 0
    named = [name for name in PHASES if name != "recovery" or recovery_ns]
    assert list(ledger.as_ms()) == named
    assert ledger.as_ns().get("recovery", 0) == recovery_ns


def test_two_legs() -> None:
    prefill = Leg(elapsed_ns=100, phases_ns={"tokenise": 5, "prefill": 70, "total": 90})
    decode = Leg(elapsed_ns=50, phases_ns={"transfer": 20, "first_step": 10, "total": 40})
    ledger = balance(171, 11, [prefill, decode])
    assert ledger.relay_ns == 10 + 10 + (171 - 11 - 150)
    assert ledger.unattributed_ns == 15 + 10
    assert (ledger.queue_ns, ledger.transfer_ns, ledger.prefill_ns) == (11, 20, 70)


def test_a_worker_that_says_nothing_accounts_for_its_whole_leg() -> None:
    ledger = balance(100, 10, [Leg(elapsed_ns=80, phases_ns={})])
    assert (ledger.unattributed_ns, ledger.relay_ns) == (80, 10)


def test_a_worker_that_claims_too_much_is_cut_and_shows() -> None:
    leg = Leg(elapsed_ns=80, phases_ns={"prefill": 500, "total": 500})
    ledger = balance(100, 10, [leg])
    assert (ledger.unattributed_ns, ledger.relay_ns, ledger.ttft_ns) == (-420, 10, 100)


@given(st.dictionaries(st.sampled_from(PHASES), st.integers(0, 10**12).map(lambda n: n * 1000)))
def test_header_round_trip(phases: dict[str, int]) -> None:
    assert parse_server_timing(format_server_timing(phases)) == phases


def test_header_of_others_is_read_as_far_as_it_makes_sense() -> None:
    value = (
        'cache;desc="a";dur=1.5, total;dur="2", miss, bad;dur=x, neg;dur=-1, ;dur=3, inf;dur=1e999'
    )
    assert parse_server_timing(value) == {"cache": 1_500_000, "total": 2_000_000}
    assert parse_server_timing("") == {}


@given(st.text(max_size=60))
def test_any_header_is_read(value: str) -> None:
    assert all(ns >= 0 for ns in parse_server_timing(value).values())
