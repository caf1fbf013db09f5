"""Planner ``chen-greedy``: a checkpoint whenever b bytes have been dropped since the last.

Chen et al., "Training Deep Nets with Sublinear Memory Cost" (arXiv:1604.06174), section 4,
Algorithm 3: walk through forward, add up what it makes, and when the sum passes b put a checkpoint
at the next candidate.  The paper searches b around √(x y), x the bytes of the checkpoints and y
those of the largest segment; as the budget is known here, a geometric grid of b between the
smallest value and all of forward is tried, and the cheapest plan that fits is taken.  On other
graphs than chains, the two ways that Checkmate (Jain et al., MLSys 2020, section 6) names; see
`segments`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar

from dtrcompile.passes.errors import OptionError
from dtrcompile.passes.planning.planners.linearize import Linearization
from dtrcompile.passes.planning.planners.segments import SegmentPlanner


@dataclass(frozen=True)
class ChenGreedyPlanner(SegmentPlanner):
    """See the module docstring; ``way`` and ``most_runs`` as in `segments.SegmentPlanner`.

    Attributes:
        segment_bytes: the paper's b; None: search it.
        grid: how many b are tried for each way, at least 2.
    """

    name: ClassVar[str] = "chen-greedy"

    segment_bytes: int | None = None
    grid: int = 32

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.grid < 2:
            raise OptionError(f"grid must be at least 2, not {self.grid}")
        if self.segment_bytes is not None and self.segment_bytes < 0:
            raise OptionError(f"segment_bytes must not be negative, not {self.segment_bytes}")

    def choices(self, line: Linearization, candidates: list[int]) -> Iterable[tuple[int, ...]]:
        for segment_bytes in self._grid(line):
            yield _greedy(line, frozenset(candidates), segment_bytes)

    def _grid(self, line: Linearization) -> Iterable[int]:
        if self.segment_bytes is not None:
            return (self.segment_bytes,)
        sizes = [line.index.size_bytes[s] for s in line.forward_storages()]
        if not sizes:
            return ()
        least, most = min(sizes), sum(sizes)
        ratio = (most / least) ** (1 / (self.grid - 1))
        # Below the least size every candidate is a checkpoint, which is the first of the grid.
        return (0, *(int(least * ratio**k) for k in range(self.grid - 1)))


def _greedy(line: Linearization, candidates: frozenset[int], segment_bytes: int) -> tuple[int, ...]:
    """Algorithm 3 of the paper."""
    chosen = []
    since_bytes = 0
    for s in line.forward_storages():
        since_bytes += line.index.size_bytes[s]
        if s in candidates and since_bytes > segment_bytes:
            chosen.append(s)
            since_bytes = 0
    return tuple(chosen)
