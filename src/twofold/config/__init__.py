"""Settings of every process, and the only reader of TOML, environment and flags."""

from twofold.config.options import Option, as_flags, options
from twofold.config.read import (
    GATEWAY_DEFAULTS,
    WORKER_DEFAULTS,
    Sources,
    read_gateway,
    read_serve,
    read_worker,
)
from twofold.config.settings import (
    EngineSettings,
    GatewayLimits,
    GatewaySettings,
    Role,
    ServeSettings,
    WorkerAddress,
    WorkerSettings,
)
from twofold.config.values import SettingsError, parse_address

__all__ = [
    "GATEWAY_DEFAULTS",
    "WORKER_DEFAULTS",
    "EngineSettings",
    "GatewayLimits",
    "GatewaySettings",
    "Option",
    "Role",
    "ServeSettings",
    "SettingsError",
    "Sources",
    "WorkerAddress",
    "WorkerSettings",
    "as_flags",
    "options",
    "parse_address",
    "read_gateway",
    "read_serve",
    "read_worker",
]
