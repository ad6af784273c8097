"""The tiny models must be able to show a wrong KV cache, or nothing tested with them counts."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.device.reference import expected, expected_at, prompt_of
from tests.tiny import FAMILIES, SLIDING_WINDOW, cached_model, make_model

LENGTH = 60


@pytest.mark.parametrize("family", FAMILIES)
def test_answers_vary_and_depend_on_early_tokens(family: str) -> None:
    want = expected(family, LENGTH)
    assert len(set(want.tokens)) >= len(want.tokens) // 2
    places = (LENGTH - SLIDING_WINDOW,) if family == "mistral-sliding" else (0, LENGTH // 2)
    for place in places:
        assert expected_at(cached_model(family), _changed(place)).tokens != want.tokens


def test_a_sliding_window_reaches_further_through_stacked_layers_but_not_without_end() -> None:
    want = expected("mistral-sliding", LENGTH).top[0]
    path = cached_model("mistral-sliding")
    assert expected_at(path, _changed(LENGTH - 2 * SLIDING_WINDOW), 1).top[0] != want
    # Three layers see the last token and 3 * 23 before it; a prompt of 75 has some beyond.
    far = expected("mistral-sliding", 75).top[0]
    assert expected_at(path, _changed(0, 75), 1).top[0] == far


def _changed(place: int, length: int = LENGTH) -> list[int]:
    prompt = prompt_of(length)
    prompt[place] = prompt[place] % 600 + 5
    return prompt


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_choices_are_well_apart(family: str) -> None:
    for top in expected(family, LENGTH).top:
        first, second = sorted(top.values(), reverse=True)[:2]
        assert first - second > 1e-3


def test_same_seed_gives_the_same_files(tmp_path: Path) -> None:
    weights = [
        (make_model("llama", tmp_path / name, seed=seed) / "model.safetensors").read_bytes()
        for name, seed in (("a", 0), ("b", 0), ("c", 1))
    ]
    assert weights[0] == weights[1] != weights[2]


def test_overrides_and_unknown_families(tmp_path: Path) -> None:
    wide = make_model("qwen3", tmp_path / "wide", hidden_size=96, num_hidden_layers=2)
    assert '"hidden_size": 96' in (wide / "config.json").read_text()
    with pytest.raises(ValueError, match="unknown family 'gpt'"):
        make_model("gpt", tmp_path / "gpt")


def test_tokenizer_round_trips_any_text_and_has_a_chat_template() -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(cached_model("llama"))
    for text in ("plain", "你好 🙂 naïve\n\n  two  spaces\t", "\x00\x7f\u202e 👩‍💻"):
        assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    chat = [{"role": "user", "content": "hi"}]
    text = tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
    assert text == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert tokenizer(text)["input_ids"].count(1) == 2
