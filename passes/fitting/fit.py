"""From captured graphs to graphs that fit: plan, emit, measure, plan again with what was learned.

A `MemoryModel` says what the emitted graphs will really hold: for Inductor its own schedule, for
the eager executor the referee.  Where the two differ, the next plan knows by how much at each
operator (`residuals`), or else its target moves; the cheapest plan whose *measured* peak is within
the budget wins.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

from dtrcompile.passes.errors import DTRError, InfeasibleBudgetError, format_bytes
from dtrcompile.passes.fitting.kept_choices import Choice, refusal_entry, refusal_of_entry
from dtrcompile.passes.fitting.measured import Measured, SizeModel
from dtrcompile.passes.fitting.peak_formula import StepFormulas
from dtrcompile.passes.fitting.plan_formula import plan_moments
from dtrcompile.passes.fitting.progress import EMISSION, LOWERING, PLANNING, stage
from dtrcompile.passes.fitting.residuals import (
    NOTHING,
    residuals,
    savings,
    with_residuals,
    without_residuals,
)
from dtrcompile.passes.fitting.settings import (
    AGREEMENT_PERCENT,
    AMPLE,
    HOPELESS_SHARE,
    LOOSER_THAN_MINIMUM_PERCENT,
    MAX_LEARNING_ROUNDS,
    MAX_REPLANNING_ROUNDS,
    NEAR_THE_PLAN_PERCENT,
    SPEED_WORKSPACE_COST_SHARE,
    SPEED_WORKSPACE_DIVISOR,
)
from dtrcompile.passes.fitting.sharing import (
    ALONE,
    GraphBytes,
    OtherGraphs,
    with_other_graphs,
    without_other_graphs,
)
from dtrcompile.passes.fitting.targets import (
    Attempt,
    BudgetSearch,
    Confirmed,
    Learned,
    NoPlan,
    SmallerAttempt,
    first_target,
    is_worth_measuring,
    next_smaller_target,
    next_target,
    smaller_plans_left,
)
from dtrcompile.passes.graphs.capture import Captured
from dtrcompile.passes.graphs.emit import Emitted, emit
from dtrcompile.passes.graphs.verify import Verifier
from dtrcompile.passes.inductor import disk_cache
from dtrcompile.passes.inductor.layouts import allow_workspace
from dtrcompile.passes.inductor.plan_order import allow_late_frees
from dtrcompile.passes.planning.planners import minimum_plan
from dtrcompile.passes.planning.planners.base import Planner, keep_all
from dtrcompile.passes.program.plan import (
    Boundary,
    Free,
    Offload,
    Plan,
    Prefetch,
    Step,
)
from dtrcompile.passes.program.program import Program
from dtrcompile.passes.program.replay import MemoryTimeline, PlanStats, replay
from dtrcompile.passes.program.sizes import Sizes, at_sizes
from dtrcompile.passes.program.tighten import tighten
from dtrcompile.passes.torch_private import dynamo_timed

log = logging.getLogger("dtrcompile")


class MemoryModel(ABC):
    """Tells what graphs will hold once compiled."""

    @abstractmethod
    def measure(self, captured: Captured, emitted: Emitted | None, stats: PlanStats) -> Measured:
        """Measure a plan's graphs, or, where ``emitted`` is None, the default split's."""

    def measure_likely(
        self, captured: Captured, emitted: Emitted | None, stats: PlanStats
    ) -> Measured:
        """The same of graphs that will probably be chosen: it may begin to compile them."""
        return self.measure(captured, emitted, stats)

    def give_up(self, measured: Measured) -> None:  # noqa: ARG002
        """Graphs that were likely to be chosen will not be."""
        return

    def guess(self, captured: Captured, stats: PlanStats) -> Measured | None:  # noqa: ARG002
        """What the default split holds, roughly and at once; None: it has to be measured.

        For budgets so large that measuring would tell nothing new.  Only where what was compiled
        is looked at afterwards, so that the guess does not stay the promise.

        Args:
            stats: the referee's, of each operator once.
        """
        return None

    def key_of(self, captured: Captured, planner: Planner, limits: Limits) -> str | None:  # noqa: ARG002
        """Under what a choice is kept on disk, None: it is not kept.

        Covers all that a choice depends on.
        """
        return None

    def keep(self, measured: Measured) -> None:  # noqa: ARG002
        """Let later processes read from disk what was lowered to measure this."""
        return

    def may_measure(self, n_measured: int) -> bool:  # noqa: ARG002
        """Whether a search may measure one more plan.

        Args:
            n_measured: the operators of the graphs that it has measured so far.
        """
        return True

    def gains_from_workspace(self, captured: Captured) -> bool:  # noqa: ARG002
        """Whether a kernel could be faster if it held more inside (see `layouts`)."""
        return False

    def workspaces(self, captured: Captured) -> Mapping[int, int]:  # noqa: ARG002
        """Operator -> what its library calls hold inside, in the layouts that were traced."""
        return NOTHING


class RefereeModel(MemoryModel):
    """The eager executor's: the referee's peak is exact there."""

    def measure(
        self,
        captured: Captured,  # noqa: ARG002
        emitted: Emitted | None,  # noqa: ARG002
        stats: PlanStats,
    ) -> Measured:
        return _as_planned(stats)


def _as_planned(stats: PlanStats) -> Measured:
    """What the referee says that a plan holds."""
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
        stats.forward_peak_bytes,
        stats.backward_peak_bytes,
        stats.boundary_bytes,
        stats.saved_bytes,
    )


@dataclass(frozen=True)
class PlanSizeModel(SizeModel):
    """A plan's, as the referee counts."""

    captured: Captured
    plan: Plan

    def at(self, sizes: Sizes) -> Measured:
        if self.formulas is not None:
            return replace(self.formulas.at(sizes), by_sizes=self)
        return self.replayed(sizes)

    @functools.cached_property
    def formulas(self) -> StepFormulas | None:
        captured = self.captured
        if not captured.symbols:
            return None
        moments = plan_moments(
            captured.program,
            self.plan,
            captured.storage_expressions(),
            captured.workspace_expressions(),
        )
        formulas = StepFormulas.of(moments, captured.allocator, captured.least_sizes)
        if not formulas.agrees_with(self.replayed(captured.hints), captured.hints):
            log.debug("no formula of the peak: the count at %s is another", captured.hints)
            return None
        return formulas

    def of(self, captured: Captured) -> Measured:
        program = captured.program
        plan = tighten(program, holding(program, self.plan))
        model = PlanSizeModel(captured, plan)
        return replace(_as_planned(replay(program, plan)[1]), by_sizes=model)

    def replayed(self, sizes: Sizes) -> Measured:
        """The same, as the referee counts at these sizes."""
        with at_sizes(sizes):
            program = self.captured.resized()
        stats = replay(program, replace(self.plan, program=program.fingerprint))[1]
        return replace(_as_planned(stats), by_sizes=self)


