"""A program's forward as a line: what checkpointing planners choose their checkpoints from.

Chen et al. (2016) and Griewank and Walther (2000) know chains only.  Checkmate (Jain et al., MLSys
2020, section 6) names two ways to give them any graph, and both are here:

* *articulation points*: the values without which the forward graph would fall apart;
* *linearized*: the order in which the operators run is taken for a chain.

Programs here have operators where those papers have layers, so two things are done differently.
Side branches that only backward reads (a norm's statistics, a saved mask) are left out before
articulation points are looked for; else every value beside one would be such a point.  And a
*position* between two operators has a *crossing*, all values made before it that forward reads
after it: on a chain that is one value, elsewhere it is what a segment can be computed from.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from dtrcompile.passes.planning.planners.base import keep_all
from dtrcompile.passes.planning.planners.improve import schedule_of
from dtrcompile.passes.program.index import ProgramIndex


@dataclass(frozen=True, slots=True)
class Linearization:
    """Forward as a line of operators; position p is before operator p.

    Attributes:
        index: of the program.
        forward_end: operators before it are forward's, those from it on backward's.
        made_at: for each storage, the operator that allocates it, -1 for a constant.
        last_read: for each storage, the last forward operator that reads it, -1 for none.
    """

    index: ProgramIndex
    forward_end: int
    made_at: list[int]
    last_read: list[int]

    @staticmethod
    def of(index: ProgramIndex) -> Linearization:
        """Build it, in time linear in the program."""
        end = forward_end(index)
        made_at = [-1] * index.n_storages
        last_read = [-1] * index.n_storages
        for o in range(index.n_operators):
            for s in index.roots[o]:
                made_at[s] = o
            if o < end:
                for s in index.input_storages[o]:
                    last_read[s] = o
        return Linearization(index, end, made_at, last_read)

    def forward_storages(self) -> list[int]:
        """What forward makes and has bytes, in the order in which it is made."""
        roots = self.index.roots[: self.forward_end]
        return [s for made in roots for s in made if self.index.size_bytes[s]]

    def crossings(self, positions: Sequence[int]) -> list[frozenset[int]]:
        """For each of the ascending ``positions``, the storages that cross it."""
        crossing: list[set[int]] = [set() for _ in positions]
        for s, made_at in enumerate(self.made_at):
            if 0 <= made_at < self.forward_end:
                first = bisect_right(positions, made_at)
                for k in range(first, bisect_right(positions, self.last_read[s])):
                    crossing[k].add(s)
        return [frozenset(c) for c in crossing]

    def crossing_bytes(self) -> list[int]:
        """For each position from 0 to `forward_end`, the bytes that cross it."""
        change = [0] * (self.forward_end + 2)
        for s, made_at in enumerate(self.made_at):
            if 0 <= made_at < self.last_read[s]:
                change[made_at + 1] += self.index.size_bytes[s]
                change[self.last_read[s] + 1] -= self.index.size_bytes[s]
        total = 0
        return [total := total + c for c in change[: self.forward_end + 1]]

    def windows(self, length: int) -> list[int]:
        """Position 0, and in each ``length`` operators the position with the least crossing."""
        crossing_bytes = self.crossing_bytes()
        narrowest = [
            min(range(first, min(first + length, self.forward_end)), key=crossing_bytes.__getitem__)
            for first in range(1, self.forward_end, length)
        ]
        return [0, *narrowest]

    def articulation_points(self) -> list[int]:
        """Storages whose removal cuts what the last forward operator is computed from in two.

        The graph is undirected, as in Checkmate.  In the order in which they are made.
        """
        nodes = self._ancestors_of_the_end()
        points = _articulation_points(
            {
                s: [t for t in (*self.index.parents[s], *self.index.children[s]) if t in nodes]
                for s in sorted(nodes)
            }
        )
        return [s for s in self.forward_storages() if s in points]

    def _ancestors_of_the_end(self) -> set[int]:
        last = next((r for r in reversed(self.index.roots[: self.forward_end]) if r), ())
        nodes = set(last)
        stack = list(last)
        while stack:
            for p in self.index.parents[stack.pop()]:
                # A storage that backward writes a view of can have parents made later.
                if p not in nodes and self.made_at[p] < self.forward_end:
                    nodes.add(p)
                    stack.append(p)
        return nodes


def forward_end(index: ProgramIndex) -> int:
    """Where backward begins: the boundary, or just after the operator at the baseline's peak.

    A log of one straight program, or an inference pass, has no boundary with operators on both
    sides; but memory grows while values are saved and shrinks while they are used, so the peak is
    a good guess.
    """
    boundary = index.program.boundary
    if boundary is not None and 0 < boundary < index.n_operators:
        return boundary
    if not index.n_operators:
        return 0
    during_bytes = schedule_of(index, keep_all(index.program).steps).during_bytes
    if boundary is not None:
        del during_bytes[boundary]
    return max(range(index.n_operators), key=lambda o: (during_bytes[o], -o)) + 1


def _articulation_points(neighbours: dict[int, list[int]]) -> set[int]:
    """Tarjan's algorithm, with its own stack because chains are long."""
    found_at: dict[int, int] = {}
    low: dict[int, int] = {}
    points: set[int] = set()
    for root in neighbours:
        if root in found_at:
            continue
        found_at[root] = low[root] = len(found_at)
        subtrees = 0
        stack: list[tuple[int, int, Iterable[int]]] = [(root, -1, iter(neighbours[root]))]
        while stack:
            node, parent, rest = stack[-1]
            for other in rest:
                if other not in found_at:
                    found_at[other] = low[other] = len(found_at)
                    stack.append((other, node, iter(neighbours[other])))
                    break
                if other != parent:
                    low[node] = min(low[node], found_at[other])
            else:
                stack.pop()
                if parent == root:
                    subtrees += 1
                elif parent >= 0:
                    low[parent] = min(low[parent], low[node])
                    if low[node] >= found_at[parent]:
                        points.add(parent)
        if subtrees > 1:
            points.add(root)
    return points
