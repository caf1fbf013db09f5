"""From a policy to a plan: run operators in order, and again where their results were dropped.

A checkpointing planner decides what to drop and when; that every operator finds its inputs, that
nothing is dropped which could not be computed again, and that the result is a legal plan, is the
same for all of them and is done here.  Copies are only *ended* by `Rematerializer.drop`;
`improve.tidy` then frees each at its last read, and takes out the recomputations that nothing
reads, so a policy may drop late and recompute too much without its plan being the worse for it.
"""

from __future__ import annotations

from dtrcompile.passes.errors import InfeasibleBudgetError
from dtrcompile.passes.planning.planners.base import keep_all, lower_bound_bytes
from dtrcompile.passes.planning.planners.improve import (
    BOUNDARY,
    Schedule,
    judged_plan,
    schedule_of,
    tidy,
)
from dtrcompile.passes.program.index import ProgramIndex
from dtrcompile.passes.program.plan import Plan
from dtrcompile.passes.program.program import Program


class TooManyRunsError(Exception):
    """A policy ran more operators than it was allowed; its caller tries another."""


class Rematerializer:
    """Runs operators, brings back what they miss, and remembers both.

    Attributes:
        defined: for each tensor, whether it is in memory.
        fresh: storages computed again and not yet kept or dropped by the policy.
    """

    def __init__(self, index: ProgramIndex, most_runs: int) -> None:
        self.index = index
        self.most_runs = most_runs
        self.defined = [False] * len(index.producer)
        self.fresh: list[int] = []
        self._resident = [False] * index.n_storages
        self._has_run = [False] * index.n_operators
        self._operators: list[int] = []
        self._frees: list[list[int]] = []
        outputs = index.program.output_storages
        self._may_drop = [
            index.size_bytes[s] > 0
            and not index.makes_once[s]
            and index.pinned_until[s] < 0
            and s not in outputs
            for s in range(index.n_storages)
        ]

    def missing(self, o: int) -> list[int]:
        """The inputs of operator ``o`` that are not in memory."""
        return [t for t in self.index.inputs[o] if not self.defined[t]]

    def run(self, o: int) -> None:
        """Run operator ``o``, after whatever has to run again for it.

        Raises:
            TooManyRunsError: past the limit.
        """
        stack = [o]
        while stack:
            missing = self.missing(stack[-1])
            if missing:
                stack.extend(self.index.producer[t] for t in reversed(missing))
                continue
            o = stack.pop()
            if not self._has_run[o] or not all(self.defined[t] for t in self.index.outputs[o]):
                self._record(o)

    def run_again(self, o: int) -> None:
        """Run operator ``o`` if it has not run, or a result of it is not in memory."""
        if not self._has_run[o] or not all(self.defined[t] for t in self.index.outputs[o]):
            self.run(o)

    def cross_boundary(self) -> None:
        """Forward is over; its outputs, which are never dropped, stay."""
        self._operators.append(BOUNDARY)
        self._frees.append([])

    def drop(self, s: int) -> None:
        """End the present copy of ``s``, unless it could or may not come back."""
        if self._resident[s] and self._may_drop[s]:
            self._resident[s] = False
            self._frees[-1].append(s)
            for t in self.index.tensors_of[s]:
                self.defined[t] = False

    def schedule(self) -> Schedule:
        """What was run, tidied."""
        return tidy(self.index, self._operators, self._frees)

    def _record(self, o: int) -> None:
        if len(self._operators) >= self.most_runs:
            raise TooManyRunsError
        self._operators.append(o)
        self._frees.append([])
        for s in self.index.roots[o]:
            if not self._resident[s]:
                self._resident[s] = True
                if self._has_run[o]:
                    self.fresh.append(s)
        for t in self.index.outputs[o]:
            self.defined[t] = True
        self._has_run[o] = True


class Cheapest:
    """Keeps the cheapest of the schedules that fit a budget, the first of equals."""

    def __init__(self, index: ProgramIndex, budget_bytes: int) -> None:
        self.index = index
        self.budget_bytes = budget_bytes
        self.best: Schedule | None = None

    def offer(self, schedule: Schedule) -> bool:
        """Whether ``schedule`` fits; it is kept if it is the cheapest that does."""
        if schedule.peak_bytes > self.budget_bytes:
            return False
        if self.best is None or schedule.rank < self.best.rank:
            self.best = schedule
        return True

    def plan(self, name: str) -> Plan:
        """The best, as a plan that the referee has accepted.

        Raises:
            InfeasibleBudgetError: if nothing fitted.
            PlanError: if the referee disagrees with the fast account; a bug.
        """
        if self.best is None:
            raise InfeasibleBudgetError(self.budget_bytes)
        return judged_plan(self.index.program, self.best, self.budget_bytes, name)


def baseline_if_it_fits(program: Program, index: ProgramIndex, budget_bytes: int) -> Cheapest:
    """A `Cheapest` that starts with the baseline.

    Raises:
        InfeasibleBudgetError: if no plan at all can fit.
    """
    if budget_bytes < lower_bound_bytes(program):
        raise InfeasibleBudgetError(budget_bytes)
    cheapest = Cheapest(index, budget_bytes)
    cheapest.offer(schedule_of(index, keep_all(program).steps))
    return cheapest
