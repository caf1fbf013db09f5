"""Planner ``treeverse``: the binomial schedule, optimal on chains of equal layers.

Griewank, "Achieving logarithmic growth of temporal and spatial complexity in reverse automatic
differentiation" (1992); Griewank and Walther, "Algorithm 799: revolve" (ACM TOMS 26(1), 2000),
the formulas of β and t.  To reverse l steps with s snapshots (the start counts as one), take the
next snapshot so that both parts can be reversed with as few repetitions r as the whole needs, the
right one with s - 1 snapshots; `repetition`, `forward_steps` and `advance` are those formulas.

For other programs than chains, the line of `linearize` is cut into stages, between articulation
points or at the narrowest position in every so many operators; a snapshot is all that crosses its
position.  What differs from the paper:

* the schedule is made on demand: backward asks for a value, the walk back to it places snapshots
  with the slots that are free then.  On a chain this is the paper's recursion;
* a value inside a stage has its whole stage computed again and kept until backward is done with it;
* the budget is in bytes, not in snapshots: for each way to cut, the largest number of snapshots
  whose plan fits is searched by bisection, and the cheapest plan of all is taken.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import ClassVar

from dtrcompile.passes.errors import OptionError
from dtrcompile.passes.planning.planners.base import Planner
from dtrcompile.passes.planning.planners.improve import Schedule
from dtrcompile.passes.planning.planners.linearize import Linearization
from dtrcompile.passes.planning.planners.rematerialize import (
    Cheapest,
    Rematerializer,
    TooManyRunsError,
    baseline_if_it_fits,
)
from dtrcompile.passes.program.index import ProgramIndex
from dtrcompile.passes.program.plan import Plan
from dtrcompile.passes.program.program import Program

_WAYS = ("articulation-points", "linearized")


def capacity(snapshots: int, repetitions: int) -> int:
    """β(s, r) = (s + r)! / (s! r!): the most steps that s snapshots and r repetitions reverse."""
    if snapshots < 0 or repetitions < 0:
        return 0
    return math.comb(snapshots + repetitions, snapshots)


def repetition(steps: int, snapshots: int) -> int:
    """The least r with β(s, r) ≥ l: how often any step is run forward at most.

    >>> repetition(10, 3)  # β(3, 1) = 4, β(3, 2) = 10
    2
    """
    low, high = 0, steps
    while low < high:
        middle = (low + high) // 2
        if capacity(snapshots, middle) >= steps:
            high = middle
        else:
            low = middle + 1
    return low


def forward_steps(steps: int, snapshots: int) -> int:
    """t(l, s) = r l - β(s + 1, r - 1): forward steps that reversing l steps takes at least.

    The first sweep is counted, from the start to the state before the last step; what the reversal
    of a step itself does is not.

    >>> [forward_steps(10, s) for s in (1, 3, 9, 10)]
    [45, 15, 10, 9]
    """
    r = repetition(steps, snapshots)
    return r * steps - capacity(snapshots + 1, r - 1)


def advance(steps: int, snapshots: int) -> int:
    """How many steps on the next snapshot stands, of ``steps`` ≥ 2 with the state at the first."""
    if snapshots == 1:
        return steps - 1
    r = repetition(steps, snapshots)
    return max(1, capacity(snapshots, r - 2), steps - capacity(snapshots - 1, r))


@dataclass(frozen=True)
class TreeversePlanner(Planner):
    """See the module docstring.

    Attributes:
        way: where stages may end: ``"articulation-points"``, ``"linearized"`` or ``"any"``.
        window: ``"linearized"`` stages have about as many operators as this; None: 1, 2, 4, ...
            are tried.
        most_stages: ways to cut into more are passed over.
        most_runs: plans of more runs of operators are passed over.
    """

    name: ClassVar[str] = "treeverse"

    way: str = "any"
    window: int | None = None
    most_stages: int = 2048
    most_runs: int = 1_000_000

    def __post_init__(self) -> None:
        if self.way not in ("any", *_WAYS):
            raise OptionError.unknown("way", self.way, ("any", *_WAYS))
        if self.window is not None and self.window < 1:
            raise OptionError(f"window must be at least 1, not {self.window}")

    def plan(self, program: Program, budget_bytes: int) -> Plan:
        index = ProgramIndex.of(program)
        cheapest = baseline_if_it_fits(program, index, budget_bytes)
        if cheapest.best is None:
            line = Linearization.of(index)
            for positions in dict.fromkeys(self._cuts(line)):
                self._search(ChainStages.of(line, positions), cheapest)
        return cheapest.plan(self.name)

    def _cuts(self, line: Linearization) -> Iterator[tuple[int, ...]]:
        if self.way != "linearized":
            points = (line.made_at[s] + 1 for s in line.articulation_points())
            yield tuple(dict.fromkeys((0, *points)))
        if self.way != "articulation-points":
            window = self.window or 1
            while window < max(2, line.forward_end):
                yield tuple(line.windows(window))
                if self.window is not None:
                    return
                window *= 2

    def _search(self, stages: ChainStages, cheapest: Cheapest) -> None:
        """Offer the schedule with the most snapshots that fits, and those on the way to it."""
        if len(stages.positions) > self.most_stages:
            return
        low, high = 0, len(stages.positions) + 1  # low fits or takes too long, high does not fit
        while high - low > 1:
            snapshots = (low + high) // 2
            schedule = binomial_schedule(stages, snapshots, self.most_runs)
            if schedule is None or cheapest.offer(schedule):
                low = snapshots
            else:
                high = snapshots


@dataclass(frozen=True, slots=True)
class ChainStages:
    """A line cut into stages.

    Attributes:
        line: what is cut.
        positions: ascending, the first is 0; stage k is the operators from ``positions[k]`` on.
        state: for each stage, what crosses its position: what it is computed from.
    """

    line: Linearization
    positions: tuple[int, ...]
    state: tuple[frozenset[int], ...]

    @staticmethod
    def of(line: Linearization, positions: tuple[int, ...]) -> ChainStages:
        """Cut at ``positions``."""
        return ChainStages(line, positions, tuple(line.crossings(positions)))

    def operators(self, stage: int) -> range:
        """Those of a stage."""
        end = (
            self.positions[stage + 1] if stage + 1 < len(self.positions) else self.line.forward_end
        )
        return range(self.positions[stage], end)

    def stage_of(self, storage: int) -> int:
        """The stage that makes it."""
        return bisect_right(self.positions, self.line.made_at[storage]) - 1


def binomial_schedule(stages: ChainStages, snapshots: int, most_runs: int) -> Schedule | None:
    """The schedule with that many snapshots, None if it takes too many runs of operators."""
    if forward_steps(len(stages.positions), snapshots) > most_runs:
        return None
    try:
        return _Treeverse(stages, snapshots, most_runs).schedule()
    except TooManyRunsError:
        return None


class _Treeverse:
    def __init__(self, stages: ChainStages, snapshots: int, most_runs: int) -> None:
        self.stages = stages
        self.snapshots = snapshots
        self.index = stages.line.index
        self.run = Rematerializer(self.index, most_runs)
        # ChainStages whose state is kept, the first of them the start, which holds constants only.
        self.taken = [0]
        self.current = 0

    def schedule(self) -> Schedule:
        index, run, boundary = self.index, self.run, self.index.program.boundary
        end = self.stages.line.forward_end
        if boundary == 0:
            run.cross_boundary()
        self.walk_to(len(self.stages.positions) - 1, frozenset())
        for o in self.stages.operators(self.current):
            run.run(o)
        for o in range(end, index.n_operators + 1):
            if o == boundary and o > 0:
                run.cross_boundary()
            if o < index.n_operators:
                self.serve(o)
        return run.schedule()

    def serve(self, o: int) -> None:
        """Run backward's operator ``o``; what it misses comes back by the way of the snapshots."""
        stages, run = self.stages, self.run
        missing = {self.index.storage_of[t] for t in run.missing(o)}
        if missing:
            stage = max(stages.stage_of(s) for s in missing)
            # The next stage's state may be all that is asked for.
            crosses = stage + 1 < len(stages.positions) and all(
                s in stages.state[stage + 1] for s in missing if stages.stage_of(s) == stage
            )
            self.walk_to(stage + crosses, frozenset(self.index.input_storages[o]))
            if not crosses:
                for again in stages.operators(stage):
                    run.run_again(again)
        run.fresh.clear()
        run.run(o)
        self.drop_early((*sorted(missing), *run.fresh), frozenset())

    def walk_to(self, target: int, keep: frozenset[int]) -> None:
        """Have the state of stage ``target`` in memory; snapshots are placed on the way."""
        done = [self.current]
        while self.taken[-1] > target:
            done.append(self.taken.pop())
        self.current = target
        for stage in done:
            self.drop_early(sorted(self.stages.state[stage]), keep)
        at = self.taken[-1]
        while at < target:
            slots = self.snapshots - len(self.taken) + 1
            stop = at + advance(target - at + 1, slots)
            for stage in range(at, stop):
                self.pass_stage(stage, keep)
            at = stop
            if at < target:
                self.taken.append(at)

    def pass_stage(self, stage: int, keep: frozenset[int]) -> None:
        """From the state of ``stage`` to that of the next."""
        state = self.stages.state
        for o in self.stages.operators(stage):
            self.run.run_again(o)
        kept = state[stage + 1] | state[self.taken[-1]] | keep
        made = (s for o in self.stages.operators(stage) for s in self.index.roots[o])
        for s in (*sorted(state[stage]), *made):
            if s not in kept:
                self.run.drop(s)

    def drop_early(self, storages: Iterable[int], keep: frozenset[int]) -> None:
        """Drop what only stages before the present one will ask for again."""
        state = self.stages.state
        kept = state[self.current] | state[self.taken[-1]] | keep
        for s in storages:
            if 0 <= self.stages.stage_of(s) < self.current and s not in kept:
                self.run.drop(s)
