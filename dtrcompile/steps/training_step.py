"""The graphs of one training step, planned together once all of them are known."""

from __future__ import annotations

import contextlib
import functools
import logging
import operator
from collections.abc import Sequence
from dataclasses import replace

from dtrcompile.options import Options
from dtrcompile.outside.loss import LossBytes
from dtrcompile.outside.surroundings import NO_SURROUNDINGS, SurroundingBytes
from dtrcompile.passes.errors import InfeasibleBudgetError, format_bytes
from dtrcompile.passes.fitting.fit import as_it_is
from dtrcompile.passes.fitting.sharing import (
    Demand,
    GraphBytes,
    OtherGraphs,
    cheapest_share,
    other_graphs_of,
    share,
    step_peak_bytes,
    with_other_graphs,
)
from dtrcompile.passes.graphs.capture import NOTHING_HANDED_ON, HandedOn
from dtrcompile.passes.planning.planners import make_planner, minimum_plan
from dtrcompile.passes.planning.planners.base import Planner
from dtrcompile.passes.program.replay import replay
from dtrcompile.steps.calls import external_bytes
from dtrcompile.steps.planned import Assignment, Code, Planned
from dtrcompile.steps.shared_graph import GraphCall, SharedGraph, planned_of

log = logging.getLogger("dtrcompile")

# Attempts at a share, and what it is multiplied by when the measured graphs turn out larger than
# the planned ones.
_MAX_ATTEMPTS = 4
_SHARE_FACTOR = 0.85
# Peaks of a step that differ by less than this part of it are the same to a search.
_CLOSE = 0.01
# A graph that is the whole step is planned again if this part of its peak is not there.
_WORTHWHILE = 0.02


class Form:
    """A form that a step takes: what its calls hold beside their plans.

    Args:
        calls: all of the step, in order.
        graphs: those that were planned, of all forms.
        others: the calls of the other forms, whose inputs may still be there.
        beside: what no graph holds.

    Attributes:
        sequence: the graph of each planned call, in order.
        external_bytes: constants of all graphs, as in `other_graphs_of`, and what lies beside them.
        gradient_bytes: of each call, gradients that its backward is the first to make.
        result_bytes: of each call, outputs and tangents that stay with the caller.
        loss: what is held between the last graph and the loss.
        around_bytes: constants of all graphs, and results.
    """

    def __init__(
        self,
        calls: Sequence[GraphCall],
        graphs: Sequence[SharedGraph],
        others: Sequence[GraphCall],
        beside: SurroundingBytes,
    ) -> None:
        self.sequence = [graphs.index(c.graph) for c in calls if c.graph.planned is not None]
        # Calls of which nothing was used, so that their backward never ran -> outputs' bytes.
        self.unused = {
            k: planned_of(c.graph).returned_bytes
            for k, c in enumerate(c for c in calls if c.graph.planned is not None)
            if c.is_unused
        }
        constant_bytes = external_bytes(calls, others)
        self.external_bytes = constant_bytes + beside.resident_bytes
        self.gradient_bytes = _gradient_bytes(calls)
        self.result_bytes = _result_bytes(calls)
        losses = [c.loss for c in calls if c.loss is not None]
        self.loss = LossBytes(
            max((loss.peak_bytes for loss in losses), default=0),
            max((loss.held_bytes for loss in losses), default=0),
        )
        self.around_bytes = constant_bytes + sum(self.result_bytes)

    def in_order(self, held: Sequence[GraphBytes]) -> list[GraphBytes]:
        """One entry a call; its results stay after its backward, as gradients do.

        The last entry is what runs outside of the graphs, between their forwards and backwards.
        """
        calls = zip(self.sequence, self.gradient_bytes, self.result_bytes, strict=True)
        own = (
            replace(held[i], gradient_bytes=min(held[i].gradient_bytes, new_bytes) + result_bytes)
            for i, new_bytes, result_bytes in calls
        )
        entries = [
            replace(
                h, backward_peak_bytes=0, boundary_bytes=h.constant_bytes + kept, gradient_bytes=0
            )
            if (kept := self.unused.get(k)) is not None
            else h
            for k, h in enumerate(own)
        ]
        return [*entries, GraphBytes(0, self.loss.peak_bytes, 0, 0, self.loss.held_bytes)]

    def peak(self, held: Sequence[GraphBytes]) -> int:
        """The most that a step of this form holds."""
        return step_peak_bytes(self.in_order(held), self.external_bytes)

    def others_of_calls(self, held: Sequence[GraphBytes], i: int) -> list[OtherGraphs]:
        """What each call of graph ``i`` sees of the others."""
        calls = self.in_order(held)
        return [
            other_graphs_of(calls, k, self.external_bytes)
            for k, j in enumerate(self.sequence)
            if j == i
        ]


