"""Text to token ids and back, by the model's own tokenizer and chat template."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from twofold.live.openai import ApiError, GenerateRequest


class Tokeniser:
    """The tokenizer of a Hugging Face model directory. Raises ValueError when it has none.

    `eos_token_ids` end an answer unless the request says otherwise.
    """

    def __init__(self, path: Path) -> None:
        from transformers import AutoTokenizer

        try:
            self._outer: Any = AutoTokenizer.from_pretrained(
                path, local_files_only=True, trust_remote_code=False, use_fast=True
            )
            self._inner: Any = self._outer.backend_tokenizer
        except Exception as error:
            # The library raises whatever its parsers raise.
            line = (str(error).strip().splitlines() or [type(error).__name__])[0]
            raise ValueError(f"{path}: no usable tokenizer: {line}") from error
        eos = self._outer.eos_token_id
        self.eos_token_ids: tuple[int, ...] = () if eos is None else (int(eos),)
        self.has_chat_template = bool(self._outer.chat_template)

    def prompt_ids(self, request: GenerateRequest) -> tuple[int, ...]:
        """Token ids of a request's prompt. Raises ApiError 400 when it cannot be had."""
        if request.kind == "completion":
            if isinstance(request.prompt, tuple):
                return request.prompt
            return tuple(self.encode(request.prompt))
        if not self.has_chat_template:
            raise ApiError(400, "no_chat_template", "this model has no chat template", "messages")
        turns = [{"role": m.role, "content": m.content} for m in request.messages]
        try:
            text = self._outer.apply_chat_template(
                turns, tokenize=False, add_generation_prompt=True
            )
        except Exception as error:
            # Templates raise their own errors for turns that they do not accept.
            line = (str(error).strip().splitlines() or [type(error).__name__])[0]
            raise ApiError(400, "invalid_messages", f"messages: {line}", "messages") from error
        # The template writes the special tokens itself.
        return tuple(self._inner.encode(text, add_special_tokens=False).ids)

    def encode(self, text: str) -> list[int]:
        """Ids of `text`, with the special tokens that the model expects around it."""
        ids: list[int] = self._inner.encode(text, add_special_tokens=True).ids
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        """Text of `ids` without special tokens; bytes that are no character yet come as U+FFFD."""
        text: str = self._inner.decode(list(ids), skip_special_tokens=True)
        return text

    def token_text(self, token: int) -> str:
        """Text of one token, special or not."""
        text: str = self._inner.decode([token], skip_special_tokens=False)
        return text
