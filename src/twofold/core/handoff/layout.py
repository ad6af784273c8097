"""Whether one worker can read another's KV."""

from __future__ import annotations

from twofold.types import KVLayout


def incompatibility(ours: KVLayout, theirs: KVLayout) -> str | None:
    """The first field in which two layouts differ, in words, or None when they are equal.

    Every field counts: with any of them different the copy succeeds and the text is wrong.
    """
    if ours == theirs:  # most pairs, and asked for every request
        return None
    for field in KVLayout.__struct_fields__:
        a, b = getattr(ours, field), getattr(theirs, field)
        if a != b:
            return f"{field} differs: {a} and {b}"
    return None
