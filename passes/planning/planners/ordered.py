"""Planner ``ordered``: planner ``auto`` on the program, and on the program in other orders.

Every other planner runs operators for the first time in the program's order.  Here the program is
also planned in orders in which it would hold less without any recomputation (`orders`), and the
cheapest plan is taken, the program's own order first: it is never more expensive than ``auto``'s.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from dtrcompile.passes.errors import InfeasibleBudgetError
from dtrcompile.passes.planning.orders import orders, permuted, plan_of_permuted
from dtrcompile.passes.planning.planners.auto import AutoPlanner
from dtrcompile.passes.planning.planners.base import Planner
from dtrcompile.passes.program.plan import Plan
from dtrcompile.passes.program.program import Program
from dtrcompile.passes.program.replay import replay


@dataclass(frozen=True)
class OrderedPlanner(Planner):
    """See the module docstring.

    Attributes:
        heuristic, cost_limit, planning_s: of planner ``auto``, for each order.
    """

    name: ClassVar[str] = "ordered"

    heuristic: str | None = None
    cost_limit: float = 8.0
    planning_s: float | None = None
    first_fit: bool = False

    def plan(self, program: Program, budget_bytes: int) -> Plan:
        auto = AutoPlanner(self.heuristic, self.cost_limit, self.planning_s, self.first_fit)
        found: list[Plan] = []
        own = tuple(range(len(program.operators)))
        for order in (own, *orders(program)):
            try:
                plan = auto.plan(permuted(program, order), budget_bytes)
            except InfeasibleBudgetError:
                continue
            found.append(plan_of_permuted(program, order, plan, self.name))
            stats = replay(program, found[-1])[1]
            if self.first_fit or stats.cost_ns == program.cost_ns:
                return found[-1]
        if not found:
            raise InfeasibleBudgetError(budget_bytes)
        return min(found, key=lambda plan: _rank(program, plan))

    def for_minimum(self) -> Planner:
        return replace(self, first_fit=True)


def _rank(program: Program, plan: Plan) -> tuple[int, int]:
    timeline, stats = replay(program, plan)
    return stats.cost_ns, timeline.peak_bytes
