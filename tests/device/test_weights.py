from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.device.gguf_file import write_gguf
from tests.device.reference import (
    assert_same,
    expected,
    generate,
    loaded,
    make_sequence,
    prompt_of,
    shuffled_blocks,
)
from tests.tiny import FAMILIES, cached_model, make_model
from twofold.device.digest import digest_files
from twofold.device.runner import Runner
from twofold.device.weights import ModelError, layout_of, load_model, quiet
from twofold.types import PROTOCOL_VERSION


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A copy of a tiny model that the test may damage."""
    return Path(shutil.copytree(cached_model("llama"), tmp_path / "model"))


def edit_config(model: Path, **fields: Any) -> None:
    file = model / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **fields}))


def error_of(path: Path, **options: Any) -> str:
    with pytest.raises(ModelError) as caught:
        load_model(path, **options)
    message = str(caught.value)
    assert "\n" not in message
    return message


@pytest.mark.parametrize("family", FAMILIES)
def test_layout(family: str) -> None:
    layout = layout_of(loaded(family), block_size=8)
    assert (layout.protocol, layout.engine, layout.dtype) == (
        PROTOCOL_VERSION,
        "twofold",
        "float32",
    )
    assert (layout.layers, layout.kv_heads, layout.head_dim) == (3, 2, 16)
    assert json.loads(layout.rope) == {"rope_theta": 10000.0, "rope_type": "default"}
    assert layout.block_bytes == Runner(loaded(family), num_blocks=1, block_size=8).bytes_per_block
    assert loaded(family).eos_token_ids == (2,)
    assert loaded(family).max_len == 4096
    assert loaded(family).vocab_size == 640


def test_digests_differ_when_weights_or_tokenizer_do(model: Path, tmp_path: Path) -> None:
    first = layout_of(loaded("llama"), block_size=8)
    assert layout_of(load_model(model), block_size=8) == first, "a copy is the same model"
    other = load_model(make_model("llama", tmp_path / "other", seed=1))
    assert layout_of(other, block_size=8).model_digest != first.model_digest
    assert layout_of(other, block_size=8).tokenizer_digest == first.tokenizer_digest
    file = model / "tokenizer.json"
    file.write_text(file.read_text() + " ")
    changed = layout_of(load_model(model), block_size=8)
    assert changed.model_digest == first.model_digest
    assert changed.tokenizer_digest != first.tokenizer_digest
    edit_config(model, rope_parameters={"rope_theta": 500.0, "rope_type": "default"})
    assert layout_of(load_model(model), block_size=8).rope != first.rope


def test_digests_of_long_files_see_their_ends_size_and_samples(tmp_path: Path) -> None:
    file, mib = tmp_path / "weights", 1 << 20
    content = bytearray(20 * mib + 5)
    file.write_bytes(content)
    seen = {digest_files([file])}
    for place in (100, mib - 1, 7 * mib + 100, 20 * mib, len(content) - 1):
        content[place] = 1
        file.write_bytes(content)
        seen.add(digest_files([file]))
    file.write_bytes(content + b"\0")
    seen.add(digest_files([file]))
    file.rename(tmp_path / "renamed")
    seen.add(digest_files([tmp_path / "renamed"]))
    assert len(seen) == 8


def test_paths_that_are_no_models(tmp_path: Path, model: Path) -> None:
    assert "no such model directory" in error_of(tmp_path / "absent")
    (tmp_path / "empty").mkdir()
    assert "has no config.json" in error_of(tmp_path / "empty")
    (model / "model.safetensors").unlink()
    assert "has no weights" in error_of(model)
    (model / "config.json").write_text("{")
    assert "config.json: not valid JSON" in error_of(model)
    (model / "config.json").write_text("[]")
    assert "has no model_type" in error_of(model)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"model_type": "nonesuch"}, "nonesuch"),
        ({"model_type": "vit"}, "'vit' is not a decoder"),
        ({"model_type": "t5", "is_encoder_decoder": True}, "'t5' is not a decoder"),
        ({"model_type": "deepseek_v3", "kv_lora_rank": 512}, "MLA"),
        ({"model_type": "qwen2", "layer_types": ["chunked_attention"] * 3}, "chunked_attention"),
        (
            {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}},
            "rope of type 'dynamic'",
        ),
        ({"num_hidden_layers": 4}, "the weights lack model.layers.3."),
        ({"intermediate_size": 96}, "do not fit the shape of model.layers.0.mlp"),
        ({"hidden_size": "wide"}, "expected int, got str"),
    ],
)
def test_configurations_that_cannot_be_served(
    model: Path, fields: dict[str, Any], message: str
) -> None:
    edit_config(model, **fields)
    assert message in error_of(model)


def test_damaged_weights(model: Path) -> None:
    file = model / "model.safetensors"
    file.write_bytes(file.read_bytes()[:1000])
    assert str(model) in error_of(model)


def test_dtypes_and_devices_that_there_are_not(model: Path) -> None:
    assert "dtype 'int8' is not one of float32, float16, bfloat16" in error_of(model, dtype="int8")
    assert "device 'toaster' cannot be used" in error_of(model, device="toaster")


def test_models_whose_attention_is_not_ours_are_refused(tmp_path: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, BertConfig, BloomConfig

    bert = BertConfig(
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=32,
        vocab_size=64,
    )
    bloom = BloomConfig(hidden_size=32, n_layer=2, n_head=2, vocab_size=64)
    messages = []
    for name, config in (("bert", bert), ("bloom", bloom)):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        with quiet():
            model.save_pretrained(tmp_path / name)
        messages.append(error_of(tmp_path / name))
    assert "attention that is not causal is not supported" in messages[0]
    assert "0 of 2 layers use transformers' attention interface" in messages[1]


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_runs(dtype: str) -> None:
    model = load_model(cached_model("llama"), dtype=dtype)
    runner = Runner(model, num_blocks=16, block_size=8)
    assert runner.bytes_per_block == layout_of(model, block_size=8).block_bytes
    sequence = make_sequence(prompt_of(20), shuffled_blocks(16))
    generate(runner, [sequence], chunk=7)
    first = expected("llama", 20).top[0]
    mine = dict(sequence.sampled[0].top)
    common = set(first) & set(mine)
    assert len(common) >= 3
    assert max(abs(first[token] - mine[token]) for token in common) < 0.5


def test_gguf_files_give_the_same_model(tmp_path: Path) -> None:
    file = write_gguf(cached_model("llama"), tmp_path / "tiny.gguf")
    model = load_model(file)
    assert (model.shape, model.max_len) == (loaded("llama").shape, 4096)
    sequence = make_sequence(prompt_of(29), shuffled_blocks(16))
    generate(Runner(model, num_blocks=16, block_size=8), [sequence])
    assert_same(sequence.answer(), expected("llama", 29))
    layout = layout_of(model, block_size=8)
    assert layout.model_digest == layout.tokenizer_digest == digest_files([file])


def test_damaged_gguf_files(tmp_path: Path) -> None:
    file = tmp_path / "bad.gguf"
    file.write_bytes(b"GGUF" + b"\0" * 100)
    assert str(file) in error_of(file)
