"""From the word MODEL to a path that a worker can load."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import msgspec

from twofold.cli.command import EXIT_FAILED, CommandError
from twofold.config import EngineSettings

BUILTIN: Final = "builtin"
_NEEDS_DEVICE: Final = "workers need more packages: pip install 'twofold[device]'"


def with_local_model(engine: EngineSettings) -> EngineSettings:
    """The same settings with an absolute path as `model`; "builtin" is converted on first use.

    Raises CommandError when there is no such model.
    """
    if engine.model == BUILTIN:
        path = _builtin()
        name = engine.served_model_name or BUILTIN
        return msgspec.structs.replace(engine, model=str(path), served_model_name=name)
    path = Path(engine.model).expanduser()
    if not path.exists():
        raise CommandError(f"MODEL {engine.model}: no such directory; builtin is always there")
    if not (path / "config.json").is_file() and path.suffix != ".gguf":
        raise CommandError(f"MODEL {engine.model}: holds no config.json, so it is not a model")
    return msgspec.structs.replace(engine, model=str(path.resolve()))


def needs_device(error: ImportError) -> CommandError:
    """What to tell somebody who has only the gateway's packages."""
    return CommandError(f"{error.name or error} is not installed; {_NEEDS_DEVICE}")


def _builtin() -> Path:
    try:
        from twofold.device.builtin import builtin_model
        from twofold.device.errors import ModelError
    except ImportError as error:
        raise needs_device(error) from None
    try:
        return builtin_model()
    except ModelError as error:
        raise CommandError(f"MODEL {BUILTIN}: {error}", EXIT_FAILED) from None
