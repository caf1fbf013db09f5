"""Which target to plan for next: decided from what was tried so far, and from nothing else.

`fit` asks for a target, plans for it, measures the plan and records the attempt.  The decision is
a pure function of the attempts, so that each of its cases can be written down as a test, without
torch and without a plan.

A *target* is the number of bytes that a planner is given as its budget.  It is not the budget
itself where the compiler's schedule holds more, or less, than the plan says.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from dtrcompile.passes.fitting.settings import (
    FALLBACK_STEP_DIVISOR,
    MAX_PLANS_PER_SMALLER_TARGET,
    MAX_SMALLER_PLANS,
    MIN_INTERVAL_DIVISOR,
    MIN_STEP_DIVISOR,
    SMALLER_STEP_DIVISOR,
    WELL_FILLED_SHARE,
    WORTHWHILE_SAVING_SHARE,
)


@dataclass(frozen=True, slots=True)
class NoPlan:
    """The planner has no plan for ``target_bytes``."""

    target_bytes: int


@dataclass(frozen=True, slots=True)
class Learned:
    """A plan was measured that taught something: the next one knows what operators really hold."""

    target_bytes: int
    peak_bytes: int


@dataclass(frozen=True, slots=True)
class Confirmed:
    """A plan was measured that taught nothing new.

    Attributes:
        peak_bytes: what its schedule holds.
        planned_bytes: what the plan holds, counted with all that is known of its operators.
    """

    target_bytes: int
    peak_bytes: int
    planned_bytes: int

    @property
    def gap_bytes(self) -> int:
        """What the schedule holds beyond the plan; negative where it holds less."""
        return self.peak_bytes - self.planned_bytes


Attempt = NoPlan | Learned | Confirmed


@dataclass(frozen=True, slots=True)
class BudgetSearch:
    """A search for the cheapest plan whose measured peak is within a budget.

    Attributes:
        first_target_bytes: what the first plan is made for.
        too_large_bytes: a target that is known not to fit.
        max_rounds: the number of targets that may be tried.
    """

    budget_bytes: int
    first_target_bytes: int
    too_large_bytes: int
    max_rounds: int


def first_target(budget_bytes: int, baseline_planned_bytes: int, baseline_bytes: int) -> int:
    """The first target for a budget that the default split is above.

    Where the compiler's schedule of the default split lies above the plan, its schedules of other
    plans are likely to as well, but by less: what is evicted can be in nobody's way.  (Where it
    lies below, by in-place updates that the program does not know, plans rarely keep the gain.)

    Args:
        baseline_planned_bytes: what the default split holds by the plan.
        baseline_bytes: what it was measured to hold.
    """
    likely_bytes = (baseline_planned_bytes + baseline_bytes) // 2
    target_bytes = budget_bytes * likely_bytes // max(baseline_bytes, 1)
    return min(target_bytes, budget_bytes, baseline_planned_bytes - 1)


def next_target(search: BudgetSearch, attempts: Sequence[Attempt]) -> int | None:
    """The target to try after these attempts; None where the search is over."""
    if not attempts:
        return search.first_target_bytes if search.max_rounds > 0 else None
    if len(attempts) >= search.max_rounds:
        return None
    low, high = _interval(search, attempts)
    match attempts[-1]:
        case NoPlan():
            if all(isinstance(attempt, NoPlan) for attempt in attempts):
                return None  # nothing was measured that could correct the target
            return (low + high) // 2
        case Learned(_, peak_bytes):
            # The planner can keep to the budget itself, where it knows what operators hold.
            return None if _fills(search, peak_bytes) else search.budget_bytes
        case Confirmed(_, peak_bytes) as last:
            return None if _fills(search, peak_bytes) else _corrected(search, last, low, high)


def _interval(search: BudgetSearch, attempts: Sequence[Attempt]) -> tuple[int, int]:
    """The largest target known to fit or to be too small to plan for, the smallest known not to
    fit.

    What a plan taught something about may be planned for again, with another result.
    """
    low, high = 0, search.too_large_bytes
    for attempt in attempts:
        match attempt:
            case NoPlan(target):
                low = max(low, target)
            case Confirmed(target, peak_bytes) if peak_bytes <= search.budget_bytes:
                low = max(low, target)
            case Confirmed(target):
                high = min(high, target)
    return low, high


def _fills(search: BudgetSearch, peak_bytes: int) -> bool:
    """Whether a plan fits so well that a looser one is not worth looking for."""
    return WELL_FILLED_SHARE * search.budget_bytes <= peak_bytes <= search.budget_bytes


def _corrected(search: BudgetSearch, last: Confirmed, low: int, high: int) -> int | None:
    """The target at which the budget would be met if the next plan had the gap of the last."""
    budget_bytes = search.budget_bytes
    target = budget_bytes - last.gap_bytes
    if last.peak_bytes > budget_bytes:
        target = min(target, last.target_bytes - budget_bytes // MIN_STEP_DIVISOR)
    elif target <= last.target_bytes:
        return None  # no looser plan is expected to fit
    if not low < target < high:
        target = (low + high) // 2 if low else high - budget_bytes // FALLBACK_STEP_DIVISOR
    if target <= 0 or high - low < budget_bytes // MIN_INTERVAL_DIVISOR:
        return None
    return target


def is_worth_measuring(cost_ns: int, best_cost_ns: int) -> bool:
    """Whether a plan saves enough of the best one's compute to be emitted and measured."""
    return cost_ns <= (1 - WORTHWHILE_SAVING_SHARE) * best_cost_ns


@dataclass(frozen=True, slots=True)
class SmallerAttempt:
    """A search for a plan that holds less than the smallest one measured before it.

    Attributes:
        smallest_bytes: the smallest measured peak before it.
        n_plans: the number of plans that were measured for it.
        has_fitted: whether one of them was within the target.
    """

    target_bytes: int
    smallest_bytes: int
    n_plans: int
    has_fitted: bool


def next_smaller_target(
    planned_bytes: int, smallest_bytes: int, attempts: Sequence[SmallerAttempt]
) -> int | None:
    """Where to look for a plan below the smallest measured one; None where the search is over.

    The smallest plan need not have the smallest schedule: a plan for less than what was measured,
    made for its cost, may lose nothing on the way.  It is looked for by halves, between the
    planner's minimum and the smallest measured peak.

    Args:
        planned_bytes: what the planner's smallest plan holds, by the plan.
        smallest_bytes: the smallest measured peak so far.
    """
    if smaller_plans_left(attempts) <= 0:
        return None
    if attempts:
        last = attempts[-1]
        if not last.has_fitted and last.target_bytes == _next_below(last.smallest_bytes):
            return None
    failed = [attempt.target_bytes for attempt in attempts if not attempt.has_fitted]
    low = failed[-1] if failed else planned_bytes
    return min((low + smallest_bytes) // 2, _next_below(smallest_bytes))


def smaller_plans_left(attempts: Sequence[SmallerAttempt]) -> int:
    """The number of plans that may still be measured, for the next target."""
    n_plans = sum(attempt.n_plans for attempt in attempts)
    return min(MAX_SMALLER_PLANS - n_plans, MAX_PLANS_PER_SMALLER_TARGET)


def _next_below(smallest_bytes: int) -> int:
    """The largest target below a measured peak that is worth a search."""
    return smallest_bytes - -(-smallest_bytes // SMALLER_STEP_DIVISOR)
