from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from twofold.cost.errors import CostError
from twofold.cost.link import Link, SharedLink

MS = 10**6


def test_one_transfer() -> None:
    link = Link(bytes_per_s=50 * 10**9, latency_ns=2000, prepare_ns=3 * MS)
    assert link.transfer_ns(50 * MS) == 3 * MS + 2000 + MS
    assert link.transfer_ns(50 * MS, sharers=4) == 3 * MS + 2000 + 4 * MS
    assert link.transfer_ns(0) == 3 * MS + 2000
    assert link.transfer_ns(1) == 3 * MS + 2001
    assert link.loop_ns() == 0
    assert Link(bytes_per_s=1, prepare_ns=5, prepare_on_loop=True).loop_ns() == 5


def test_bounces_through_the_host() -> None:
    serial = Link(bytes_per_s=10**9, bounce="serial", bounce_bytes_per_s=2 * 10**9)
    assert serial.transfer_ns(10**6) == MS + 2 * MS // 2
    piped = Link(bytes_per_s=10**9, bounce="pipelined", bounce_bytes_per_s=5 * 10**8)
    assert piped.transfer_ns(10**6) == 2 * MS
    with pytest.raises(CostError, match="bounce_bytes_per_s"):
        Link(bytes_per_s=1, bounce="serial")
    with pytest.raises(CostError, match="1 or more"):
        Link(bytes_per_s=0)


def test_sharing_by_hand() -> None:
    link = SharedLink(1_000_000_000)  # 1 byte a ns
    link.add(7, 1000, 0)
    assert link.next_completion() == (1000, 7)
    link.add(3, 1000, 500)  # 7 has 500 left, both at half speed
    assert link.next_completion() == (1500, 7)
    assert link.pop_completed(1499) == []
    assert link.pop_completed(1500) == [7]
    assert link.next_completion() == (2000, 3)
    assert link.cancel(3, 1700) == 300
    assert link.next_completion() is None
    assert link.active == 0


def test_equal_ends_go_by_id_and_misuse_is_refused() -> None:
    link = SharedLink(10**9)
    for transfer in (5, 2, 9):
        link.add(transfer, 600, 0)
    with pytest.raises(ValueError, match="in flight already"):
        link.add(5, 1, 0)
    assert link.pop_completed(10**6) == [2, 5, 9]
    with pytest.raises(ValueError, match="before"):
        link.add(1, 1, 5)
    with pytest.raises(KeyError):
        link.cancel(99, 10**6)
    link.add(2, 0, 10**6)
    assert link.pop_completed(10**6) == [2]


@given(
    st.lists(st.tuples(st.integers(0, 2000), st.integers(0, 5000)), min_size=1, max_size=25),
    st.integers(1, 3 * 10**9),
)
def test_the_link_is_never_idle_and_never_exceeded(jobs: list[tuple[int, int]], rate: int) -> None:
    """All end; while anything is in flight the bytes moved are the rate's, to within rounding."""
    link = SharedLink(rate)
    ends: dict[int, int] = {}
    jobs = sorted(jobs)

    def drain(until: int | None) -> None:
        while (following := link.next_completion()) and (until is None or following[0] <= until):
            for transfer in link.pop_completed(following[0]):
                ends[transfer] = following[0]

    for transfer, (start, size) in enumerate(jobs):
        drain(start)
        link.add(transfer, size, start)
    drain(None)
    assert len(ends) == len(jobs)
    assert link.active == 0
    for transfer, (start, size) in enumerate(jobs):
        assert ends[transfer] - start >= -(-size * 10**9 // rate)
    # A work-conserving link ends its last transfer when one serving in turn would.
    clock = 0.0
    for start, size in jobs:
        clock = max(clock, start) + size * 1e9 / rate
    assert max(ends.values()) == pytest.approx(clock, abs=2 * len(jobs) + 1)


def test_the_order_of_calls_does_not_change_the_end() -> None:
    one, many = SharedLink(999_999_937), SharedLink(999_999_937)
    for link in (one, many):
        link.add(1, 10**9, 0)
        link.add(2, 10**8, 10)
    for now in range(1000, 10_000_000, 99_991):
        many.pop_completed(now)
    a, b = one.next_completion(), many.next_completion()
    assert a is not None
    assert b is not None
    assert abs(a[0] - b[0]) <= 1
