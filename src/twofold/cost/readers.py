"""Makes profiles from published step-time tables."""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean, median
from typing import Final

import msgspec

from twofold.cost.errors import CostError
from twofold.cost.profile import (
    DecodeRow,
    MixedRow,
    Polynomial,
    PrefillRow,
    Profile,
    parse_profile,
    read_bytes,
    validate,
)

_AICONFIGURATOR: Final = ("kind", "batch", "new_tokens_per_seq", "cached_prefix", "ctx_len")
_SPLITWISE: Final = ("model", "hardware", "prompt_size", "batch_size", "token_time")
_SPLITWISE_LONGEST_PROMPT: Final = 8192
_DYNAMO_DECODE: Final = ("context_len", "itl_ms", "concurrency")
_DYNAMO_PREFILL: Final = ("isl", "ttft_ms")


def read_profile(path: str | Path, select: str = "") -> Profile:
    """Reads a twofold profile or any published table below, told apart by its content.

    `select` picks one of a file that holds several: "MODEL:TP" of DistServe's coefficients,
    "MODEL:HARDWARE:TP" of Splitwise's table (parts may be left out while one fits).
    A folder is read as Dynamo's pair of CSVs. Raises CostError.
    """
    path = Path(path)
    if path.is_dir():
        return read_dynamo(path)
    text = read_bytes(path)
    if path.suffix == ".json" or text[:1] == b"{":
        if b'"twofold_profile"' in text:
            return parse_profile(text, str(path))
        return read_distserve(path, select)
    header = text.split(b"\n", 1)[0].decode("utf-8", "replace").strip().split(",")
    if set(_AICONFIGURATOR) <= set(header):
        return read_aiconfigurator(path)
    if set(_SPLITWISE) <= set(header):
        return read_splitwise(path, select)
    if set(_DYNAMO_DECODE) <= set(header) or set(_DYNAMO_PREFILL) <= set(header):
        return read_dynamo(path.parent)
    raise CostError(
        f"{path}: not a known profile; a twofold profile, a step table of aiconfigurator, "
        "coefficients of DistServe, Splitwise's perf_model.csv or Dynamo's folder is"
    )


def read_aiconfigurator(path: str | Path) -> Profile:
    """A step table: kind prefill, decode or mixed. The file's name is MODEL__SYSTEM__ENGINE__tpN.

    Times are computed from measured kernels, so the profile calls itself an estimate.
    """
    path = Path(path)
    names = path.stem.split("__")
    if len(names) != 4 or not names[3].startswith("tp"):
        raise CostError(f"{path}: the name is not MODEL__SYSTEM__ENGINE__tpN.csv")
    prefill, decode, mixed = [], [], []
    for line, row in _table(path, _AICONFIGURATOR):
        value = _Fields(path, line, row)
        kind, ms = row["kind"], value.number("latency_ms")
        if kind == "prefill":
            new, cached = value.whole("new_tokens_per_seq"), value.whole("cached_prefix")
            prefill.append(
                PrefillRow(batch=value.whole("batch"), new_tokens=new, cached_tokens=cached, ms=ms)
            )
        elif kind == "decode":
            decode.append(
                DecodeRow(batch=value.whole("batch"), context_tokens=value.whole("ctx_len"), ms=ms)
            )
        elif kind == "mixed":
            mixed.append(
                MixedRow(
                    chunk_tokens=value.whole("chunk_tokens"),
                    prompt_tokens=value.whole("ctx_len"),
                    batch=value.whole("batch"),
                    context_tokens=value.whole("ctx_len"),
                    ms=ms,
                    nonattn_ms=value.number("nonattn_ms"),
                    prefill_attn_ms=value.number("prefill_attn_ms"),
                    decode_attn_ms=value.number("decode_attn_ms"),
                )
            )
        else:
            raise CostError(f"{path}:{line}:kind: {kind!r}; prefill, decode or mixed is right")
    digits = names[3].split("_")[0][2:]
    profile = Profile(
        model=names[0],
        accelerator=names[1],
        engine=names[2],
        tp=int(digits) if digits.isdecimal() else 0,
        measured=False,
        source=f"aiconfigurator step table {path.name}",
        prefill=tuple(prefill),
        decode=tuple(decode),
        mixed=tuple(mixed),
    )
    return validate(profile, str(path))


