"""The error of this package that a user can act on. Free of torch, so that anyone may catch it."""

from __future__ import annotations


class ModelError(ValueError):
    """A model that cannot be served; the message is one line that says why."""