class TrainingStep:
    """The graphs of a step, and what they hold together, in each form that the step takes.

    Args:
        forms: for each form, all calls of a step, in order.
        beside: what no graph holds.
        outliving: calls of other steps of the same models, whose inputs may outlive them.

    Attributes:
        graphs: those that were planned.
    """

    def __init__(
        self,
        forms: Sequence[Sequence[GraphCall]],
        options: Options,
        beside: SurroundingBytes = NO_SURROUNDINGS,
        outliving: Sequence[GraphCall] = (),
    ) -> None:
        self.options = options
        self.beside = beside
        calls = self.calls = [c for form in forms for c in form]
        self.graphs = list(dict.fromkeys(c.graph for c in calls if c.graph.planned is not None))
        self.forms = [
            Form(
                form,
                self.graphs,
                [*(c for other in forms if other is not form for c in other), *outliving],
                beside,
            )
            for form in forms
        ]
        # What is handed on in every form.
        self.handed_on = [
            functools.reduce(
                operator.and_,
                [
                    handed_on
                    for form in forms
                    for c, handed_on in zip(form, _handed_on(form), strict=True)
                    if c.graph is graph and not c.is_unused
                ]
                or [NOTHING_HANDED_ON],
            )
            for graph in self.graphs
        ]
        self._planned: dict[int, tuple[Planned, Planned]] = {}
        self._refused: list[tuple[int, Assignment, InfeasibleBudgetError]] = []
        planner: Planner = make_planner(options.planner, **options.planner_options())
        # To find who may keep what; the compilation plans with all candidates.
        self.quick = planner.for_minimum()

    def is_known_well_enough(self) -> bool:
        """Whether its graphs were compiled for the step that it turned out to be."""
        plans = [self.planned(i) for i in range(len(self.graphs))]
        is_inference = all(p.program.boundary is None for p in plans)
        return is_inference or (self.is_settled and not self.is_worth_planning_again())

    @property
    def is_settled(self) -> bool:
        """Whether it is one graph that was compiled as such: its code is right as it is."""
        told = [planned_of(g).assignment for g in self.graphs]
        was_guessed = any(
            a.more_follow or a.is_share_of_unknown or a.handed_on.outputs is None for a in told
        )
        return not was_guessed and self.most_calls < 2

    def is_worth_planning_again(self) -> bool:
        """Whether a graph that is the whole step had better be planned for what was seen.

        Its caller may have given up what it returned, so that there is more room, or hold what it
        gave up before; or what runs between it and the loss takes the step past the budget.
        """
        if self.is_of_any_size:
            return self.is_worth_telling()
        if len(self.graphs) != 1 or self.graphs[0].symbols:
            return False
        planned, seen = planned_of(self.graphs[0]), self.planned(0)
        budget_bytes, peak_bytes = self.budget_bytes(), self.peak(self.held())
        if budget_bytes is None:
            is_at_loss = peak_bytes > seen.chosen.peak_bytes
            gained_bytes = planned.chosen.peak_bytes - seen.chosen.peak_bytes
        else:
            is_at_loss = peak_bytes > budget_bytes
            outside_bytes = planned.assignment.others.outside_bytes
            gained_bytes = outside_bytes + planned.own_peak_bytes - peak_bytes
        if planned.is_default:
            return budget_bytes is not None and is_at_loss
        is_much = gained_bytes >= _WORTHWHILE * planned.chosen.peak_bytes
        return is_at_loss or is_much or self.holds_more()

    @property
    def is_of_any_size(self) -> bool:
        """Whether it is one call of a graph that chooses a plan for the sizes of each call."""
        if len(self.graphs) != 1 or not self.graphs[0].symbols:
            return False
        told = planned_of(self.graphs[0]).assignment
        return self.most_calls == 1 and not (told.is_provisional or told.is_refused)

    def is_worth_telling(self) -> bool:
        """Whether what was seen beside a graph of any size differs from what it was told."""
        (graph,) = self.graphs
        planned, seen = planned_of(graph), self.planned(0)
        told, found = planned.assignment.others, self.others_of_any_size()
        own_bytes, peak_bytes = graph.own_bytes(planned), planned.chosen.peak_bytes
        differences = (
            found.between_bytes - told.between_bytes,
            found.gradient_bytes - told.gradient_bytes,
            seen.chosen.peak_bytes - peak_bytes,
        )
        return (own_bytes is not None and seen.chosen.peak_with(found) > own_bytes) or any(
            abs(d) >= _WORTHWHILE * peak_bytes for d in differences
        )

    def others_of_any_size(self) -> OtherGraphs:
        """What was seen beside a graph of any size.  Each call sees for itself what is outside."""
        found = self.others(self.held(), 0)
        outside_bytes = self.graphs[0].assignment.others.outside_bytes
        return replace(found, outside_bytes=outside_bytes)

    def holds_more(self) -> bool:
        """Whether the caller holds what the plan of the only graph takes to be given up."""
        planned, seen = planned_of(self.graphs[0]), self.planned(0)
        return seen.chosen.peak_bytes > planned.chosen.peak_bytes

    def planned(self, i: int) -> Planned:
        """What is known of graph ``i``, which hands on what was seen."""
        planned = planned_of(self.graphs[i])
        if i not in self._planned or self._planned[i][0] is not planned:
            self._planned[i] = planned, planned.handing_on(self.handed_on[i])
        return self._planned[i][1]

    def compile(self) -> None:
        """Plan the graphs together, and compile them again where that changes anything.

        A graph of any size is only told what was seen: its calls choose among its plans.

        Raises:
            InfeasibleBudgetError: if the step does not fit.
        """
        if self.is_of_any_size:
            (graph,) = self.graphs
            assignment = self.assignment(None, self.others_of_any_size(), 0)
            graph.tell(replace(assignment, beside=graph.assignment.beside))
            return
        budget_bytes = self.budget_bytes()
        if budget_bytes is not None:
            self.beside.check(budget_bytes, max(form.around_bytes for form in self.forms))
        if budget_bytes is None:
            self.compile_smallest()
            self.keep_all(None)
        elif self.is_settled and self.holds_more() and self.peak(self.held()) <= budget_bytes:
            self.keep_all(budget_bytes)
        else:
            self.compile_within(budget_bytes)

    def show_peak(self) -> None:
        """Let its models know what they hold together without a budget.

        Other graphs of theirs, of a shorter last batch for example, may begin a step that is a part
        of such a one as far as anyone knows by then.
        """
        if self.most_calls < 2 or not any(planned_of(g).trains for g in self.graphs):
            return
        peak_bytes = self.baseline_peak_bytes()
        for graph in self.graphs:
            graph.step_peak.see_several(peak_bytes)

    def baseline_peak_bytes(self) -> int:
        """What the graphs hold together without a budget."""
        plans = [self.planned(i) for i in range(len(self.graphs))]
        return self.peak([p.baseline for p in plans]) - self.beside.resident_bytes

    def budget_bytes(self) -> int | None:
        """The options', of this step; None for the smallest.

        A share is one of the largest step of several graphs that the models were seen in.
        """
        seen_bytes = max(g.step_peak.of_several_bytes for g in self.graphs)
        peak_bytes = max(self.baseline_peak_bytes(), seen_bytes)
        around_bytes = max(form.around_bytes for form in self.forms)
        whole_bytes = self.beside.whole_bytes(peak_bytes, around_bytes)
        return self.options.resolve_budget_bytes(whole_bytes, self.planned(0).available_bytes)

    def peak(self, held: Sequence[GraphBytes]) -> int:
        return max(form.peak(held) for form in self.forms)

    @property
    def most_calls(self) -> int:
        """Of planned graphs in a step, in the form that has the most."""
        return max(len(form.sequence) for form in self.forms)

    def calls_of(self, i: int) -> int:
        """How often graph ``i`` runs in a step."""
        return max(form.sequence.count(i) for form in self.forms)

    def others(self, held: Sequence[GraphBytes], i: int) -> OtherGraphs:
        """What graph ``i`` sees of the others; the strictest, where it runs several times."""
        others_of_calls = [
            others for form in self.forms for others in form.others_of_calls(held, i)
        ]
        outside = max(r.outside_bytes for r in others_of_calls)
        waiting = max(r.outside_bytes + r.between_bytes for r in others_of_calls)
        backward = max(r.outside_bytes + r.gradient_bytes for r in others_of_calls)
        return OtherGraphs(outside, waiting - outside, backward - outside)

    def other_graphs_of_calls(
        self, held: Sequence[GraphBytes], i: int, peak_bytes: int
    ) -> OtherGraphs:
        """What graph ``i`` sees, so that it keeps no more than ``held`` if it is called again.

        It is then among its own others, which is only right if its plan keeps what they do.
        """
        others = self.others(held, i)
        if self.calls_of(i) == 1:
            return others
        room_bytes = peak_bytes - others.outside_bytes - held[i].boundary_bytes
        return replace(others, between_bytes=max(others.between_bytes, room_bytes))

    def assignment(self, budget_bytes: int | None, others: OtherGraphs, i: int) -> Assignment:
        """What graph ``i`` is told."""
        graph, handed_on = self.graphs[i], self.handed_on[i]
        holders = max((c.holders for c in self.calls if c.graph is graph), default=())
        is_whole = self.most_calls == 1
        return Assignment(
            budget_bytes,
            others,
            note=self.note(others),
            handed_on=handed_on,
            holders=holders,
            beside=self.beside,
            loss_sizes=graph.sizes if is_whole and self.loss_bytes else None,
        )

    @property
    def loss_bytes(self) -> int:
        """What is held at most between the last graph and the loss."""
        return max(form.loss.peak_bytes for form in self.forms)

    def note(self, others: OtherGraphs) -> str:
        """For the report."""
        graphs = self.most_calls
        if graphs == 1:
            return ""
        return (
            f"one of {graphs} graphs of the step: the others hold"
            f" {format_bytes(others.outside_bytes)} beside it, and"
            f" {format_bytes(others.between_bytes)} between its forward and its backward"
        )

    def compile_within(self, budget_bytes: int) -> None:
        """Compile every graph for the step's budget."""
        demands = [self.demand(i) for i in range(len(self.graphs))]
        # What the first step ran with saves the least; it is there, if nothing better is found.
        codes = [g.code for g in self.graphs]
        first_bytes = self.peak(self.held())
        peak_operator = ""
        scale = 1.0
        for attempt in range(_MAX_ATTEMPTS):
            planned = self.shared(demands, scale, budget_bytes)
            last = attempt == _MAX_ATTEMPTS - 1 or planned is None
            if planned is None and first_bytes > budget_bytes:
                planned = [self.least(i) for i in range(len(self.graphs))]
            if planned is None:
                break
            try:
                self.compile_all(planned, budget_bytes)
                return
            except InfeasibleBudgetError as refusal:
                if last:
                    peak_operator = refusal.operator
                    break
            scale *= _SHARE_FACTOR
        self.use(codes)
        if first_bytes > budget_bytes:
            self.compile_smallest(budget_bytes)
        held = self.held()
        if self.peak(held) > budget_bytes:
            raise InfeasibleBudgetError(
                budget_bytes, minimum_bytes=self.peak(held), operator=peak_operator
            )
        self.keep_all(budget_bytes)

    def keep_all(self, budget_bytes: int | None) -> None:
        """Go on with the code that is there, now that the step is known."""
        held = self.held()
        for i, graph in enumerate(self.graphs):
            graph.keep(self.assignment(budget_bytes, self.others(held, i), i))

    def held(self) -> list[GraphBytes]:
        """What each graph holds with the code that it has."""
        return [self.planned(i).chosen for i in range(len(self.graphs))]

    def compile_smallest(self, enough_bytes: int = 0) -> None:
        """Compile for the smallest peak of the step that is found.

        Args:
            enough_bytes: a peak that is small enough.
        """
        self.compile_where_peak_occurs(enough_bytes)
        if any(self.calls_of(i) > 1 for i in range(len(self.graphs))):
            self.compile_together(enough_bytes)

    def compile_together(self, enough_bytes: int) -> None:
        """Compile all graphs for a smaller peak, where a graph runs several times.

        Such a graph is among its own others: a plan that keeps less makes room for all of its
        calls, though its own peak may be larger, which no search of one graph after the other sees.
        The peaks that are tried begin with that of the plans that keep the least, by the referee;
        what is measured may be larger.
        """
        peak_bytes = self.peak(self.held())
        if peak_bytes <= enough_bytes:
            return
        demands = [self.demand(i) for i in range(len(self.graphs))]
        low_bytes = max(enough_bytes, self.peak([self.least(i) for i in range(len(self.graphs))]))
        for attempt in range(_MAX_ATTEMPTS):
            budget_bytes = low_bytes + (peak_bytes - low_bytes) * attempt // _MAX_ATTEMPTS
            if peak_bytes - budget_bytes <= _CLOSE * peak_bytes:
                return
            planned = self.shared(demands, 1.0, budget_bytes)
            if planned is None:
                continue
            codes = [g.code for g in self.graphs]
            with contextlib.suppress(InfeasibleBudgetError):
                self.compile_all(planned, budget_bytes)
            if self.peak(self.held()) < peak_bytes:
                self.compile_where_peak_occurs(enough_bytes)
                return
            self.use(codes)

    def use(self, codes: Sequence[Code]) -> None:
        """Go back to the code that the graphs had."""
        for graph, code in zip(self.graphs, codes, strict=True):
            if graph.code is not code:
                graph.use(code)

    def compile_where_peak_occurs(self, enough_bytes: int) -> None:
        """Compile again what the step's peak occurs in, as long as that makes it smaller."""
        tried: set[int] = set()
        while True:
            held = self.held()
            peak_bytes = self.peak(held)
            if peak_bytes <= enough_bytes:
                return
            others_of_calls = [self.others(held, i) for i in range(len(self.graphs))]
            stands_at = [
                i
                for i, (h, others) in enumerate(zip(held, others_of_calls, strict=True))
                if i not in tried
                and others.outside_bytes + h.peak_with(others) >= peak_bytes
                and self.can_be_smaller(i, others, peak_bytes)
            ]
            if not stands_at:
                return
            i = stands_at[0]
            tried.add(i)
            graph, code = self.graphs[i], self.graphs[i].code
            others = self.other_graphs_of_calls(held, i, peak_bytes)
            # (A share without a number would be one of this graph's peak, not of the step's.)
            self.compile_again(i, self.assignment(enough_bytes or None, others, i))
            held[i] = self.planned(i).chosen
            if self.peak(held) >= peak_bytes:
                graph.use(code)

    def compile_again(self, i: int, assignment: Assignment) -> None:
        """Compile a graph for another assignment; what was refused before is so at once.

        Raises:
            InfeasibleBudgetError: if no plan fits.
        """
        for refused, refused_for, refusal in self._refused:
            if refused == i and refused_for == assignment:
                raise refusal
        try:
            self.graphs[i].compile_again(assignment)
        except InfeasibleBudgetError as refusal:
            self._refused.append((i, assignment, refusal))
            raise

    def can_be_smaller(self, i: int, others: OtherGraphs, peak_bytes: int) -> bool:
        """Whether a graph at which the step's peak occurs was compiled beside other graphs."""
        planned = self.planned(i)
        if planned.assignment.more_follow:
            # It was to save the least, at the price of its own peak.
            own_bytes = planned.chosen.peak_with(replace(others, between_bytes=0))
            return others.outside_bytes + own_bytes >= peak_bytes
        return others.between_bytes > 0 or planned.assignment.handed_on != self.handed_on[i]

    def shared(
        self, demands: Sequence[Demand], scale: float, budget_bytes: int
    ) -> list[GraphBytes] | None:
        """The plans at the share that costs the least, quotas multiplied by ``scale``."""

        def fit(quotas: Sequence[int]) -> tuple[float, list[GraphBytes]] | None:
            return self.plan([int(q * scale) for q in quotas], budget_bytes)

        if any(self.calls_of(i) > 1 for i in range(len(self.graphs))):
            found = cheapest_share(demands, fit, lambda planned: planned[0])
        else:
            found = share(demands, fit)
        return None if found is None else found[1]

    def demand(self, i: int) -> Demand:
        return Demand(self.least(i).kept_bytes, self.planned(i).baseline.kept_bytes)

    def least(self, i: int) -> GraphBytes:
        """The plan that keeps the least: as the referee sees it, or one that was measured."""
        planned = self.planned(i)
        program = planned.program
        if program.boundary is None:
            return planned.chosen
        between = replay(program, as_it_is(program))[1].peak_bytes
        plan = minimum_plan(
            with_other_graphs(program, OtherGraphs(between_bytes=between)), self.quick
        )
        found = planned.planned_bytes(planned.stats_of(plan))
        return min(
            (planned.baseline, planned.chosen, found), key=lambda b: (b.kept_bytes, b.peak_bytes)
        )

    def plan(
        self, quotas: Sequence[int], budget_bytes: int
    ) -> tuple[float, list[GraphBytes]] | None:
        """Plans whose kept bytes are within the quotas and whose step is within the budget.

        Returns:
            The compute of all calls, in ns, and what each graph holds.
        """
        # Until it is planned, a graph leaves what it may: its own other calls see that.
        held = [
            replace(b, boundary_bytes=min(b.boundary_bytes, b.constant_bytes + quota))
            for i, quota in enumerate(quotas)
            for b in [self.planned(i).baseline]
        ]
        cost_ns = 0.0
        for i in range(len(self.graphs)):
            planned = self.planned(i)
            program = planned.program
            others = self.others(held, i)
            own_bytes = budget_bytes - others.outside_bytes
            baseline = planned.baseline
            if baseline.kept_bytes <= quotas[i] and baseline.peak_with(others) <= own_bytes:
                held[i] = baseline
                cost_ns += self.calls_of(i) * program.cost_ns
                continue
            between = max(0, own_bytes - program.constant_bytes - quotas[i])
            is_last = self.calls_of(i) == 1 and all(
                i not in form.sequence or i == form.sequence[-1] for form in self.forms
            )
            if is_last:
                between = others.between_bytes
            elif planned.baseline.kept_bytes <= quotas[i]:
                between = 0
            try:
                whole = with_other_graphs(program, replace(others, between_bytes=between))
                plan = self.quick.plan(whole, own_bytes)
            except InfeasibleBudgetError:
                return None
            stats = planned.stats_of(plan)
            held[i] = planned.planned_bytes(stats)
            cost_ns += self.calls_of(i) * stats.cost_ns
        return (cost_ns, held) if self.peak(held) <= budget_bytes else None

    def compile_all(self, held: Sequence[GraphBytes], budget_bytes: int) -> None:
        """Compile the graphs in order; each sees what those before it really hold."""
        held = list(held)
        for i, graph in enumerate(self.graphs):
            others = self.other_graphs_of_calls(held, i, budget_bytes)
            planned = self.planned(i)
            fits_as_it_is = planned.is_default and (
                others.outside_bytes + planned.chosen.peak_with(others) <= budget_bytes
            )
            assignment = self.assignment(budget_bytes, others, i)
            if fits_as_it_is:
                graph.keep(assignment)
            else:
                self.compile_again(i, assignment)
            held[i] = self.planned(i).chosen
        peak = self.peak(held)
        log.info(
            "a step of %d graphs: promised %s of %s",
            self.most_calls,
            format_bytes(peak),
            format_bytes(budget_bytes),
        )
        if peak > budget_bytes:
            raise InfeasibleBudgetError(budget_bytes)
        # A graph that runs several times was given all the room that its own calls may take.
        self.keep_all(budget_bytes)


