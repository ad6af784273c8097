from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.unit.published import published
from twofold.cost.accelerators import accelerator, known_accelerators
from twofold.cost.errors import CostError
from twofold.cost.models import fits_tokens, known_models, model_shape, read_hf_config
from twofold.cost.profile import (
    DecodeRow,
    PrefillRow,
    Profile,
    load_profile,
    parse_profile,
    save_profile,
)
from twofold.cost.sizing import chunk_reads, decode_slots, loop_time_lost, transfer_ms, workers

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30


def test_kv_arithmetic_to_the_digit() -> None:
    qwen = model_shape("Qwen3-32B")
    assert qwen.kv_bytes_per_token() == 256 * KIB
    assert qwen.kv_bytes(16_000) == 4_194_304_000
    assert transfer_ms(qwen.kv_bytes(16_000), 50e9, cards=8) == pytest.approx(10.5, abs=0.02)
    llama = model_shape("Llama-3.1-8B")
    assert llama.kv_bytes_per_token() == 128 * KIB
    assert llama.kv_bytes(2048) == 256 * MIB
    big = model_shape("Llama-3.1-70B")
    assert big.kv_bytes_per_token() == 320 * KIB
    assert big.kv_bytes(128 * 1024) == 40 * GIB
    opt = model_shape("OPT-66B")
    assert opt.kv_bytes(512) / GIB == pytest.approx(1.13, abs=0.01)
    # The paper's 11.3 GB/s and 90 Gbit/s at 10 requests/s count 2**30 bytes to the GB.
    assert 10 * opt.kv_bytes(512) / GIB * 8 == pytest.approx(90, abs=0.1)


def test_decode_slots_and_loop_time_to_the_digit() -> None:
    assert decode_slots(8, 128, 7.0) == pytest.approx(7.168)
    assert decode_slots(8, 128, 10.4) == pytest.approx(10.6, abs=0.1)
    assert decode_slots(8, 2000, 7.0) / decode_slots(8, 128, 7.0) == pytest.approx(15.6, abs=0.1)
    assert loop_time_lost(8, 14.7) == pytest.approx(0.1176)


def test_workers_to_the_digit() -> None:
    assert workers(2, 4000, 5000, 0.8) == 2
    assert workers(2, 500, 800, 0.8) == 2
    assert workers(1, 900, 800, 0.8) == 2
    # An exact fit takes no worker more, whatever binary fractions say.
    assert workers(0.3, 10, 1, 1.0) == 3
    assert workers(0, 500, 800) == 0
    with pytest.raises(CostError, match="utilisation"):
        workers(1, 1, 1, 1.5)


def test_chunk_reads_grow_with_the_square() -> None:
    assert chunk_reads(8192, 8192) == 0
    assert chunk_reads(8192, 1024) == 1024 * 28
    assert chunk_reads(8192, 512) / chunk_reads(8192, 1024) == pytest.approx(120 * 512 / 28 / 1024)


def test_shipped_shapes_agree_with_the_published_ones() -> None:
    rows = json.loads(published("models/models.json").read_text())["models"]
    assert len(rows) == 24
    for row in rows:
        shape = model_shape(row["name"])
        assert shape.total_params == row["params_total_computed"], row["name"]
        assert shape.active_params == row["params_active_computed"], row["name"]
        assert shape.kv_bytes_per_token() == row["kv_bytes_per_token"], row["name"]
        cap = row.get("kv_bytes_sliding_cap", 0)
        far = shape.kv_bytes(10**6) - 10**6 * shape.kv_bytes_per_token()
        assert far == cap, row["name"]


def test_every_shape_and_accelerator_has_a_source() -> None:
    assert len(known_models()) >= 24
    assert all(shape.source for shape in known_models().values())
    assert all(entry.source for entry in known_accelerators().values())
    assert accelerator("H100").nic_bytes_per_s == 50_000_000_000
    assert accelerator("l40s").link_bytes_per_s == 32e9
    with pytest.raises(CostError, match="known are a100"):
        accelerator("tpu")
    with pytest.raises(CostError, match="known are BLOOM"):
        model_shape("nope")
    assert model_shape("meta-llama/Meta-Llama-3.1-8B").name == "Llama-3.1-8B"


def test_ranks_split_heads_but_not_latents() -> None:
    qwen, deepseek = model_shape("Qwen3-32B"), model_shape("DeepSeek-V3")
    assert qwen.kv_bytes_per_rank(100, 4) == qwen.kv_bytes(100) // 4
    assert qwen.kv_bytes_per_rank(100, 16) == qwen.kv_bytes(100) // 8
    assert deepseek.kv_bytes(1) == 70272
    assert deepseek.kv_bytes_per_rank(100, 8) == 7_027_200


def test_sliding_windows_bound_the_cache() -> None:
    gemma = model_shape("Gemma-3-27B")
    assert gemma.kv_bytes(1000) == 507_904 * 1000
    assert gemma.kv_bytes(5000) == 81_920 * 5000 + 436_207_616
    assert gemma.windowed_pairs(10, 0) == 62 * 50
    assert gemma.windowed_pairs(1024, 1024) == 10 * 1024 * 1536 + 52 * 1024 * 1024
    halves = gemma.windowed_pairs(1500, 0) + gemma.windowed_pairs(1500, 1500)
    assert halves == pytest.approx(gemma.windowed_pairs(3000, 0))


