"""The cost of evicted neighborhoods, kept up to date as storages are evicted and computed again.

Kirisame et al., ICLR 2021, section 4.1 (e*) and appendix C.2 (union-find with cost splitting).
Each class writes ``PoolState.neighborhood_ns`` for storages in memory; the value of any other is
meaningless until it is back.

A storage is *absent* if it was computed once, is not in memory and can be computed again.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from dtrcompile.passes.planning.heuristics import Ids, Neighborhood, PoolState
from dtrcompile.passes.program.index import NEVER, ProgramIndex

Mask: TypeAlias = npt.NDArray[np.bool_]


class NeighborhoodTracker(ABC):
    """Told of every change; asked to `refresh` before scores are taken."""

    @abstractmethod
    def on_absent(self, s: int) -> None:
        """``s`` was evicted, or freed while it could still be computed again."""

    @abstractmethod
    def on_resident(self, s: int) -> None:
        """``s`` was computed."""

    def on_absent_use(self, s: int) -> None:  # noqa: B027  (most do not care)
        """Absent ``s`` is needed again, or is no longer."""

    @abstractmethod
    def on_banished(self, s: int) -> None:
        """``s`` is freed for good; told before the simulator's ``absent`` changes."""

    @abstractmethod
    def refresh(self, ids: Ids, mask: Mask) -> None:
        """Bring `PoolState.neighborhood_ns` up to date for ``ids``, which are where ``mask`` is."""


def make_tracker(
    kind: Neighborhood,
    index: ProgramIndex,
    state: PoolState,
    absent: list[bool],
    next_use: list[int],
    walk_limit: int,
) -> NeighborhoodTracker:
    """A tracker that reads the simulator's ``absent`` and ``next_use`` lists (by storage).

    ``walk_limit`` bounds the storages seen in one walk over an evicted neighborhood, so that long
    chains of freed storages do not make planning quadratic; a cut walk counts the cost seen so far.
    """
    match kind:
        case Neighborhood.NONE:
            return _NoNeighborhood()
        case Neighborhood.ANCESTORS:
            return _WalkedNeighborhood(index, state, absent, next_use, walk_limit, False)
        case Neighborhood.EXACT:
            return _WalkedNeighborhood(index, state, absent, next_use, walk_limit, True)
        case Neighborhood.EQUIVALENCE:
            return _EquivalenceClasses(index, state, absent)


class _NoNeighborhood(NeighborhoodTracker):
    def on_absent(self, s: int) -> None:
        pass

    def on_resident(self, s: int) -> None:
        pass

    def on_banished(self, s: int) -> None:
        pass

    def refresh(self, ids: Ids, mask: Mask) -> None:
        pass


class _WalkedNeighborhood(NeighborhoodTracker):
    """Exact, by walks over absent storages; walked again only where something changed."""

    def __init__(
        self,
        index: ProgramIndex,
        state: PoolState,
        absent: list[bool],
        next_use: list[int],
        walk_limit: int,
        descendants: bool,
    ) -> None:
        self.parents, self.children = index.parents, index.children
        self.cost_ns = index.cost_ns
        self.state, self.absent, self.next_use = state, absent, next_use
        self.walk_limit = walk_limit
        self.descendants = descendants
        self.resident = [False] * index.n_storages
        self.dirty: set[int] = set()

    def _mark(self, s: int) -> None:
        """Everything in memory whose neighborhood may hold ``s``."""
        self._mark_readers(s, self.children)
        # As a descendant it counts only while something needs it.
        if self.descendants and self.next_use[s] != NEVER:
            self._mark_readers(s, self.parents)

    def _mark_readers(self, s: int, adjacent: list[tuple[int, ...]]) -> None:
        absent, resident, dirty, limit = self.absent, self.resident, self.dirty, self.walk_limit
        seen = {s}
        stack = [s]
        while stack and len(seen) <= limit:
            for r in adjacent[stack.pop()]:
                if r not in seen:
                    seen.add(r)
                    if absent[r]:
                        stack.append(r)
                    elif resident[r]:
                        dirty.add(r)

    def on_absent(self, s: int) -> None:
        self.resident[s] = False
        self.dirty.discard(s)
        self._mark(s)

    def on_absent_use(self, s: int) -> None:
        if self.descendants:
            self._mark_readers(s, self.parents)

    def on_resident(self, s: int) -> None:
        self.resident[s] = True
        self._mark(s)
        self.dirty.add(s)

    def on_banished(self, s: int) -> None:
        self.resident[s] = False
        self.dirty.discard(s)
        self._mark(s)

    def refresh(self, ids: Ids, mask: Mask) -> None:
        if not self.dirty:
            return
        absent, next_use, cost_ns = self.absent, self.next_use, self.cost_ns
        parents, children = self.parents, self.children
        values = self.state.neighborhood_ns
        if 2 * len(self.dirty) < len(ids):
            stale = {s for s in self.dirty if mask[s]}
        else:
            stale = self.dirty.intersection(ids.tolist())
        self.dirty -= stale
        for s in stale:
            seen = {s}
            total = 0
            stack = [s]
            while stack and len(seen) <= self.walk_limit:
                for p in parents[stack.pop()]:
                    if absent[p] and p not in seen:
                        seen.add(p)
                        stack.append(p)
                        total += cost_ns[p]
            if self.descendants:
                stack = [s]
                visited = len(seen)
                while stack and len(seen) - visited <= self.walk_limit:
                    for c in children[stack.pop()]:
                        if absent[c] and c not in seen and next_use[c] != NEVER:
                            seen.add(c)
                            stack.append(c)
                            total += cost_ns[c]
            values[s] = total