def _gradient_bytes(calls: Sequence[GraphCall]) -> list[int]:
    """For each planned call, gradients that no later call, whose backward runs before, has made."""
    made: dict[int, int] = {}
    new_bytes: list[int] = []
    for call in reversed(calls):
        if call.graph.planned is not None:
            before = sum(made.values())
            made.update(call.parameters)
            new_bytes.append(sum(made.values()) - before)
    return new_bytes[::-1]


def _handed_on(calls: Sequence[GraphCall]) -> list[HandedOn]:
    """Of each call; nothing of one whose outputs are taken by operators that nobody counted."""
    taken = {identity for call in calls for identity in call.inputs}
    return [
        c.handed_on
        if c.loss is not None or any(identity in taken for identity in c.outputs)
        else NOTHING_HANDED_ON
        for c in calls
    ]


def _result_bytes(calls: Sequence[GraphCall]) -> list[int]:
    """For each planned call, what it returns that no call takes, or that is held when its backward
    begins, and what its backward is given that somebody holds on to, such as the gradient of the
    loss: the caller may keep it."""
    taken = {identity for call in calls for identity in call.inputs}
    return [
        sum(size for identity, size in call.outputs.items() if identity not in taken)
        - call.gone_bytes(taken)
        + call.held_bytes(taken)
        + call.kept_tangent_bytes
        for call in calls
        if call.graph.planned is not None
    ]
