"""What a simulation may raise."""

from __future__ import annotations


class StuckError(RuntimeError):
    """More events than allowed: the simulated system makes no progress."""
