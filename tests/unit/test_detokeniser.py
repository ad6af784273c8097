"""From tokens to text, whatever bytes they stand for."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from twofold.live.detokeniser import Detokeniser

NOTHING = 256
"""A token without text, as special ones are."""
LETTERS = st.sampled_from(["a", "é", "你", "🙂", "\ufffd"])


class Bytes:
    """One token for each byte. Counts the ids that were decoded at most in one call."""

    def __init__(self) -> None:
        self.longest = 0

    def __call__(self, ids: Sequence[int]) -> str:
        self.longest = max(self.longest, len(ids))
        return bytes(i for i in ids if i != NOTHING).decode(errors="replace")


class ByteRuns(Bytes):
    """As tokenizers with byte fallback do: a run of byte tokens is a text, or as many U+FFFD."""

    def __call__(self, ids: Sequence[int]) -> str:
        self.longest = max(self.longest, len(ids))
        run = bytes(i for i in ids if i != NOTHING)
        try:
            return run.decode()
        except UnicodeDecodeError:
            return "\ufffd" * len(run)


def _pieces(decode: Bytes, tokens: Sequence[int]) -> list[str]:
    made = Detokeniser(decode)
    return [*(made.feed(token) for token in tokens), made.flush()]


@given(st.lists(LETTERS | st.integers(0, NOTHING), max_size=60))
def test_pieces_join_to_the_whole(parts: list[str | int]) -> None:
    tokens = [t for part in parts for t in (part.encode() if isinstance(part, str) else [part])]
    assert "".join(_pieces(Bytes(), tokens)) == Bytes()(tokens)


@given(st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\ufffd"), max_size=40))
def test_a_text_is_whole_by_byte_runs_too(text: str) -> None:
    assert "".join(_pieces(ByteRuns(), text.encode())) == text


@pytest.mark.parametrize("text", ["abc", "é你🙂", "🙂🙂 ok"])
def test_a_character_comes_when_it_is_complete(text: str) -> None:
    expected = [piece for letter in text for piece in [""] * (len(letter.encode()) - 1) + [letter]]
    assert _pieces(Bytes(), text.encode()) == [*expected, ""]


def test_a_character_may_be_split_over_tokens_that_end_amid_the_next() -> None:
    raw = "你好世界" * 5
    data = raw.encode()
    tokens = [data[:2], *(data[i : i + 3] for i in range(2, len(data), 3))]

    def decode(ids: Sequence[int]) -> str:
        return b"".join(tokens[i] for i in ids).decode(errors="replace")

    made = Detokeniser(decode)
    pieces = [made.feed(i) for i in range(len(tokens))]
    assert "".join(pieces) + made.flush() == raw
    assert any(pieces[:-1]), "all of it waited for the last token"


@pytest.mark.parametrize("decode", [Bytes(), ByteRuns()])
@pytest.mark.parametrize("token", [0x80, 0xE4, 0xFF, NOTHING])
def test_what_is_no_text_does_not_pile_up(decode: Bytes, token: int) -> None:
    decode.longest = 0
    made = Detokeniser(decode)
    assert made.feed(ord("a")) == "a"
    text = "".join(made.feed(token) for _ in range(1000))
    assert decode.longest <= 20
    shown = 0 if token == NOTHING else 1000
    assert text + made.flush() == "\ufffd" * shown
    assert len(text) >= shown - 10


def test_text_comes_again_after_bytes_that_are_none() -> None:
    tokens = [*b"a", *[0xE4] * 30, *"é你".encode(), *[NOTHING] * 30, *"🙂b".encode()]
    pieces = _pieces(Bytes(), tokens)
    assert "".join(pieces) == "a" + "\ufffd" * 30 + "é你🙂b"
    assert pieces[-2] == "b"


def test_stop_strings_count_after_as_many_tokens() -> None:
    made = Detokeniser(Bytes(), ["bc"], min_tokens=3)
    assert [made.feed(token) for token in b"bcabc"] == ["b", "c", "a", "", ""]
    assert made.stopped
    assert made.flush() == ""
    early = Detokeniser(Bytes(), ["b"], min_tokens=1)
    assert (early.feed(ord("b")), early.stopped) == ("b", False)
    assert (early.feed(ord("b")), early.stopped) == ("", True)


def test_what_might_have_been_a_stop_string_is_let_go_in_the_end() -> None:
    made = Detokeniser(Bytes(), ["stop"])
    assert "".join(made.feed(token) for token in b"no sto") == "no "
    assert made.flush() == "sto"
    assert not made.stopped
