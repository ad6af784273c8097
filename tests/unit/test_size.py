"""`twofold size`: the published arithmetic to the digit, what is shown, and what is refused."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from twofold.cli.main import main
from twofold.plan.facts import Facts
from twofold.plan.rules import RULES, judge
from twofold.plan.size import SizeInputs, find_model, needs, size

GIB = 1 << 30
QWEN = "--model Qwen3-32B "
FULL = QWEN + (
    "--prompt-tokens 4000 --prompt-p95-tokens 16000 --output-tokens 500 --rate 2 --tp 4 "
    "--link-gbits-per-s 400 --ms-per-token 12 --slots 64 --prefill-tokens-per-s 5000 "
    "--decode-tokens-per-s 800 --target-utilisation 0.8 --prepare-ms 14.7 --gpus 16 --nodes 2 "
    "--slo-ttft 2 --slo-tpot 0.03 --prefix-hit 0.5"
)
KEYS = {
    "kv_bytes_per_token", "kv_bytes", "transfer_ms", "decode_slots", "slot_utilisation",
    "loop_time_lost", "prefill_workers", "decode_workers", "verdicts",
}  # fmt: skip


def run(capsys: pytest.CaptureFixture[str], words: str) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of `twofold size`."""
    try:
        code = main(["size", *words.split()])
    except SystemExit as ended:
        code = int(ended.code or 0)
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def figures(capsys: pytest.CaptureFixture[str], words: str) -> dict[str, Any]:
    code, out, err = run(capsys, words + " --json -")
    assert (code, err) == (0, "")
    found = json.loads(out)
    assert isinstance(found, dict)
    return found


def holds(found: dict[str, Any]) -> dict[str, bool | None]:
    return {verdict["rule"]: verdict["holds"] for verdict in found["verdicts"]}


def test_qwen_is_256_kib_a_token_and_10_ms_over_8_cards(
    capsys: pytest.CaptureFixture[str],
) -> None:
    found = figures(capsys, QWEN + "--prompt-tokens 16000 --tp 8 --link-gbytes-per-s 50")
    assert found["kv_bytes_per_token"] == 256 * 1024
    assert found["kv_bytes"] == 4_194_304_000
    assert found["transfer_ms"] == pytest.approx(10.48576)
    assert found == figures(capsys, QWEN + "--prompt-tokens 16000 --tp 8 --link-gbits-per-s 400")


