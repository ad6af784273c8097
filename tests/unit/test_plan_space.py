"""Which set-ups there are: pools in words, the placement space, and sweeps."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.unit.plan_support import scenario, write_profile, write_requests
from twofold.plan.hardware import Hardware, Machine, read_machine
from twofold.plan.placement import MOST_RATIOS, Space, between, enumerate_space, first_of
from twofold.plan.runner import SetupError
from twofold.plan.scenario import Scenario, config_sha256
from twofold.plan.sweep import Axes, combinations, rates
from twofold.sim.pools import PoolsError, parse_pools, plan_pools, pools_name
from twofold.trace import TraceRequest


def machines(folder: Path, *tps: int, accelerator: str = "h100") -> list[Machine]:
    return [
        read_machine(Hardware(profile=str(write_profile(folder, tp, accelerator=accelerator))))
        for tp in tps
    ]


def names(space: Space) -> list[str]:
    return [pools_name(candidate.pools) for candidate in space.splits]


# ---------------------------------------------------------------------------------------- pools


@pytest.mark.parametrize(
    ("spec", "name"),
    [
        ("2P1D", "2P1D"),
        ("3m", "3M"),
        ("0P0D2M", "2M"),
        ("2P:h100,2D:H200", "2P:h100,2D:h200"),
        ("1P:tp4, 4D:tp1", "1P:tp4,4D:tp1"),
        ("2P:h100:tp2,1D,1M", "2P:h100:tp2,1D,1M"),
    ],
)
def test_pools_are_read_and_named_alike(spec: str, name: str) -> None:
    assert pools_name(parse_pools(spec)) == name
    assert parse_pools(name) == parse_pools(spec)


@pytest.mark.parametrize(
    ("spec", "problem"),
    [
        ("", "counts of P, D and M are right"),
        ("2X", "counts of P, D and M are right"),
        ("0M", "no workers"),
        ("2P", "prefill and decode workers need each other"),
        ("1P:tp0,1D", "tp is 1 or more"),
        ("1P:a:b,1D", "not COUNT, role and what it runs on"),
        ("999999M", "more than 100,000 workers"),
    ],
)
def test_pools_that_are_none_are_one_line(spec: str, problem: str) -> None:
    with pytest.raises(PoolsError, match=problem) as error:
        parse_pools(spec)
    assert "\n" not in str(error.value)


def test_pools_that_are_all_alike_name_no_hardware() -> None:
    with pytest.raises(PoolsError, match="leave out what follows"):
        plan_pools(
            "1P:h100,1D", {}, read_machine(Hardware(model="Qwen3-8B", accelerator="h100")).step
        )


# ---------------------------------------------------------------------------------------- space


def test_all_ratios_of_one_degree(tmp_path: Path) -> None:
    space = enumerate_space(machines(tmp_path, 1), 4, chunks=(512, 2048))
    assert names(space) == ["1P3D", "2P2D", "3P1D"]
    assert [(c.chunk_tokens, c.routing) for c in space.unsplit] == [
        (512, "always"),
        (2048, "always"),
        (512, "projected"),
        (2048, "projected"),
    ]
    assert len({c.family for c in (space.splits[0], *space.unsplit)}) == 3
    assert "two ways to route" in space.words
    assert pools_name(space.unsplit[0].pools) == "4M"
    assert "3 splits of 4 GPUs" in space.words
    assert "no pipeline parallelism" in space.words


def test_each_phase_has_its_own_degree(tmp_path: Path) -> None:
    space = enumerate_space(machines(tmp_path, 1, 2), 4)
    assert {"1P:tp2,2D:tp1", "2P:tp1,1D:tp2", "1P:tp2,1D:tp2", "2P:tp1,2D:tp1"} <= set(names(space))
    for candidate in space.splits:
        used = sum(p.count * h.tp for p, h in zip(candidate.pools, candidate.hardware, strict=True))
        assert used in (3, 4), "more GPUs than there are, or some left that would be a worker"
    assert len(names(space)) == len(set(names(space)))
    assert {pools_name(c.pools) for c in space.unsplit} == {"4M:tp1", "2M:tp2"}


def test_no_ratio_leaves_gpus_that_would_be_a_worker(tmp_path: Path) -> None:
    found = names(enumerate_space(machines(tmp_path, 1, 2), 5))
    assert "3P:tp1,1D:tp2" in found
    assert "2P:tp1,1D:tp2" not in found


def test_one_gpu_has_no_split_and_none_is_an_error(tmp_path: Path) -> None:
    alone = enumerate_space(machines(tmp_path, 1), 1, chunks=(512,))
    assert alone.splits == ()
    assert len(alone.unsplit) == 1, "one worker leaves nothing to route"
    with pytest.raises(SetupError, match=r"^--gpus 1: fewer than one worker takes \(2\)$"):
        enumerate_space(machines(tmp_path, 2), 1)


def test_equal_cost_and_power_trade_accelerators(tmp_path: Path) -> None:
    both = [*machines(tmp_path, 1), *machines(tmp_path, 1, accelerator="a100")]
    assert "4M:a100" in {pools_name(c.pools) for c in enumerate_space(both, 4).unsplit}
    cost = enumerate_space(both, 4, equal="cost")
    # 4 x 4.76 USD an hour buy 8 x 2.21; 4 x 700 W feed 7 x 400 W.
    assert {pools_name(c.pools) for c in cost.unsplit} == {"4M:h100", "8M:a100"}
    assert "1P:h100,6D:a100" in names(cost)
    power = enumerate_space(both, 4, equal="power")
    assert {pools_name(c.pools) for c in power.unsplit} == {"4M:h100", "7M:a100"}


def test_a_price_that_is_not_known_is_asked_for(tmp_path: Path) -> None:
    with pytest.raises(SetupError, match="the price of h200 is not known; --usd-per-hour gives"):
        enumerate_space(machines(tmp_path, 1, accelerator="h200"), 4, equal="cost")


def test_long_families_are_closed_in_on(tmp_path: Path) -> None:
    family = enumerate_space(machines(tmp_path, 1), 64).splits
    assert len(family) == 63
    first = [c.place for c in first_of(family)]
    assert len(first) == MOST_RATIOS
    assert (first[0], first[-1]) == (0, 62)
    tried, best = list(first), 21
    while wave := [c.place for c in between(family, sorted(tried), best)]:
        tried += wave
        best = min(tried, key=lambda place: abs(place - 17))
    assert 17 in tried
    assert len(tried) < 20


# ---------------------------------------------------------------------------------------- sweep


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("2", (2.0,)),
        ("1:3:1", (1.0, 2.0, 3.0)),
        ("0.1:0.5:0.1", (0.1, 0.2, 0.3, 0.4, 0.5)),
        ("1:2:0.6", (1.0, 1.6)),
        ("2:2:1", (2.0,)),
    ],
)
def test_rates(text: str, found: tuple[float, ...]) -> None:
    assert rates(text) == found


@pytest.mark.parametrize("text", ["", "x", "0", "-1", "1:2", "3:1:1", "1:2:0", "inf", "1:9e9:1e-9"])
def test_rates_that_are_none(text: str) -> None:
    with pytest.raises(ValueError, match=r"right|steps"):
        rates(text)


@pytest.fixture
def like(tmp_path: Path) -> Scenario:
    trace = write_requests(tmp_path, [TraceRequest(0, 10, 2)])
    return scenario(trace, write_profile(tmp_path), "1M")


def test_a_sweep_is_every_combination_rates_last(like: Scenario, tmp_path: Path) -> None:
    axes = Axes(
        pools=(parse_pools("1P1D"), parse_pools("2M")), rate_scales=(1.0, 2.0), chunks=(512, 1024)
    )
    found = combinations(like, axes, machines(tmp_path, 1))
    assert [scenario.name for scenario in found][:3] == [
        "1P1D chunk 512 at 1x",
        "1P1D chunk 512 at 2x",
        "1P1D chunk 1024 at 1x",
    ]
    assert len(found) == 8


def test_pools_take_the_profile_that_they_name(like: Scenario, tmp_path: Path) -> None:
    known = [*machines(tmp_path, 1, 2), *machines(tmp_path, 1, accelerator="h200")]
    (found,) = combinations(like, Axes(pools=(parse_pools("1P:tp2,2D:h200"),)), known)
    assert [Path(h.profile).name for h in found.hardware] == ["h100-tp2.json", "h200-tp1.json"]
    assert found.gpus == 4
    every = combinations(like, Axes(pools=(parse_pools("2M"),)), known)
    assert [pools_name(s.pools) for s in every] == ["2M:h100:tp1", "2M:h100:tp2", "2M:h200:tp1"]
    for spec, problem in (("2M:l40s", "fits no profile"), ("2M:h100", "fits several profiles")):
        with pytest.raises(SetupError, match=f"--pools {spec}: {problem}; there are h100:tp1"):
            combinations(like, Axes(pools=(parse_pools(spec),)), known)


def test_estimates_are_made_for_whatever_a_pool_names(like: Scenario) -> None:
    one = read_machine(Hardware(model="Qwen3-8B", accelerator="h100"))
    (found,) = combinations(like, Axes(pools=(parse_pools("1P:h200:tp2,1D"),)), [one])
    assert [(h.accelerator, h.tp) for h in found.hardware] == [("h200", 2), ("h100", 1)]


def test_the_hash_of_a_configuration_knows_settings_and_no_paths(
    like: Scenario, tmp_path: Path
) -> None:
    other = tmp_path / "elsewhere"
    other.mkdir()
    moved = scenario(write_requests(other, [TraceRequest(0, 10, 2)]), write_profile(other), "1M")
    assert config_sha256([like]) == config_sha256([moved])
    changed = scenario(Path(like.workload.trace), write_profile(tmp_path), "2M")
    assert config_sha256([like]) != config_sha256([changed]) != config_sha256([like], more=1)
