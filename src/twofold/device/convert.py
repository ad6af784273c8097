"""`python -m twofold.device.convert GGUF DIRECTORY`: a GGUF file to a Hugging Face directory.

A process of its own, since the libraries that it needs leave a gigabyte behind. Each stage is
told on stdout as a line `N what`, N being the percentage of the work behind it.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any


def convert(gguf: Path, directory: Path) -> None:
    """Write config, float32 safetensors, tokenizer and chat template. Raises ModelError."""
    _tell(0, "reading the tokenizer")
    from transformers import AutoTokenizer

    from twofold.device.weights import load_model, quiet

    with quiet():
        tokenizer: Any = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    _split_digits(tokenizer, gguf)
    _tell(25, "dequantising the weights")
    loaded = load_model(gguf, dtype="float32")
    _tell(80, "writing the weights")
    if loaded.max_len:
        tokenizer.model_max_length = loaded.max_len
    directory.mkdir(parents=True, exist_ok=True)
    with quiet():
        loaded.model.save_pretrained(directory)
        tokenizer.save_pretrained(directory)
    _tell(95, "checking")


def _split_digits(tokenizer: Any, gguf: Path) -> None:
    """Restore the tokenizer's splitting rule where the GGUF reader falls back on GPT-2's.

    Tokenizers of the kind that GGUF calls "smollm" take digits one by one before anything else,
    which decides where the spaces before a number go.
    """
    from gguf import GGUFReader
    from tokenizers import pre_tokenizers

    field = GGUFReader(gguf).get_field("tokenizer.ggml.pre")
    if field is not None and field.contents() == "smollm":
        tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Digits(individual_digits=True),
                pre_tokenizers.ByteLevel(add_prefix_space=False),
            ]
        )


def _tell(percent: int, what: str) -> None:
    print(percent, what, flush=True)


if __name__ == "__main__":
    convert(Path(sys.argv[1]), Path(sys.argv[2]))
