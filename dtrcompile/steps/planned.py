"""`Assignment`: what a graph is compiled for.  `Planned` and `Code`: what came of that.

A `Planned` consists of plain values, which may come from disk (`steps.summary`), and of `Details`:
the graphs that the values were counted from.  These are asked for only where the values do not do.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, TypeAlias

import sympy

from dtrcompile.outside import watching
from dtrcompile.outside.surroundings import NO_SURROUNDINGS, SurroundingBytes
from dtrcompile.passes.device.allocators import Allocator
from dtrcompile.passes.errors import InfeasibleBudgetError
from dtrcompile.passes.fitting.fit import Limits, Outcome, holding
from dtrcompile.passes.fitting.measured import Measured
from dtrcompile.passes.fitting.sharing import GraphBytes, OtherGraphs, without_other_graphs
from dtrcompile.passes.graphs.capture import (
    NOTHING_HANDED_ON,
    Captured,
    HandedOn,
)
from dtrcompile.passes.program.plan import Boundary, Free, Plan
from dtrcompile.passes.program.program import Program
from dtrcompile.passes.program.replay import PlanStats, replay
from dtrcompile.passes.program.sizes import Sizes, at_sizes
from dtrcompile.passes.program.tighten import tighten
from dtrcompile.steps.summary import GraphFacts, Summary

# A graph that others follow keeps its default split in the first step if that takes no more than
# this part of what is left, so that an ample budget costs no second compile.
_SMALL_PART = 1 / 8
_MAX_CACHED_SIZES = 1024


@dataclass(frozen=True, slots=True)
class Assignment:
    """What a graph is compiled for: its budget, and what lies beside it.

    Attributes:
        budget_bytes: of the step, None: resolve the options' for this graph.
        others: the other graphs, as far as they are known.
        more_follow: other graphs will run between this one's forward and backward, which ones is
            not known yet.
        is_share_of_unknown: the budget is a share of the whole step's peak, which is not known yet.
        is_refused: no plan is within the budget.  The graph is compiled to be as small as can be,
            for its forward alone: when its step's first backward begins, all graphs are known, and
            what the whole step needs can be said.
        names_minimum: whether a refusal has to name the smallest budget that can be met, which
            takes a search.
        note: for the report.
        handed_on: what the caller does not hold in backward, as far as that was seen.
        holders: how many held the gradients that backward was given when that was seen.
        sizes: the values of symbolic sizes to plan for; None: those that it was traced with.
        number: which of the graph's plans this is.
        beside: what optimizers and kept gradients hold; it is in ``others`` too.
        loss_sizes: the values of symbolic sizes for which ``others`` count a loss outside of the
            graphs, which grows with what the graph returns; None: they are right at any sizes.
    """

    budget_bytes: int | None = None
    others: OtherGraphs = field(default_factory=OtherGraphs)
    more_follow: bool = False
    is_share_of_unknown: bool = False
    is_refused: bool = False
    names_minimum: bool = True
    note: str = ""
    handed_on: HandedOn = NOTHING_HANDED_ON
    holders: tuple[int, ...] = ()
    sizes: Sizes | None = None
    number: int = 0
    beside: SurroundingBytes = NO_SURROUNDINGS
    loss_sizes: Sizes | None = None

    @property
    def is_provisional(self) -> bool:
        """The step is not known yet, so the graph is compiled again when it is."""
        return self.more_follow or self.is_share_of_unknown

    def limits(
        self, measured: Measured, budget_bytes: int | None, *, waits: bool = False
    ) -> Limits:
        """The terms of a graph whose default split holds ``measured``.

        Args:
            budget_bytes: what the options come to for this graph; None for the smallest.
            waits: the budget is a share of a training step that was not seen yet.
        """
        if self.budget_bytes is not None:
            budget_bytes = self.budget_bytes
        if waits:
            return Limits(None, self.others, is_unlimited=True)
        more_follow = self.more_follow and measured.backward_peak_bytes > 0  # else it saves nothing
        if self.is_refused:
            return Limits(None, self.others, more_follow, is_refused=True)
        if self.is_share_of_unknown:
            # A share of the step is no less than that of this graph, and it has to fit by itself.
            if budget_bytes is not None:
                budget_bytes -= self.beside.resident_bytes
            return Limits(None, more_follow=more_follow, least_budget_bytes=budget_bytes)
        own_bytes = measured.peak_bytes - _constants(measured)
        if is_small(own_bytes, budget_bytes, self.others.outside_bytes):
            more_follow = False
        return Limits(budget_bytes, self.others, more_follow, names_minimum=self.names_minimum)


NextAssignment: TypeAlias = Callable[[InfeasibleBudgetError], Assignment | None]
"""Told why no plan is within the budget, says what else to plan the same graph for."""


def is_small(own_bytes: int, budget_bytes: int | None, outside_bytes: int) -> bool:
    """Whether a graph need not be made smaller yet, though others follow."""
    return budget_bytes is not None and own_bytes <= _SMALL_PART * (budget_bytes - outside_bytes)


def _constants(measured: Measured) -> int:
    return measured.split.get("parameters", 0) + measured.split.get("inputs", 0)


@dataclass(frozen=True)
class Details:
    """The graphs of a plan, and what they hold, counted from their schedules."""

    captured: Captured
    baseline_measured: Measured
    measured: Measured

    @staticmethod
    def of(outcome: Outcome) -> Details:
        """Of what planning came to."""
        return Details(outcome.captured, outcome.baseline_measured, outcome.measured)

    def at(self, sizes: Sizes) -> Details:
        """Where the graph's symbols have these values."""
        return replace(
            self,
            baseline_measured=_at(self.baseline_measured, sizes),
            measured=_at(self.measured, sizes),
        )

    def handing_on(self, handed_on: HandedOn) -> Details:
        """Where the caller gives these up."""
        captured = self.captured.handing_on(handed_on)
        if captured is self.captured or not self.baseline_measured.by_sizes:
            return self
        return Details(
            captured, *(_of(m, captured) for m in (self.baseline_measured, self.measured))
        )


