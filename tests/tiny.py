"""Makers of tiny random-weight models, as Hugging Face directories, shared by all tests.

Plain initialisation gives models that repeat one token whatever the prompt, against which a wrong
KV cache goes unseen. These have an untied head and weights scaled up, so that greedy choices are
well apart and change when an early prompt token does (`tests/device/test_tiny.py`).
"""

from __future__ import annotations

import atexit
import functools
import shutil
import tempfile
from pathlib import Path
from typing import Any, Final

FAMILIES: Final = ("llama", "qwen2", "qwen3", "mistral", "mistral-sliding", "qwen3-moe")
SLIDING_WINDOW: Final = 24
VOCAB_SIZE: Final = 640

_TEXT: Final = """
Prefill reads the prompt in one go and fills the KV cache; decode writes the answer one token at a
time. The two halves want different machines: the first is bound by arithmetic, the second by
memory. What passes between them is the cache, block by block, and every block has its checksum.
A worker that reads a block which is no longer held must throw it away and compute it again.
The quick brown fox jumps over the lazy dog. What is the capital of France? Paris is the capital.
Numbers: 0 1 2 3 4 5 6 7 8 9 10 16 32 64 128 256 512 1024. Letters: a b c d e f g h i j k l m.
def answer(question: str) -> str: return {"role": "assistant", "content": question}["content"]
Größe, café, naïve, Übermut, señor, ça va; Привет, мир; γειά σου κόσμε; שלום עולם; مرحبا بالعالم.
你好，世界。今天天气很好，我们去公园散步吧。東京は日本の首都です。안녕하세요 세계.
Emoji: 🙂 🚀 👩‍💻 🇫🇷 🎉 🙂🙂 🚀🚀 — and then the text goes on, and on, and on until it ends.
"""

_CHAT_TEMPLATE: Final = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def _tokenizer() -> Any:
    """A byte-level BPE tokenizer: any text goes through it and back unchanged."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator(_TEXT.splitlines(), trainer)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        bos_token="<|endoftext|>",
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
    )
    tokenizer.chat_template = _CHAT_TEMPLATE
    tokenizer.model_max_length = 4096
    return tokenizer


def _config(family: str, overrides: dict[str, Any]) -> Any:
    import transformers

    shape: dict[str, Any] = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 4096,
        "tie_word_embeddings": False,
        "initializer_range": 0.15,
        "bos_token_id": 0,
        "eos_token_id": 2,
        "pad_token_id": 0,
    }
    if family == "llama":
        return transformers.LlamaConfig(**{**shape, **overrides})
    if family == "qwen2":
        return transformers.Qwen2Config(**{**shape, **overrides})
    if family == "qwen3":
        return transformers.Qwen3Config(**{**shape, **overrides})
    if family == "mistral":
        return transformers.MistralConfig(**{**shape, "sliding_window": None, **overrides})
    if family == "mistral-sliding":
        window = {"sliding_window": SLIDING_WINDOW}
        return transformers.MistralConfig(**{**shape, **window, **overrides})
    if family == "qwen3-moe":
        experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
        return transformers.Qwen3MoeConfig(**{**shape, **experts, **overrides})
    raise ValueError(f"unknown family {family!r}; known: {', '.join(FAMILIES)}")


def make_model(family: str, directory: Path, *, seed: int = 0, **overrides: Any) -> Path:
    """Write a model of `family` into `directory` and return it.

    The same family, seed and overrides (fields of the family's config) give the same weights.
    Token 2, `<|im_end|>`, ends an answer. Weights are float32.
    """
    import torch
    from transformers import AutoModelForCausalLM

    from twofold.device.weights import quiet

    config = _config(family, overrides)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        with torch.no_grad():
            # The last norm makes the head's input unit-sized: its scale alone sets how far apart
            # the logits lie.
            model.get_output_embeddings().weight.normal_(0.0, 0.5)
    model.generation_config.eos_token_id = config.eos_token_id
    model.generation_config.pad_token_id = config.pad_token_id
    directory.mkdir(parents=True, exist_ok=True)
    with quiet():
        model.save_pretrained(directory)
    _tokenizer().save_pretrained(directory)
    return directory


@functools.cache
def _scratch() -> Path:
    path = Path(tempfile.mkdtemp(prefix="twofold-tiny-"))
    atexit.register(shutil.rmtree, path, ignore_errors=True)
    return path


@functools.cache
def cached_model(family: str, seed: int = 0) -> Path:
    """A model of `family`, written once per test session. Tests must not change its files."""
    return make_model(family, _scratch() / f"{family}-{seed}", seed=seed)
