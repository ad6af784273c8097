from __future__ import annotations

import statistics
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.published import published
from twofold.cost.accelerators import accelerator
from twofold.cost.errors import CostError, OutOfRange
from twofold.cost.linear import Pieces, floor_sum
from twofold.cost.models import model_shape
from twofold.cost.profile import DecodeRow, PrefillRow, Profile
from twofold.cost.readers import read_profile, read_splitwise
from twofold.cost.step import LinearStep, StepTime, work
from twofold.cost.step_profile import step_time
from twofold.cost.step_roofline import RooflineStep
from twofold.cost.step_table import TableStep

STEPS = "profiles/aiconfigurator_steps"
QWEN = f"{STEPS}/Qwen3-32B__h100_sxm__vllm__tp2.csv"
LLAMA = f"{STEPS}/Meta-Llama-3.1-70B__h100_sxm__vllm__tp4.csv"


def toy(*, cached: bool = True) -> Profile:
    """prefill 10 + 0.1 n + 1e-4 pairs; decode a ragged table with a dip."""
    prefill = [
        PrefillRow(new_tokens=n, ms=10 + 0.1 * n + 5e-5 * n * n) for n in (16, 64, 256, 1024)
    ]
    if cached:
        prefill += [
            PrefillRow(new_tokens=n, cached_tokens=c, ms=10 + 0.1 * n + 1e-4 * n * (n / 2 + c))
            for n in (64, 1024)
            for c in (512, 4096)
        ]
    decode = [
        DecodeRow(batch=b, context_tokens=c, ms=5 + 0.2 * b + b * c * 1e-4 - (b == 4) * 0.3)
        for b in (1, 4, 16)
        for c in (64, 256, 2048)
        if not (b == 16 and c == 2048)
    ]
    return Profile(
        model="toy", accelerator="x", engine="e", tp=1, measured=True,
        prefill=tuple(prefill), decode=tuple(decode),
    )  # fmt: skip


def models() -> dict[str, StepTime]:
    return {
        "table": TableStep(toy(), extrapolate=True),
        "linear": LinearStep(1_000_003, 17.3, 1234.5, 0.7131),
        "roofline": RooflineStep(model_shape("Llama-3.1-8B"), accelerator("h100")),
        "window": RooflineStep(model_shape("gpt-oss-120b"), accelerator("h100"), tp=2),
        "mla": RooflineStep(model_shape("DeepSeek-V3"), accelerator("h200"), tp=8),
    }


MODELS = models()


