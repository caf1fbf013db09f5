"""The planners by name, and what can be asked of any of them.

`PLANNERS` holds every planner that a module of this folder defines.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from inspect import isabstract
from pkgutil import iter_modules
from typing import Any

from dtrcompile.passes.errors import InfeasibleBudgetError, OptionError
from dtrcompile.passes.planning.heuristics import HEURISTICS
from dtrcompile.passes.planning.planners.base import Planner, keep_all, lower_bound_bytes
from dtrcompile.passes.planning.settings import (
    MAX_BISECTION_RUNS,
    MAX_KNOWN_MINIMUMS,
    MINIMUM_TOLERANCE_DIVISOR,
    NEXT_SEARCH_DIVISOR,
)
from dtrcompile.passes.program.plan import Plan
from dtrcompile.passes.program.program import Program
from dtrcompile.passes.program.replay import replay
from dtrcompile.passes.remembered import Remembered

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
    Deterministic; at most 24 runs of the planner, and none if the same was asked before: it is the
    same at every budget, and what takes longest of all that is asked of a planner.
    """
    return _minimum(program, planner)[1]


_MINIMUMS = Remembered[tuple[str, Planner], tuple[int, Plan]](MAX_KNOWN_MINIMUMS)


def _minimum(program: Program, planner: Planner) -> tuple[int, Plan]:
    """A budget at which ``planner`` finds a plan, as small as could be found, and that plan."""
    key = program.fingerprint, planner
    found = _MINIMUMS.get(key)
    if found is None:
        found = _found_minimum(program, planner)
        _MINIMUMS.put(key, found)
    return found


def _found_minimum(program: Program, planner: Planner) -> tuple[int, Plan]:
    baseline = keep_all(program)
    baseline_bytes = replay(program, baseline)[0].peak_bytes
    found = _Smallest(baseline_bytes, baseline_bytes, None)
    for quick in planner.minimum_searches():
        found = _smaller(program, quick, found)
    if found.plan is None:
        return baseline_bytes, baseline
    # A plan may need less than the budget that it was found at; but the budget that is named must
    # be one at which the planner itself succeeds.
    for budget_bytes in dict.fromkeys((found.peak_bytes, found.budget_bytes)):
        try:
            return budget_bytes, planner.plan(program, budget_bytes)
        except InfeasibleBudgetError:
            continue
    return found.budget_bytes, found.plan


@dataclass(frozen=True)
class _Smallest:
    """A plan, what it holds, and the budget that it was found at; no plan: the baseline."""

    peak_bytes: int
    budget_bytes: int
    plan: Plan | None


def _smaller(program: Program, quick: Planner, found: _Smallest) -> _Smallest:
    """The smallest plan of one search, or ``found`` if there is none that is smaller.

    Without a plan, the search begins with the lower bound, and goes on by bisection.  With one it
    looks a little below, further each time that it finds something, and bisects in the end: a
    budget that cannot be met takes the longest.
    """
    least_bytes = lower_bound_bytes(program)
    low = least_bytes - 1  # infeasible
    divisor = MINIMUM_TOLERANCE_DIVISOR if found.plan is None else NEXT_SEARCH_DIVISOR
    step = 0 if found.plan is None else found.peak_bytes // divisor
    budget_bytes = max(found.peak_bytes - step if step else 0, least_bytes)
    for _ in range(MAX_BISECTION_RUNS):
        if found.peak_bytes - low <= max(1, found.peak_bytes // divisor):
            break  # near enough
        try:
            plan = quick.plan(program, budget_bytes)
        except InfeasibleBudgetError:
            low, step = budget_bytes, 0
        else:
            peak_bytes = replay(program, plan)[0].peak_bytes
            found = _Smallest(peak_bytes, budget_bytes, plan)
            step *= 2
        middle = (low + found.peak_bytes) // 2
        budget_bytes = max(found.peak_bytes - step, middle) if step else middle
    return found


def infeasible(program: Program, budget_bytes: int, planner: Planner) -> InfeasibleBudgetError:
    """The error to raise: what the smallest budget is, and what stands in its way."""
    minimum_bytes, plan = _minimum(program, planner)
    timeline, stats = replay(program, plan)
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
