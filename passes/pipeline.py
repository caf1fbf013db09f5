"""From captured graphs to graphs that fit: plan, emit, measure, plan again with what was learned.

A `MemoryModel` says what the emitted graphs will really hold: for Inductor its own schedule, for
the eager executor the referee.  Where the two differ, the plan's target moves by the difference,
and the cheapest plan whose *measured* peak is within the budget wins.
"""

from __future__ import annotations

import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass

from torch import fx

from dtrcompile.passes.capture import Captured
from dtrcompile.passes.emit import Emitted, emit
from dtrcompile.passes.errors import InfeasibleBudgetError, format_bytes
from dtrcompile.passes.plan import Plan
from dtrcompile.passes.planners import minimum_plan
from dtrcompile.passes.planners.base import Planner, keep_all
from dtrcompile.passes.program import Program, StorageKind
from dtrcompile.passes.replay import MemoryTimeline, PlanStats, replay
from dtrcompile.passes.tighten import tighten
from dtrcompile.passes.verify import verify_emitted

log = logging.getLogger("dtrcompile")

# Rounds of planning with a corrected target.  Nearly every graph needs one or two.
_MOST_ROUNDS = 4
# A plan that uses less than this share of the budget is worth another, looser one.
_GOOD_FILL = 0.97


@dataclass(frozen=True)
class Measured:
    """What graphs hold, as a memory model sees it.

    Attributes:
        peak_bytes: the most at any moment.
        peak_at: what was being computed or allocated there.
        split: bytes at the peak by the report's categories.
        saved_bytes: held between forward and backward.
    """

    peak_bytes: int
    peak_at: str
    split: dict[str, int]
    saved_bytes: int


class MemoryModel(ABC):
    """Tells what graphs will hold once compiled."""

    @abstractmethod
    def measure(self, captured: Captured, emitted: Emitted | None, stats: PlanStats) -> Measured:
        """Measure a plan's graphs, or, where ``emitted`` is None, the default split's."""


class RefereeModel(MemoryModel):
    """The eager executor's: the referee's peak is exact there."""

    def measure(
        self,
        captured: Captured,  # noqa: ARG002
        emitted: Emitted | None,  # noqa: ARG002
        stats: PlanStats,
    ) -> Measured:
        split = stats.peak_split
        return Measured(
            stats.peak_bytes,
            stats.peak_operator,
            {
                "parameters": split.get("parameter", 0),
                "inputs": split.get("input", 0) + split.get("tangent", 0),
                "saved": split.get("saved", 0),
                "temporaries": split.get("intermediate", 0) + split.get("workspace", 0),
                "gradients": split.get("gradient", 0),
                "outputs": split.get("output", 0),
            },
            stats.saved_bytes,
        )


@dataclass(frozen=True)
class Candidate:
    """A plan with its graphs and what they hold."""

    plan: Plan
    timeline: MemoryTimeline
    stats: PlanStats
    emitted: Emitted
    measured: Measured


@dataclass(frozen=True)
class Outcome:
    """What to compile.

    Attributes:
        chosen: the plan to compile, or None: the default split fits as it is.
        baseline: the default split's plan (each operator once).
        baseline_measured: what the default split holds.
        budget_bytes: the resolved budget; None for the smallest.
        planning_s, lowering_s: seconds spent planning and measuring.
    """

    chosen: Candidate | None
    baseline: tuple[Plan, MemoryTimeline, PlanStats]
    baseline_measured: Measured
    budget_bytes: int | None
    planning_s: float
    lowering_s: float


def fit(
    captured: Captured,
    planner: Planner,
    resolve_budget: Callable[[int], int | None],
    model: MemoryModel,
    *,
    always_emit: bool = False,
) -> Outcome:
    """Find the cheapest graphs that stay within the budget.

    Args:
        resolve_budget: measured baseline peak in bytes -> budget in bytes, None for the smallest.
        always_emit: emit the baseline too, where it fits (the eager executor runs nothing else).

    Raises:
        InfeasibleBudgetError: naming the smallest budget that can be met.
    """
    return _Fit(captured, planner, model).run(resolve_budget, always_emit)


