"""What is known of a workload on a machine before anything is simulated."""

from __future__ import annotations

import math

import msgspec

from twofold.cost import sizing
from twofold.cost.errors import CostError
from twofold.plan.facts import Facts, Prompt
from twofold.plan.hardware import KV_ITEM_BYTES, Machine
from twofold.plan.placement import Candidate
from twofold.plan.runner import link_bytes_per_s, machines_of
from twofold.plan.scenario import Scenario
from twofold.plan.workload import Summary

_ROUNDS = 20


def facts_of(
    scenario: Scenario,
    machine: Machine,
    found: Summary,
    *,
    gpus: int,
    nodes: int | None,
    prepare_ms: float | None,
) -> Facts:
    """What the rules judge by, at the rate of `scenario`, unsplit workers of `machine` assumed."""
    rate = found.rate_rps * scenario.rate_scale
    slo = scenario.slo
    return Facts(
        tp=machine.tp,
        pp=machine.pp,
        gpus=gpus,
        nodes=nodes,
        no_goal=math.isinf(slo.ttft_ms) and math.isinf(slo.tpot_ms),
        slo_ttft_ms=_goal(slo.ttft_ms),
        slo_tpot_ms=_goal(slo.tpot_ms),
        rate_rps=rate,
        prompts=(
            _prompt("P50", found.input_p50, scenario, machine),
            _prompt("P95", found.input_p95, scenario, machine),
        ),
        output_tokens=found.output_mean,
        ms_per_token=ms_per_token(machine, found, rate, gpus),
        prepare_ms=prepare_ms,
        prefix_hit_share=found.reuse_share if found.longest.hash_ids is not None else None,
    )


def with_split(facts: Facts, best: Candidate, max_num_seqs: int) -> Facts:
    """`facts` with the workers and slots of a split."""
    prefill = sum(pool.count for pool in best.pools if pool.role == "prefill")
    decode = sum(pool.count for pool in best.pools if pool.role == "decode")
    return msgspec.structs.replace(
        facts,
        prefill_workers=prefill,
        decode_workers=decode,
        split_gpus=sum(
            pool.count * hardware.gpus
            for pool, hardware in zip(best.pools, best.hardware, strict=True)
        ),
        slots=decode * max_num_seqs,
    )


def _goal(ms: float) -> float | None:
    return None if math.isinf(ms) else ms


def _prompt(label: str, tokens: int, scenario: Scenario, machine: Machine) -> Prompt:
    kv = machine.shape.kv_bytes(tokens, KV_ITEM_BYTES[scenario.engine.kv_dtype])
    return Prompt(
        label=label,
        tokens=tokens,
        prefill_ms=prefill_ms(machine, tokens),
        transfer_ms=sizing.transfer_ms(kv, link_bytes_per_s(scenario)),
    )


def prefill_ms(machine: Machine, tokens: int) -> float | None:
    """Time to read a prompt in one step; None outside the profile."""
    try:
        return machine.step.step_ns([(tokens, 0)], 0, 0) / 1e6
    except CostError:
        return None


def ms_per_token(machine: Machine, found: Summary, rate: float, gpus: int) -> float | None:
    """A decode step at the batch that this rate keeps busy, spread over unsplit workers.

    The batch follows from the step and the step from the batch, so it is found by rounds. None
    where it does not settle inside the profile: then decode cannot keep up by itself.
    """
    workers = max(1, gpus // machine.gpus)
    context = found.input_mean + found.output_mean / 2
    batch = 1
    try:
        for _ in range(_ROUNDS):
            ms = machine.decode_ns(batch, round(batch * context)) / 1e6
            more = max(1, math.ceil(rate / workers * found.output_mean * ms / 1e3))
            if more <= batch:
                return ms
            batch = more
    except CostError:
        return None
    return None


def start_scale(scenario: Scenario, found: Summary) -> float:
    """A rate scale near the most that the set-up could do, to begin a search at.

    From the time that one mean prompt and one mean answer take in steps of a middling batch.
    """
    if not found.rate_rps:
        return 1.0
    batch = min(32, scenario.engine.max_num_seqs)
    able: dict[str, float] = {}
    for pool, machine in zip(scenario.pools, machines_of(scenario), strict=True):
        context = round(batch * (found.input_mean + found.output_mean / 2))
        try:
            prompt = (max(2, round(found.input_mean)), 0)
            read_ns = machine.step.step_ns([prompt], 0, 0) / machine.pp
            write_ns = machine.decode_ns(batch, context) * found.output_mean / batch
        except CostError:
            return 1.0
        took = {"prefill": read_ns, "decode": write_ns, "mixed": read_ns + write_ns}[pool.role]
        able[pool.role] = able.get(pool.role, 0.0) + pool.count * 1e9 / took
    return max(min(able.values()) * 0.6 / found.rate_rps, 1e-3)
