"""What the flags that `replay` and `plan` share ask for, read and checked."""

from __future__ import annotations

import argparse
import hashlib
import math
import os
from typing import Final

import msgspec

from twofold.cli.command import CommandError
from twofold.cli.replay_flags import DEFAULT_SEQS
from twofold.cli.replay_values import (
    from_zero,
    given,
    link,
    many,
    not_negative,
    one,
    positive,
    price,
    share,
    span,
    whole,
)
from twofold.core.handoff import MODES
from twofold.cost.errors import CostError
from twofold.plan.hardware import Hardware, Machine, read_machine
from twofold.plan.scenario import Engine, Scenario, Workload
from twofold.plan.workload import Requests, requests_of
from twofold.report.results import Goal
from twofold.trace import TraceError
from twofold.types import NS_PER_MS

DEFAULT_CHUNK: Final = 2048
_HANDOFFS: Final = tuple(MODES)


class Setting(msgspec.Struct, frozen=True, kw_only=True):
    """What the shared flags ask for; `notes` are what was settled without being asked."""

    like: Scenario
    machines: tuple[Machine, ...]
    requests: Requests
    goal: Goal
    jobs: int
    notes: tuple[str, ...]

    @property
    def profile_sha256(self) -> str:
        """The profile's own hash, or one over all of them."""
        hashes = [machine.sha256 for machine in self.machines]
        if len(hashes) == 1:
            return hashes[0]
        return hashlib.sha256("".join(hashes).encode()).hexdigest()


def read_setting(args: argparse.Namespace) -> Setting:
    """What the flags ask for, the trace read. Raises CommandError."""
    goal = Goal(
        ttft_ms=_ms(one(args, "--slo-ttft", positive, 0.0)),
        tpot_ms=_ms(one(args, "--slo-tpot", positive, 0.0)),
        attainment=one(args, "--attainment", share, 0.9),
    )
    try:
        machines = read_machines(args)
        engine, notes = _engine(args, machines)
        workload = _workload(args)
        seed = one(args, "--seed", from_zero, 0)
        requests = requests_of(workload, seed)
    except (CostError, TraceError, ValueError) as error:
        raise CommandError(str(error)) from None
    workload = msgspec.structs.replace(workload, sha256=requests.info.sha256)
    like = Scenario(
        workload=workload,
        pools=(),
        hardware=(),
        engine=engine,
        slo=goal.slo(),
        attainment=goal.attainment,
        seed=seed,
        link_sharing=args.link_sharing,
        bounce_bytes_per_s=one(args, "--host-bounce", link, 0),
        prepare_ns=round(one(args, "--prepare-ms", not_negative, 0.0) * NS_PER_MS),
    )
    notes = [requests.info.describe(), *(m.words for m in machines), *notes]
    jobs = one(args, "--jobs", whole, len(os.sched_getaffinity(0)))
    return Setting(
        like=like,
        machines=tuple(machines),
        requests=requests_of(workload, seed),
        goal=goal,
        jobs=jobs,
        notes=tuple(notes),
    )


def _ms(seconds: float) -> float | None:
    return seconds * 1e3 if seconds else None


def read_machines(args: argparse.Namespace) -> list[Machine]:
    """The machines that the flags name, each once. Raises CommandError and CostError."""
    prices = dict(many(args, "--usd-per-hour", price, ()))
    profiles, selects = given(args, "--profile"), given(args, "--profile-select") or [""]
    accelerators, tps = given(args, "--accelerator"), many(args, "--tp", whole, ())
    wanted: list[Hardware] = []
    if profiles:
        if tps or len(accelerators) > 1:
            flag = "--tp" if tps else "--accelerator"
            raise CommandError(f"{flag}: a profile has its own; leave it out")
        wanted = [
            Hardware(
                profile=profile,
                select=select,
                model=args.model or "",
                accelerator=(accelerators or [""])[0],
                extrapolate=args.extrapolate,
            )
            for profile in profiles
            for select in selects
        ]
    elif args.model and accelerators:
        wanted = [
            Hardware(model=args.model, accelerator=name, tp=tp, extrapolate=args.extrapolate)
            for name in accelerators
            for tp in tps or (1,)
        ]
    else:
        missing = "--accelerator" if args.model else "--profile"
        raise CommandError(
            f"{missing}: needed: step times come from --profile FILE, or are estimated from "
            "--model NAME and --accelerator NAME"
        )
    found: dict[tuple[str, int], Machine] = {}
    pps = many(args, "--pp", whole, (1,))
    for hardware in (msgspec.structs.replace(each, pp=pp) for each in wanted for pp in pps):
        machine = read_machine(hardware)
        usd = next((prices[name] for name in machine.names if name in prices), 0.0)
        if usd:
            machine = read_machine(msgspec.structs.replace(hardware, usd_per_hour=usd))
        found.setdefault((machine.sha256, machine.pp), machine)
    return list(found.values())


def _engine(args: argparse.Namespace, machines: list[Machine]) -> tuple[Engine, list[str]]:
    """The settings that are not swept, with defaults for those that are."""
    notes: list[str] = []
    seqs, chunk = DEFAULT_SEQS, DEFAULT_CHUNK
    batches = [machine.most_batch for machine in machines if machine.most_batch]
    if not given(args, "--max-num-seqs") and batches and min(batches) < seqs:
        seqs = min(batches)
        notes.append(f"max_num_seqs {seqs}: the largest batch that the profile has")
    chunks = many(args, "--chunk", whole, ())
    if chunks and min(chunks) < seqs and not given(args, "--max-num-seqs"):
        seqs = min(chunks)
        notes.append(f"max_num_seqs {seqs}: a step decodes all sequences, so at most --chunk")
    prefills = [machine.most_prefill for machine in machines if machine.most_prefill]
    if not chunks and prefills and min(prefills) < chunk:
        chunk = min(prefills)
        notes.append(f"chunk {chunk}: the longest prompt that the profile has")
    engine = Engine(
        max_num_seqs=seqs,
        chunk_tokens=max(chunk, seqs),
        chunk_cap_tokens=one(args, "--chunk-cap", whole, 0),
        memory_share=one(args, "--memory-share", share, 0.9),
        kv_dtype=args.kv_dtype,
        prefix_caching=not args.no_prefix_caching,
    )
    return engine, notes


def _workload(args: argparse.Namespace) -> Workload:
    rate = one(args, "--rate", positive, 0.0)
    cv = one(args, "--cv", positive, 1.0)
    if args.cv and not rate:
        raise CommandError("--cv: needs --rate, which draws arrivals anew")
    return Workload(
        trace=args.trace,
        skip_bad=args.skip_bad,
        sort=args.sort,
        klass=getattr(args, "class") or "",
        window_s=one(args, "--window", span, (0.0, math.inf)) if args.window else None,
        requests=one(args, "--requests", whole, 0),
        length_divide=one(args, "--length-divide", whole, 1),
        drop_hashes=args.drop_hashes,
        jitter_s=one(args, "--jitter", not_negative, 0.0),
        arrivals=("" if not rate else "poisson" if cv == 1 else "gamma"),
        rate_rps=rate,
        cv=cv,
    )


def handoff(text: str) -> str:
    """A mode of handing over. Raises ValueError."""
    if text not in _HANDOFFS:
        raise ValueError(f"must be one of {', '.join(_HANDOFFS)}")
    return text


def links(args: argparse.Namespace) -> tuple[int, ...]:
    """Bytes per second of each accelerator's link, 0 for the usual one."""
    return many(args, "--link-gbytes-per-s", link, (0,))