def test_weights_bytes_and_room() -> None:
    assert model_shape("Llama-3.1-8B").weights_bytes == 2 * 8_029_995_008
    assert 60e9 < model_shape("gpt-oss-120b").weights_bytes < 68e9
    assert model_shape("DeepSeek-V3").weights_bytes == 671_025_397_760
    room = fits_tokens(model_shape("Llama-3.1-8B"), 80 * 10**9, 1)
    assert room == (80 * 10**9 - 16_059_990_016) // 131072
    assert fits_tokens(model_shape("Llama-3.1-70B"), 80 * 10**9, 1) == 0
    moe = model_shape("Mixtral-8x7B")
    assert moe.touched_weight_bytes(1) == pytest.approx(2 * moe.active_params)
    assert moe.touched_weight_bytes(1000) == pytest.approx(2 * moe.total_params, rel=0.01)


def hf(tmp_path: Path, **fields: object) -> Path:
    config: dict[str, object] = {
        "model_type": "llama",
        "num_hidden_layers": 4,
        "hidden_size": 64,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "intermediate_size": 128,
        "vocab_size": 100,
        "torch_dtype": "bfloat16",
    }
    config.update(fields)
    (tmp_path / "config.json").write_text(json.dumps(config))
    return tmp_path


def test_hugging_face_folders_give_shapes(tmp_path: Path) -> None:
    plain = model_shape(hf(tmp_path))
    assert (plain.head_dim, plain.kv_bytes_per_token()) == (8, 4 * 2 * 2 * 8 * 2)
    assert plain.total_params == 2 * 6400 + 4 * (64 * 8 * 20 + 3 * 64 * 128)
    types = ["sliding_attention", "full_attention"] * 2
    window = model_shape(hf(tmp_path, sliding_window=16, layer_types=types))
    assert (window.sliding_window, window.full_attention_layers) == (16, 2)
    off = model_shape(hf(tmp_path, sliding_window=16, use_sliding_window=False))
    assert off.sliding_window == 0
    whole = model_shape(hf(tmp_path, sliding_window=16))
    assert (whole.kv_bytes_per_token(), whole.kv_bytes(99)) == (0, 16 * 256)
    moe = model_shape(hf(tmp_path, num_experts=8, num_experts_per_tok=2, moe_intermediate_size=32))
    assert moe.moe is not None
    assert (moe.moe.experts, moe.moe.expert_intermediate) == (8, 32)
    mla = model_shape(
        hf(
            tmp_path, kv_lora_rank=32, q_lora_rank=None, qk_rope_head_dim=8, qk_nope_head_dim=16,
            v_head_dim=16,
        )
    )  # fmt: skip
    assert mla.kv_bytes_per_token() == 4 * 40 * 2
    eight = model_shape(hf(tmp_path, quantization_config={"quant_method": "fp8"}))
    assert eight.weights_bytes == eight.total_params


def test_hugging_face_errors_name_the_field(tmp_path: Path) -> None:
    for fields, says in (
        ({"num_hidden_layers": None}, "config.json:num_hidden_layers: missing"),
        ({"hidden_size": "x"}, "config.json:hidden_size: 'x' is not a whole number"),
        ({"num_attention_heads": 0}, "must be above 0"),
    ):
        with pytest.raises(CostError, match=says):
            model_shape(hf(tmp_path, **fields))
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(CostError, match="not JSON"):
        read_hf_config(tmp_path / "config.json")


def profile() -> Profile:
    return Profile(
        model="m", accelerator="h100", engine="vllm", tp=2, measured=True,
        prefill=(PrefillRow(new_tokens=16, ms=10.0),),
        decode=(DecodeRow(batch=1, context_tokens=64, ms=5.5),),
    )  # fmt: skip


def test_profiles_round_trip_and_hash_their_content(tmp_path: Path) -> None:
    path = tmp_path / "p.json"
    save_profile(path, profile())
    assert load_profile(path) == profile()
    assert load_profile(path).sha256 == profile().sha256
    # Spelling does not matter, content does.
    loose = json.dumps(dict(reversed(json.loads(path.read_text()).items())), indent=3)
    loose = loose.replace("10.0", "10")
    assert parse_profile(loose.encode(), "x").sha256 == profile().sha256
    other = loose.replace("5.5", "5.6")
    assert parse_profile(other.encode(), "x").sha256 != profile().sha256
    fields = json.loads(path.read_text())
    assert list(fields) == sorted(fields)
    for name in ("twofold_profile", "model", "accelerator", "engine", "tp", "measured", "mixed"):
        assert name in fields


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ('"twofold_profile":1', '"twofold_profile":2', "this version reads 1"),
        ('"tp":2', '"tp":0', "tp is 0"),
        ('"tp":2', '"tp":"x"', r"p: not a twofold profile: .*\$\.tp"),
        ('"ms":5.5', '"ms":0', r"decode\[0\]: ms is 0.0"),
        (
            '"batch":1,"context_tokens":64',
            '"batch":0,"context_tokens":64',
            r"decode\[0\]: batch is 0",
        ),
        ('"cached_tokens":0', '"cached_tokens":-1', "cached_tokens is -1"),
        ('"model":"m",', "", "missing required field `model`"),
    ],
)
def test_bad_profiles_are_refused_in_words(old: str, new: str, says: str) -> None:
    text = profile().canonical_json().decode()
    assert old in text
    with pytest.raises(CostError, match=says):
        parse_profile(text.replace(old, new).encode(), "p")
