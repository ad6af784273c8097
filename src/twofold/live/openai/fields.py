"""Checks of single fields of a request: each says what the field is called and what is right."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from twofold.live.openai.errors import ApiError

Fields = Mapping[str, Any]

_I64_MIN: Final = -(2**63)
_I64_MAX: Final = 2**63 - 1


def invalid(param: str, message: str) -> ApiError:
    """A 400 for a field that is wrong."""
    return ApiError(400, "invalid_value", f"{param}: {message}", param)


def unsupported(param: str, message: str) -> ApiError:
    """A 400 for a field that asks for something this server does not do."""
    return ApiError(400, "unsupported", f"{param}: {message}", param)


def shown(value: object) -> str:
    """What a value is, for a message: small ones themselves, others by their kind."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int | float):
        return repr(value)[:40]
    if isinstance(value, str):
        return "a string"
    return "a list" if isinstance(value, list) else "an object"


def boolean(fields: Fields, name: str, default: bool) -> bool:
    """A true or false; null counts as absent."""
    value = fields.get(name)
    if value is None:
        return default
    if not isinstance(value, bool):
        raise invalid(name, f"must be true or false, not {shown(value)}")
    return value


def integer(fields: Fields, name: str, low: int = _I64_MIN, high: int = _I64_MAX) -> int | None:
    """A whole number from `low` to `high`, or None if it is absent or null."""
    value = fields.get(name)
    if value is None:
        return None
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise invalid(name, f"must be {_span('a whole number', low, high)}, not {shown(value)}")
    return value


def number(fields: Fields, name: str, default: float, low: float, high: float) -> float:
    """A number from `low` to `high`; null counts as absent."""
    value = fields.get(name)
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
        raise invalid(name, f"must be a number from {low:g} to {high:g}, not {shown(value)}")
    return float(value)


def above(fields: Fields, name: str, default: float, low: float, high: float) -> float:
    """A number above `low` and at most `high`; null counts as absent."""
    value = fields.get(name)
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, int | float) or not low < value <= high:
        top = "" if high == float("inf") else f" and at most {high:g}"
        raise invalid(name, f"must be a number above {low:g}{top}, not {shown(value)}")
    if value == float("inf"):
        raise invalid(name, "must be finite")
    return float(value)


def string(fields: Fields, name: str, default: str = "") -> str:
    """A string; null counts as absent."""
    value = fields.get(name)
    if value is None:
        return default
    if not isinstance(value, str):
        raise invalid(name, f"must be a string, not {shown(value)}")
    return value


def token_ids(value: object, name: str) -> tuple[int, ...]:
    """A list of token ids, none below 0."""
    if not isinstance(value, list):
        raise invalid(name, f"must be a list of token ids, not {shown(value)}")
    for item in value:
        if type(item) is not int or not 0 <= item < 2**31:
            raise invalid(name, f"must hold token ids from 0 to 2^31 - 1, not {shown(item)}")
    return tuple(value)


def _span(what: str, low: int, high: int) -> str:
    if high == _I64_MAX:
        return what if low == _I64_MIN else f"{what} of at least {low}"
    return f"{what} from {low} to {high}"
