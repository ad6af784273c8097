"""Where published traces and tables lie, for the tests that read them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest


def published(name: str) -> Path:
    """A published file or folder; skips the test, saying why, where it is absent."""
    root = Path(__file__).resolve().parents[2]
    data = Path(os.environ.get("TWOFOLD_DATA") or root.parent / "shared" / "data")
    path = data / name
    if not path.exists():
        pytest.skip(f"no {name}: set TWOFOLD_DATA to the folder of published data")
    return path
