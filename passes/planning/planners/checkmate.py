"""Planner ``checkmate``: the optimal plan, by mixed-integer linear programming.

Jain et al., MLSys 2020, sections 4.2 to 4.8; `checkmate_model` has the program and says what is
different.  Solved by HiGHS under a time limit.

The relaxation is solved first, and ``auto``'s plan bounds the search: where it can be written as a
Checkmate schedule, nothing that costs more is looked for, and operators that cost more than it
spends on recomputation run once.  It is the answer if the relaxation proves that nothing is better,
or if HiGHS finds no other in time.  As in any branch and bound, the optimum is the same with and
without a first solution.

Optimal means: among the plans that run operators for the first time in program order, and again at
most once between two first runs, in program order.  Others exist, and may be cheaper when memory is
very tight.
"""

from __future__ import annotations

import logging
import math
import time
from dataclasses import dataclass, replace
from typing import ClassVar

from dtrcompile.passes.errors import InfeasibleBudgetError, OptionError, TimeLimitError
from dtrcompile.passes.planning.planners.auto import AutoPlanner
from dtrcompile.passes.planning.planners.base import Planner, keep_all, lower_bound_bytes
from dtrcompile.passes.planning.planners.checkmate_model import (
    Choice,
    Memory,
    Stages,
    build,
    choice_of,
    steps_of,
)
from dtrcompile.passes.planning.planners.highs import Solved, Status, solve_linear
from dtrcompile.passes.planning.planners.improve import Schedule, judged_plan, schedule_of
from dtrcompile.passes.planning.settings import (
    MAX_TOLERANCE_RETRIES,
    TOLERANCE_SHARE,
)
from dtrcompile.passes.program.index import ProgramIndex
from dtrcompile.passes.program.plan import Plan
from dtrcompile.passes.program.program import Program
from dtrcompile.passes.program.replay import replay

log = logging.getLogger("dtrcompile")


@dataclass(frozen=True)
class Solution:
    """What a solve found and proved.

    Attributes:
        status: OPTIMAL: ``plan`` is within ``gap`` of the optimum that was asked for.  FEASIBLE:
            time was up, ``plan`` is what there was.  INFEASIBLE: proven, no plan.  TIME_LIMIT: no
            plan, nothing proven.
        plan: within the budget, by the referee.
        cost_ns: the plan's, by the referee.
        bound_ns: no Checkmate schedule costs less.
        solve_s: of building and solving.
        nodes: of the search tree.
        from_start: the plan is the one that the search began with, which is ``auto``'s.
    """

    status: Status
    plan: Plan | None
    cost_ns: int | None
    bound_ns: float
    solve_s: float
    nodes: int = 0
    from_start: bool = False

    @property
    def gap(self) -> float:
        """(cost - bound) / cost; 0.0 is proven, infinite where there is no plan."""
        if self.cost_ns is None:
            return math.inf
        return max(0.0, 1.0 - self.bound_ns / self.cost_ns) if self.cost_ns else 0.0


