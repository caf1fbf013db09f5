"""Planner ``ordered``: planner ``auto`` on the program, and on the program in other orders.

Every other planner runs operators for the first time in the program's order.  Here the program is
also planned in orders in which it would hold less without any recomputation (`orders`), and the
cheapest plan is taken, the program's own order first: it is never more expensive than ``auto``'s.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from dtrcompile.passes.errors import InfeasibleBudgetError
from dtrcompile.passes.planning.orders import orders, permuted, plan_of_permuted
from dtrcompile.passes.planning.planners.auto import AutoPlanner
from dtrcompile.passes.program.plan import Plan
from dtrcompile.passes.program.program import Program
from dtrcompile.passes.program.replay import replay


@dataclass(frozen=True)
class OrderedPlanner(AutoPlanner):
    """See the module docstring; the options are those of planner ``auto``, for each order."""

    name: ClassVar[str] = "ordered"

    def plan(self, program: Program, budget_bytes: int) -> Plan:
        best: tuple[tuple[int, int], Plan] | None = None
        own = tuple(range(len(program.operators)))
        for order in (own, *orders(program)):
            try:
                found = super().plan(permuted(program, order), budget_bytes)
            except InfeasibleBudgetError:
                continue
            plan = plan_of_permuted(program, order, found, self.name)
            timeline, stats = replay(program, plan)
            rank = stats.cost_ns, timeline.peak_bytes
            if best is None or rank < best[0]:
                best = rank, plan
            if self.first_fit or stats.cost_ns == program.cost_ns:
                break
        if best is None:
            raise InfeasibleBudgetError(budget_bytes)
        return best[1]