class _EquivalenceClasses(NeighborhoodTracker):
    """ẽ*: absent neighbors form classes with one running cost each.

    Evicting joins the classes of the absent neighbors; computing again takes the storage's own
    cost out of its class, which stays joined ("phantom connections").  Each class knows the
    storages in memory that touch it, so a change of cost reaches exactly those.
    """

    def __init__(self, index: ProgramIndex, state: PoolState, absent: list[bool]) -> None:
        self.neighbors = [
            tuple(dict.fromkeys((*p, *c)))
            for p, c in zip(index.parents, index.children, strict=True)
        ]
        self.cost_ns = index.cost_ns
        self.values = state.neighborhood_ns
        self.absent = absent
        self.node = [-1] * index.n_storages
        self.known = [False] * index.n_storages
        self.above: list[int] = []
        self.class_ns: list[int] = []
        self.touching: list[set[int]] = []

    def _find(self, s: int) -> int:
        above = self.above
        node = self.node[s]
        while above[node] != node:
            above[node] = above[above[node]]
            node = above[node]
        return node

    def _add(self, storages: set[int], cost_ns: int) -> None:
        if not storages or not cost_ns:
            return
        values = self.values
        if len(storages) > 16:
            values[np.fromiter(storages, np.intp, len(storages))] += cost_ns
        else:
            for s in storages:
                values[s] += cost_ns

    def on_absent(self, s: int) -> None:
        absent = self.absent
        self.known[s] = True
        root = len(self.above)
        self.above.append(root)
        self.class_ns.append(self.cost_ns[s])
        self.node[s] = root
        near = [r for r in self.neighbors[s] if absent[r]]
        touching = {r for r in self.neighbors[s] if not absent[r] and self.known[r]}
        self.touching.append(touching)
        self._add(touching, self.class_ns[root])
        for r in near:
            other = self._find(r)
            if other == root:
                continue
            if len(self.touching[other]) > len(self.touching[root]):
                root, other = other, root
            self._add(self.touching[other] - self.touching[root], self.class_ns[root])
            self._add(self.touching[root] - self.touching[other], self.class_ns[other])
            self.touching[root] |= self.touching[other]
            self.touching[other] = set()
            self.class_ns[root] += self.class_ns[other]
            self.above[other] = root
        self.touching[root].discard(s)

    def _leave(self, s: int) -> None:
        """``s`` leaves its class, and whatever touched the class only through ``s`` lets go."""
        if self.node[s] < 0:
            return
        root = self._find(s)
        self.node[s] = -1
        self.class_ns[root] -= self.cost_ns[s]
        touching = self.touching[root]
        self._add(touching, -self.cost_ns[s])
        absent = self.absent
        for r in self.neighbors[s]:
            if r in touching and not any(
                absent[q] and q != s and self._find(q) == root for q in self.neighbors[r]
            ):
                touching.discard(r)
                self.values[r] -= self.class_ns[root]

    def on_resident(self, s: int) -> None:
        self._leave(s)
        self.known[s] = True
        roots = {self._find(r) for r in self.neighbors[s] if self.absent[r]}
        for root in roots:
            self.touching[root].add(s)
        self.values[s] = sum(self.class_ns[root] for root in roots)

    def on_banished(self, s: int) -> None:
        if not self.absent[s]:
            # It was in memory, so it touches classes rather than being in one.
            for root in {self._find(r) for r in self.neighbors[s] if self.absent[r]}:
                self.touching[root].discard(s)
        self._leave(s)
        self.known[s] = False

    def refresh(self, ids: Ids, mask: Mask) -> None:
        pass