@dataclass(frozen=True)
class Candidate:
    """A plan with its graphs and what they hold."""

    plan: Plan
    timeline: MemoryTimeline
    stats: PlanStats
    emitted: Emitted
    measured: Measured

    @property
    def n_operators(self) -> int:
        """Of the emitted graphs, with those that run again."""
        graphs = (self.emitted.forward, self.emitted.backward)
        nodes = (node for g in graphs if g is not None for node in g.graph.nodes)
        return sum(node.op == "call_function" for node in nodes)


@dataclass(frozen=True)
class Outcome:
    """What to compile.

    Attributes:
        captured: what was planned; it may have another order than what was given.
        others: the other graphs of the step.
        chosen: the plan to compile, or None: the default split fits as it is.
        baseline: the default split's plan (each operator once).
        baseline_measured: what the default split holds.
        budget_bytes: the resolved budget; None for the smallest.
        planning_s, lowering_s: seconds spent planning and measuring.
        is_guess: ``baseline_measured`` is; what is compiled must be held to the budget.
        is_kept: an earlier process made the plan.
        saves_least: because graphs of unknown size follow, at the price of compute.
        is_cut_short: a search ended because it had lowered as much as it may.
        chunks: what is computed in chunks, and in how many; ``baseline_measured`` is then of the
            graph as it was.
        n_in_place: sums of gradients that are made in place.
        n_unpadded: matrix products that are computed without the padding that Inductor gave them.
    """

    captured: Captured
    others: OtherGraphs
    chosen: Candidate | None
    baseline: tuple[Plan, MemoryTimeline, PlanStats]
    baseline_measured: Measured
    budget_bytes: int | None
    planning_s: float
    lowering_s: float
    is_guess: bool = False
    is_kept: bool = False
    saves_least: bool = False
    is_cut_short: bool = False
    chunks: tuple[str, ...] = ()
    n_in_place: int = 0
    n_unpadded: int = 0

    @property
    def measured(self) -> Measured:
        """What will be compiled holds."""
        return self.baseline_measured if self.chosen is None else self.chosen.measured

    def holding(self, measured: Measured) -> Outcome:
        """The same, where what will be compiled holds this."""
        if self.chosen is None:
            return replace(self, baseline_measured=measured)
        return replace(self, chosen=replace(self.chosen, measured=measured))

    @property
    def plan(self) -> Plan:
        """What will be compiled."""
        return self.baseline[0] if self.chosen is None else self.chosen.plan

    @property
    def stats(self) -> PlanStats:
        """What it costs."""
        return self.baseline[2] if self.chosen is None else self.chosen.stats


class UnsearchedBudgetError(InfeasibleBudgetError):
    """A budget was refused at once, because even the planner's smallest plan is far above it.

    Only for a caller that does not ask for the minimum (`Limits.names_minimum`) and has something
    else to try.  It never reaches a user.
    """