class _Fit:
    def __init__(self, captured: Captured, planner: Planner, model: MemoryModel) -> None:
        self.captured = captured
        self.program = captured.program
        self.planner = planner
        self.model = model
        self.planning_s = 0.0
        self.lowering_s = 0.0
        self.candidates: dict[Plan, Candidate] = {}

    def run(self, resolve_budget: Callable[[int], int | None], always_emit: bool) -> Outcome:
        plan = keep_all(self.program)
        timeline, stats = replay(self.program, plan)
        start = time.perf_counter()
        measured = self.model.measure(self.captured, None, stats)
        self.lowering_s += time.perf_counter() - start
        budget_bytes = resolve_budget(measured.peak_bytes)
        log.debug(
            "baseline: planned %s, measured %s; budget %s",
            format_bytes(stats.peak_bytes),
            format_bytes(measured.peak_bytes),
            "min" if budget_bytes is None else format_bytes(budget_bytes),
        )

        chosen: Candidate | None = None
        if budget_bytes is None:
            chosen = self.smallest()
            if chosen.measured.peak_bytes >= measured.peak_bytes:
                chosen = None
        elif measured.peak_bytes > budget_bytes:
            chosen = self.cheapest_within(budget_bytes, stats.peak_bytes, measured)
        if chosen is None and always_emit:
            chosen = self.try_plan(plan)
        return Outcome(
            chosen,
            (plan, timeline, stats),
            measured,
            budget_bytes,
            self.planning_s,
            self.lowering_s,
        )

    def try_plan(self, plan: Plan) -> Candidate:
        """Emit, verify and measure a plan, once."""
        plan = tighten(self.program, plan)
        if plan not in self.candidates:
            timeline, stats = replay(self.program, plan)
            emitted = emit(self.captured, plan)
            verify_emitted(self.captured, plan, timeline, emitted)
            start = time.perf_counter()
            measured = self.model.measure(self.captured, emitted, stats)
            self.lowering_s += time.perf_counter() - start
            log.debug(
                "plan %s: planned %s, measured %s, overhead %.3f",
                plan.planner,
                format_bytes(stats.peak_bytes),
                format_bytes(measured.peak_bytes),
                stats.overhead,
            )
            self.candidates[plan] = Candidate(plan, timeline, stats, emitted, measured)
        return self.candidates[plan]

    def plan_for(self, target_bytes: int) -> Candidate | None:
        """The planner's answer for a target, None where it has none."""
        start = time.perf_counter()
        try:
            plan = self.planner.plan(self.program, target_bytes)
        except InfeasibleBudgetError:
            return None
        finally:
            self.planning_s += time.perf_counter() - start
        return self.try_plan(plan)

    def cheapest_within(
        self, budget_bytes: int, baseline_planned_bytes: int, baseline: Measured
    ) -> Candidate:
        """The least compute whose measured peak is within the budget."""
        # Where the compiler's baseline lies above the referee's, its plans are likely to as well.
        # (Where it lies below, by in-place updates at the peak, plans rarely keep the gain.)
        target = budget_bytes * baseline_planned_bytes // max(baseline.peak_bytes, 1)
        target = min(target, budget_bytes, baseline_planned_bytes - 1)
        best: Candidate | None = None
        low, high = 0, baseline_planned_bytes  # targets known to fit, known not to
        for _ in range(_MOST_ROUNDS):
            candidate = self.plan_for(target)
            if candidate is None:
                break
            peak = candidate.measured.peak_bytes
            if peak <= budget_bytes:
                low = max(low, target)
                if best is None or candidate.stats.cost_ns < best.stats.cost_ns:
                    best = candidate
                if peak >= _GOOD_FILL * budget_bytes:
                    break
            else:
                high = min(high, target)
            step = budget_bytes - peak
            target += step if step > 0 else step - budget_bytes // 256
            if not low < target < high:
                target = (low + high) // 2 if low else high + step - budget_bytes // 64
            if target <= 0 or high - low < budget_bytes // 128:
                break
        if best is not None:
            return best
        smallest = self.smallest()
        if smallest.measured.peak_bytes > budget_bytes:
            raise self.infeasible(budget_bytes, smallest)
        return min(
            (c for c in self.candidates.values() if c.measured.peak_bytes <= budget_bytes),
            key=lambda c: c.stats.cost_ns,
        )

    def smallest(self) -> Candidate:
        """The smallest measured peak among plans at and a little above the planner's minimum.

        The same set whatever was tried before, so that the minimum that an error names is met when
        it is asked for.
        """
        start = time.perf_counter()
        plan = minimum_plan(self.program, self.planner)
        self.planning_s += time.perf_counter() - start
        minimum = self.try_plan(plan)
        tried = [minimum]
        if minimum.measured.peak_bytes <= minimum.stats.peak_bytes * 102 // 100:
            return minimum  # nothing lost between plan and schedule, so nothing to win
        for percent in (104, 112):
            candidate = self.plan_for(minimum.stats.peak_bytes * percent // 100)
            if candidate is not None:
                tried.append(candidate)
        return min(tried, key=lambda c: (c.measured.peak_bytes, c.stats.cost_ns))

    def infeasible(self, budget_bytes: int, smallest: Candidate) -> InfeasibleBudgetError:
        resident = sorted(
            (self.program.storages[s] for s in smallest.timeline.peak_resident),
            key=lambda s: (-s.size_bytes, s.id),
        )
        return InfeasibleBudgetError(
            budget_bytes,
            minimum_bytes=smallest.measured.peak_bytes,
            operator=smallest.stats.peak_operator,
            largest=[(s.name, s.size_bytes) for s in resident[:5]],
        )


def constant_bytes(program: Program) -> dict[StorageKind, int]:
    """Bytes of each kind of constant."""
    totals = dict.fromkeys((StorageKind.PARAMETER, StorageKind.INPUT, StorageKind.TANGENT), 0)
    for storage in program.storages:
        if storage.kind in totals:
            totals[storage.kind] += storage.size_bytes
    return totals


def placeholders(gm: fx.GraphModule) -> list[fx.Node]:
    """A graph's inputs in order."""
    return [n for n in gm.graph.nodes if n.op == "placeholder"]
