"""What `plan` does: the space, the rules, the search, and the plan that comes of it."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import TypeVar

import msgspec

from twofold.cli.command import CommandError
from twofold.cli.replay_jobs import made_executor
from twofold.cli.replay_progress import Bar
from twofold.cli.replay_run import Job, lost, work
from twofold.cli.replay_setting import Setting, handoff, links
from twofold.cli.replay_values import (
    from_zero,
    given,
    many,
    not_negative,
    one,
    policy,
    positive,
    whole,
)
from twofold.cost.errors import CostError
from twofold.plan.bisect import Outcome
from twofold.plan.execute import Executor, run_all
from twofold.plan.facts import Facts
from twofold.plan.known import facts_of, with_split
from twofold.plan.placement import CHUNKS, ROUTINGS, Candidate, Space, enumerate_space
from twofold.plan.rules import Rule, judge
from twofold.plan.runner import Probe, Problem, SetupError, attempt, check
from twofold.plan.scenario import Scenario, config_of
from twofold.plan.search import QUICK, THOROUGH, Effort, Finding, Progress, sampled, search
from twofold.plan.verdict import Case, Judge, decide, forbidding, stronger
from twofold.plan.workload import summary
from twofold.report import results
from twofold.report.results import Interval, Plan, Run, header_of
from twofold.sim.pools import PoolsError
from twofold.trace import TraceError

T = TypeVar("T")


class Wish(msgspec.Struct, frozen=True, kw_only=True):
    """What is to be planned. `like` has the load as its rate scale; `facts` are for the rules."""

    setting: Setting
    like: Scenario
    space: Space
    facts: Facts
    gpus: int
    judge: Judge
    effort: Effort
    ray: str
    config: dict[str, object]
    notes: tuple[str, ...]


def read_wish(args: argparse.Namespace, setting: Setting) -> Wish:
    """What the flags ask for. Raises CommandError."""
    gpus = one(args, "--gpus", whole, 0)
    if not gpus:
        raise CommandError("--gpus: needed: how many accelerators there are")
    for flag in ("--handoff", "--policy", "--block-size", "--kv-blocks", "--max-num-seqs"):
        if len(given(args, flag)) > 1:
            raise CommandError(f"{flag}: once; a plan tries ratios, degrees and chunk sizes")
    like = _like(args, setting)
    if args.quick and args.thorough:
        raise CommandError("--quick and --thorough: give one of them")
    effort = QUICK if args.quick else THOROUGH if args.thorough else Effort()
    effort = msgspec.structs.replace(
        effort, resamples=one(args, "--resamples", from_zero, effort.resamples)
    )
    chunks = many(args, "--chunk", whole, CHUNKS)
    seqs = like.engine.max_num_seqs
    limits = [machine.most_prefill for machine in setting.machines if machine.most_prefill]
    usable = [c for c in chunks if c >= seqs and c <= min(limits, default=c)] or [seqs]
    try:
        space = enumerate_space(
            setting.machines,
            gpus,
            equal=args.equal,
            chunks=usable,
            split_chunk=max(usable),
            routings=("",) if "split" in dict(like.policies) else ROUTINGS,
        )
        space, dropped = _able(space, like, args.skip_bad)
        facts = facts_of(
            msgspec.structs.replace(like, hardware=(setting.machines[0].hardware,)),
            setting.machines[0],
            summary(setting.requests.rows),
            gpus=gpus,
            nodes=one(args, "--nodes", whole, 0) or None,
            prepare_ms=one(args, "--prepare-ms", not_negative, -1.0) if args.prepare_ms else None,
        )
    except (SetupError, CostError, PoolsError, TraceError) as error:
        raise CommandError(str(error)) from None
    return Wish(
        setting=setting,
        like=like,
        space=space,
        facts=facts,
        gpus=gpus,
        judge=args.judge,
        effort=effort,
        ray=args.ray or "",
        config=config_of(
            [like],
            space=[m.degree for m in setting.machines],
            chunks=usable,
            gpus=gpus,
            equal=args.equal,
            judge=args.judge,
            effort=msgspec.to_builtins(effort),
        ),
        notes=(f"space: {space.words}", *dropped, *_sampling(setting, effort)),
    )


def _sampling(setting: Setting, effort: Effort) -> tuple[str, ...]:
    n = len(setting.requests.rows)
    if n <= effort.whole:
        return ()
    return (
        f"figures are of about {effort.whole:,} of {n:,} requests, in stretches from all over the "
        "trace; --thorough takes all",
    )


def _like(args: argparse.Namespace, setting: Setting) -> Scenario:
    """What all set-ups share."""
    engine = setting.like.engine
    policies: tuple[tuple[str, str], ...] = one(args, "--policy", policy, ())
    engine = msgspec.structs.replace(
        engine,
        handoff=many(args, "--handoff", handoff, (engine.handoff,))[0],
        block_size=one(args, "--block-size", whole, engine.block_size),
        kv_blocks=one(args, "--kv-blocks", whole, 0),
        max_num_seqs=one(args, "--max-num-seqs", whole, engine.max_num_seqs),
    )
    return msgspec.structs.replace(
        setting.like,
        engine=engine,
        rate_scale=one(args, "--rate-scale", positive, 1.0),
        policies=policies,
        link_bytes_per_s=links(args)[0],
    )


def _able(space: Space, like: Scenario, skip_bad: bool) -> tuple[Space, list[str]]:
    """`space` without set-ups that cannot run, and a line for each reason.

    Raises SetupError where none can.
    """
    reasons: dict[str, None] = {}

    def kept(candidates: Sequence[Candidate]) -> tuple[Candidate, ...]:
        found = []
        for candidate in candidates:
            try:
                check(candidate.scenario(like), skip_too_large=skip_bad)
            except (SetupError, CostError) as error:
                reasons[str(error)] = None
            else:
                found.append(candidate)
        return tuple(found)

    able = msgspec.structs.replace(space, splits=kept(space.splits), unsplit=kept(space.unsplit))
    if not able.unsplit:
        raise SetupError(next(iter(reasons)))
    return able, [f"left out: {reason}" for reason in reasons]


def make_plan(wish: Wish) -> Plan:
    """Rules, search, verdict and the runs to show. Raises CommandError where nothing can run."""
    rules = judge(wish.facts)
    space = wish.space
    forbids = forbidding(rules)
    if forbids is not None:
        space = msgspec.structs.replace(space, splits=())
    with Bar() as bar:
        if forbids is not None:
            bar.note(f"no split is simulated: {forbids.rule} ({forbids.because})")
        progress = Progress(bar.say, bar.tick, bar.note)
        with made_executor(wish.ray, attempt, wish.setting.jobs, _lost_probe) as where:
            splits, unsplit = search(space, wish.like, wish.effort, where, progress)
            case = _case(wish, splits, unsplit, rules, where, progress)
        verdict = decide(case)
        jobs = _jobs(wish, case, splits, unsplit)
        bar.say("the runs to show", len(jobs))
        with made_executor(wish.ray, work, wish.setting.jobs, lost) as where_runs:
            shown = run_all(jobs, where_runs, bar.tick)
    runs = {i: run for i, run in enumerate(shown) if isinstance(run, Run)}
    best_split = runs.get(1) if case.split is not None else None
    best = best_split if _recommends_split(case, verdict.word) else runs.get(0)
    return Plan(
        header=header_of(
            trace_sha256=wish.setting.requests.info.sha256,
            profile_sha256=wish.setting.profile_sha256,
            config=wish.config,
            seed=wish.like.seed,
        ),
        goal=wish.setting.goal,
        verdict=verdict.word,
        because=verdict.because,
        best=best,
        best_split=best_split,
        best_unsplit=runs.get(0),
        frontier=frontier(list(runs.values())),
        rules=[results.Rule(rule=r.rule, holds=r.holds, because=r.because) for r in case.rules],
        runs=list(runs.values()),
    )


def _recommends_split(case: Case, word: str) -> bool:
    """Whether the best is the split: where that is the verdict, or where neither is enough and
    the split gets further.
    """
    if case.split is None or word == "do not split":
        return False
    return word == "split" or stronger(case.split, case.unsplit) is case.split


def _lost_probe(scenario: Scenario, reason: str) -> Outcome:
    return Problem(scenario=scenario.name, reason=reason)


def _case(
    wish: Wish,
    splits: Sequence[Finding],
    unsplit: Sequence[Finding],
    rules: tuple[Rule, ...],
    where: Executor[Scenario, Outcome],
    progress: Progress,
) -> Case:
    """What the verdict is judged by: both winners at the load, the weaker where the other holds."""
    split, other = (splits[0] if splits else None), unsplit[0]
    like = sampled(wish.like, wish.effort.whole)
    scenarios = [f.candidate.scenario(like) for f in (other, split) if f is not None]
    pushed_by = None
    if split is not None:
        best = stronger(split, other)
        loser = other if best is split else split
        if best.best.held is not None and best.best.scale > loser.best.scale:
            pushed_by = best
            scenarios.append(
                msgspec.structs.replace(loser.candidate.scenario(like), rate_scale=best.best.scale)
            )
    progress.say("the best at the load", len(scenarios))
    outcomes = run_all(scenarios, where, progress.tick)
    probes = [_probe(outcome) for outcome in outcomes]
    facts = wish.facts
    if split is not None:
        facts = with_split(facts, split.candidate, wish.like.engine.max_num_seqs)
    return Case(
        split=split,
        unsplit=other,
        slo=wish.like.slo,
        attainment=wish.like.attainment,
        load=wish.like.rate_scale,
        judge=wish.judge,
        at_load=(probes[1] if split is not None else None, probes[0]),
        pushed=probes[-1] if pushed_by is not None else None,
        rules=judge(facts),
        gpus=wish.gpus,
    )


def _probe(outcome: Outcome) -> Probe:
    """The probe. Raises CommandError where a run of a winner failed."""
    if isinstance(outcome, Problem):
        raise CommandError(f"{outcome.scenario}: {outcome.reason}")
    return outcome


def _jobs(
    wish: Wish, case: Case, splits: Sequence[Finding], unsplit: Sequence[Finding]
) -> list[Job]:
    """Runs to show: the best unsplit one, the best split, then all finalists at what they hold.

    The first two at the load, or at the rate that each holds where capacity is judged.
    """
    winners = [finding for finding in (case.unsplit, case.split) if finding is not None]
    finalists = [f for f in (*unsplit, *splits) if f.fine is not None and f.best.held is not None]
    jobs = []
    for finding in winners:
        scale = finding.best.scale if wish.judge == "capacity" else 0.0
        jobs.append(_job(wish, finding, scale or wish.like.rate_scale))
    shown = {
        (id(f.candidate), job.scenario.rate_scale) for f, job in zip(winners, jobs, strict=True)
    }
    jobs += [
        _job(wish, finding, finding.best.scale)
        for finding in finalists
        if (id(finding.candidate), finding.best.scale) not in shown
    ]
    return jobs


def _job(wish: Wish, finding: Finding, scale: float) -> Job:
    each = Interval(value=None)
    if finding.best.held is not None:
        low, high = finding.interval or (None, None)
        each = Interval(
            value=finding.best.rate_rps / finding.gpus,
            low=None if low is None else low / finding.gpus,
            high=None if high is None else high / finding.gpus,
        )
    like = sampled(wish.like, wish.effort.whole)
    scenario = msgspec.structs.replace(finding.candidate.scenario(like), rate_scale=scale)
    return Job(
        scenario=scenario,
        goal=wish.setting.goal,
        settings=_settings(finding.candidate),
        goodput_per_gpu=each,
    )


def _settings(candidate: Candidate) -> dict[str, results.Setting]:
    found: dict[str, results.Setting] = {"chunk": candidate.chunk_tokens}
    if candidate.routing:
        found["split"] = candidate.routing
    return found


def frontier(runs: Sequence[Run]) -> list[Run]:
    """Runs that no other beats in both goodput per GPU and attainment, from the most goodput."""

    def key(run: Run) -> tuple[float, float]:
        return run.goodput_rps / max(run.gpus, 1), run.slo_attainment or 0.0

    kept: list[Run] = []
    for run in sorted(runs, key=lambda run: (-key(run)[0], -key(run)[1], run.pools)):
        if not kept or key(run)[1] > key(kept[-1])[1]:
            kept.append(run)
    return kept