@dataclass(frozen=True, slots=True)
class Limits:
    """What a graph has to keep to.

    Attributes:
        budget_bytes: of the whole step; None for the smallest.
        others: the other graphs of the step; what they hold beside this one comes off the budget.
        more_follow: graphs of unknown size run between forward and backward, so it is to save as
            little as it can.
        is_unlimited: there is no budget yet; the default split is what runs.
        least_budget_bytes: what the budget will come to at least, where it is not known yet; None
            where that is not known either.
        is_refused: no plan is within the budget, so the planner's smallest plan will do: there is
            no search for a smaller schedule.
        names_minimum: whether a refusal has to name the smallest budget that can be met.
        needed_bytes: what the step needs where none of its graphs run; a refusal names no less.
    """

    budget_bytes: int | None
    others: OtherGraphs = ALONE
    more_follow: bool = False
    is_unlimited: bool = False
    least_budget_bytes: int | None = None
    is_refused: bool = False
    names_minimum: bool = True
    needed_bytes: int = 0

    def are_ample(self, guessed: Measured) -> bool:
        """Whether a guess is so far below the budget that the default split will fit."""
        if self.is_unlimited:
            return True
        if self.budget_bytes is None or self.more_follow:
            return False
        own_bytes = self.budget_bytes - self.others.outside_bytes
        return AMPLE * guessed.peak_with(self.others) <= own_bytes


class Fitter:
    """Finds the cheapest graphs for one budget after the other.

    What was planned and lowered for one budget is used for the next, and changes no answer.

    Args:
        always_emit: emit the baseline too, where it fits (the eager executor runs nothing else).
    """

    def __init__(
        self,
        captured: Captured,
        planner: Planner,
        model: MemoryModel,
        *,
        always_emit: bool = False,
    ) -> None:
        self._always_emit = always_emit
        self._given = captured
        self._fit = _Fit(captured, planner, model)

    def fit(self, limits: Callable[[Measured], Limits], *, is_whole_peak: bool = False) -> Outcome:
        """The cheapest graphs that stay within a budget.

        Args:
            limits: what the default split holds -> what to keep to.
            is_whole_peak: the budget is what the default split holds, whatever that is.

        Raises:
            InfeasibleBudgetError: naming the smallest budget that can be met.
        """
        with _only_new_objects_collected():
            return self._fit.run(limits, is_whole_peak, self._always_emit)

    @property
    def captured(self) -> Captured:
        """What is planned."""
        return self._fit.captured

    @property
    def is_reordered(self) -> bool:
        """Whether the graphs were captured again, in the order in which the compiler draws random
        numbers."""
        return self._fit.captured is not self._given

    @property
    def baseline(self) -> Measured | None:
        """What the default split holds; None where that was not measured."""
        return None if self._fit.default is None else self._fit.default[3]

    @property
    def spent_s(self) -> tuple[float, float]:
        """Seconds of planning and of measuring for the budget that was asked for last."""
        return self._fit.planning_s, self._fit.lowering_s

    @functools.cached_property
    def least_bytes(self) -> int:
        """About the smallest peak that a plan can have, without measuring anything."""
        return self._fit.least_planned_bytes()

    def has_plan_within(self, budget_bytes: int) -> bool:
        """Whether a plan of so much is found, where `least_bytes` searches for the smallest.

        Nothing is measured.  If none is found, there may be one all the same.
        """
        return self._fit.has_plan_within(budget_bytes)

    def cost_within(self, budget_bytes: int) -> int | None:
        """What the planner's plan for so much costs, in ns; None if it finds none.

        Nothing is measured.
        """
        return self._fit.cost_within(budget_bytes)

    @functools.cached_property
    def least_lowered_bytes(self) -> int:
        """As `least_bytes`, by what the default split was seen to hold; it is measured for that."""
        return self._fit.least_lowered_bytes()


def _plan_within(planner: Planner, program: Program, budget_bytes: int) -> Plan | None:
    try:
        return planner.plan(program, budget_bytes)
    except InfeasibleBudgetError:
        return None


def fit(
    captured: Captured,
    planner: Planner,
    limits: Callable[[Measured], Limits],
    model: MemoryModel,
    *,
    is_whole_peak: bool = False,
    always_emit: bool = False,
) -> Outcome:
    """As `Fitter.fit`, for one budget."""
    fitter = Fitter(captured, planner, model, always_emit=always_emit)
    return fitter.fit(limits, is_whole_peak=is_whole_peak)


_is_frozen_by_others = False


@contextlib.contextmanager
def _only_new_objects_collected() -> Iterator[None]:
    """Have Python's cycle collector leave alone what is there already, all of PyTorch above all.

    Each lowering leaves cycles, and looking for them among everything took an eighth of the time.
    """
    global _is_frozen_by_others
    # To count what is frozen takes a tenth of a second if PyTorch is, so that is not done again.
    _is_frozen_by_others = _is_frozen_by_others or gc.get_freeze_count() > 0
    if _is_frozen_by_others:
        yield
        return
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


_CUT_SHORT = (
    "The search ended after the time of option 'lowering_s'; with more time it may find a smaller"
    " plan."
)


