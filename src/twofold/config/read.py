"""Settings from four places, of which the first that names one wins.

Flags, then `TWOFOLD_*` variables, then the TOML file of `--config`, then defaults.
"""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

import msgspec

from twofold.config.options import Option, Table, all_options, options, tables
from twofold.config.settings import (
    EngineSettings,
    GatewayLimits,
    GatewaySettings,
    ServeSettings,
    WorkerSettings,
)
from twofold.config.values import SettingsError, read_value

_PREFIX: Final = "TWOFOLD_"
WORKER_DEFAULTS: Final = MappingProxyType({"host": "127.0.0.1", "port": 0, "handoff_port": 0})
"""What `twofold worker` takes for what its settings leave open."""

GATEWAY_DEFAULTS: Final = MappingProxyType(
    {"host": "127.0.0.1", "port": 8000, "admin_host": "127.0.0.1", "admin_port": 0}
)
"""What `twofold gateway` takes for what its settings leave open."""

_POOLS: Final = ("prefill", "decode", "mixed")


class Sources(msgspec.Struct, frozen=True):
    """Where settings come from.

    `flags`: by key of the option, as text (a bool for a switch, a list for a repeated flag);
    a flag that was not given is absent. `file`: the path after `--config`, or empty.
    """

    flags: Mapping[str, Any] = {}
    environ: Mapping[str, str] = {}
    file: str = ""


class Reader:
    """Settings of one process, read with the rule of precedence; every method may refuse."""

    def __init__(self, sources: Sources) -> None:
        """Read the file and refuse names that are not settings. Raises SettingsError."""
        self._flags = sources.flags
        self._environ = sources.environ
        self._file = sources.file
        self._tables = _read_file(sources.file) if sources.file else {}
        _refuse_unknown_variables(sources.environ)
        self._given: dict[str, str] = {}

    def values(
        self, chosen: Iterable[Option], defaults: Mapping[str, Any] | None = None
    ) -> dict[str, Any]:
        """The value of each option that has one, by key; `defaults` are this command's own.

        An option that nobody gives and that has no default is refused. Raises SettingsError.
        """
        found: dict[str, Any] = dict(defaults or {})
        for option in chosen:
            place = self._look_up(option)
            if place is None:
                if option.default is msgspec.NODEFAULT and option.key not in found:
                    name = "MODEL" if option.key == "model" else option.flag
                    raise SettingsError(f"{name} is missing: {option.description}")
                continue
            raw, where, is_text = place
            found[option.key] = read_value(raw, option.type, is_text=is_text, where=where)
            self._given[option.key] = where
        return found

    def given(self) -> frozenset[str]:
        """Keys read so far that were not left to their default."""
        return frozenset(self._given)

    def where(self, keys: Iterable[str]) -> str:
        """The places in which those of `keys` were set that were set at all."""
        return ", ".join(self._given[key] for key in keys if key in self._given)

    def _look_up(self, option: Option) -> tuple[Any, str, bool] | None:
        """The value as written, where it stands in words, and whether numbers are text there."""
        if option.key in self._flags:
            raw = self._flags[option.key]
            if option.is_bool:
                return raw, option.flag, False
            name = "MODEL" if option.key == "model" else option.flag
            shown = " ".join(raw) if option.is_list else raw
            return raw, f"{name} {shown or repr(shown)}", True
        if option.variable in self._environ:
            raw = self._environ[option.variable]
            return raw, f"{option.variable}={raw}", True
        if option.key in self._tables.get(option.table, {}):
            raw = self._tables[option.table][option.key]
            return raw, f"{self._file}: [{option.table}] {option.key} = {_as_toml(raw)}", False
        return None


def read_worker(sources: Sources) -> WorkerSettings:
    """Settings of `twofold worker`. Raises SettingsError."""
    reader = Reader(sources)
    engine = EngineSettings(**reader.values(options("engine")))
    _check_chunks(engine, reader)
    return WorkerSettings(**reader.values(options("worker"), WORKER_DEFAULTS), engine=engine)


def read_gateway(sources: Sources) -> GatewaySettings:
    """Settings of `twofold gateway`. Raises SettingsError."""
    return GatewaySettings(**Reader(sources).values(options("gateway"), GATEWAY_DEFAULTS))


