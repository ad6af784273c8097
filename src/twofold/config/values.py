"""One setting's value: read from text or TOML, checked, and described in words."""

from __future__ import annotations

import math
from typing import Any, Final

import msgspec
from msgspec import inspect as shape

from twofold.config.settings import CHOICES, POWER_OF_TWO, WorkerAddress

_ADDRESS_FORM: Final = "NAME=ROLE@HOST:PORT with a role of prefill, decode or mixed"


class SettingsError(Exception):
    """A setting is wrong. The message is one line that says where, and what would be right."""


def read_value(raw: object, type_: Any, *, is_text: bool, where: str) -> Any:
    """`raw` as a value of the annotated `type_`.

    `is_text`: it came from a flag or the environment, where numbers are written as text.
    Raises SettingsError, which begins with `where`, when it does not fit.
    """
    plain, extra = _plain(shape.type_info(type_))
    if isinstance(plain, shape.VarTupleType):
        return _read_addresses(raw, where=where)
    try:
        value = msgspec.convert(raw, type_, strict=not is_text)
    except msgspec.ValidationError:
        raise SettingsError(f"{where}: must be {describe(type_)}") from None
    fits = not (isinstance(value, float) and not math.isfinite(value))
    if POWER_OF_TWO in extra:
        fits = value.bit_count() == 1
    elif CHOICES in extra:
        fits = value in extra[CHOICES]
    if not fits:
        raise SettingsError(f"{where}: must be {describe(type_)}")
    return value


def describe(type_: Any) -> str:
    """What a value of the annotated `type_` may be, to follow "must be"."""
    plain, extra = _plain(shape.type_info(type_))
    if CHOICES in extra:
        return _one_of(extra[CHOICES])
    if isinstance(plain, shape.LiteralType):
        return _one_of(plain.values)
    if isinstance(plain, shape.BoolType):
        return "true or false"
    if isinstance(plain, shape.StrType):
        return "text that is not empty" if plain.min_length else "text"
    if isinstance(plain, shape.IntType | shape.FloatType):
        noun = "a whole number" if isinstance(plain, shape.IntType) else "a number"
        if POWER_OF_TWO in extra:
            noun = "a power of two"
        return noun + _bounds(plain)
    return f"a list of {_ADDRESS_FORM}"


def parse_address(text: str) -> WorkerAddress:
    """The address written as `NAME=ROLE@HOST:PORT`.

    Raises SettingsError when it is written otherwise.
    """
    name, _, rest = text.strip().partition("=")
    role, _, place = rest.partition("@")
    host, _, port = place.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    try:
        return msgspec.convert(
            {"name": name, "role": role, "host": host, "port": port}, WorkerAddress, strict=False
        )
    except msgspec.ValidationError:
        raise SettingsError(f"{text}: must be {_ADDRESS_FORM}") from None


def format_address(address: WorkerAddress) -> str:
    """The text that `parse_address` reads."""
    host = f"[{address.host}]" if ":" in address.host else address.host
    return f"{address.name}={address.role}@{host}:{address.port}"


def _read_addresses(raw: object, *, where: str) -> tuple[WorkerAddress, ...]:
    """A list of addresses as text or tables, or one text with commas between them."""
    items = raw.split(",") if isinstance(raw, str) else raw
    if not isinstance(items, list | tuple) or not items:
        raise SettingsError(f"{where}: must be one or more of {_ADDRESS_FORM}")
    found: list[WorkerAddress] = []
    for item in items:
        try:
            if isinstance(item, str):
                found.append(parse_address(item))
            else:
                found.append(msgspec.convert(item, WorkerAddress))
        except (SettingsError, msgspec.ValidationError):
            raise SettingsError(f"{where}: {item} must be {_ADDRESS_FORM}") from None
    names = [address.name for address in found]
    for name in names:
        if names.count(name) > 1:
            raise SettingsError(f"{where}: two workers are named {name}; each needs its own name")
    return tuple(found)


def _plain(info: shape.Type) -> tuple[shape.Type, dict[str, Any]]:
    """The type inside its descriptions, and what the settings' own `Meta.extra` says."""
    extra: dict[str, Any] = {}
    while isinstance(info, shape.Metadata):
        extra.update(info.extra or {})
        info = info.type
    return info, extra


def _one_of(words: tuple[Any, ...]) -> str:
    if len(words) == 1:
        return str(words[0])
    return f"one of {', '.join(str(word) for word in words)}"


def _bounds(info: shape.IntType | shape.FloatType) -> str:
    if info.ge is not None and info.le is not None:
        return f" from {info.ge} to {info.le}"
    if info.ge is not None:
        return f", {info.ge} or more"
    if info.gt is not None:
        return f" above {info.gt:g}"
    return ""
