"""The plans of one graph: each call takes the cheapest that holds the budget for its sizes.

A graph whose sizes are symbols (dynamic shapes, a data loader's last batch) runs at sizes that it
was not planned for.  What each of its plans holds at those is known before the call runs
(`passes.measured.SizeModel`).  Where no plan holds the budget, the graph is planned once more, for
sizes somewhat larger than the call's if that costs next to nothing, so that sizes that grow little
by little do not mean a plan each.  Where calls that could do without recomputation keep paying for
it, the graph is planned for those too.  The number of plans is bounded; past that the plan goes
that the calls seen so far miss least.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from dtrcompile.outside import watching
from dtrcompile.passes.errors import InfeasibleBudgetError
from dtrcompile.passes.planning.planners import keep_all
from dtrcompile.passes.planning.planners.base import Planner
from dtrcompile.passes.program.replay import replay
from dtrcompile.steps.planned import Code, Planned
from dtrcompile.steps.symbols import Symbols

log = logging.getLogger("dtrcompile")

# A plan for sizes that many times the call's, the first that costs the call little enough.
_HEADROOMS = (2.0, 1.5, 1.25)
# Compute, as a part of the baseline's, that headroom may cost the call that asks for a plan; and
# once the family is full, so that it does not go on growing plan by plan.
_HEADROOM_COST = 0.03
_HEADROOM_COST_WHEN_FULL = 0.3
# What a quick estimate of a plan's peak may be off by: of plans for larger sizes that a call was
# then found to have room for, or not, estimates were between 0.2 % and 1.3 % above the room.
_ESTIMATE_ERROR = 0.02
# Steps' worth of compute that calls have to lose before they are given a cheaper plan.
_MAX_LOST_STEPS = 4.0
# A plan is worth compiling if it saves the calls this part of the baseline's compute.
_WORTHWHILE = 0.02
# At "min": sizes so many times those planned for are planned anew.
_MUCH_LARGER = 2.0
_MAX_CACHED_CHOICES = 4096


@dataclass(frozen=True, slots=True)
class _Choice:
    """What calls of one set of sizes run.

    Attributes:
        code: the plan's.
        loss: compute beyond the baseline's, in steps of the baseline, that a cheaper plan could
            save a call.
    """

    code: Code
    loss: float = 0.0


@dataclass(frozen=True, slots=True)
class Fitting:
    """A plan at a call's sizes.

    Attributes:
        planned: at these sizes.
        own_bytes: what the graph may hold at these sizes; None: as little as can be.
    """

    code: Code
    planned: Planned
    own_bytes: int | None

    @property
    def peak_bytes(self) -> int:
        """What counts against `own_bytes`."""
        return self.planned.own_peak_bytes

    @property
    def fits(self) -> bool:
        """Whether the plan holds the budget at these sizes."""
        return self.own_bytes is None or self.peak_bytes <= self.own_bytes

    @property
    def overhead(self) -> float:
        """Compute beyond the baseline's, as a part of it."""
        baseline_ns = self.planned.program.cost_ns
        return self.planned.cost_ns / baseline_ns - 1 if baseline_ns else 0.0


@dataclass(frozen=True, slots=True)
class _Estimate:
    """What a plan would come to at a call's sizes, before it is compiled.

    Attributes:
        overhead: as of `Fitting`.
        fits: whether it is likely to hold the budget at these sizes.
    """

    overhead: float
    fits: bool


def _for_planner(own_bytes: int, planned: Planned) -> int:
    """What a graph may hold, in bytes of the planner, which counts other things than a schedule."""
    referee_bytes = replay(planned.program, keep_all(planned.program))[1].peak_bytes
    return own_bytes * referee_bytes // max(planned.baseline_peak_bytes, 1)


Values = tuple[int, ...]


