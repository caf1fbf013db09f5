"""The planners by name, and what can be asked of any of them.

`PLANNERS` holds every planner that a module of this folder defines.
"""

from __future__ import annotations

from importlib import import_module
from inspect import isabstract
from pkgutil import iter_modules
from typing import Any

from dtrcompile.passes.errors import InfeasibleBudgetError, OptionError
from dtrcompile.passes.planning.heuristics import HEURISTICS
from dtrcompile.passes.planning.planners.base import Planner, keep_all, lower_bound_bytes
from dtrcompile.passes.planning.settings import (
    MAX_BISECTION_RUNS,
    MINIMUM_TOLERANCE_DIVISOR,
    NEXT_SEARCH_DIVISOR,
)
from dtrcompile.passes.program.plan import Plan
from dtrcompile.passes.program.program import Program
from dtrcompile.passes.program.replay import replay

__all__ = [
    "HEURISTICS",
    "PLANNERS",
    "infeasible",
    "keep_all",
    "lower_bound_bytes",
    "make_planner",
    "minimum_plan",
]


def _planners() -> dict[str, type[Planner]]:
    """Every planner by its name: the concrete subclasses of `Planner` in this folder's modules.

    They are found, not listed, so that adding a planner is adding one file.
    """
    found: dict[str, type[Planner]] = {}
    for info in iter_modules(__path__):
        module = import_module(f"{__name__}.{info.name}")
        for value in vars(module).values():
            is_own = isinstance(value, type) and value.__module__ == module.__name__
            if is_own and issubclass(value, Planner) and not isabstract(value):
                other = found.setdefault(value.name, value)
                assert other is value, f"{other} and {value} are both named {value.name!r}"
    return found


PLANNERS: dict[str, type[Planner]] = _planners()


def make_planner(name: str, **options: Any) -> Planner:
    """The planner of that name, with its fields as options.

    Raises:
        OptionError: for an unknown name or option.
    """
    if name not in PLANNERS:
        raise OptionError.unknown("planner", name, PLANNERS)
    planner = PLANNERS[name]
    allowed = list(getattr(planner, "__dataclass_fields__", {}))
    for option in options:
        if option not in allowed:
            raise OptionError.unknown(f"option of planner {name!r}", option, allowed)
    return planner(**options)


def minimum_plan(program: Program, planner: Planner) -> Plan:
    """The plan with the smallest peak that ``planner`` finds, by bisection on the budget.

    A planner is not monotone in the budget, so this is the smallest that was found, not a proof.
    Deterministic; at most 24 runs of the planner.
    """
    return _minimum(program, planner)[1]


def _minimum(program: Program, planner: Planner) -> tuple[int, Plan]:
    """A budget at which ``planner`` finds a plan, as small as could be found, and that plan."""
    baseline = keep_all(program)
    high = found_at = replay(program, baseline)[0].peak_bytes
    least = lower_bound_bytes(program)
    quick_plan: Plan | None = None
    for quick in planner.minimum_searches():
        low = least - 1  # infeasible
        # The bound itself is worth the first try; once something was found, a little below it.
        budget_bytes = least if quick_plan is None else high - high // NEXT_SEARCH_DIVISOR
        for _ in range(MAX_BISECTION_RUNS):
            if high - low <= max(1, high // MINIMUM_TOLERANCE_DIVISOR):
                break  # near enough
            budget_bytes = max(budget_bytes, least)
            try:
                quick_plan = quick.plan(program, budget_bytes)
            except InfeasibleBudgetError:
                low = budget_bytes
            else:
                found_at = budget_bytes
                high = replay(program, quick_plan, planner.link)[0].peak_bytes
            budget_bytes = (low + high) // 2
    if quick_plan is None:
        return high, baseline
    # A plan may need less than the budget that it was found at; but the budget that is named must
    # be one at which the planner itself succeeds.
    for budget_bytes in dict.fromkeys((high, found_at)):
        try:
            return budget_bytes, planner.plan(program, budget_bytes)
        except InfeasibleBudgetError:
            continue
    return found_at, quick_plan


def infeasible(program: Program, budget_bytes: int, planner: Planner) -> InfeasibleBudgetError:
    """The error to raise: what the smallest budget is, and what stands in its way."""
    minimum_bytes, plan = _minimum(program, planner)
    timeline, stats = replay(program, plan, planner.link)
    resident = sorted(
        (program.storages[s] for s in timeline.peak_resident),
        key=lambda s: (-s.size_bytes, s.id),
    )
    return InfeasibleBudgetError(
        budget_bytes,
        minimum_bytes=minimum_bytes,
        operator=stats.peak_operator,
        largest=[(s.name, s.size_bytes) for s in resident[:5]],
    )
