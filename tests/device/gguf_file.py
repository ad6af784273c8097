"""Writes a tiny Llama directory as a GGUF file, the way llama.cpp's converter lays it out."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

_NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}
_TOP = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}


def write_gguf(directory: Path, file: Path) -> Path:
    """`directory` as made by `tests.tiny.make_model("llama", ...)`; weights stay float32."""
    from gguf import GGUFWriter
    from safetensors.numpy import load_file

    config = json.loads((directory / "config.json").read_text())
    writer = GGUFWriter(file, "llama")
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    writer.add_rope_dimension_count(config["head_dim"])
    writer.add_vocab_size(config["vocab_size"])
    _add_tokenizer(writer, directory)
    for name, weight in sorted(load_file(directory / "model.safetensors").items()):
        writer.add_tensor(*_tensor(name, weight, config))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


def _tensor(name: str, weight: np.ndarray, config: dict[str, Any]) -> tuple[str, np.ndarray]:
    if name in _TOP:
        return _TOP[name], weight
    _, _, layer, rest = name.split(".", 3)
    kind = _NAMES[rest.removesuffix(".weight")]
    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    if kind in heads:
        # llama.cpp rotates neighbours where transformers rotates halves.
        halves = weight.reshape(heads[kind], 2, -1, weight.shape[1])
        weight = np.ascontiguousarray(halves.swapaxes(1, 2).reshape(weight.shape))
    return f"blk.{layer}.{kind}.weight", weight


def _add_tokenizer(writer: Any, directory: Path) -> None:
    from gguf import TokenType

    tokenizer = json.loads((directory / "tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    special = {token["content"]: token["id"] for token in tokenizer["added_tokens"]}
    tokens = sorted({**vocabulary, **special}.items(), key=lambda item: item[1])
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list([token for token, _ in tokens])
    writer.add_token_types(
        [TokenType.CONTROL if token in special else TokenType.NORMAL for token, _ in tokens]
    )
    writer.add_token_merges([" ".join(pair) for pair in tokenizer["model"]["merges"]])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_pad_token_id(0)
    writer.add_add_bos_token(False)
    writer.add_add_space_prefix(False)
    writer.add_chat_template((directory / "chat_template.jinja").read_text())
