"""Profile tables: measured or computed step times of one model on one set-up, as one JSON file."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import msgspec

from twofold.cost.errors import CostError

PROFILE_VERSION: Final = 1


class PrefillRow(msgspec.Struct, frozen=True, kw_only=True):
    """A step of `batch` prompts, `new_tokens` computed of each after `cached_tokens` in cache."""

    batch: int = 1
    new_tokens: int
    cached_tokens: int = 0
    ms: float


class DecodeRow(msgspec.Struct, frozen=True, kw_only=True):
    """A step of `batch` sequences, one token each, at `context_tokens` each.

    `context_tokens` None: measured without regard to context, so that any will do.
    """

    batch: int
    context_tokens: int | None
    ms: float


class MixedRow(msgspec.Struct, frozen=True, kw_only=True):
    """A step of `chunk_tokens` of prompts `prompt_tokens` long, beside `batch` decoding sequences.

    The three parts, where known, add up to `ms`.
    """

    chunk_tokens: int
    prompt_tokens: int
    batch: int
    context_tokens: int
    ms: float
    nonattn_ms: float | None = None
    prefill_attn_ms: float | None = None
    decode_attn_ms: float | None = None


class Polynomial(msgspec.Struct, frozen=True, kw_only=True):
    """DistServe's form, times in ms: (constant, per sum of lengths, per sum of squares) for
    prefill, (constant, per sum of contexts, per sequence) for decode below and from `threshold`
    sequences on. `max_prefill_tokens` bounds one step, None for no bound.
    """

    prefill: tuple[float, float, float]
    decode_small: tuple[float, float, float]
    decode_large: tuple[float, float, float]
    threshold: int
    max_prefill_tokens: int | None = None


class Profile(msgspec.Struct, frozen=True, kw_only=True):
    """Step times of `model` on `tp` x `accelerator` under `engine`.

    `measured` is False for times that a model computed. `source` and `note` are for people.
    `formula` replaces the tables where the profile was published as coefficients. `mixed_factor`:
    a mixed step takes that many times a prefill step of all its tokens (Splitwise's rule); without
    it mixed steps are composed from prefill and decode. `max_kv_tokens`: tokens that fit the
    set-up's KV memory, where known.
    """

    twofold_profile: int = PROFILE_VERSION
    model: str
    accelerator: str
    engine: str
    tp: int
    measured: bool
    source: str = ""
    note: str = ""
    prefill: tuple[PrefillRow, ...] = ()
    decode: tuple[DecodeRow, ...] = ()
    mixed: tuple[MixedRow, ...] = ()
    formula: Polynomial | None = None
    mixed_factor: float | None = None
    max_kv_tokens: int | None = None

    def canonical_json(self) -> bytes:
        """The one spelling that is hashed: sorted keys, no spaces, fields at defaults included."""
        fields = msgspec.to_builtins(self)
        return json.dumps(fields, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()

    @property
    def sha256(self) -> str:
        """Hex SHA-256 over the canonical JSON."""
        return hashlib.sha256(self.canonical_json()).hexdigest()

    @property
    def title(self) -> str:
        """What a table calls it."""
        kind = "" if self.measured else ", an estimate"
        return f"{self.model} on {self.tp} x {self.accelerator} ({self.engine}{kind})"


def validate(profile: Profile, where: str) -> Profile:
    """Returns the profile, or raises CostError naming `where`, the row and what would be right."""
    if profile.twofold_profile != PROFILE_VERSION:
        raise CostError(
            f"{where}: twofold_profile is {profile.twofold_profile}; "
            f"this version reads {PROFILE_VERSION}"
        )
    if profile.tp < 1:
        raise CostError(f"{where}: tp is {profile.tp}; a whole number from 1 on is right")
    if not (profile.prefill or profile.decode or profile.formula):
        raise CostError(f"{where}: no prefill rows, decode rows or formula; one of them is needed")
    _check_rows(profile.prefill, f"{where}: prefill")
    _check_rows(profile.decode, f"{where}: decode")
    _check_rows(profile.mixed, f"{where}: mixed")
    return profile


def _check_rows(rows: Sequence[PrefillRow | DecodeRow | MixedRow], where: str) -> None:
    seen: dict[tuple[object, ...], int] = {}
    for index, row in enumerate(rows):
        place = f"{where}[{index}]"
        if not (math.isfinite(row.ms) and row.ms > 0):
            raise CostError(f"{place}: ms is {row.ms}; a finite number above 0 is right")
        for field in ("batch", "new_tokens", "context_tokens", "chunk_tokens", "prompt_tokens"):
            value = getattr(row, field, None)
            if value is not None and value < 1:
                raise CostError(f"{place}: {field} is {value}; 1 or more is right")
        if isinstance(row, PrefillRow) and row.cached_tokens < 0:
            raise CostError(f"{place}: cached_tokens is {row.cached_tokens}; 0 or more is right")
        key = _key(row)
        if key in seen:
            raise CostError(f"{place}: the same point as row {seen[key]}; each point is given once")
        seen[key] = index
    contexts = [row.context_tokens is None for row in rows if isinstance(row, DecodeRow)]
    if any(contexts) and not all(contexts):
        raise CostError(f"{where}: context_tokens is null in some rows; all or none is right")


def _key(row: PrefillRow | DecodeRow | MixedRow) -> tuple[object, ...]:
    if isinstance(row, PrefillRow):
        return row.batch, row.new_tokens, row.cached_tokens
    if isinstance(row, DecodeRow):
        return row.batch, row.context_tokens
    return row.chunk_tokens, row.prompt_tokens, row.batch, row.context_tokens


def parse_profile(text: bytes, where: str) -> Profile:
    """Decodes and validates a profile. Raises CostError naming `where` and the field."""
    try:
        profile = msgspec.json.decode(text, type=Profile)
    except msgspec.DecodeError as error:
        raise CostError(f"{where}: not a twofold profile: {error}") from None
    return validate(profile, where)


def load_profile(path: str | Path) -> Profile:
    """Reads a profile that `save_profile` (or `twofold profile`) wrote. Raises CostError."""
    return parse_profile(read_bytes(Path(path)), str(path))


def save_profile(path: str | Path, profile: Profile) -> None:
    """Writes the canonical JSON and a newline."""
    Path(path).write_bytes(validate(profile, str(path)).canonical_json() + b"\n")


def read_bytes(path: Path) -> bytes:
    """The file's bytes. Raises CostError in one line."""
    try:
        return path.read_bytes()
    except OSError as error:
        raise CostError(f"{path}: cannot read: {error.strerror}") from None