class _DistServe(msgspec.Struct):
    prefill: tuple[float, float, float]
    decoding_smallbs: tuple[float, float, float]
    decoding_largebs: tuple[float, float, float]
    decoding_large_small_bs_threshold: int


def read_distserve(path: str | Path, select: str = "") -> Profile:
    """DistServe's coefficients of one model and tensor-parallel degree, as a formula.

    A negative quadratic term (OPT-66B TP2 under vLLM) bounds a step where the fit turns down.
    """
    path = Path(path)
    try:
        data = msgspec.json.decode(read_bytes(path), type=dict[str, dict[str, _DistServe]])
    except msgspec.DecodeError as error:
        raise CostError(f"{path}: not DistServe's coefficients: {error}") from None
    choices = {f"{model}:{tp}": (model, tp) for model in data for tp in data[model]}
    model, tp = choices[_pick(path, select, list(choices))]
    fit = data[model][tp]
    _, per_token, per_square = fit.prefill
    bound = int(-per_token / (2 * per_square)) if per_square < 0 else None
    profile = Profile(
        model=model.split("/")[-1],
        accelerator="a100",
        engine="vllm" if ".vllm." in path.name else "distserve",
        tp=int(tp),
        measured=True,
        source=f"DistServe fit {path.name}",
        note="fitted to measurements by its authors",
        formula=Polynomial(
            prefill=fit.prefill,
            decode_small=fit.decoding_smallbs,
            decode_large=fit.decoding_largebs,
            threshold=fit.decoding_large_small_bs_threshold,
            max_prefill_tokens=bound,
        ),
    )
    return validate(profile, str(path))


def read_splitwise(path: str | Path, select: str = "", *, as_published: bool = False) -> Profile:
    """Splitwise's table for one model, hardware and tensor-parallel degree.

    Prefill: median time over the step's tokens, of single prompts as far as they go (8,192) and
    of batches of 512-token prompts beyond. Decode: mean time over the batch, of the rows with
    512-token prompts, any context. A mixed step is 1.1 times a prefill of all its tokens.
    `as_published` looks times up as splitwise-sim does: medians over prompt size x batch for both,
    single prompts and batches together, so that decode, which asks with the number of sequences,
    is answered from below the first measured point.
    """
    path = Path(path)
    rows = list(_table(path, _SPLITWISE))
    choices: dict[str, None] = {}
    for _, row in rows:
        choices[f"{row['model']}:{row['hardware']}:{row['tensor_parallel']}"] = None
    chosen = _pick(path, select, list(choices))
    model, hardware, tp = chosen.split(":")
    prompt: dict[int, list[float]] = {}
    token: dict[int, list[float]] = {}
    for line, row in rows:
        if (row["model"], row["hardware"], row["tensor_parallel"]) != (model, hardware, tp):
            continue
        value = _Fields(path, line, row)
        size, batch = value.whole("prompt_size"), value.whole("batch_size")
        if as_published or batch == 1 or size * batch > _SPLITWISE_LONGEST_PROMPT:
            prompt.setdefault(size * batch, []).append(value.number("prompt_time"))
        if as_published:
            token.setdefault(size * batch, []).append(value.number("token_time"))
        elif size == 512:
            token.setdefault(batch, []).append(value.number("token_time"))
    times = {n: median(token[n]) if as_published else fmean(token[n]) for n in sorted(token)}
    if as_published:
        times = _extended_to_one(times)
    profile = Profile(
        model=model,
        accelerator=hardware,
        engine="splitwise-sim" if as_published else "vllm",
        tp=int(tp),
        measured=True,
        source=f"Splitwise table {path.name}",
        note="decode looked up as splitwise-sim does" if as_published else "",
        prefill=tuple(PrefillRow(new_tokens=n, ms=median(prompt[n])) for n in sorted(prompt)),
        decode=tuple(DecodeRow(batch=n, context_tokens=None, ms=times[n]) for n in times),
        mixed_factor=1.1,
    )
    return validate(profile, str(path))


