"""The options that follow from the settings' fields: flags, variables and TOML keys."""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal, get_args, get_origin

import msgspec

from twofold.config.settings import (
    EngineSettings,
    GatewayLimits,
    GatewaySettings,
    ServeSettings,
    WorkerAddress,
    WorkerSettings,
)
from twofold.config.values import format_address

Table = Literal["engine", "serve", "gateway", "worker"]

_STRUCTS: Final[dict[Table, type[msgspec.Struct]]] = {
    "engine": EngineSettings,
    "serve": ServeSettings,
    "gateway": GatewaySettings,
    "worker": WorkerSettings,
}


class Option(msgspec.Struct, frozen=True):
    """One setting, under all its names.

    `key` is its TOML key in `[table]`. `default` is `msgspec.NODEFAULT` for one that must be
    given. `is_limit`: a key of `[gateway]` that `twofold serve` takes too.
    """

    table: Table
    key: str
    type: Any
    default: Any
    description: str
    is_limit: bool

    @property
    def flag(self) -> str:
        """Its flag, such as `--block-size`; a repeated flag is in the singular."""
        return "--worker" if self.is_list else "--" + self.key.replace("_", "-")

    @property
    def variable(self) -> str:
        """Its environment variable, such as `TWOFOLD_BLOCK_SIZE`."""
        return "TWOFOLD_" + self.key.upper()

    @property
    def is_bool(self) -> bool:
        """Whether its flag takes no value and has a `--no-` twin."""
        return _bare(self.type) is bool

    @property
    def is_list(self) -> bool:
        """Whether its flag is given once for each item."""
        return get_origin(_bare(self.type)) is tuple

    @property
    def is_nested(self) -> bool:
        """Whether it is a struct of settings of another table."""
        return isinstance(_bare(self.type), type) and issubclass(_bare(self.type), msgspec.Struct)


def options(table: Table) -> tuple[Option, ...]:
    """All options of a TOML table, in the order of their fields."""
    limits = GatewayLimits.__struct_fields__ if table == "gateway" else ()
    found = tuple(
        Option(table, f.name, f.type, f.default, _description(f.type), f.name in limits)
        for f in msgspec.structs.fields(_STRUCTS[table])
    )
    return tuple(option for option in found if not option.is_nested)


def all_options() -> tuple[Option, ...]:
    """The options of all tables."""
    return tuple(option for table in _STRUCTS for option in options(table))


def tables() -> tuple[Table, ...]:
    """The names of all TOML tables."""
    return tuple(_STRUCTS)


def as_flags(settings: WorkerSettings | GatewaySettings) -> list[str]:
    """The command line that reads back as `settings`, without the command's own name."""
    words: list[str] = []
    if isinstance(settings, WorkerSettings):
        words.append(settings.engine.model)
        pairs = [(o, settings.engine) for o in options("engine") if o.key != "model"]
        words += _flags([*pairs, *((o, settings) for o in options("worker"))])
    else:
        words += _flags([(option, settings) for option in options("gateway")])
    return words


def _flags(pairs: list[tuple[Option, Any]]) -> list[str]:
    words: list[str] = []
    for option, owner in pairs:
        value = getattr(owner, option.key)
        if option.is_bool:
            words.append(option.flag if value else option.flag.replace("--", "--no-", 1))
        elif option.is_list:
            addresses: tuple[WorkerAddress, ...] = value
            words += [f"{option.flag}={format_address(address)}" for address in addresses]
        else:
            words.append(f"{option.flag}={value}")
    return words


def _bare(type_: Any) -> Any:
    """The type without its bounds and description."""
    return get_args(type_)[0] if get_origin(type_) is Annotated else type_


def _description(type_: Any) -> str:
    """The text that belongs to the field itself: the outermost one."""
    notes = [meta.description for meta in getattr(type_, "__metadata__", ()) if meta.description]
    return notes[-1] if notes else ""
