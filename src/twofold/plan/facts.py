"""What the rules of the verdict judge by."""

from __future__ import annotations

import msgspec

from twofold.cost import sizing


class Prompt(msgspec.Struct, frozen=True, kw_only=True):
    """A prompt of typical length or of a percentile; times are None where not known."""

    label: str
    tokens: int
    prefill_ms: float | None = None
    transfer_ms: float | None = None


class Facts(msgspec.Struct, frozen=True, kw_only=True):
    """What the rules judge by; None: not known.

    A worker has `pp` stages of `tp` GPUs. `prompts` go from the typical length to the tail's.
    `no_goal` says that there is no latency goal, unlike a goal that is not known. `ms_per_token` is
    decode's without handoff preparation on its loop; `slots` are the whole decode pool's.
    `split_gpus` are those of both pools, where their workers are not all of `tp` and `pp`.
    """

    tp: int = 1
    pp: int = 1
    gpus: int | None = None
    nodes: int | None = None
    no_goal: bool = False
    slo_ttft_ms: float | None = None
    slo_tpot_ms: float | None = None
    rate_rps: float | None = None
    prompts: tuple[Prompt, ...] = ()
    output_tokens: float | None = None
    ms_per_token: float | None = None
    slots: int | None = None
    prepare_ms: float | None = None
    split_gpus: int | None = None
    prefill_workers: int | None = None
    decode_workers: int | None = None
    prefix_hit_share: float | None = None

    @property
    def worker_gpus(self) -> int:
        """GPUs of one worker."""
        return self.tp * self.pp

    @property
    def degree(self) -> str:
        """How a worker is spread over its GPUs, in words."""
        return f"TP {self.tp}" + (f" PP {self.pp}" if self.pp > 1 else "")

    @property
    def slots_held(self) -> float | None:
        """Sequences in decode on average."""
        if self.rate_rps is None or self.output_tokens is None or self.ms_per_token is None:
            return None
        return sizing.decode_slots(self.rate_rps, self.output_tokens, self.ms_per_token)

    @property
    def unsplit_workers(self) -> int | None:
        """Workers that the same GPUs would be without a split."""
        if self.gpus is not None:
            return max(self.gpus // self.worker_gpus, 1)
        if self.prefill_workers is None or self.decode_workers is None:
            return None
        return self.prefill_workers + self.decode_workers
