"""What this package raises."""

from __future__ import annotations


class CostError(ValueError):
    """A model, accelerator or profile that cannot be used, in one line that says what would be."""


class OutOfRange(CostError):
    """A step outside what was measured: name the wider profile or allow extrapolation."""