@dataclass(frozen=True)
class CheckmatePlanner(Planner):
    """See the module docstring.

    Attributes:
        time_limit_s: of HiGHS.  A plan that is not proven optimal depends on the machine.
        gap: a plan within this share of the optimum is good enough.
        memory: ``"paper"`` or ``"live"``, see `checkmate_model.Memory`.
        start: begin with ``auto``'s plan.
    """

    name: ClassVar[str] = "checkmate"

    time_limit_s: float = 300.0
    gap: float = 1e-4
    memory: str = Memory.LIVE.value
    start: bool = True

    def __post_init__(self) -> None:
        allowed = [m.value for m in Memory]
        if self.memory not in allowed:
            raise OptionError.unknown("memory", self.memory, allowed)

    def plan(self, program: Program, budget_bytes: int) -> Plan:
        """See `Planner.plan`.

        Raises:
            InfeasibleBudgetError: proven for Checkmate's schedules.
            TimeLimitError: time was up, and there was no plan.
            MissingExtraError: without SciPy.
        """
        solution = self.solve(program, budget_bytes)
        if solution.plan is not None:
            return solution.plan
        if solution.status is Status.TIME_LIMIT:
            raise TimeLimitError(budget_bytes, time_limit_s=self.time_limit_s)
        raise InfeasibleBudgetError(budget_bytes)

    def for_minimum(self) -> Planner:
        # Any plan will do, and it is asked for some twenty times.
        return replace(self, gap=math.inf, time_limit_s=min(self.time_limit_s, 30.0))

    def solve(self, program: Program, budget_bytes: int) -> Solution:
        """The plan, and what is known of the optimum."""
        start_s = time.perf_counter()
        solution = ruled_out_or_kept(program, budget_bytes)
        if solution is None:
            solution = self.search(program, budget_bytes)
        solution = replace(solution, solve_s=time.perf_counter() - start_s)
        log.info(
            "checkmate: %s, cost %s ns, bound %.6g ns, gap %.2g, %d nodes, %.2f s",
            solution.status.value, solution.cost_ns, solution.bound_ns, solution.gap,
            solution.nodes, solution.solve_s,
        )  # fmt: skip
        return solution

    def search(self, program: Program, budget_bytes: int) -> Solution:
        """Build the program, solve it, and take the better of what came out and what was known."""
        stages = Stages.of(ProgramIndex.of(program))
        memory = Memory(self.memory)
        known: Schedule | None = None
        if self.start and memory is Memory.LIVE:
            known = first_schedule(stages, budget_bytes)
        if known is not None and math.isinf(self.gap):
            plan = Plan(known.steps(), program.fingerprint, self.name)
            cost_ns = known.cost_ns
            return Solution(Status.FEASIBLE, plan, cost_ns, program.cost_ns, 0.0, from_start=True)
        # The relaxation is quick, and may prove that what is known is the best.
        start_s = time.perf_counter()
        model = build(stages, budget_bytes, memory, known.cost_ns if known else None)
        solved = solve_linear(model.linear, integer=False, time_limit_s=self.time_limit_s)
        bound_ns = model.bound_ns(solved.bound)
        if solved.status is Status.INFEASIBLE or (
            known is not None and known.cost_ns <= bound_ns * (1 + self.gap)
        ):
            nothing_better = Solved(Status.INFEASIBLE, None, solved.bound, 0)
            return self.outcome(program, budget_bytes, nothing_better, bound_ns, None, known)
        target_bytes = budget_bytes
        for _ in range(MAX_TOLERANCE_RETRIES):
            elapsed_s = time.perf_counter() - start_s
            solved = solve_linear(
                model.linear,
                integer=True,
                time_limit_s=max(0.0, self.time_limit_s - elapsed_s),
                # To HiGHS infinity is not a number.
                gap=min(self.gap, 1e9),
            )
            found = None if solved.x is None else schedule(stages, model.choice(solved.x))
            if found is None or found.peak_bytes <= budget_bytes:
                break
            target_bytes -= math.ceil(TOLERANCE_SHARE * budget_bytes)
            model = build(stages, target_bytes, memory, known.cost_ns if known else None)
        bound_ns = max(bound_ns, model.bound_ns(solved.bound))
        return self.outcome(program, budget_bytes, solved, bound_ns, found, known)

    def outcome(
        self,
        program: Program,
        budget_bytes: int,
        solved: Solved,
        bound_ns: float,
        found: Schedule | None,
        known: Schedule | None,
    ) -> Solution:
        """The better of ``found`` and ``known``, held against the referee."""
        if found is not None and found.peak_bytes > budget_bytes:
            found = None
        best = min((s for s in (found, known) if s), key=lambda s: s.cost_ns, default=None)
        if best is None:
            status = solved.status if solved.x is None else Status.TIME_LIMIT
            return Solution(status, None, None, bound_ns, 0.0, solved.nodes)
        plan = judged_plan(program, best, budget_bytes, self.name)
        # Nothing that costs at most as much as what was known: that is the optimum.
        proven = solved.status in (Status.OPTIMAL, Status.INFEASIBLE)
        return Solution(
            Status.OPTIMAL if proven else Status.FEASIBLE,
            plan,
            best.cost_ns,
            min(bound_ns, best.cost_ns),
            0.0,
            solved.nodes,
            from_start=best is not found,
        )


def ruled_out_or_kept(program: Program, budget_bytes: int) -> Solution | None:
    """Where there is nothing to solve: the baseline fits, or one operator alone does not."""
    if budget_bytes < lower_bound_bytes(program):
        return Solution(Status.INFEASIBLE, None, None, math.inf, 0.0)
    baseline = keep_all(program)
    if replay(program, baseline)[0].peak_bytes > budget_bytes:
        return None
    return Solution(Status.OPTIMAL, baseline, program.cost_ns, program.cost_ns, 0.0)


def first_schedule(stages: Stages, budget_bytes: int) -> Schedule | None:
    """``auto``'s plan as a Checkmate schedule; None where it has none that fits."""
    try:
        plan = AutoPlanner().plan(stages.index.program, budget_bytes)
    except InfeasibleBudgetError:
        return None
    choice = choice_of(stages, plan.steps)
    if choice is None:
        return None
    first = schedule(stages, choice)
    return first if first.peak_bytes <= budget_bytes else None


def schedule(stages: Stages, choice: Choice) -> Schedule:
    """What a decision does, without what it does for nothing."""
    return schedule_of(stages.index, steps_of(stages, choice))