@pytest.mark.parametrize(
    ("model", "tokens", "per_token", "in_all"),
    [
        ("Llama-3.1-8B", 2048, 128 * 1024, GIB // 4),
        ("Llama-3.1-70B", 128 * 1024, 320 * 1024, 40 * GIB),
        ("OPT-66B", 512, 2304 * 1024, 1.125 * GIB),
        ("DeepSeek-V3", 1, 70_272, 70_272),
        ("Gemma-3-27B", 5000, 81_920, 845_807_616),
    ],
)
def test_kv_bytes(
    capsys: pytest.CaptureFixture[str], model: str, tokens: int, per_token: int, in_all: int
) -> None:
    found = figures(capsys, f"--model {model} --prompt-tokens {tokens}")
    assert (found["kv_bytes_per_token"], found["kv_bytes"]) == (per_token, in_all)


def test_opt_66b_at_10_requests_a_second_is_90_gigabits(capsys: pytest.CaptureFixture[str]) -> None:
    _, out, _ = run(capsys, "--model OPT-66B --prompt-tokens 512 --rate 10")
    assert "1.21 GB (1.13 GiB)" in out
    assert "12.1 GB/s" in out
    assert "96.6 Gbit/s (11.3 GiB/s = 90.0 Gibit/s)" in out


@pytest.mark.parametrize(("ms", "slots", "used"), [("7.0", 7.2, 0.9), ("10.4", 10.6, 1.33)])
def test_slots_by_littles_law(
    capsys: pytest.CaptureFixture[str], ms: str, slots: float, used: float
) -> None:
    words = QWEN + f"--rate 8 --output-tokens 128 --ms-per-token {ms} --slots 8"
    found = figures(capsys, words)
    assert round(found["decode_slots"], 1) == slots
    assert round(found["slot_utilisation"], 2) == used
    assert holds(found)["decode pool already full"] is True


def test_a_long_answer_holds_a_slot_16_times_as_long(capsys: pytest.CaptureFixture[str]) -> None:
    held = [
        figures(capsys, QWEN + f"--rate 8 --output-tokens {n} --ms-per-token 7")["decode_slots"]
        for n in (128, 2000)
    ]
    assert round(held[1] / held[0]) == 16


def test_loop_time_lost_is_12_percent(capsys: pytest.CaptureFixture[str]) -> None:
    found = figures(capsys, QWEN + "--rate 8 --prepare-ms 14.7")
    assert found["loop_time_lost"] == pytest.approx(0.1176)
    _, out, _ = run(capsys, QWEN + "--rate 8 --prepare-ms 14.7")
    assert re.search(r"decode loop lost +11\.8 % +8 req/s x 14\.7 ms", out)


def test_two_workers_of_each(capsys: pytest.CaptureFixture[str]) -> None:
    found = figures(
        capsys,
        QWEN + "--rate 2 --prompt-tokens 4000 --output-tokens 500 --prefill-tokens-per-s 5000 "
        "--decode-tokens-per-s 800",
    )
    assert (found["prefill_workers"], found["decode_workers"]) == (2, 2)
    found = figures(capsys, FULL.replace("--target-utilisation 0.8", "--target-utilisation 0.2"))
    assert (found["prefill_workers"], found["decode_workers"]) == (8, 7)


def test_a_latent_is_copied_and_scarce_heads_too(capsys: pytest.CaptureFixture[str]) -> None:
    link = " --prompt-tokens 1000 --link-gbytes-per-s 1 --tp "
    times = [
        figures(capsys, f"--model DeepSeek-V3{link}1")["transfer_ms"],
        json.loads(run(capsys, f"--model DeepSeek-V3{link}8 --json -")[1])["transfer_ms"],
    ]
    assert times == [pytest.approx(70.272)] * 2
    code, out, err = run(capsys, f"{QWEN}{link}16 --json -")
    assert code == 0
    assert json.loads(out)["transfer_ms"] == pytest.approx(262.144 / 8)
    assert err.startswith(
        "note: 8 KV heads over TP 16: heads are copied, so the transfer takes as "
    )


def test_the_model_alone_gives_nulls_and_says_which_flags(
    capsys: pytest.CaptureFixture[str],
) -> None:
    found = figures(capsys, QWEN)
    assert set(found) >= KEYS
    assert {found[key] for key in KEYS - {"kv_bytes_per_token", "verdicts"}} == {None}
    assert len(found["verdicts"]) == len(RULES)
    for verdict in found["verdicts"]:
        assert set(verdict) == {"rule", "holds", "because"}
        assert verdict["holds"] is None
        assert verdict["because"].startswith("needs --")
    _, out, _ = run(capsys, QWEN)
    assert re.search(r"transfer +- +needs --prompt-tokens and --link-gbytes-per-s", out)
    assert "No rule could be judged" in out


def test_giving_what_is_needed_judges_every_rule(capsys: pytest.CaptureFixture[str]) -> None:
    found = figures(capsys, FULL)
    assert None not in found.values()
    assert set(holds(found).values()) == {False}
    assert found["link_share"] == pytest.approx(2 * found["transfer_ms"] / 1e3)
    assert found["decode_kv_bytes"] == 12 * 4500 * found["kv_bytes_per_token"]
    because = {verdict["rule"]: verdict["because"] for verdict in found["verdicts"]}
    assert because["no latency goal"] == "asked for: TTFT 2,000 ms and TPOT 30.0 ms"
    _, out, _ = run(capsys, FULL)
    assert "needs --" not in out
    assert "No rule that could be judged speaks against a split." in out


@pytest.mark.parametrize(
    ("without", "rule", "because"),
    [
        ("--slots 64", "decode pool already full", "needs --slots"),
        ("--rate 2", "decode pool already full", "needs --rate"),
        ("--gpus 16", "too few GPUs for both pools", "needs --gpus"),
        ("--prefill-tokens-per-s 5000", "short prompts", "needs --prefill-tokens-per-s"),
        ("--ms-per-token 12", "strong prefix reuse", "needs --ms-per-token"),
        ("--link-gbits-per-s 400", "link too slow to hide the bytes", "needs --link-gbytes-per-s"),
        (
            "--decode-tokens-per-s 800",
            "decode must be chosen after prefill",
            "needs --decode-tokens-per-s",
        ),
    ],
)
def test_each_flag_left_out_is_asked_for(
    capsys: pytest.CaptureFixture[str], without: str, rule: str, because: str
) -> None:
    assert without in FULL
    found = figures(capsys, FULL.replace(without, ""))
    [verdict] = [verdict for verdict in found["verdicts"] if verdict["rule"] == rule]
    assert (verdict["holds"], verdict["because"]) == (None, because)


def test_alternatives_among_others_are_set_apart() -> None:
    inputs = SizeInputs(model=find_model("Qwen3-32B"), rate=1.0, prepare_ms=1.0)
    [stalls] = [v for v in size(inputs).verdicts if v.rule == "handoff preparation stalls decode"]
    assert stalls.because == "needs --ms-per-token and (--slots or --slo-tpot)"


def test_every_fact_that_a_rule_can_miss_has_a_flag() -> None:
    inputs = SizeInputs(model=find_model("Qwen3-32B"))
    for rule in judge(Facts()):
        assert needs(inputs, rule.missing).startswith("needs --")


def test_the_table_shows_the_arithmetic_and_the_rules_that_hold_first(
    capsys: pytest.CaptureFixture[str],
) -> None:
    code, out, err = run(
        capsys,
        QWEN + "--prompt-tokens 16000 --output-tokens 128 --rate 8 --tp 8 --link-gbytes-per-s 50 "
        "--ms-per-token 7 --slots 8 --prepare-ms 14.7 --no-slo",
    )
    assert (code, err) == (0, "")
    for text in (
        "2 x 64 layers x 8 KV heads x 128 x 2 B = 262,144 B",
        "16,000 tokens x 262,144 B = 4,194,304,000 B",
        "524 MB a card / 50.0 GB/s (400 Gbit/s)",
        "8 req/s x 128 tokens x 7 ms",
        "7.17 / 8 slots; 80 % or less takes 9 slots",
        "Against a split: no latency goal and decode pool already full.",
        "Against pull that prepares on decode's loop: handoff preparation stalls decode.",
    ):
        assert text in " ".join(out.split()), text
    assert max(len(line) for line in out.splitlines()) <= 100
    marks = re.findall(r"^(yes|no|\?) ", out, re.MULTILINE)
    assert marks == sorted(marks, key=["yes", "no", "?"].index)
    assert (marks.count("yes"), len(marks)) == (3, len(RULES))


@pytest.mark.parametrize("model", ["Gemma-3-27B", "DeepSeek-V3", "OPT-175B"])
def test_every_kind_of_table_fits(capsys: pytest.CaptureFixture[str], model: str) -> None:
    words = FULL.replace("Qwen3-32B", model).replace("--rate 2", "--rate 123456.789")
    code, out, _ = run(capsys, words.replace("--link-gbits-per-s 400", "--link-gbits-per-s 0.3"))
    assert code == 0
    assert max(len(line) for line in out.splitlines()) <= 100


def test_kv_dtype_halves_the_bytes(capsys: pytest.CaptureFixture[str]) -> None:
    found = figures(capsys, QWEN + "--kv-dtype fp8 --prompt-tokens 10")
    assert found["kv_bytes_per_token"] == 128 * 1024
    assert found["kv_bytes"] == 10 * 128 * 1024
    assert "8 KV heads x 128 x 1 B" in run(capsys, QWEN + "--kv-dtype fp8")[1]


def test_gigabytes_that_look_like_gigabits_are_noted(capsys: pytest.CaptureFixture[str]) -> None:
    _, out, _ = run(capsys, QWEN + "--link-gbytes-per-s 400")
    assert "400 GB/s a card is 3,200 Gbit/s" in out
    assert "--link-gbits-per-s 400" in " ".join(out.split())
    assert "note" not in run(capsys, QWEN + "--link-gbits-per-s 400")[1]


def test_more_tokens_than_positions_are_noted(capsys: pytest.CaptureFixture[str]) -> None:
    words = "--model OPT-66B --prompt-tokens 2000 --output-tokens 49"
    assert "prompt and output are 2,049 tokens, and OPT-66B has 2,048 positions" in " ".join(
        run(capsys, words)[1].split()
    )
    assert "positions" not in run(capsys, words.replace("49", "48"))[1]
    words = "--model OPT-66B --prompt-tokens 9 --prompt-p95-tokens 2049"
    assert "are 2,049 tokens" in run(capsys, words)[1]


def test_windows_are_shown_apart(capsys: pytest.CaptureFixture[str]) -> None:
    out = " ".join(run(capsys, "--model Gemma-3-27B --prompt-tokens 5000")[1].split())
    assert "2 x 10 layers x 16 KV heads x 128 x 2 B = 81,920 B" in out
    assert "52 layers more up to 1,024 tokens" in out
    assert "5,000 tokens x 81,920 B + 436,207,616 B in windows = 845,807,616 B" in out


def test_json_goes_to_a_file_beside_the_table(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    target = tmp_path / "size.json"
    code, out, _ = run(capsys, f"{FULL} --json {target}")
    assert code == 0
    assert out.startswith("Qwen3-32B, KV cache in bf16, TP 4\n")
    assert json.loads(target.read_text()) == figures(capsys, FULL)


def test_a_folder_is_a_model(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    config: dict[str, Any] = {
        "model_type": "llama", "num_hidden_layers": 4, "hidden_size": 64, "vocab_size": 100,
        "num_attention_heads": 8, "num_key_value_heads": 2, "intermediate_size": 128,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert figures(capsys, f"--model {tmp_path}")["kv_bytes_per_token"] == 4 * 2 * 2 * 8 * 2
    for changes, says in (
        ({"num_key_value_heads": 0}, ": a cache needs KV heads and a head size above 0"),
        (
            {"num_hidden_layers": None},
            "/config.json:num_hidden_layers: missing; a decoder's config",
        ),
        ({"hidden_size": None, "text_config": "x"}, "/config.json:hidden_size: missing; a decoder"),
    ):
        (tmp_path / "config.json").write_text(json.dumps(config | changes))
        code, out, err = run(capsys, f"--model {tmp_path}")
        assert (code, out, err.count("\n")) == (2, "", 1)
        assert f"twofold size: --model {tmp_path}{says}" in err


NUMBER = "must be a number from 1e-9 to 1,000,000,000"
WHOLE = "must be a whole number from 1 to 1,000,000,000"


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("", "the following arguments are required: --model"),
        ("--model Qwen3-23B", "Qwen3-23B: not a known model or a folder; did you mean Qwen3-32B, "),
        ("--model org/llama-3-70b", "did you mean Llama-3.1-70B"),
        ("--model zzz", "--model zzz: not a known model or a folder; known are BLOOM-176B, "),
        ("--model " + "a" * 5000, ": cannot read: file name too long"),
        (QWEN + "--rate -1", f"--rate -1: {NUMBER}"),
        (QWEN + "--rate 0", f"--rate 0: {NUMBER}"),
        (QWEN + "--rate nan", f"--rate nan: {NUMBER}"),
        (QWEN + "--rate inf", f"--rate inf: {NUMBER}"),
        (QWEN + "--link-gbytes-per-s 1e-300", f"--link-gbytes-per-s 1e-300: {NUMBER}"),
        (QWEN + "--ms-per-token fast", f"--ms-per-token fast: {NUMBER}"),
        (QWEN + "--tp 0", f"--tp 0: {WHOLE}"),
        (QWEN + "--slots 8.5", f"--slots 8.5: {WHOLE}"),
        (QWEN + "--prompt-tokens 16k", f"--prompt-tokens 16k: {WHOLE}"),
        (QWEN + "--target-utilisation 0", "--target-utilisation 0: must be above 0 and at most 1"),
        (QWEN + "--target-utilisation 1.01", "--target-utilisation 1.01: must be above 0 and at"),
        (QWEN + "--prefix-hit 90", "--prefix-hit 90: must be from 0 to 1"),
        (QWEN + "--prepare-ms -3", f"--prepare-ms -3: must be 0 or {NUMBER[8:]}"),
        (QWEN + "--prepare-ms inf", f"--prepare-ms inf: must be 0 or {NUMBER[8:]}"),
        (QWEN + "--link-gbytes-per-s 50 --link-gbits-per-s 400", "give one; 8 gigabits are 1"),
        (QWEN + "--gpus 4 --tp 8", "--gpus 4: fewer than the 8 of one worker (--tp)"),
        (QWEN + "--gpus 4 --nodes 5", "--nodes 5: more than the 4 GPUs (--gpus)"),
        (QWEN + "--no-slo --slo-tpot 1", "--no-slo: contradicts --slo-ttft and --slo-tpot"),
        (QWEN + "--prompt-tokens 9 --prompt-p95-tokens 8", "p95-tokens 8: below --prompt-tokens 9"),
        (QWEN + "--kv-dtype int3", "--kv-dtype: invalid choice: 'int3'"),
        (QWEN + "--link-gbits 3", "unknown argument; did you mean --link-gbits-per-s?"),
    ],
)  # fmt: skip
def test_bad_input_is_one_line_and_exit_code_2(
    capsys: pytest.CaptureFixture[str], words: str, says: str
) -> None:
    code, out, err = run(capsys, words)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert err.startswith("twofold size: ")
    assert says in err


def test_a_folder_without_a_model_is_refused(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert run(capsys, f"--model {tmp_path}") == (
        2,
        "",
        f"twofold size: --model {tmp_path}: holds no config.json, so it is not a model\n",
    )


def test_the_largest_and_smallest_values_stay_finite(capsys: pytest.CaptureFixture[str]) -> None:
    most, least = "1000000000", "0.000000001"
    for link, rate in ((least, most), (most, least)):
        words = re.sub(r" (?!0\.8)[\d.]+(?= |$)", f" {most}", FULL.replace("Qwen3-32B", "OPT-175B"))
        words = words.replace("--prefix-hit 1000000000", "--prefix-hit 0.5")
        words = re.sub(r"(--link-gbits-per-s) \S+", rf"\1 {link}", words)
        words = re.sub(r"(--rate) \S+", rf"\1 {rate}", words)
        code, out, _ = run(capsys, words + " --json -")
        assert code == 0
        assert None not in json.loads(out).values()
        code, out, _ = run(capsys, words)
        assert code == 0
        assert max(len(line) for line in out.splitlines()) <= 100