def _at(measured: Measured, sizes: Sizes) -> Measured:
    return measured if measured.by_sizes is None else measured.by_sizes.at(sizes)


def _of(measured: Measured, captured: Captured) -> Measured:
    return measured if measured.by_sizes is None else measured.by_sizes.of(captured)


@dataclass(frozen=True)
class HeldBytes:
    """What a plan's graph holds where its caller gives something up, as plain values.

    Attributes:
        given_storages: of the program, what is given up.
        baseline, chosen: what the default split holds, and what was compiled.
        plan: the same plan, which frees them when they are read for the last time.
    """

    given_storages: tuple[int, ...]
    baseline: Measured
    chosen: Measured
    plan: Plan


class Memory(Protocol):
    """Remembers, in this process and in later ones, what was counted from the graphs."""

    def read_held(self, handed_on: HandedOn) -> HeldBytes | None:
        """What was written; None where nothing was."""

    def write_held(self, handed_on: HandedOn, held: HeldBytes) -> None:
        """Keep it."""


@dataclass(frozen=True)
class Planned:
    """What the ledger knows of a compiled graph.

    Attributes:
        baseline_measured, measured: what the default split holds, and what was compiled.
        handed_on: what its caller gives up.
        get_details: makes the graphs again where they were not made in this process.
        memory: what was counted with other things given up; None where that is not kept.
    """

    program: Program
    assignment: Assignment
    available_bytes: int | None
    baseline_measured: Measured
    measured: Measured
    is_default: bool
    saves_least: bool
    plan: Plan
    cost_ns: int
    graph: GraphFacts
    allocator: Allocator
    handed_on: HandedOn
    get_details: Callable[[], Details]
    memory: Memory | None = None

    @staticmethod
    def of(
        summary: Summary,
        assignment: Assignment,
        available_bytes: int | None,
        get_details: Callable[[], Details],
        memory: Memory | None = None,
    ) -> Planned:
        """From what the compilation found."""
        return Planned(
            summary.program,
            assignment,
            available_bytes,
            summary.baseline,
            summary.measured,
            summary.is_default,
            summary.saves_least,
            summary.plan,
            summary.stats.cost_ns,
            summary.graph,
            summary.allocator,
            summary.handed_on,
            get_details,
            memory,
        )

    @functools.cached_property
    def details(self) -> Details:
        """The graphs, and what they hold."""
        return self.get_details()

    @functools.cached_property
    def baseline(self) -> GraphBytes:
        """What the default split holds, for the account of a step."""
        return self._bytes_of(self.baseline_measured)

    @functools.cached_property
    def chosen(self) -> GraphBytes:
        """What was compiled holds, for the account of a step."""
        return self._bytes_of(self.measured)

    def _bytes_of(self, measured: Measured) -> GraphBytes:
        gradient_bytes = self.graph.parameter_gradient_bytes
        return measured.graph_bytes(self.program.constant_bytes, gradient_bytes)

    def at(self, sizes: Sizes) -> Planned:
        """The same plan, where the graph's symbols have these values."""
        if not sizes.values:
            return self
        watching.take_no_more_lines()
        captured, details = self.details.captured, self.details.at(sizes)
        with at_sizes(sizes):
            program = captured.resized()
        plan = replace(self.plan, program=program.fingerprint)
        return replace(
            self,
            program=program,
            assignment=self.with_loss_at(sizes, self.assignment),
            baseline_measured=details.baseline_measured,
            measured=details.measured,
            plan=plan,
            cost_ns=replay(program, plan)[1].cost_ns,
        )

    def with_loss_at(self, sizes: Sizes, assignment: Assignment) -> Assignment:
        """The assignment for other sizes: a loss grows as much as what the graph returns."""
        if assignment.loss_sizes is None or assignment.loss_sizes == sizes:
            return assignment
        returned_bytes = self._returned_bytes_at(assignment.loss_sizes)
        growth = self._returned_bytes_at(sizes) / returned_bytes if returned_bytes else 1.0
        others = replace(
            assignment.others,
            between_bytes=math.ceil(growth * assignment.others.between_bytes),
            gradient_bytes=math.ceil(growth * assignment.others.gradient_bytes),
        )
        return replace(assignment, others=others, loss_sizes=sizes)

    def _returned_bytes_at(self, sizes: Sizes) -> int:
        with at_sizes(sizes):
            storage_bytes = self.details.captured.storage_bytes()
        return sum(storage_bytes[s] for s in self.program.held_from_boundary)

    def handing_on(self, handed_on: HandedOn) -> Planned:
        """What the same graph and plan hold, where the caller gives these up."""
        if handed_on == self.handed_on or not self.trains:
            return self
        held = None if self.memory is None else self.memory.read_held(handed_on)
        if held is None:
            held = self._counted(handed_on)
            if held is None:
                return self
            if self.memory is not None:
                self.memory.write_held(handed_on, held)
        given = frozenset(held.given_storages)
        storages = tuple(replace(s, is_handed_on=s.id in given) for s in self.program.storages)
        return replace(
            self,
            program=replace(self.program, storages=storages),
            baseline_measured=held.baseline,
            measured=held.chosen,
            plan=held.plan,
            handed_on=handed_on,
            get_details=lambda: self.details.handing_on(handed_on),
        )

    def handing_on_at_most(self, most: HandedOn) -> Planned:
        """The same, where the caller gives up no more than this."""
        return self.handing_on(self.handed_on & most)

    def _counted(self, handed_on: HandedOn) -> HeldBytes | None:
        """What the graphs hold then; None where that is the same."""
        watching.take_no_more_lines()
        details = self.details.handing_on(handed_on)
        if details is self.details:
            return None
        program = details.captured.program
        return HeldBytes(
            tuple(s.id for s in program.storages if s.is_handed_on),
            details.baseline_measured,
            details.measured,
            tighten(program, holding(program, self.plan)),
        )

    @property
    def around_bytes(self) -> int:
        """Constants and results, which are there when an optimizer steps."""
        return around_bytes(self.program)

    @property
    def trains(self) -> bool:
        """Whether the graph has a backward."""
        return self.graph.trains

    @functools.cached_property
    def given_up(self) -> frozenset[int]:
        """Indices of the outputs that the plan takes to be gone when backward begins."""
        steps = iter(self.plan.steps)
        after_boundary = itertools.dropwhile(lambda s: not isinstance(s, Boundary), steps)
        next(after_boundary, None)
        freed = itertools.takewhile(lambda s: isinstance(s, Free), after_boundary)
        storages = {s.storage for s in freed if isinstance(s, Free)} & self.program.handed_on
        return frozenset(i for s, i in self.graph.returned if i is not None and s in storages)

    @property
    def returned_bytes(self) -> int:
        """Of the outputs that are computed, not handed through."""
        return _returned_bytes(self.program)

    @property
    def own_peak_bytes(self) -> int:
        """What the graph holds, with what the others of its step hold above it."""
        return self.chosen.peak_with(self.assignment.others)

    @property
    def baseline_peak_bytes(self) -> int:
        """The same of the default split."""
        return self.baseline.peak_with(self.assignment.others)

    def stats_of(self, plan: Plan) -> PlanStats:
        """Of another plan, made of the program with the rest of a step."""
        return replay(self.program, without_other_graphs(plan, self.program))[1]

    def planned_bytes(self, stats: PlanStats) -> GraphBytes:
        """What a plan holds."""
        return GraphBytes(
            self.program.constant_bytes,
            stats.forward_peak_bytes,
            stats.backward_peak_bytes,
            stats.boundary_bytes,
            self.chosen.gradient_bytes,
        )