@dataclass
class Family:
    """The plans of one graph; not for several threads at once.

    Attributes:
        symbols: the graph's symbolic sizes.
        compile_for: plans and compiles the graph for values of its symbols, as a plan of that
            number.
        own_bytes: what the graph may hold, told a plan at the sizes of a call; None for as little
            as can be.
        forget: told the number of a plan that is dropped.
        planner: for estimates.
        most_plans: how many there may be at once.
        codes: the plans by their numbers.
        compiled: plans made so far, beside the first.
        loss: of the latest choice, see `_Choice`.
    """

    symbols: Symbols
    compile_for: Callable[[Values, int], Code]
    own_bytes: Callable[[Planned], int | None]
    forget: Callable[[int], None]
    planner: Planner
    most_plans: int
    codes: dict[int, Code] = field(default_factory=dict)
    compiled: int = 0
    loss: float = 0.0
    _choices: dict[Values, _Choice | InfeasibleBudgetError] = field(default_factory=dict)
    _calls: dict[Values, int] = field(default_factory=dict)
    _lost: float = 0.0

    def restart(self, code: Code) -> None:
        """From now on this is the only plan: the others were made for other terms."""
        for number in self.codes:
            if number:
                self.forget(number)
        self.codes = {0: code}
        self.reconsider()

    def reconsider(self) -> None:
        """The budget changed: nothing that was decided holds any more."""
        self._choices.clear()
        self._lost = self.loss = 0.0

    def choose(self, values: Values) -> Code:
        """What a call of these sizes is to run; plans and compiles where no plan fits.

        Raises:
            InfeasibleBudgetError: if no plan holds the budget at these sizes.
        """
        choice = self._choices.get(values)
        if choice is None:
            if len(self._choices) >= _MAX_CACHED_CHOICES:
                self._choices.clear()
                self._calls.clear()
            choice = self._choices[values] = self._decide(values)
        if isinstance(choice, InfeasibleBudgetError):
            raise choice
        self._calls[values] = self._calls.get(values, 0) + 1
        self._lost += choice.loss
        if choice.loss and self._lost > _MAX_LOST_STEPS:
            self._lost = 0.0
            choice = self._with_cheaper(values, choice)
        self.loss = choice.loss
        return choice.code

    def at(self, values: Values) -> list[Fitting]:
        """Every plan at these sizes, those that may run there."""
        sizes = self.symbols.sizes(values)
        found = []
        for code in self.codes.values():
            planned = code.at(sizes)
            if planned is not None and code.may_run_at(sizes):
                found.append(Fitting(code, planned, self.own_bytes(planned)))
        return found

    def _decide(self, values: Values) -> _Choice | InfeasibleBudgetError:
        plans = self.at(values)
        if not plans:
            # Nothing was planned (a graph without a tensor to compute).
            return _Choice(next(iter(self.codes.values())))
        if all(plan.own_bytes is None for plan in plans):
            best = min(plans, key=lambda plan: (plan.peak_bytes, plan.planned.cost_ns))
            if any(self._growth(values)) and self._is_much_larger(values):
                return self._extended(values)
            return _Choice(best.code)
        fitting = [plan for plan in plans if plan.fits]
        if not fitting:
            return self._extended(values)
        best = min(fitting, key=lambda plan: plan.planned.cost_ns)
        return _Choice(best.code, self._loss(best))

    def _loss(self, plan: Fitting) -> float:
        """What a cheaper plan might save a call, in steps of the baseline."""
        if plan.own_bytes is None or plan.overhead <= _WORTHWHILE:
            return 0.0
        baseline = plan.planned.baseline_peak_bytes
        if baseline <= plan.own_bytes:
            return plan.overhead
        # Of what the plan gives up, the part that the unused room could keep.
        unused = plan.own_bytes - plan.peak_bytes
        loss = plan.overhead * unused / max(baseline - plan.peak_bytes, 1)
        return loss if loss > _WORTHWHILE else 0.0

    def _growth(self, values: Values) -> list[bool]:
        """Of each symbol, whether it is larger than all plans were made for."""
        made_for = [self._planned_for(code) for code in self.codes.values()]
        return [all(value > sizes[i] for sizes in made_for) for i, value in enumerate(values)]

    def _is_much_larger(self, values: Values) -> bool:
        return all(
            any(value >= _MUCH_LARGER * made for value, made in zip(values, sizes, strict=True))
            for sizes in map(self._planned_for, self.codes.values())
        )

    def _planned_for(self, code: Code) -> Values:
        if code.sizes is None:
            return self.symbols.hints()
        return tuple(int(code.sizes.by_symbol[s.symbol]) for s in self.symbols.symbols)

    # --- another plan ---------------------------------------------------------------------------

    def _extended(self, values: Values) -> _Choice | InfeasibleBudgetError:
        """With a plan for a call that none of the plans holds the budget for."""
        watching.take_no_more_lines()
        grown = self._growth(values)
        estimate = self._estimated(values, values) if any(grown) else None
        tight: Code | None = (
            None  # (and once it is one that the call may not run, no more headroom)
        )
        for factor in (*_HEADROOMS, 1.0):
            target = self.symbols.scaled(values, grown, factor)
            if factor > 1.0 and (
                tight is not None
                or target == values
                or estimate is None
                or not self._is_headroom_cheap(values, target, estimate)
            ):
                continue
            try:
                tight = self._compile(target, values)
            except InfeasibleBudgetError as refusal:
                if factor > 1.0:
                    continue
                if not self.symbols:
                    return refusal
                return refusal.with_advice(
                    f"The graph is asked to run at {self.symbols.sizes(values)}; smaller sizes"
                    " still run."
                )
            planned = tight.at(self.symbols.sizes(values))
            if planned is None or Fitting(tight, planned, self.own_bytes(planned)).fits:
                break
        assert tight is not None
        self._add(tight)
        return _Choice(tight)

    def _is_headroom_cheap(self, values: Values, target: Values, tight: _Estimate) -> bool:
        """Whether a plan for larger sizes would cost the call little, by a quick estimate.

        Of a share of the step, a plan for larger sizes may hold more at the call's than the share
        of these.

        Args:
            tight: of a plan for the call's own sizes.
        """
        is_full = self.compiled >= self.most_plans
        most_cost = _HEADROOM_COST_WHEN_FULL if is_full else _HEADROOM_COST
        roomy = self._estimated(target, values)
        return roomy is not None and roomy.fits and roomy.overhead - tight.overhead <= most_cost

    def _estimated(self, made_for: Values, values: Values) -> _Estimate | None:
        """Of a plan made for some sizes, at a call's; without compiling anything.

        Returns:
            None where the planner finds no plan.
        """
        code = next(iter(self.codes.values()))
        planned = code.at(self.symbols.sizes(made_for))
        at_call = code.at(self.symbols.sizes(values))
        if planned is None or at_call is None:
            return None
        own_bytes, call_bytes = self.own_bytes(planned), self.own_bytes(at_call)
        if own_bytes is None or call_bytes is None:
            return _Estimate(0.0, fits=True)
        if planned.baseline_peak_bytes <= own_bytes:
            return _Estimate(0.0, at_call.baseline_peak_bytes <= call_bytes)
        try:
            plan = self.planner.plan(planned.program, _for_planner(own_bytes, planned))
        except InfeasibleBudgetError:
            return None
        plan = replace(plan, program=at_call.program.fingerprint)
        stats = replay(at_call.program, plan)[1]
        most_bytes = (1 + _ESTIMATE_ERROR) * _for_planner(call_bytes, at_call)
        return _Estimate(stats.overhead - 1, stats.peak_bytes <= most_bytes)

    def _with_cheaper(self, values: Values, choice: _Choice) -> _Choice:
        """After many calls that a cheaper plan would have served: one for these sizes, if it is."""
        settled = self._choices[values] = _Choice(choice.code)  # asked once
        if self.compiled >= self.most_plans or len(self.codes) >= self.most_plans - 1:
            return settled  # the last place is kept for larger sizes
        watching.take_no_more_lines()
        sizes = self.symbols.sizes(values)
        now = choice.code.at(sizes)
        estimate = self._estimated(values, values)
        if now is None or estimate is None:
            return settled
        saved_ns = now.cost_ns - (1 + estimate.overhead) * now.program.cost_ns
        if saved_ns <= _WORTHWHILE * now.program.cost_ns:
            return settled
        try:
            code = self._compile(values, values)
        except InfeasibleBudgetError:
            return settled
        self._add(code)
        again = self._decide(values)
        if isinstance(again, InfeasibleBudgetError):
            return settled
        self._choices[values] = again
        return again

    def _compile(self, target: Values, values: Values) -> Code:
        if self.symbols:
            planned_for = [self._planned_for(code) for code in self.codes.values()]
            log.warning(
                "compiling the graph once more, for %s: its plan(s) for %s do not suit a call at"
                " %s",
                self.symbols.sizes(target),
                " and ".join(str(self.symbols.sizes(s)) for s in planned_for),
                self.symbols.sizes(values),
            )
        else:
            log.warning(
                "compiling the graph once more: it has less room than it was planned for, because"
                " of what lies beside it (gradients in .grad, an optimizer)"
            )
        self.compiled += 1
        return self.compile_for(target, self._free_number())

    def _free_number(self) -> int:
        return next(n for n in range(len(self.codes) + 1) if n not in self.codes)

    def _add(self, code: Code) -> None:
        self.codes[code.number] = code
        self._choices.clear()
        if len(self.codes) > self.most_plans:
            gone = min((n for n in self.codes if n != code.number), key=self._missed)
            del self.codes[gone]
            self.forget(gone)

    def _missed(self, number: int) -> tuple[float, int]:
        """What the calls seen so far would lose without a plan, in steps of the baseline."""
        lost = 0.0
        for values, calls in self._calls.items():
            plans = [plan for plan in self.at(values) if plan.fits]
            others = [plan.overhead for plan in plans if plan.code.number != number]
            best = min((plan.overhead for plan in plans), default=0.0)
            # Calls that no other plan holds the budget for would have to be planned again.
            lost += calls * (min(others) - best if others else 1.0)
        return lost, number
