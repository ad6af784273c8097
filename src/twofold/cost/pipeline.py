"""Pipeline parallelism: layers spread over stages, through which steps go one after another."""

from __future__ import annotations

import msgspec

from twofold.types import NS_PER_S, ceil_div


class Pipeline(msgspec.Struct, frozen=True, kw_only=True):
    """`stages` stages, each with an even share of the layers and so of a step's time.

    Between stages go `bytes_per_token` of activations for each token of a step, at `bytes_per_s`
    and after `latency_ns`; a stage goes on with the next step meanwhile. `bytes_per_s` 0: however
    many there are takes no more than `latency_ns`.
    """

    stages: int = 1
    bytes_per_token: int = 0
    bytes_per_s: int = 0
    latency_ns: int = 0

    def stage_ns(self, step_ns: int) -> int:
        """Time that a step of `step_ns` on all layers spends in each stage."""
        return ceil_div(step_ns, self.stages)

    def hop_ns(self, tokens: int) -> int:
        """Time from the end of one stage of a step of `tokens` to where the next can begin."""
        if not self.bytes_per_s:
            return self.latency_ns
        return self.latency_ns + ceil_div(
            tokens * self.bytes_per_token * NS_PER_S, self.bytes_per_s
        )