def read_serve(sources: Sources) -> tuple[ServeSettings, frozenset[str]]:
    """Settings of `twofold serve`, and the keys that were not left to their default.

    A model that nobody names is "builtin". When only `mixed` is given, there are no other
    workers. Raises SettingsError.
    """
    reader = Reader(sources)
    engine = reader.values(options("engine"), {"model": "builtin"})
    limits = reader.values(option for option in options("gateway") if option.is_limit)
    own = reader.values(options("serve"))
    if own.get("mixed", 0) > 0 and "prefill" not in own and "decode" not in own:
        own |= {"prefill": 0, "decode": 0}
    settings = ServeSettings(**own, engine=EngineSettings(**engine), limits=GatewayLimits(**limits))
    _check_pools(settings, reader.where(_POOLS))
    _check_chunks(settings.engine, reader)
    return settings, reader.given()


def _check_pools(settings: ServeSettings, where: str) -> None:
    if settings.prefill + settings.decode + settings.mixed == 0:
        raise SettingsError(f"{where}: there must be at least one worker")
    if settings.mixed > 0:
        return
    if settings.prefill == 0:
        raise SettingsError(f"{where}: decode workers need a prefill or a mixed worker as well")
    if settings.decode == 0:
        raise SettingsError(f"{where}: prefill workers need a decode or a mixed worker as well")


def _check_chunks(engine: EngineSettings, reader: Reader) -> None:
    """Raise SettingsError for a chunk policy without the limit that it keeps to."""
    limit = {"capped": "chunk_cap_tokens", "tpot_goal": "chunk_tpot_s"}.get(engine.chunk_policy)
    if limit is not None and not getattr(engine, limit):
        flag = f"--{limit.replace('_', '-')}"
        raise SettingsError(f"{reader.where(['chunk_policy'])}: needs {flag} above 0")


def _read_file(name: str) -> dict[str, dict[str, Any]]:
    """The tables of a TOML file. Raises SettingsError for what is not a setting."""
    try:
        content = tomllib.loads(Path(name).read_text(encoding="utf-8"))
    except OSError as error:
        raise SettingsError(f"--config {name}: {(error.strerror or str(error)).lower()}") from None
    except UnicodeDecodeError:
        raise SettingsError(f"--config {name}: must be a TOML file in UTF-8") from None
    except tomllib.TOMLDecodeError as error:
        raise SettingsError(f"--config {name}: must be TOML: {error}") from None
    for table, entries in content.items():
        if table not in tables():
            hint = _nearest(table, tables()) or f"tables are {', '.join(tables())}"
            raise SettingsError(f"{name}: [{table}]: unknown table; {hint}")
        if not isinstance(entries, dict):
            raise SettingsError(f"{name}: {table}: must be a table, [{table}]")
        known = {option.key: option for option in options(_table(table))}
        for key, raw in entries.items():
            if key not in known:
                raise SettingsError(
                    f"{name}: [{table}] {key}: unknown key; {_place_of(key, known)}"
                )
            where = f"{name}: [{table}] {key} = {_as_toml(raw)}"
            read_value(raw, known[key].type, is_text=False, where=where)
    return content


def _table(name: str) -> Table:
    return next(table for table in tables() if table == name)


def _place_of(key: str, known: Iterable[str]) -> str:
    """Where an unknown key might belong, in words."""
    homes = [f"[{option.table}]" for option in all_options() if option.key == key]
    if homes:
        return f"it belongs in {' or '.join(homes)}"
    return _nearest(key, known) or f"keys are {', '.join(known)}"


def _nearest(name: str, known: Iterable[str], cutoff: float = 0.6) -> str:
    """A question naming the nearest of `known`, or nothing when none is near."""
    near = difflib.get_close_matches(name, list(known), n=1, cutoff=cutoff)
    return f"did you mean {near[0]}?" if near else ""


def _refuse_unknown_variables(environ: Mapping[str, str]) -> None:
    """Refuse a variable that is nearly a setting's.

    Others are left alone: platforms add their own, such as TWOFOLD_SERVICE_HOST for a service
    of that name.
    """
    known = [option.key for option in all_options()]
    for variable in sorted(environ):
        key = variable.removeprefix(_PREFIX).lower()
        if variable.startswith(_PREFIX) and key not in known:
            near = difflib.get_close_matches(key, known, n=1, cutoff=0.85)
            if near:
                right = _PREFIX + near[0].upper()
                raise SettingsError(f"{variable}: unknown variable; did you mean {right}?")


def _as_toml(raw: object) -> str:
    """A value as it would be written in TOML, near enough to be found."""
    if isinstance(raw, bool):
        return "true" if raw else "false"
    return f'"{raw}"' if isinstance(raw, str) else str(raw)