@given(st.integers(0, 60), st.integers(1, 300), st.integers(-900, 900), st.integers(-900, 900))
def test_floor_sum(n: int, m: int, a: int, b: int) -> None:
    assert floor_sum(n, m, a, b) == sum((a * i + b) // m for i in range(n))


@given(
    st.lists(
        st.tuples(st.integers(0, 5000), st.floats(-100, 1e7)),
        min_size=1, max_size=6, unique_by=lambda p: p[0],
    ),
    st.integers(0, 6000), st.integers(1, 700), st.integers(0, 60),
)  # fmt: skip
def test_a_run_is_the_sum_of_its_values(
    knots: list[tuple[int, float]], x: int, step: int, n: int
) -> None:
    knots.sort()
    pieces = Pieces([x for x, _ in knots], [y for _, y in knots])
    assert pieces.run(x, step, n) == sum(pieces.at(x + step * i) for i in range(n))


def test_pieces_round_to_the_nearest_and_change_over_at_the_knot() -> None:
    assert [Pieces((0,), (y,)).at(0) for y in (1.25, 1.75)] == [1, 2]
    long = Pieces((0, 3_000_000), (0.0, 1_000_000.0))
    assert long.at(3_000_000) == 1_000_000
    assert long.run(2_999_998, 1, 3) == sum(long.at(x) for x in range(2_999_998, 3_000_001))
    assert long.run(2_000_000, 1_000_000, 2) == long.at(2_000_000) + 1_000_000


@pytest.mark.parametrize("name", sorted(MODELS))
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_decode_runs_are_exact_sums(name: str, data: st.DataObject) -> None:
    step = MODELS[name]
    batch = data.draw(st.integers(1, 16))
    context = batch * data.draw(st.integers(1, 3000)) + data.draw(st.integers(0, batch - 1))
    k = data.draw(st.integers(0, 300))
    singles = [step.step_ns((), batch, context + i * batch) for i in range(k)]
    assert step.decode_run_ns(batch, context, k) == sum(singles)
    exactly = st.integers(0, k).map(lambda n: sum(singles[:n]))
    budget = data.draw(st.integers(0, 2 * sum(singles) + 10) | exactly)
    most = data.draw(st.integers(0, 300))
    fits, ns = step.decode_steps_within(batch, context, budget, most)
    assert ns == step.decode_run_ns(batch, context, fits) <= budget
    assert fits == most or step.decode_run_ns(batch, context, fits + 1) > budget


def test_runs_on_published_profiles_are_exact_sums() -> None:
    found = [
        step_time(read_profile(published(QWEN))),
        step_time(read_profile(published("profiles/dynamo_h200_llama31_8b_fp8"))),
        step_time(
            read_profile(published("profiles/distserve/profiler-a100-80g.vllm.json"), "opt-66b:4")
        ),
        step_time(
            read_profile(published("profiles/splitwise_perf_model.csv"), "bloom-176b:h100-80gb:8")
        ),
    ]
    for step in found:
        for batch, context, k in ((1, 400, 700), (7, 7 * 900 + 3, 500), (60, 60 * 500, 90)):
            assert step.decode_run_ns(batch, context, k) == sum(
                step.step_ns((), batch, context + i * batch) for i in range(k)
            )


def test_table_is_exact_at_its_rows() -> None:
    profile = toy()
    step = TableStep(profile)
    for row in profile.prefill:
        ns = step.step_ns([(row.new_tokens, row.cached_tokens)], 0, 0)
        assert ns == pytest.approx(row.ms * 1e6, abs=1)
    for each in profile.decode:
        assert each.context_tokens is not None
        ns = step.step_ns((), each.batch, each.batch * each.context_tokens)
        assert ns == pytest.approx(each.ms * 1e6, abs=1)
    # Between rows: linear in context at a batch, and in batch at a context.
    assert step.step_ns((), 1, 160) == pytest.approx((5.2 + 160e-4) * 1e6, abs=2)
    assert step.step_ns((), 10, 640) == pytest.approx((5 + 2 - 0.15 + 640e-4) * 1e6, abs=2)


@given(st.integers(1, 2047), st.sampled_from([1, 2, 3, 4]))
def test_decode_is_monotone_and_continuous_where_the_rows_are(each: int, batch: int) -> None:
    step = TableStep(toy())
    a, b = (step.step_ns((), batch, batch * e) for e in (each, each + 1))
    assert a <= b <= a + batch * 100 + 2


@given(st.integers(1, 1023), st.integers(0, 4095))
def test_prefill_is_monotone_and_continuous_where_the_rows_are(new: int, before: int) -> None:
    step = TableStep(toy())
    here = step.step_ns([(new, before)], 0, 0)
    longer, later = step.step_ns([(new + 1, before)], 0, 0), step.step_ns([(new, before + 1)], 0, 0)
    assert here <= later <= here + 200 * new
    assert here - 1 <= longer <= here + 2_000_000


def test_prefill_composes_from_tokens_and_pairs() -> None:
    """The toy's law is exactly what the composition assumes, so it must be recovered."""

    def law(parts: list[tuple[int, int]]) -> float:
        new, pairs = work(parts)
        return 1e6 * (10 + 0.1 * new + 1e-4 * pairs)

    step = TableStep(toy())
    for parts in ([(512, 512), (512, 0)], [(256, 0)] * 4, [(64, 4096)] * 3, [(1024, 2000)]):
        assert step.step_ns(parts, 0, 0) == pytest.approx(law(parts), rel=0.01)
    # Without cached rows the price comes from the curvature, and reaches as far as the prompts.
    bare = TableStep(toy(cached=False))
    assert bare.step_ns([(256, 700)], 0, 0) == pytest.approx(law([(256, 700)]), rel=0.01)
    with pytest.raises(OutOfRange, match="256 tokens after 4000"):
        bare.step_ns([(256, 4000)], 0, 0)


def test_chunks_cost_more_than_the_whole_by_what_they_repeat() -> None:
    step = TableStep(toy())
    chunks = sum(step.step_ns([(256, before)], 0, 0) for before in range(0, 1024, 256))
    whole = step.step_ns([(1024, 0)], 0, 0)
    assert chunks - whole == pytest.approx(3 * 10e6, rel=0.05)


def test_mixed_steps_pay_the_base_once() -> None:
    step = TableStep(toy())
    prefill, decode = step.step_ns([(256, 0)], 0, 0), step.step_ns((), 4, 4 * 256)
    mixed = step.step_ns([(256, 0)], 4, 4 * 256)
    assert max(prefill, decode) < mixed < prefill + decode
    assert mixed == pytest.approx(prefill + 4 * 0.1e6 + 4 * 256 * 100, rel=0.01)
    assert step.step_ns((), 0, 0) == 0


def test_outside_the_table_is_refused_unless_told() -> None:
    step, told = TableStep(toy()), TableStep(toy(), extrapolate=True)
    for prefill, batch, context, says in (
        ((), 17, 17 * 64, "batch of 17 .* 1 to 16"),
        ((), 4, 4 * 2049, "4 sequences with 2049 .* ends at 2048"),
        ((), 16, 16 * 2048, "ends at 256"),
        ([(1025, 0)], 0, 0, "1025 tokens"),
        ([(64, 4097)], 0, 0, "64 tokens after 4097"),
    ):
        with pytest.raises(OutOfRange, match=says):
            step.step_ns(prefill, batch, context)
        assert told.step_ns(prefill, batch, context) > 0
    with pytest.raises(OutOfRange):
        step.decode_run_ns(4, 4 * 2000, 50)
    assert step.decode_run_ns(4, 4 * 2000, 49) > 0
    assert step.decode_steps_within(4, 4 * 2000, 10**12, 500)[0] == 49
    bare = TableStep(Profile(model="m", accelerator="a", engine="e", tp=1, measured=True))
    with pytest.raises(CostError, match="has no decode rows"):
        bare.step_ns((), 1, 1)
    with pytest.raises(CostError, match="has no prefill rows"):
        bare.step_ns([(1, 0)], 0, 0)


def test_one_prompt_and_decode_rows_are_exact_and_the_rest_close() -> None:
    profile = read_profile(published(LLAMA))
    step = step_time(profile)
    batches, mixed = [], []
    for row in profile.prefill:
        parts = [(row.new_tokens, row.cached_tokens)] * row.batch
        ns = step.step_ns(parts, 0, 0)
        if row.batch == 1:
            assert ns == pytest.approx(row.ms * 1e6, abs=1)
        elif row.batch * row.new_tokens <= 16384:
            batches.append(abs(ns / row.ms / 1e6 - 1))
    for each in profile.decode:
        context = each.batch * (each.context_tokens or 0)
        assert step.step_ns((), each.batch, context) == pytest.approx(each.ms * 1e6, abs=1)
    for m in profile.mixed:
        whole, rest = divmod(m.chunk_tokens, m.prompt_tokens)
        parts = [(m.prompt_tokens, 0)] * whole + ([(rest, 0)] if rest else [])
        mixed.append(step.step_ns(parts, m.batch, m.batch * m.context_tokens) / m.ms / 1e6 - 1)
    assert statistics.mean(batches) < 0.03
    assert statistics.mean(abs(e) for e in mixed) < 0.05


def test_distserve_formula() -> None:
    path = published("profiles/distserve/profiler-a100-80g.distserve.json")
    step = step_time(read_profile(path, "opt-13b:1"))
    assert not step.estimate
    prefill = (
        18.10254647486372 + 0.1019122572698738 * 768 + 7.122264314252114e-6 * (512**2 + 256**2)
    )
    assert step.step_ns([(512, 0), (256, 0)], 0, 0) == round(prefill * 1e6)
    small = 19.934702624895458 + 0.0006269356524350583 * 9000 + 0.03850697740828398 * 94
    assert step.step_ns((), 94, 9000) == pytest.approx(small * 1e6, abs=1)
    large = 7.1661889468253595 + 0.0005798000403396046 * 9000 + 0.15831096191764046 * 95
    assert step.step_ns((), 95, 9000) == pytest.approx(large * 1e6, abs=1)
    # A mixed step pays the larger constant once.
    mixed = 19.934702624895458 + 0.1019122572698738 * 512 + 7.122264314252114e-6 * 512**2
    mixed += 0.0006269356524350583 * 9000 + 0.03850697740828398 * 30
    assert step.step_ns([(512, 0)], 30, 9000) == round(mixed * 1e6)
    # Two chunks meet the pairs of the whole and pay the constant twice.
    chunks = step.step_ns([(256, 0)], 0, 0) + step.step_ns([(256, 256)], 0, 0)
    assert chunks - step.step_ns([(512, 0)], 0, 0) == pytest.approx(18_102_546, abs=3)


def test_a_falling_fit_is_not_followed() -> None:
    path = published("profiles/distserve/profiler-a100-80g.vllm.json")
    step = step_time(read_profile(path, "opt-66b:2"))
    with pytest.raises(OutOfRange, match="above the 26892"):
        step.step_ns([(26893, 0)], 0, 0)
    assert step.step_ns([(26892, 0)], 0, 0) > step.step_ns([(26000, 0)], 0, 0)


def test_splitwise_meets_its_paper_and_its_simulator() -> None:
    path = published("profiles/splitwise_perf_model.csv")
    for hardware, paper in (("a100-80gb", (93, 155, 274, 661)), ("h100-80gb", (54, 78, 137, 390))):
        step = step_time(read_splitwise(path, f"llama2-70b:{hardware}:8"))
        ms = [step.step_ns([(n, 0)], 0, 0) / 1e6 for n in (512, 1024, 2048, 4096)]
        assert ms == pytest.approx(paper, rel=0.015)
        assert step.step_ns([(500, 0)], 12, 99) == pytest.approx(
            1.1 * step.step_ns([(512, 0)], 0, 0), abs=2
        )
    assert step.step_ns((), 1, 700) / 1e6 == pytest.approx(30.5, abs=0.1)
    assert step.step_ns((), 64, 1) > step.step_ns((), 1, 10**6) > 0
    theirs = step_time(read_splitwise(path, "llama2-70b:h100-80gb:8", as_published=True))
    # Their lookup reads the number of sequences as tokens: more sequences, no more time.
    assert theirs.step_ns((), 64, 1) < theirs.step_ns((), 1, 1)


def test_roofline_says_that_it_estimates_and_is_near() -> None:
    profile = read_profile(published(QWEN))
    step = RooflineStep(model_shape("Qwen3-32B"), accelerator("h100"), tp=2)
    assert step.estimate
    assert "estimate" in step.name
    decode = [
        step.step_ns((), r.batch, r.batch * (r.context_tokens or 0)) / r.ms / 1e6 - 1
        for r in profile.decode
    ]
    assert statistics.mean(abs(e) for e in decode) < 0.10
    prefill = [
        step.step_ns([(r.new_tokens, r.cached_tokens)] * r.batch, 0, 0) / r.ms / 1e6 - 1
        for r in profile.prefill
    ]
    assert statistics.mean(abs(e) for e in prefill) < 0.20
    with pytest.raises(CostError, match="more accelerators"):
        RooflineStep(model_shape("Llama-3.1-70B"), accelerator("h100"))


def test_roofline_windows_bound_attention() -> None:
    step = MODELS["window"]
    near, far = (step.step_ns((), 4, 4 * c) for c in (128, 256))
    farther = step.step_ns((), 4, 4 * 384)
    assert far - near == pytest.approx(farther - far, abs=2)
    assert step.step_ns((), 4, 4 * 128) - step.step_ns((), 4, 4 * 64) > (far - near) * 0.9
    whole = step.step_ns([(4096, 0)], 0, 0)
    assert step.step_ns([(4096, 0)], 8, 8 * 1000) > whole


def test_every_profile_file_with_a_reader_reads() -> None:
    root = published("profiles")
    tables = sorted((root / "aiconfigurator_steps").glob("*.csv"))
    assert len(tables) == 36
    for path in tables:
        profile = read_profile(path)
        rows = len(profile.prefill) + len(profile.decode) + len(profile.mixed)
        assert rows == 360
        assert profile.tp == int(path.stem.split("__tp")[1].split("_")[0])
    for name in ("distserve", "vllm"):
        path = root / "distserve" / f"profiler-a100-80g.{name}.json"
        for select in (
            "opt-13b:1",
            "opt-13b:2",
            "opt-13b:4",
            *(f"opt-66b:{t}" for t in (2, 3, 4, 8)),
        ):
            assert read_profile(path, select).formula is not None
    dynamo = read_profile(root / "dynamo_h200_llama31_8b_fp8" / "decode.csv")
    assert (len(dynamo.prefill), len(dynamo.decode), dynamo.max_kv_tokens) == (17, 41, 945029)
    with pytest.raises(CostError, match="one must be chosen: llama2-70b:a100-80gb:2"):
        read_profile(root / "splitwise_perf_model.csv")
    with pytest.raises(CostError, match="'h100-80gb' fits 4"):
        read_profile(root / "splitwise_perf_model.csv", "h100-80gb")


def test_readers_name_file_line_and_column(tmp_path: Path) -> None:
    head = "kind,batch,new_tokens_per_seq,cached_prefix,ctx_len,chunk_tokens,latency_ms\n"
    path = tmp_path / "m__h100__vllm__tp1.csv"
    for row, says in (
        ("prefill,1,16,0,,,x\n", r":2:latency_ms: 'x' is not a number"),
        ("prefill,1,16.5,0,,,1\n", r":2:new_tokens_per_seq: 16.5 is not a whole"),
        ("other,1,16,0,,,1\n", r":2:kind: 'other'"),
        ("prefill,1,16,0,,,-1\n", r"prefill\[0\]: ms is -1.0"),
        ("prefill,1,16,0,,,1\nprefill,1,16,0,,,2\n", r"prefill\[1\]: the same point as row 0"),
        ("", "no prefill rows, decode rows or formula"),
    ):
        path.write_text(head + row)
        with pytest.raises(CostError, match=says):
            read_profile(path)
    path.write_text("a,b\n1,2\n")
    with pytest.raises(CostError, match="not a known profile"):
        read_profile(path)
    with pytest.raises(CostError, match="cannot read"):
        read_profile(tmp_path / "none.csv")
