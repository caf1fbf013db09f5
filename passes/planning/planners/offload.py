"""Planner ``offload``: another planner's plans, with copies to the host where they cost less.

Capuchin (Peng et al., ASPLOS 2020, section 4.3) decides for each evicted tensor whether to copy or
to recompute it, by what would not be hidden.  Here both are candidates of whole plans, and the
referee, who adds up what compute waits for, decides:

* the base planner's plan as it is;
* that plan with copies in place of those recomputations that cost most per ns of copying, for
  several numbers of them;
* runs of the simulator that choose at each eviction, for a few heuristics and prices of the link:
  the price is a Lagrange multiplier, low where link time is plenty.

All but the first have their copies moved by `hoist`.  So a plan is never dearer than the base
planner's, and where the base planner finds none, a copy may still make room.  Without a
``host_link`` this is the base planner.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar

from dtrcompile.passes.errors import InfeasibleBudgetError, PlanError
from dtrcompile.passes.planning.heuristics import HDTRNext, Heuristic, HMSPSNext
from dtrcompile.passes.planning.hoist import hoist
from dtrcompile.passes.planning.planners.auto import AutoPlanner
from dtrcompile.passes.planning.planners.base import Planner, lower_bound_bytes
from dtrcompile.passes.planning.planners.improve import BOUNDARY, Gap, Schedule, schedule_of
from dtrcompile.passes.planning.settings import (
    MIN_OFFLOAD_STEPS,
    OFFLOAD_COPIED_SHARES,
    OFFLOAD_LINK_PRICES,
    OFFLOAD_PRICE_FACTORS,
    OFFLOAD_STEPS_PER_OPERATOR,
    SIMULATOR_WALK_LIMIT,
)
from dtrcompile.passes.planning.simulator import Simulator, SimulatorOptions
from dtrcompile.passes.program.host_link import HostLink
from dtrcompile.passes.program.index import ProgramIndex
from dtrcompile.passes.program.plan import Boundary, Compute, Free, Offload, Plan, Prefetch, Step
from dtrcompile.passes.program.program import Program
from dtrcompile.passes.program.replay import replay

_HEURISTICS: tuple[Heuristic, ...] = (
    HMSPSNext(1.0, 0.5),
    HDTRNext(1.0, 1.0),
    HDTRNext(1.0, 0.0),
)


@dataclass(frozen=True)
class OffloadPlanner(Planner):
    """See the module docstring.

    Attributes:
        host_link: the way to the host; None: no copies.
        base: the planner to start from, and to be no worse than.
        first_fit: take the first candidate that fits; for searching the smallest budget.
    """

    name: ClassVar[str] = "offload"

    host_link: HostLink | None = None
    base: Planner = field(default_factory=AutoPlanner)
    first_fit: bool = False

    def plan(self, program: Program, budget_bytes: int) -> Plan:
        if self.host_link is None:
            return self.base.plan(program, budget_bytes)
        if budget_bytes < lower_bound_bytes(program):
            raise InfeasibleBudgetError(budget_bytes)
        search = _Search(program, budget_bytes, self.host_link)
        try:
            base = self.base.plan(program, budget_bytes)
        except InfeasibleBudgetError:
            base = None
        if base is not None:
            search.offer(base)
            if not self.first_fit and not search.is_perfect():
                search.replace_recomputations(base)
        if not (search.best and self.first_fit) and not search.is_perfect():
            search.simulate(self.first_fit)
        if search.best is None:
            raise InfeasibleBudgetError(budget_bytes)
        return replace(search.best, planner=f"{self.name}({self.base.name})")

    def for_minimum(self) -> Planner:
        return replace(self, base=self.base.for_minimum(), first_fit=True)


class _Search:
    """The cheapest plan so far, by the referee; of equals the lower peak, then the first."""

    def __init__(self, program: Program, budget_bytes: int, link: HostLink) -> None:
        self.program = program
        self.index = ProgramIndex.of(program)
        self.budget_bytes = budget_bytes
        self.link = link
        self.best: Plan | None = None
        self.rank = (0, 0)

    def is_perfect(self) -> bool:
        """Whether the best plan costs what the baseline does."""
        return self.best is not None and self.rank[0] <= self.program.cost_ns

    def offer(self, plan: Plan) -> int:
        """What ``plan`` costs; it is kept if it is the best.

        Raises:
            PlanError: if it is over the budget; a bug.
        """
        timeline, stats = replay(self.program, plan)
        if timeline.peak_bytes > self.budget_bytes:
            raise PlanError(
                f"{plan.planner} planned {timeline.peak_bytes} bytes for a budget of"
                f" {self.budget_bytes}; please report the program"
            )
        rank = (stats.cost_ns, timeline.peak_bytes)
        if self.best is None or rank < self.rank:
            self.best, self.rank = plan, rank
        return stats.cost_ns

    def offer_hoisted(self, steps: Sequence[Step]) -> int:
        """As `offer`, with the copies moved to where compute hides them."""
        hoisted = hoist(self.index, steps, self.budget_bytes, self.link)
        plan = Plan(hoisted, self.program.fingerprint, OffloadPlanner.name)
        return self.offer(replace(plan, host_link=self.link) if plan.makes_copies else plan)

    def replace_recomputations(self, base: Plan) -> None:
        """Copies for the recomputations that cost most per ns of copying."""
        schedule = schedule_of(self.index, base.steps)

        def density(gap: Gap) -> tuple[float, int]:
            copy_ns = sum(self.link.transfer_ns(self.index.size_bytes[s]) for s, _ in gap.storages)
            return (-gap.cost_ns / max(copy_ns, 1e-9), gap.stop)

        gaps = sorted(schedule.gaps, key=density)
        costs: dict[int, int] = {}

        def attempt(count: int) -> None:
            if 0 < count <= len(gaps) and count not in costs:
                steps = with_copies(self.index, schedule, gaps[:count])
                costs[count] = self.offer_hoisted(steps)

        for share in OFFLOAD_COPIED_SHARES:
            attempt(round(share * len(gaps)))
        step = len(gaps) // 16
        while costs and step and not self.is_perfect():
            best = min(costs, key=lambda count: (costs[count], count))
            attempt(best - step)
            attempt(best + step)
            step //= 2

    def simulate(self, first_fit: bool) -> None:
        """Runs that choose at each eviction."""
        steps_left = max(OFFLOAD_STEPS_PER_OPERATOR * self.index.n_operators, MIN_OFFLOAD_STEPS)
        costs: dict[float, int] = {}  # at each price, the first heuristic's

        def run(heuristic: Heuristic, price: float) -> int | None:
            nonlocal steps_left
            if steps_left <= 0 or self.is_perfect() or (self.best and first_fit):
                return None
            options = SimulatorOptions(
                heuristic=heuristic,
                walk_limit=SIMULATOR_WALK_LIMIT,
                host_link=self.link,
                link_price=price,
            )
            simulator = Simulator(self.index, self.budget_bytes, options)
            try:
                steps = simulator.run().steps
            except InfeasibleBudgetError:
                return None
            finally:
                steps_left -= len(simulator.steps)
            return self.offer_hoisted(steps)

        def try_price(price: float) -> None:
            cost_ns = run(_HEURISTICS[0], price)
            if cost_ns is not None:
                costs[price] = cost_ns

        for price in OFFLOAD_LINK_PRICES:
            try_price(price)
        for factor in OFFLOAD_PRICE_FACTORS if costs else ():
            try_price(factor * _cheapest(costs))
        price = _cheapest(costs) if costs else OFFLOAD_LINK_PRICES[2]
        for heuristic in _HEURISTICS[1:]:
            run(heuristic, price)


def _cheapest(costs: dict[float, int]) -> float:
    """The price at which the plan was cheapest, the first of equals."""
    return min(costs, key=lambda price: costs[price])


def with_copies(index: ProgramIndex, schedule: Schedule, gaps: Sequence[Gap]) -> list[Step]:
    """The schedule's steps, with copies in place of the recomputations of ``gaps``.

    What then recomputes for nothing is left in: `hoist` takes it out.  A storage without bytes is
    not copied but kept.
    """
    brought = {gap.stop: [s for s, _ in gap.storages] for gap in gaps}
    leaving = {(at, s) for gap in gaps for s, at in gap.storages}
    defined = [False] * len(index.producer)
    resident = [False] * index.n_storages
    on_host: dict[int, list[int]] = {}
    steps: list[Step] = []

    def come_back(at: int, o: int) -> bool:
        """Fetch what entry ``at`` computes again, if all of it can be fetched."""
        missing = [s for s in brought[at] if not resident[s]]
        found = {t for s in missing for t in on_host.get(s, ())}
        wanted = (t for t in index.outputs[o] if not defined[t])
        if not all(t in found or index.storage_of[t] in dropped for t in wanted):
            return False
        for s in missing:
            if s not in on_host:
                return False
        for s in missing:
            steps.append(Prefetch(s))
            resident[s] = True
            for t in on_host[s]:
                defined[t] = True
        return True

    for at, (o, frees) in enumerate(zip(schedule.operators, schedule.frees, strict=True)):
        dropped = set(frees)
        if o == BOUNDARY:
            steps.append(Boundary())
        elif at not in brought or not come_back(at, o):
            steps.append(Compute(o))
            for s in index.roots[o]:
                resident[s] = True
            for t in index.outputs[o]:
                defined[t] = True
        for s in frees:
            if not resident[s]:
                continue
            if (at, s) in leaving:
                if not index.size_bytes[s]:
                    continue
                here = [t for t in index.tensors_of[s] if defined[t]]
                if not set(here) <= set(on_host.get(s, ())):
                    steps.append(Offload(s))
                    on_host[s] = here
            steps.append(Free(s))
            resident[s] = False
            for t in index.tensors_of[s]:
                defined[t] = False
    return steps
