"""What became of one request, as a client sees it: the one record that all figures come from."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import msgspec


class RequestRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One request, simulated or live. All times are integer nanoseconds of one clock.

    `token_times_ns` has one entry per token that reached the client. `phases_ns` sums to the
    TTFT and is empty without a first token. `prefill` and `decode` name workers; `prefill` is
    empty when one worker did all, both when the request was never sent. `n_bytes` of KV were
    moved for it. `recoveries` are what the failure policy made of its legs that failed, in order,
    by the names of `twofold.messages.Recovery.result`; workers are those of the last attempt.
    """

    request_id: int
    klass: str = ""
    arrival_ns: int
    end_ns: int
    input_tokens: int
    output_tokens: int
    outcome: Literal["finished", "refused", "failed", "cancelled"]
    reason: str = ""
    token_times_ns: Sequence[int] = ()
    phases_ns: dict[str, int] = msgspec.field(default_factory=dict)
    prefill: str = ""
    decode: str = ""
    n_cached: int = 0
    n_preempted: int = 0
    n_bytes: int = 0
    recoveries: tuple[str, ...] = ()

    @property
    def ttft_ns(self) -> int | None:
        """From arrival to the first token, or None when none came."""
        return self.token_times_ns[0] - self.arrival_ns if self.token_times_ns else None

    @property
    def tpot_ns(self) -> int | None:
        """(last token - first token) / (tokens - 1), rounded down; None below two tokens."""
        times = self.token_times_ns
        return (times[-1] - times[0]) // (len(times) - 1) if len(times) > 1 else None

    @property
    def e2e_ns(self) -> int:
        """From arrival to the end, whatever the end was."""
        return self.end_ns - self.arrival_ns
