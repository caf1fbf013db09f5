"""Liveness: which tensors are still to be read, while a plan is walked from its end to its start.

A tensor is *live* between the step that defines it and the last step that reads it.  A storage is
live while any of its tensors is, and may be freed right after the last step in which it is.

All that shortens plans asks here: `tighten`, `improve.tidy` of the planners, and `hoist`.  The
referee does not: it keeps its own account, and is naive on purpose.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence


class Liveness:
    """What is live after the step at hand; before the first call, after the end.

    For each step, latest first: ask what is live after it, then `define` what it defines, then
    `read` what it reads.

    Attributes:
        is_live: for each tensor, whether it is read later.
        n_live: for each storage, the number of its live tensors.
    """

    def __init__(self, storage_of: Sequence[int], n_storages: int) -> None:
        """Nothing is live yet.

        Args:
            storage_of: for each tensor, its storage.
        """
        self.storage_of = storage_of
        self.is_live = [False] * len(storage_of)
        self.n_live = [0] * n_storages

    def any_live(self, tensors: Iterable[int]) -> bool:
        """Whether one of these tensors is read later."""
        is_live = self.is_live
        return any(is_live[t] for t in tensors)

    def dead(self, storages: Iterable[int]) -> list[int]:
        """Those storages of which no tensor is read later, in the order given."""
        n_live = self.n_live
        return [s for s in storages if not n_live[s]]

    def define(self, tensors: Iterable[int]) -> list[int]:
        """These tensors are defined here, so they are not live before.

        Returns:
            the storages that are not live any more.
        """
        is_live, n_live, storage_of = self.is_live, self.n_live, self.storage_of
        ended = []
        for t in tensors:
            if is_live[t]:
                is_live[t] = False
                s = storage_of[t]
                n_live[s] -= 1
                if not n_live[s]:
                    ended.append(s)
        return ended

    def read(self, tensors: Iterable[int]) -> list[int]:
        """These tensors are read here, so they are live before.

        Returns:
            the storages that were not live after it.
        """
        is_live, n_live, storage_of = self.is_live, self.n_live, self.storage_of
        begun = []
        for t in tensors:
            if not is_live[t]:
                is_live[t] = True
                s = storage_of[t]
                if not n_live[s]:
                    begun.append(s)
                n_live[s] += 1
        return begun