def _extended_to_one(times: dict[int, float]) -> dict[int, float]:
    """splitwise-sim's line through the first two points, down to a batch of 1."""
    (x0, y0), (x1, y1) = list(times.items())[:2]
    return {1: y0 - (y1 - y0) / (x1 - x0) * (x0 - 1), **times}


def read_dynamo(folder: str | Path) -> Profile:
    """Dynamo's profile: prefill.csv (isl, ttft_ms) and decode.csv (context, concurrency, itl_ms).

    TTFT and ITL of an endpoint under closed load stand for step times.
    """
    folder = Path(folder)
    prefill = []
    for line, row in _table(folder / "prefill.csv", _DYNAMO_PREFILL):
        value = _Fields(folder / "prefill.csv", line, row)
        prefill.append(PrefillRow(new_tokens=value.whole("isl"), ms=value.number("ttft_ms")))
    decode, tokens = [], None
    for line, row in _table(folder / "decode.csv", _DYNAMO_DECODE):
        value = _Fields(folder / "decode.csv", line, row)
        batch, context = value.whole("concurrency"), value.whole("context_len")
        decode.append(DecodeRow(batch=batch, context_tokens=context, ms=value.number("itl_ms")))
        tokens = value.whole("max_kv_tokens") if "max_kv_tokens" in row else None
    names = folder.name.split("_")
    profile = Profile(
        model="_".join(names[2:]) or folder.name,
        accelerator=names[1] if len(names) > 2 else "unknown",
        engine="vllm",
        tp=1,
        measured=True,
        source=f"Dynamo profile {folder.name}",
        note="TTFT and ITL of an endpoint under closed load",
        prefill=tuple(prefill),
        decode=tuple(decode),
        max_kv_tokens=tokens,
    )
    return validate(profile, str(folder))


def _table(path: Path, needed: Sequence[str]) -> list[tuple[int, Mapping[str, str]]]:
    """(line, row) of a CSV that has the needed columns."""
    rows = csv.DictReader(io.StringIO(read_bytes(path).decode("utf-8-sig", "replace")))
    missing = [name for name in needed if name not in (rows.fieldnames or ())]
    if missing:
        raise CostError(f"{path}: no column {missing[0]!r}; {', '.join(needed)} are needed")
    return [(rows.line_num, row) for row in rows]


class _Fields:
    """Numbers of one CSV row, or a CostError with file, line and column."""

    def __init__(self, path: Path, line: int, row: Mapping[str, str | None]) -> None:
        self._place = f"{path}:{line}"
        self._row = row

    def number(self, column: str) -> float:
        text = self._row.get(column)
        try:
            return float(text or "")
        except ValueError:
            raise CostError(f"{self._place}:{column}: {text!r} is not a number") from None

    def whole(self, column: str) -> int:
        value = self.number(column)
        if not value.is_integer():
            raise CostError(f"{self._place}:{column}: {value} is not a whole number")
        return int(value)


def _pick(path: Path, select: str, choices: Sequence[str]) -> str:
    """The one choice that has all parts of `select`, in order."""
    wanted = [part for part in select.lower().split(":") if part]
    found = [choice for choice in choices if _fits(choice.lower().split(":"), wanted)]
    if len(found) == 1:
        return found[0]
    problem = f"{select!r} fits {len(found)} of them" if select else "one must be chosen"
    raise CostError(f"{path}: {problem}: {', '.join(choices)}")


def _fits(parts: Sequence[str], wanted: Sequence[str]) -> bool:
    at = 0
    for want in wanted:
        while at < len(parts) and want not in (parts[at], parts[at].split("/")[-1]):
            at += 1
        if at == len(parts):
            return False
        at += 1
    return True
