"""Planner ``checkmate-lp``: Checkmate's linear relaxation, rounded; and the bound that it proves.

Jain et al., MLSys 2020, section 5.  The relaxation of `checkmate_model` is solved with variables
between 0 and 1.  *Two-phase rounding* (algorithm 2 there) takes from it only what is kept between
stages: S is 1 where its share is above one half (deterministic), or with the probability of its
share (randomized).  What has to run follows: the least R that makes S and every first run possible.
Memory is not looked at in that step, so the relaxation is solved for (1 - ε) of the budget; the
paper takes ε = 0.1.  Here the ε is searched: the cheapest rounding that the referee puts within the
budget is the plan.

What is different: a randomized rounding draws once for each value and compares all its stages with
that (each S is 1 with the same probability as before; draws of its own for each stage would throw
values away and compute them again all the time); there are several thresholds, since one half is
not special; what may be computed only once is kept wherever something needs it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from dtrcompile.passes.errors import InfeasibleBudgetError, OptionError, TimeLimitError
from dtrcompile.passes.planning.planners.base import Planner
from dtrcompile.passes.planning.planners.checkmate import ruled_out_or_kept, schedule
from dtrcompile.passes.planning.planners.checkmate_model import (
    Bits,
    Choice,
    Memory,
    Model,
    Stages,
    build,
)
from dtrcompile.passes.planning.planners.highs import Status, solve_linear
from dtrcompile.passes.planning.planners.improve import Schedule, keep_what_fits
from dtrcompile.passes.planning.settings import (
    SOLVER_ZERO_SHARE,
)
from dtrcompile.passes.program.index import ProgramIndex
from dtrcompile.passes.program.plan import Plan
from dtrcompile.passes.program.program import Program

_ROUNDINGS = ("both", "deterministic", "randomized")


@dataclass(frozen=True)
class CheckmateLPPlanner(Planner):
    """See the module docstring.

    Attributes:
        rounding: ``"deterministic"``, ``"randomized"`` or ``"both"``.
        samples: randomized roundings of each relaxation.
        seed: of them.
        margins: the ε to try, each a relaxation to solve.
        refine: more of them, between those.
        thresholds: of the deterministic rounding.
        polish: undo evictions while there is room (`improve.keep_what_fits`), which is not
            Checkmate's, but ours.
        memory: ``"paper"`` or ``"live"``, see `checkmate_model.Memory`.
        time_limit_s: of each relaxation.
    """

    name: ClassVar[str] = "checkmate-lp"

    rounding: str = "both"
    samples: int = 20
    seed: int = 0
    margins: tuple[float, ...] = (0.0, 0.05, 0.1, 0.2, 0.3)
    refine: int = 3
    thresholds: tuple[float, ...] = (0.5, 0.25, 0.75)
    polish: bool = False
    memory: str = Memory.LIVE.value
    time_limit_s: float = 300.0

    def __post_init__(self) -> None:
        if self.rounding not in _ROUNDINGS:
            raise OptionError.unknown("rounding", self.rounding, _ROUNDINGS)
        allowed = [m.value for m in Memory]
        if self.memory not in allowed:
            raise OptionError.unknown("memory", self.memory, allowed)

    def plan(self, program: Program, budget_bytes: int) -> Plan:
        """See `Planner.plan`.

        Raises:
            InfeasibleBudgetError: no rounding fits.
            TimeLimitError: no relaxation was solved in time.
            MissingExtraError: without SciPy.
        """
        trivial = ruled_out_or_kept(program, budget_bytes)
        if trivial is not None:
            if trivial.plan is None:
                raise InfeasibleBudgetError(budget_bytes)
            return trivial.plan
        stages = Stages.of(ProgramIndex.of(program))
        best = self.search(stages, budget_bytes)
        if best is None:
            raise InfeasibleBudgetError(budget_bytes)
        return Plan(best.steps(), program.fingerprint, self.name)

    def search(self, stages: Stages, budget_bytes: int) -> Schedule | None:
        """The cheapest rounding that fits, over all margins.

        Those that are given; then between the best of them and the next below, since a larger
        budget rounds to a cheaper plan; or, where none fits, towards the first that has no
        relaxation, since a smaller one rounds to a plan that fits.
        """
        found: dict[float, Schedule | None] = {}
        too_much = 1.0
        for margin in sorted(self.margins):
            solved = self.relaxation(stages, budget_bytes, margin)
            if solved is None:
                too_much = margin
                break
            found[margin] = self.best_rounding(stages, *solved, budget_bytes)
        for _ in range(self.refine if found else 0):
            margins = sorted(found)
            best = _best_margin(found)
            if best == margins[0]:
                break
            if best is None:
                margin = (margins[-1] + too_much) / 2
            else:
                margin = (margins[margins.index(best) - 1] + best) / 2
            solved = self.relaxation(stages, budget_bytes, margin)
            if solved is None:
                too_much = margin
                continue
            found[margin] = self.best_rounding(stages, *solved, budget_bytes)
        best = _best_margin(found)
        return None if best is None else found[best]

    def relaxation(
        self, stages: Stages, budget_bytes: int, margin: float
    ) -> tuple[Model, NDArray[np.float64]] | None:
        """Its solution for ``1 - margin`` of what constants leave; None where there is none.

        Raises:
            TimeLimitError: time was up.
        """
        fixed_bytes = stages.index.program.constant_bytes
        target_bytes = fixed_bytes + math.floor((1 - margin) * (budget_bytes - fixed_bytes))
        model = build(stages, target_bytes, Memory(self.memory))
        solved = solve_linear(model.linear, integer=False, time_limit_s=self.time_limit_s)
        if solved.status is Status.TIME_LIMIT:
            raise TimeLimitError(budget_bytes, time_limit_s=self.time_limit_s)
        return None if solved.x is None else (model, solved.x)

    def best_rounding(
        self, stages: Stages, model: Model, x: NDArray[np.float64], budget_bytes: int
    ) -> Schedule | None:
        """The cheapest that fits; the first of equals."""
        best: Schedule | None = None
        for kept in self.roundings(model, x):
            rounded = schedule(stages, with_least_runs(stages, kept))
            if rounded.peak_bytes > budget_bytes:
                continue
            if self.polish:
                rounded = keep_what_fits(stages.index, rounded, budget_bytes)
            if best is None or rounded.cost_ns < best.cost_ns:
                best = rounded
        return best

    def roundings(self, model: Model, x: NDArray[np.float64]) -> Iterator[Bits]:
        """What is kept: stage by tensor."""
        shares = np.where(model.kept < 0, 0.0, x[model.kept])
        if self.rounding != "randomized":
            for threshold in self.thresholds:
                yield shares >= max(threshold, SOLVER_ZERO_SHARE)
        if self.rounding != "deterministic":
            random = np.random.default_rng(self.seed)
            for _ in range(self.samples):
                # One draw a tensor, for all stages.
                drawn = np.maximum(random.random(shares.shape[1]), SOLVER_ZERO_SHARE)
                yield shares >= drawn


def _best_margin(found: dict[float, Schedule | None]) -> float | None:
    fitting = [(s.cost_ns, margin) for margin, s in found.items() if s is not None]
    return min(fitting)[1] if fitting else None


def with_least_runs(stages: Stages, kept: Bits) -> Choice:
    """Algorithm 2's second phase: what must run for what is kept.  From the last stage backwards.

    What cannot be computed again is kept too, and so is the storage of a view that is.
    """
    index, n = stages.index, len(stages)
    root_tensor = index.program.root_tensor
    kept = kept.copy()
    runs = np.zeros((n, n), dtype=np.bool_)

    def keep(t: int, x: int) -> None:
        kept[t, x] = kept[t, root_tensor[index.storage_of[x]]] = True

    def provide(t: int, x: int) -> None:
        k = stages.node_of[x]
        if kept[t, x]:
            return
        if k < t and stages.runs_once(k):
            keep(t, x)
        else:
            runs[t, k] = True

    for t in range(n - 1, -1, -1):
        runs[t, t] = True
        for x in np.flatnonzero(kept[t]).tolist():
            keep(t, x)
        for x in np.flatnonzero(kept[t + 1]).tolist():
            provide(t, x)
        for k in range(t, -1, -1):
            if runs[t, k]:
                for x in stages.reads[k]:
                    provide(t, x)
    return Choice(runs, kept)


def lp_bound(
    program: Program,
    budget_bytes: int,
    *,
    memory: Memory = Memory.LIVE,
    time_limit_s: float = 300.0,
) -> float:
    """A cost in ns that no Checkmate schedule of ``program`` within ``budget_bytes`` is below.

    For graphs of up to about two hundred operators: there are three variables for each pair of
    them.  The relaxation of `Memory.LIVE` is the tighter.  Infinite where even the relaxation has
    no solution.

    Raises:
        TimeLimitError: time was up.
        MissingExtraError: without SciPy.
    """
    trivial = ruled_out_or_kept(program, budget_bytes)
    if trivial is not None:
        return trivial.bound_ns
    stages = Stages.of(ProgramIndex.of(program))
    model = build(stages, budget_bytes, memory)
    solved = solve_linear(model.linear, integer=False, time_limit_s=time_limit_s)
    if solved.status is Status.TIME_LIMIT:
        raise TimeLimitError(budget_bytes, time_limit_s=time_limit_s)
    return model.bound_ns(solved.bound)
