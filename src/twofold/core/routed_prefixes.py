"""Which prefix blocks each worker probably caches, from where the router has sent prompts.

Approximate on purpose: workers evict on their own, and nothing is asked of them. Since a prompt
counts from when it is sent, siblings that come at once meet on one worker.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence


class RoutedPrefixes:
    """Per worker, the block keys last sent to it; the oldest go first.

    A key stands for its block and all before it, so a prompt's keys are a chain.
    """

    def __init__(self) -> None:
        self._keys: dict[str, OrderedDict[int, None]] = {}

    def hits(self, worker: str, keys: Sequence[int]) -> int:
        """How many of `keys`, from the first on, `worker` has been sent."""
        known = self._keys.get(worker)
        if not known:
            return 0
        for index, key in enumerate(keys):
            if key not in known:
                return index
        return len(keys)

    def kept(self, worker: str) -> int:
        """Keys remembered of `worker`."""
        return len(self._keys.get(worker, ()))

    def add(self, worker: str, keys: Sequence[int], most_keys: int) -> None:
        """`worker` is sent a prompt with `keys`; at most `most_keys` of its keys are kept."""
        known = self._keys.setdefault(worker, OrderedDict())
        # Last block first, so that of one chain the end is forgotten before what it hangs on.
        for key in reversed(keys):
            known[key] = None
            known.move_to_end(key)
        while len(known) > most_keys:
            known.popitem(last=False)

    def forget(self, worker: str) -> None:
        """`worker` has started anew, with an empty cache."""
        self._keys.pop(worker, None)