class _Fit:
    """Bytes here are the graph's own: what is outside is taken off the budget beforehand."""

    def __init__(self, captured: Captured, planner: Planner, model: MemoryModel) -> None:
        self.captured = captured
        self.program = captured.program
        self.others = ALONE
        self.planner = planner
        self.model = model
        self.baseline_bytes = 0
        self.planning_s = 0.0
        self.lowering_s = 0.0
        # Residuals that hold in nearly any plan: what the default split's library calls were seen
        # to need, and what its loops do not, because they write over what they read.
        self.workspaces: Mapping[int, int] = NOTHING
        # What one kernel may hold inside for the sake of its speed.
        self.speed_workspace_bytes = 0
        self.candidates: dict[tuple[Plan, int], Candidate] = {}
        self.is_kept = False
        # Operators of the graphs that the present search has measured.
        self.n_measured = 0
        self.is_cut_short = False
        # The default split: its plan, and what it holds.
        self.default: tuple[Plan, MemoryTimeline, PlanStats, Measured] | None = None
        self._split: tuple[Plan, MemoryTimeline, PlanStats] | None = None
        self._verifier: Verifier | None = None
        self.answers: dict[tuple[int, tuple[tuple[int, int], ...]], Plan | None] = {}

    def run(
        self, limits: Callable[[Measured], Limits], is_whole_peak: bool, always_emit: bool
    ) -> Outcome:
        self.begin()
        if not always_emit and self.default is None:
            ample = self.guessed_to_be_ample(limits, is_whole_peak)
            if ample is not None:
                return ample
        plan, timeline, stats, measured = self.measured_default()
        agreed = limits(measured)
        budget_bytes = agreed.budget_bytes
        if self.others != agreed.others:
            self.others = agreed.others
            self.answers.clear()  # they were for other graphs beside it
        own_bytes = None if budget_bytes is None else budget_bytes - self.others.outside_bytes
        log.debug(
            "baseline: planned %s, measured %s; budget %s",
            format_bytes(stats.peak_bytes),
            format_bytes(measured.peak_bytes),
            "min" if budget_bytes is None else format_bytes(budget_bytes),
        )

        chosen = self.kept_or_chosen(agreed, own_bytes, measured, plan)
        if chosen is None and always_emit:
            chosen = self.try_plan(tighten(self.program, plan))
        return Outcome(
            self.captured,
            self.others,
            chosen,
            (plan, timeline, stats),
            measured,
            budget_bytes,
            self.planning_s,
            self.lowering_s,
            is_kept=self.is_kept,
            saves_least=agreed.more_follow,
            is_cut_short=self.is_cut_short,
        )

    def guessed_to_be_ample(
        self, limits: Callable[[Measured], Limits], is_whole_peak: bool
    ) -> Outcome | None:
        """The default split as it is, where a guess of what it holds is far below the budget."""
        plan, timeline, stats = self.default_split()
        guessed = self.model.guess(self.captured, stats)
        if guessed is None:
            return None
        agreed = limits(guessed)
        if agreed.are_ample(guessed) and not is_whole_peak:
            stats = self.stats_of(plan, self.model.workspaces(self.captured))
            guessed = self.model.guess(self.captured, stats) or guessed
            agreed = limits(guessed)
        if not is_whole_peak and not agreed.are_ample(guessed):
            return None
        log.debug("baseline: about %s, not measured", format_bytes(guessed.peak_bytes))
        return Outcome(
            self.captured,
            agreed.others,
            None,
            (plan, timeline, stats),
            guessed,
            agreed.budget_bytes,
            0.0,
            0.0,
            is_guess=True,
        )

    def begin(self) -> None:
        """Forget what belongs to the search for one budget; what was tried is still true."""
        self.planning_s = self.lowering_s = 0.0
        self.n_measured = self.speed_workspace_bytes = 0
        self.is_kept = self.is_cut_short = False

    def default_split(self) -> tuple[Plan, MemoryTimeline, PlanStats]:
        """The default split's plan, replayed once for a program."""
        if self._split is None or self._split[0].program != self.program.fingerprint:
            plan = as_it_is(self.program)
            self._split = (plan, *replay(self.program, plan))
        return self._split

    def measured_default(self) -> tuple[Plan, MemoryTimeline, PlanStats, Measured]:
        """The default split, measured once, and captured again if the compiler draws random numbers
        in another order: from one seed, a plan must draw the same."""
        if self.default is not None:
            return self.default
        plan, timeline, stats = self.default_split()
        start = time.perf_counter()
        stage("lowering the default split")
        with dynamo_timed(LOWERING):
            measured = self.measured(None, plan, stats)
        if list(measured.draws) != sorted(measured.draws):
            self.captured = self.captured.with_draws(measured.draws)
            self.program = self.captured.program
            plan, timeline, stats = self.default_split()
            measured = self.measured(None, plan, stats)
        self.lowering_s += time.perf_counter() - start
        self.model.keep(measured)
        self.workspaces = {
            **measured.workspace_bytes,
            **savings(self.program, measured.written_over),
        }
        self.default = plan, timeline, stats, measured
        return self.default

    def kept_or_chosen(
        self, agreed: Limits, own_bytes: int | None, measured: Measured, plan: Plan
    ) -> Candidate | None:
        """What an earlier process chose for the same question, else what is chosen now.

        Raises:
            InfeasibleBudgetError: if no plan keeps to the limits.
        """
        is_question = not agreed.is_unlimited and (
            agreed.more_follow or own_bytes is None or measured.peak_with(self.others) > own_bytes
        )
        if not is_question:
            return None
        self.refuse_below_needed(agreed, measured)
        key = self.model.key_of(self.captured, self.planner, agreed)
        with disk_cache.one_at_a_time(key):
            entry = disk_cache.read(key)
            refused = refusal_of_entry(entry)
            if refused is not None:
                raise refused
            choice = Choice.of_entry(entry)
            if choice is not None and self.takes_up(choice, measured):
                return None if choice.plan is None else self.try_plan(choice.plan)
            try:
                chosen = self.chosen_for(agreed, own_bytes, measured, plan)
            except InfeasibleBudgetError as refusal:
                if type(refusal) is InfeasibleBudgetError:  # not that a planner's time was up
                    disk_cache.write(key, refusal_entry(refusal))
                raise
            held = measured.peak_with(self.others) if chosen is None else self.peak(chosen)
            chosen_plan = None if chosen is None else chosen.plan
            if chosen is not None:
                self.model.keep(chosen.measured)
            choice = Choice(
                chosen_plan, self.others, self.speed_workspace_bytes, held, self.is_cut_short
            )
            disk_cache.write(key, choice.entry())
        return chosen

    def refuse_below_needed(self, agreed: Limits, baseline: Measured) -> None:
        """Where the budget that is needed in any case has room for the default split.

        Raises:
            InfeasibleBudgetError: if the budget that was given is smaller.
        """
        given_bytes, needed_bytes = agreed.budget_bytes, agreed.needed_bytes
        whole_bytes = baseline.peak_with(self.others) + self.others.outside_bytes
        if given_bytes is not None and given_bytes < needed_bytes and whole_bytes <= needed_bytes:
            raise InfeasibleBudgetError(given_bytes, minimum_bytes=needed_bytes)

    def takes_up(self, choice: Choice, measured: Measured) -> bool:
        """Go on from an earlier choice, unless its graphs hold something else by now."""
        before = self.others, self.speed_workspace_bytes
        self.others, self.speed_workspace_bytes = choice.others, choice.speed_workspace_bytes
        try:
            held = measured.peak_with(self.others)
            if choice.plan is not None:
                held = self.peak(self.try_plan(choice.plan))
            self.is_kept = held == choice.peak_bytes
            self.is_cut_short = self.is_kept and choice.is_cut_short
        except DTRError as error:
            log.debug("a plan that was kept cannot be used: %s", error)
        if not self.is_kept:
            self.others, self.speed_workspace_bytes = before
            self.candidates.clear()
        return self.is_kept

    def chosen_for(
        self, agreed: Limits, own_bytes: int | None, measured: Measured, plan: Plan
    ) -> Candidate | None:
        """What keeps to the limits; None: the default split.

        Args:
            own_bytes: the budget without what is outside; None for the smallest.
            measured, plan: of the default split.
        """
        if agreed.more_follow:
            # The graphs that follow are taken to hold as much as this one does at its smallest, or
            # half of what is available: this graph then saves little, and holds little itself.
            between_bytes = least_bytes = self.least_own_bytes()
            if own_bytes is not None:
                available_bytes = own_bytes - self.program.constant_bytes
                is_hopeless = available_bytes < HOPELESS_SHARE * least_bytes
                if is_hopeless and not agreed.names_minimum:
                    raise UnsearchedBudgetError(own_bytes + self.others.outside_bytes)
                between_bytes = max(between_bytes, available_bytes // 2)
            self.others = replace(self.others, between_bytes=between_bytes)
        peak_bytes = self.baseline_bytes = measured.peak_with(self.others)
        if not agreed.more_follow and own_bytes is not None:
            planned_bytes = self.planned_peak(plan, self.workspaces)
            return self.cheapest_within(own_bytes, planned_bytes, peak_bytes)
        smallest = self.minimum(self.workspaces) if agreed.is_refused else self.smallest()
        chosen = self.unless_larger_than(measured, smallest)
        if own_bytes is not None:
            return self.within(own_bytes, chosen, measured)
        if agreed.least_budget_bytes is not None:
            return self.within_if_possible(agreed.least_budget_bytes, chosen, measured)
        return chosen

    def measured(
        self, emitted: Emitted | None, plan: Plan, stats: PlanStats, *, is_likely: bool = False
    ) -> Measured:
        """What the memory model says of a plan's graphs, or, of None, of the default split's."""
        measure = self.model.measure_likely if is_likely else self.model.measure
        measured = measure(self.captured, emitted, stats)
        if measured.by_sizes is None:
            measured = replace(measured, by_sizes=PlanSizeModel(self.captured, plan))
        return measured

    @contextlib.contextmanager
    def timed_planning(self) -> Iterator[None]:
        """What runs within it is planning, also where it finds nothing."""
        start = time.perf_counter()
        try:
            with dynamo_timed(PLANNING):
                yield
        finally:
            self.planning_s += time.perf_counter() - start

    def least_planned_bytes(self) -> int:
        """About the smallest peak that a plan of these graphs alone can have."""
        with self.timed_planning():
            plan = minimum_plan(self.program, self.planner.for_minimum())
        return replay(self.program, plan)[1].peak_bytes

    def has_plan_within(self, budget_bytes: int) -> bool:
        """Whether a plan of these graphs alone is found, by one look each way to search."""
        with self.timed_planning():
            return any(
                _plan_within(planner, self.program, budget_bytes) is not None
                for planner in self.planner.minimum_searches()
            )

    def cost_within(self, budget_bytes: int) -> int | None:
        """What a plan of these graphs alone costs, in ns; None if none is found."""
        with self.timed_planning():
            plan = _plan_within(self.planner, self.program, budget_bytes)
        return None if plan is None else replay(self.program, plan)[1].cost_ns

    def least_lowered_bytes(self) -> int:
        """As `least_planned_bytes`, with what the default split's schedule was seen to hold beyond
        its plan."""
        self.measured_default()
        return self.least_own_bytes() + self.program.constant_bytes

    def least_own_bytes(self) -> int:
        """About the smallest peak that a plan can have, without constants."""
        plan = self.plan_with(
            lambda program: minimum_plan(program, self.planner.for_minimum()), self.workspaces
        )
        return self.stats_of(plan, self.workspaces).peak_bytes - self.program.constant_bytes

    def unless_larger_than(self, baseline: Measured, candidate: Candidate) -> Candidate | None:
        """A candidate, or None if the default split is no larger."""
        return candidate if self.peak(candidate) < baseline.peak_with(self.others) else None

    def within(
        self, own_bytes: int, chosen: Candidate | None, baseline: Measured
    ) -> Candidate | None:
        """What was chosen, or, where it is too large to run, what leaves fewer bytes to others: all
        that it leaves beside what was chosen, or none.

        Raises:
            InfeasibleBudgetError: if that is too large as well.
        """

        def held() -> Measured:
            return baseline if chosen is None else chosen.measured

        for between_bytes in (own_bytes - held().boundary_bytes, 0):
            if held().peak_bytes > own_bytes and 0 <= between_bytes < self.others.between_bytes:
                self.others = replace(self.others, between_bytes=between_bytes)
                self.answers.clear()  # they were for other graphs beside it
                chosen = self.unless_larger_than(baseline, self.smallest())
        if held().peak_bytes > own_bytes:
            raise self.infeasible(own_bytes, self.smallest(), held().peak_bytes)
        return chosen

    @property
    def verifier(self) -> Verifier:
        """Of the graphs that are planned; they are captured again at most once.

        Looking at a schedule may settle symbolic sizes, and values then have other numbers.
        """
        known = self._verifier
        if known is None or known.captured is not self.captured or self.captured.symbols:
            known = self._verifier = Verifier(self.captured)
        return known

    def within_if_possible(
        self, own_bytes: int, chosen: Candidate | None, baseline: Measured
    ) -> Candidate | None:
        """The same, or what was chosen where nothing is small enough."""
        others = self.others
        try:
            return self.within(own_bytes, chosen, baseline)
        except InfeasibleBudgetError:
            self.others = others
            return chosen

    def peak(self, candidate: Candidate) -> int:
        """What counts against the budget."""
        return candidate.measured.peak_with(self.others)

    def try_plan(self, plan: Plan, *, is_likely: bool = False) -> Candidate:
        """Emit, verify and measure a plan, once.

        Args:
            is_likely: it will probably be chosen.
        """
        key = plan, self.speed_workspace_bytes
        if key not in self.candidates:
            with dynamo_timed(EMISSION):
                timeline, stats = replay(self.program, plan)
                emitted = emit(self.captured, plan)
                graphs = [g for g in (emitted.forward, emitted.backward) if g]
                allow_workspace(graphs, self.speed_workspace_bytes)
                if not self.captured.symbols:  # at other sizes, other steps hold the most
                    known, peaks = self.replayed(plan, self.workspaces)
                    peak_bytes = (peaks.forward_peak_bytes, peaks.backward_peak_bytes)
                    for graph, most_bytes in zip(graphs, peak_bytes, strict=False):
                        allow_late_frees(graph, known.during_bytes, most_bytes)
                self.verifier.verify(plan, timeline, emitted)
            start = time.perf_counter()
            self.say("lowering plan")
            with dynamo_timed(LOWERING):
                measured = self.measured(emitted, plan, stats, is_likely=is_likely)
            self.lowering_s += time.perf_counter() - start
            log.debug(
                "plan %s: planned %d bytes, measured %d, overhead %.3f",
                plan.planner,
                stats.peak_bytes,
                measured.peak_bytes,
                stats.overhead,
            )
            self.candidates[key] = Candidate(plan, timeline, stats, emitted, measured)
        self.n_measured += self.candidates[key].n_operators
        return self.candidates[key]

    def may_go_on(self) -> bool:
        """Whether the present search may measure one more plan; if not, that is noted.

        It depends on what was measured for this search alone, whether that was done anew or not, so
        that the same question always has the same answer.
        """
        may = self.model.may_measure(self.n_measured)
        self.is_cut_short |= not may
        return may

    def plan_for(self, target_bytes: int, known: Mapping[int, int]) -> Plan | None:
        """The planner's answer for a target, None where it has none.

        Args:
            known: residuals of operators.
        """
        question = (target_bytes, tuple(sorted(known.items())))
        if question not in self.answers:
            try:
                self.answers[question] = self.plan_with(
                    lambda program: self.planner.plan(program, target_bytes), known
                )
            except InfeasibleBudgetError:
                self.answers[question] = None
        return self.answers[question]

    def plan_with(self, planner: Callable[[Program], Plan], known: Mapping[int, int]) -> Plan:
        """A plan made of the program that knows the residuals, as one of the program."""
        self.say("searching for plan")
        with self.timed_planning():
            program = with_residuals(self.program, known)
            plan = planner(with_other_graphs(program, self.others))
        plan = without_residuals(without_other_graphs(plan, program), self.program)
        return tighten(self.program, plan)

    def say(self, what: str) -> None:
        """Tell whoever shows it what is done now."""
        text = f"{what} {len(self.candidates) + 1}"
        if self.candidates:
            least = min(self.peak(candidate) for candidate in self.candidates.values())
            text += f" (the smallest so far holds {format_bytes(least)})"
        stage(text)

    def learn(self, candidate: Candidate, known: dict[int, int]) -> bool:
        """Add a candidate's residuals; whether any was new."""
        measured = candidate.measured.step_bytes
        new = residuals(candidate.plan, candidate.timeline, measured, known)
        known.update(new)
        return bool(new)

    def cheapest_within(
        self, budget_bytes: int, baseline_planned_bytes: int, baseline_bytes: int
    ) -> Candidate:
        """The least compute whose measured peak is within the budget.

        Raises:
            InfeasibleBudgetError: if there is none.
        """
        self.n_measured = 0
        first = first_target(budget_bytes, baseline_planned_bytes, baseline_bytes)
        search = BudgetSearch(budget_bytes, first, baseline_planned_bytes, MAX_REPLANNING_ROUNDS)
        speed_workspaces = [0]
        if self.model.gains_from_workspace(self.captured):
            speed_workspaces = [budget_bytes // SPEED_WORKSPACE_DIVISOR, 0]
        for self.speed_workspace_bytes in speed_workspaces:
            found = self.search(search, self.workspaces, is_first_likely=True)
            best = self.cheapest_of(found, budget_bytes)
            if best is None:
                continue
            if not self.speed_workspace_bytes or self.is_speed_worth_its_cost(best, first):
                return best
        smallest = self.smallest()
        if self.peak(smallest) > budget_bytes:
            # The compiler can make more of every plan than of the default split.
            minimum_bytes = min(self.peak(smallest), self.baseline_bytes)
            raise self.infeasible(budget_bytes, smallest, minimum_bytes)
        cheapest = self.cheapest_of(self.candidates.values(), budget_bytes)
        assert cheapest is not None  # the smallest is one of them
        return cheapest

    def cheapest_of(self, candidates: Iterable[Candidate], budget_bytes: int) -> Candidate | None:
        """Of those that are within the budget; the first of equals."""
        return min(
            (c for c in candidates if self.peak(c) <= budget_bytes),
            key=lambda c: c.stats.cost_ns,
            default=None,
        )

    def is_speed_worth_its_cost(self, candidate: Candidate, target_bytes: int) -> bool:
        """Whether little was computed again for what kernels may hold inside for their speed."""
        without = self.plan_for(target_bytes, self.workspaces)
        if without is None:
            return True
        extra_ns = candidate.stats.cost_ns - replay(self.program, without)[1].cost_ns
        return extra_ns <= SPEED_WORKSPACE_COST_SHARE * self.program.cost_ns

    def search(
        self,
        search: BudgetSearch,
        known: Mapping[int, int],
        least_bytes: int | None = None,
        *,
        is_first_likely: bool = False,
    ) -> list[Candidate]:
        """The plans that were measured for a budget, whether they are within it or not.

        Args:
            known: residuals of operators.
            least_bytes: plans that surely hold more than this are not measured.
            is_first_likely: the first plan will probably be chosen.
        """
        found: list[Candidate] = []
        attempts: list[Attempt] = []
        learned_from: set[Plan] = set()
        learned, known = known, dict(known)
        while (target := next_target(search, attempts)) is not None:
            plan = self.plan_for(target, known)
            if plan is None and known != self.workspaces:
                known = dict(self.workspaces)  # what was learned of a plan need not hold in another
                plan = self.plan_for(target, known)
                if plan is not None and self.is_surely_larger(plan, learned, least_bytes):
                    plan = None
            if plan is None:
                attempts.append(NoPlan(target))
                continue
            best = self.cheapest_of(found, search.budget_bytes)
            if best is not None:
                cost_ns = replay(self.program, plan)[1].cost_ns
                if not is_worth_measuring(cost_ns, best.stats.cost_ns):
                    break
            if not self.may_go_on():
                break
            is_likely = is_first_likely and not found
            candidate = self.try_plan(plan, is_likely=is_likely)
            if is_likely and self.peak(candidate) > search.budget_bytes:
                self.model.give_up(candidate.measured)
            found.append(candidate)
            is_new = plan not in learned_from
            learned_from.add(plan)
            if is_new and self.learn(candidate, known):
                attempts.append(Learned(target, self.peak(candidate)))
            else:
                planned_bytes = self.planned_peak(plan, known)
                attempts.append(Confirmed(target, self.peak(candidate), planned_bytes))
        return found

    def is_surely_larger(
        self, plan: Plan, learned: Mapping[int, int], least_bytes: int | None
    ) -> bool:
        """Whether a plan holds more by what was learned of other plans, and not just a little."""
        if least_bytes is None:
            return False
        return self.planned_peak(plan, learned) > least_bytes * AGREEMENT_PERCENT // 100

    def smallest(self) -> Candidate:
        """The smallest measured peak among plans at and a little above the planner's minimum.

        The same set whatever was tried before, so that the minimum that an error names is met when
        it is asked for.
        """
        self.n_measured = 0
        known = dict(self.workspaces)
        tried = [self.minimum(known)]
        if self.is_floor(tried[0]):
            return tried[0]
        for _ in range(MAX_LEARNING_ROUNDS):
            if self.agrees(tried[-1], known) or not self.learn(tried[-1], known):
                break
            if not self.may_go_on():
                break
            tried.append(self.minimum(known))
        planned_bytes = self.planned_peak(tried[0].plan, self.workspaces)
        if not self.agrees(tried[-1], known):
            targets = [planned_bytes * percent // 100 for percent in LOOSER_THAN_MINIMUM_PERCENT]
            looser = [self.plan_for(target, self.workspaces) for target in targets]
            tried += [self.try_plan(p) for p in looser if p is not None and self.may_go_on()]
        attempts: list[SmallerAttempt] = []
        least = min(self.peak(c) for c in tried)
        while (target := next_smaller_target(planned_bytes, least, attempts)) is not None:
            if any(map(self.is_floor, tried)) or not self.may_go_on():
                break
            left = smaller_plans_left(attempts)
            is_near = least <= planned_bytes * NEAR_THE_PLAN_PERCENT // 100
            search = BudgetSearch(target, target, least, left)
            found = self.search(search, known, least if is_near else None)
            has_fitted = self.cheapest_of(found, target) is not None
            attempts.append(SmallerAttempt(target, least, len(found), has_fitted))
            tried += found
            least = min(self.peak(c) for c in tried)
        return min(tried, key=lambda c: (self.peak(c), c.stats.cost_ns))

    def is_floor(self, candidate: Candidate) -> bool:
        """Whether no plan holds less."""
        return candidate.measured.is_floor and self.others == ALONE

    def planned_peak(self, plan: Plan, known: Mapping[int, int]) -> int:
        """What the referee, who knows the residuals, says that counts against the budget."""
        stats = self.stats_of(plan, known)
        return GraphBytes(
            0, stats.forward_peak_bytes, stats.backward_peak_bytes, stats.boundary_bytes, 0
        ).peak_with(self.others)

    def stats_of(self, plan: Plan, known: Mapping[int, int]) -> PlanStats:
        """The referee's, of the program that knows the residuals."""
        return self.replayed(plan, known)[1]

    def replayed(self, plan: Plan, known: Mapping[int, int]) -> tuple[MemoryTimeline, PlanStats]:
        """The same, with what is held at each step."""
        program = with_residuals(self.program, known)
        return replay(program, replace(plan, program=program.fingerprint))

    def agrees(self, candidate: Candidate, known: Mapping[int, int]) -> bool:
        """Whether next to nothing was lost between plan and schedule."""
        planned_bytes = self.planned_peak(candidate.plan, known)
        return self.peak(candidate) <= planned_bytes * AGREEMENT_PERCENT // 100

    def minimum(self, known: Mapping[int, int]) -> Candidate:
        """The planner's smallest plan of the program that knows the residuals."""
        return self.try_plan(self.plan_with(lambda p: minimum_plan(p, self.planner), known))

    def infeasible(
        self, budget_bytes: int, smallest: Candidate, minimum_bytes: int
    ) -> InfeasibleBudgetError:
        resident = sorted(
            (self.program.storages[s] for s in smallest.timeline.peak_resident),
            key=lambda s: (-s.size_bytes, s.id),
        )
        return InfeasibleBudgetError(
            budget_bytes + self.others.outside_bytes,
            minimum_bytes=minimum_bytes + self.others.outside_bytes,
            operator=smallest.stats.peak_operator,
            largest=[(s.name, s.size_bytes) for s in resident[:5]],
            advice=_CUT_SHORT if self.is_cut_short else "",
        )


def as_it_is(program: Program) -> Plan:
    """The default split's plan: what is handed on is freed at its last use."""
    plan = keep_all(program)
    return tighten(program, plan) if program.handed_on else plan


def holding(program: Program, plan: Plan) -> Plan:
    """A plan of the same graphs that may give up more, where this program's caller holds it."""
    steps: list[Step] = []
    is_after = False
    for step in plan.steps:
        is_after |= isinstance(step, Boundary)
        if (
            is_after
            and isinstance(step, Free | Offload | Prefetch)
            and step.storage not in program.handed_on
        ):
            storage = program.storages[step.storage]
            if storage.is_constant or step.storage in program.held_from_boundary:
                continue
        steps.append(step)
    return replace(plan, steps=tuple(steps), program=program.fingerprint)
