"""The runs of a sweep: which they are, running them, and what they come to."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from typing import TypeAlias, TypeVar

import msgspec

from twofold.cli.command import CommandError
from twofold.cli.replay_progress import Bar
from twofold.cli.replay_run import Job, lost, work
from twofold.cli.replay_setting import Setting, handoff, links
from twofold.cli.replay_values import (
    crash,
    failure_policy,
    faults,
    many,
    one,
    policy,
    retries,
    scales,
    whole,
)
from twofold.cost.errors import CostError
from twofold.plan.execute import Executor, executor
from twofold.plan.ray import RayExecutor, RayMissing
from twofold.plan.runner import Problem, SetupError, check
from twofold.plan.scenario import Scenario, config_of
from twofold.plan.sweep import Axes, combinations
from twofold.report import results
from twofold.report.results import Header, Replay, Run, header_of, replay_of
from twofold.sim.pools import PoolsError, parse_pools
from twofold.trace import TraceError

T = TypeVar("T")
A = TypeVar("A")
Policies: TypeAlias = tuple[tuple[tuple[str, str], ...], ...]


def jobs_of(args: argparse.Namespace, setting: Setting) -> list[Job]:
    """Every combination of what was given. Raises CommandError."""
    axes = _axes(args, setting)
    like = msgspec.structs.replace(
        setting.like,
        crashes=many(args, "--crash", crash, ()),
        retries=one(args, "--retries", retries, 1),
        recompute_tokens_per_s=one(args, "--recompute-tokens-per-s", whole, 2_000),
        faults=one(args, "--faults", faults, None),
    )
    try:
        scenarios = combinations(like, axes, setting.machines)
        for scenario in _setups(scenarios):
            check(scenario, skip_too_large=args.skip_bad)
    except (SetupError, PoolsError, CostError, TraceError) as error:
        raise CommandError(str(error)) from None
    if args.chrome_trace and len(scenarios) > 1:
        raise CommandError(f"--chrome-trace: of one run, and these are {len(scenarios):,}")
    return [
        Job(
            scenario=scenario,
            goal=setting.goal,
            settings=_settings(scenario, axes),
            queues=bool(args.html),
            chrome=args.chrome_trace or "",
            header=_header(scenarios, setting),
        )
        for scenario in scenarios
    ]


def _axes(args: argparse.Namespace, setting: Setting) -> Axes:
    engine = setting.like.engine
    rates: tuple[tuple[float, ...], ...] = many(args, "--rate-scale", scales, ((1.0,),))
    pools = many(args, "--pools", parse_pools, ())
    if not pools:
        raise CommandError("--pools: name the workers to simulate, such as --pools 2P1D --pools 3M")
    return Axes(
        pools=pools,
        rate_scales=tuple(dict.fromkeys(rate for some in rates for rate in some)),
        chunks=many(args, "--chunk", whole, (engine.chunk_tokens,)),
        handoffs=many(args, "--handoff", handoff, (engine.handoff,)),
        policies=_policies(args),
        block_sizes=many(args, "--block-size", whole, (engine.block_size,)),
        kv_blocks=many(args, "--kv-blocks", whole, (0,)),
        max_num_seqs=many(args, "--max-num-seqs", whole, (engine.max_num_seqs,)),
        links=links(args),
    )


def _policies(args: argparse.Namespace) -> Policies:
    """Every `--policy` with every `--failure-policy`. Raises CommandError where both name one."""
    policies: Policies = many(args, "--policy", policy, ((),))
    failures = many(args, "--failure-policy", failure_policy, ())
    if not failures:
        return policies
    if any(kind == "failure" for some in policies for kind, _ in some):
        raise CommandError("--failure-policy: --policy failure= says it too; leave one out")
    return tuple(
        tuple(sorted((*some, ("failure", name)))) for some in policies for name in failures
    )


def _setups(scenarios: Sequence[Scenario]) -> list[Scenario]:
    """One of each set-up, whatever its rates: they fit or do not alike."""
    at_one = [msgspec.structs.replace(scenario, rate_scale=1.0) for scenario in scenarios]
    return list({msgspec.json.encode(scenario): scenario for scenario in at_one}.values())


def _settings(scenario: Scenario, axes: Axes) -> dict[str, results.Setting]:
    """What tells this run from others of the sweep, beside its pools, rate, handoff and policy."""
    engine = scenario.engine
    found: dict[str, results.Setting] = {"chunk": engine.chunk_tokens}
    swept: tuple[tuple[str, Sequence[object], results.Setting], ...] = (
        ("block_size", axes.block_sizes, engine.block_size),
        ("kv_blocks", axes.kv_blocks, engine.kv_blocks),
        ("max_num_seqs", axes.max_num_seqs, engine.max_num_seqs),
        ("link_gbytes_per_s", axes.links, scenario.link_bytes_per_s / 1e9),
    )
    return found | {name: value for name, values, value in swept if len(values) > 1}


def _header(scenarios: Sequence[Scenario], setting: Setting) -> Header:
    return header_of(
        trace_sha256=setting.requests.info.sha256,
        profile_sha256=setting.profile_sha256,
        config=config_of(scenarios),
        seed=setting.like.seed,
    )


def made_executor(
    ray: str | None, work: Callable[[T], A], jobs: int, lost: Callable[[T, str], A]
) -> Executor[T, A]:
    """Where the work is done. Raises CommandError where Ray is asked for and is not there."""
    if not ray:
        return executor(work, jobs, lost)
    try:
        return RayExecutor(work, ray, lost)
    except RayMissing as error:
        raise CommandError(str(error)) from None


def run_all(
    ray: str | None, jobs: Sequence[Job], processes: int
) -> tuple[list[Run], list[Problem], bool]:
    """(runs that were done, in order; what went wrong; whether Ctrl-C ended it early)."""
    done: dict[int, Run | Problem] = {}
    interrupted = False
    with (
        made_executor(ray, work, min(processes, len(jobs)), lost) as where,
        Bar() as bar,
    ):
        bar.begin("simulating", len(jobs))
        try:
            for number, job in enumerate(jobs):
                where.submit(number, job)
            while len(done) < len(jobs):
                number, outcome = where.take()
                done[number] = outcome
                bar.tick()
        except KeyboardInterrupt:
            interrupted = True
    outcomes = [done[number] for number in sorted(done)]
    runs = [outcome for outcome in outcomes if isinstance(outcome, Run)]
    return runs, [o for o in outcomes if isinstance(o, Problem)], interrupted


def result_of(jobs: Sequence[Job], setting: Setting, runs: Sequence[Run]) -> Replay:
    """The runs under their header."""
    header = jobs[0].header or _header([job.scenario for job in jobs], setting)
    goal = setting.goal
    asked = goal.ttft_ms is not None or goal.tpot_ms is not None
    return replay_of(header, runs, goal if asked else None)
