"""Checkpointing by segments: what ``chen-sqrt`` and ``chen-greedy`` have in common.

Chen et al., "Training Deep Nets with Sublinear Memory Cost" (arXiv:1604.06174), section 4,
Algorithm 1: forward keeps the *checkpoints* and drops what lies between them; backward computes a
segment again from its checkpoints when it comes to it, and keeps the segment until it is done with
it.  So every operator runs at most twice on a chain.

On other graphs a segment may need values from before its checkpoints (skips).  As in Checkmate's
implementation, these are computed again too; they are dropped at once, because their own segment's
turn comes later.
"""

from __future__ import annotations

from abc import abstractmethod
from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar

from dtrcompile.passes.errors import OptionError
from dtrcompile.passes.planning.planners.base import Planner
from dtrcompile.passes.planning.planners.improve import Schedule
from dtrcompile.passes.planning.planners.linearize import Linearization
from dtrcompile.passes.planning.planners.rematerialize import (
    Rematerializer,
    TooManyRunsError,
    baseline_if_it_fits,
)
from dtrcompile.passes.program.index import ProgramIndex
from dtrcompile.passes.program.plan import Plan
from dtrcompile.passes.program.program import Program

WAYS = ("articulation-points", "linearized", "crossings")
"""Where checkpoints may stand; see `SegmentPlanner`."""


@dataclass(frozen=True, slots=True)
class Checkpoints:
    """A checkpoint set.

    Attributes:
        storages: kept from when they are made.
        positions: ascending; a segment ends at each.
    """

    storages: frozenset[int]
    positions: tuple[int, ...]


@dataclass(frozen=True)
class SegmentPlanner(Planner):
    """A planner that offers checkpoint sets; the cheapest that fits is taken.

    Attributes:
        way: ``"articulation-points"``: checkpoints are articulation points of the forward graph;
            ``"linearized"``: any forward values, in the order of the program;
            ``"crossings"``: as that, but all values that cross a cut are kept, so that no segment
            needs anything from before it (ours);
            ``"any"``: all three are tried.
        most_runs: a checkpoint set that makes more runs of operators than this multiple of the
            program's is passed over.
    """

    name: ClassVar[str]

    way: str = "any"
    most_runs: float = 8.0

    def __post_init__(self) -> None:
        if self.way not in ("any", *WAYS):
            raise OptionError.unknown("way", self.way, ("any", *WAYS))

    def plan(self, program: Program, budget_bytes: int) -> Plan:
        index = ProgramIndex.of(program)
        cheapest = baseline_if_it_fits(program, index, budget_bytes)
        if cheapest.best is None:
            line = Linearization.of(index)
            for checkpoints in dict.fromkeys(self._checkpoint_sets(line)):
                schedule = schedule_with(line, checkpoints, self.most_runs)
                if schedule is not None:
                    cheapest.offer(schedule)
        return cheapest.plan(self.name)

    def _checkpoint_sets(self, line: Linearization) -> Iterable[Checkpoints]:
        for way in WAYS if self.way == "any" else (self.way,):
            candidates = (
                line.articulation_points()
                if way == "articulation-points"
                else line.forward_storages()
            )
            for chosen in dict.fromkeys(self.choices(line, candidates)):
                positions = tuple(dict.fromkeys(line.made_at[s] + 1 for s in chosen))
                kept = (
                    frozenset().union(*line.crossings(positions))
                    if way == "crossings"
                    else frozenset(chosen)
                )
                yield Checkpoints(kept, positions)

    @abstractmethod
    def choices(self, line: Linearization, candidates: list[int]) -> Iterable[tuple[int, ...]]:
        """Checkpoint sets, each in the order in which ``candidates`` come."""


def schedule_with(
    line: Linearization, checkpoints: Checkpoints, most_runs: float
) -> Schedule | None:
    """What these checkpoints come to; None if it takes over ``most_runs`` times the program."""
    try:
        return _schedule(line, checkpoints, int(most_runs * line.index.n_operators) + 1)
    except TooManyRunsError:
        return None


def _schedule(line: Linearization, checkpoints: Checkpoints, most_runs: int) -> Schedule:
    index = line.index
    run = Rematerializer(index, most_runs)
    segment = [bisect_left(checkpoints.positions, made_at + 1) for made_at in line.made_at]
    last_segment = bisect_left(checkpoints.positions, line.forward_end)

    def drop_before(current: int, storages: Iterable[int]) -> None:
        for s in storages:
            if segment[s] < current and s not in checkpoints.storages:
                run.drop(s)

    for o in range(index.n_operators + 1):
        if o == line.forward_end:
            drop_before(last_segment, line.forward_storages())
        if o == index.program.boundary:
            run.cross_boundary()
        if o == index.n_operators:
            break
        missing = run.missing(o)
        run.run(o)
        if missing:
            current = max(segment[index.storage_of[t]] for t in missing)
            drop_before(current, run.fresh)
            run.fresh.clear()
    return run.schedule()