def around_bytes(program: Program) -> int:
    """Bytes of what is there before a step, and of what forward returns."""
    return program.constant_bytes + _returned_bytes(program)


def _returned_bytes(program: Program) -> int:
    return sum(program.storages[s].size_bytes for s in program.held_from_boundary)


@dataclass(frozen=True)
class Code:
    """A compiled graph.

    Attributes:
        function: to call.
        what_is_known: returns what is known of it, which is more once its backward is compiled.
        restore: makes its report the graph's current one again, whatever was compiled since.
        change_assignment: reports it for another assignment that its code is right for too.
        assignment: what it was compiled for.
        requires: conditions on the symbols, beyond those that Dynamo checks.
    """

    function: Callable[..., Any]
    what_is_known: Callable[[], Planned | None]
    restore: Callable[[], None]
    change_assignment: Callable[[Assignment], None]
    assignment: Assignment
    requires: tuple[sympy.Basic, ...] = ()
    _at: dict[Sizes, tuple[Planned, Planned]] = field(default_factory=dict, repr=False)

    @property
    def number(self) -> int:
        """Which of the graph's plans it is."""
        return self.assignment.number

    @property
    def sizes(self) -> Sizes | None:
        """The values of symbolic sizes that it was planned for; None: as traced."""
        return self.assignment.sizes

    def at(self, sizes: Sizes) -> Planned | None:
        """What is known of it where the graph's symbols have these values."""
        planned = self.what_is_known()
        if planned is None:
            return None
        found = self._at.get(sizes)
        if found is None or found[0] is not planned:  # more is known by now
            if len(self._at) >= _MAX_CACHED_SIZES:
                self._at.clear()
            found = self._at[sizes] = planned, planned.at(sizes)
        return found[1]

    def may_run_at(self, sizes: Sizes) -> bool:
        """Whether the code is right for these values."""
        return all(c.xreplace(sizes.by_symbol) == sympy.true for c in self.requires)
