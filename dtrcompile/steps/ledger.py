"""One budget for several graphs: decides what each graph of a training step is compiled for.

A graph break, DDP's buckets or a second compiled module make several graphs of one step.  A
`Ledger` (one for each set of options) shares the budget out among them
(`passes.fitting.sharing`):

* While the first step runs, graphs are compiled one by one, and the later ones are not known yet.
  A graph that others follow is compiled to save as little as possible, unless it is small; a graph
  that ends the step gets what the earlier ones leave.
* When the first step is over, the order of the graphs and the needs of each are known.  They are
  planned together (`training_step`) and compiled once more.

A step is over when a graph is called and no call waits for its backward any more.  Whether the
calls of a step are recorded, and the step is planned when it is over, is the state machine of
`recording`; what becomes of one graph is that of `shared_graph`.  A model that is one graph is
compiled once, and each call then costs one look at its outputs.

A graph may also be called more often in a step than its plan foresees: one that is compiled for
each block of a model, for example.  It is then compiled to save as little as possible, and the
next step is observed.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import threading
import weakref
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import fx, nn

from dtrcompile.options import BudgetKind, Options
from dtrcompile.outside import watching
from dtrcompile.outside.step_check import StepCheck
from dtrcompile.outside.surroundings import (
    OptimizerSteps,
    Surroundings,
    before_steps,
)
from dtrcompile.passes.errors import InfeasibleBudgetError, TimeLimitError, format_bytes
from dtrcompile.passes.fitting.fit import UnsearchedBudgetError, as_it_is
from dtrcompile.passes.fitting.sharing import OtherGraphs
from dtrcompile.passes.graphs.capture import ALL_HANDED_ON, NOTHING_HANDED_ON, HandedOn
from dtrcompile.passes.program.replay import replay
from dtrcompile.report import compilations
from dtrcompile.steps.autograd_nodes import are_unheld, waits
from dtrcompile.steps.calls import Call, emptied_now, external_bytes, input_bytes, related
from dtrcompile.steps.planned import Assignment, NextAssignment, Planned, is_small
from dtrcompile.steps.recording import Recording
from dtrcompile.steps.shared_graph import GraphCall, SharedGraph, planned_of
from dtrcompile.steps.step_peak import StepPeaks
from dtrcompile.steps.training_step import TrainingStep
from dtrcompile.steps.waiting import Waiting

log = logging.getLogger("dtrcompile")

_RELEASED = (
    "a graph of the step finds no room beside what earlier ones saved: these compute it again in"
    " this step"
)
_REFUSED = "no plan is within the budget: the step is refused when its backward begins"
_SHARE_OF_ONE = (
    "The budget is {} of this graph alone. If the training step has more graphs (modules that are"
    " compiled one by one), options={{'several_graphs': True}} makes it a share of the whole step."
)
_SHARE_OF_STEP = (
    "The budget is {} of the largest training step so far; this graph, without gradients, may hold"
    " as much."
)
_FIRST_STEP = (
    "This is what the first step needs up to this graph. Other graphs of the step are not planned"
    " yet, and the whole step may need more."
)
_EXPECTS_LOSS = (
    "{} are set aside for what runs between the graph and the loss, which is not known before the"
    " first backward"
)
_NO_ROOM_FOR_LOSS = (
    "No plan within the budget leaves room for every loss that may be computed outside of the"
    " graph, so the first step may hold up to about %s more than the budget. Compute the loss in"
    " the compiled model or function."
)
_LOSS_OUTSIDE = (
    "About {} of that is what runs outside of the graphs, between the model and the loss. Compute"
    " the loss in the compiled model or function, and it is planned too."
)
# Forms of a step that graphs are planned for.
_MAX_FORMS = 4
# At most: the loss and its gradient, which are held while backward runs.
_SCALAR_BYTES = 16


class Ledger:
    """The graphs of one set of options, and how much each of them may hold.

    Attributes:
        recording: whether the calls of the step that runs are recorded, and the step then planned.
        calls: of the step that runs, as far as they are recorded.
        forms: the latest forms that a step took, each with its calls.
    """

    def __init__(self, options: Options) -> None:
        self.options = options
        self.surroundings = Surroundings(options)
        self.lock = threading.RLock()
        self.graphs: list[weakref.ref[SharedGraph]] = []
        self.calls: list[GraphCall] = []
        self.recording = Recording()
        self.forms: list[_KnownForm] = []
        self.step_peaks = StepPeaks()
        self.together: dict[int, set[int]] = {}  # graphs by serial, of one step
        self.optimizer_steps = OptimizerSteps()
        self.most_kept_bytes = 0  # gradients in ``.grad`` that the user was told of
        if options.counts_optimizers:
            before_steps(weakref.ref(self), Ledger.before_optimizer_step)
        self.step_check: StepCheck | None = None
        self.n_compiled_when_collected = 0

    @property
    def is_recording(self) -> bool:
        """Whether calls are recorded, and may release what they saved."""
        return self.recording.is_on

    # While the first step runs

    def first_assignment(self, more_follow: bool, of_graph: SharedGraph) -> Assignment:
        """For a graph that is compiled now, while others may wait for their backward.

        Args:
            of_graph: that one; if it was compiled before, it may be among those that wait.
        """
        beside = of_graph.beside()
        if self.options.is_whole_peak:
            # The whole peak of the step: every graph may have its own.
            return Assignment(beside=beside)
        waiting = self.waiting_calls()
        outside = sum(w.kept_bytes for w in self.waiting())
        if self.recording.has_all_calls:
            calls = [c for c in self.calls if c.graph is not of_graph]
            emptied = emptied_now(calls)
            # What the graph reads is among its own constants.
            outside += external_bytes(calls, self.related_calls(), emptied, of_graph.read)
            outside += self.own_inputs_bytes(of_graph)
        else:
            outside += sum(
                graph.planned.chosen.constant_bytes
                for graph in self._alive()
                if graph.waiting and graph.planned is not None and graph is not of_graph
            )
        outside = max(0, outside - self.received_bytes(of_graph))
        budget = self.options.budget
        if budget.kind is BudgetKind.SHARE and (waiting or more_follow):
            note = "one of several graphs of the step: as small as can be until all are known"
            return Assignment(
                more_follow=more_follow, is_share_of_unknown=True, note=note, beside=beside
            )
        note = ""
        if waiting:
            note = f"{waiting} earlier graph(s) of the step hold {format_bytes(outside)}"
        if more_follow:
            note = f"{note}; more graphs follow".lstrip("; ")
        others = OtherGraphs(outside_bytes=outside + beside.resident_bytes)
        return Assignment(others=others, more_follow=more_follow, note=note, beside=beside)

    def is_above_any_share(self, graph: SharedGraph) -> bool:
        """Whether a new graph that others follow will find no room in its backward.

        The share is one of a step that is not known yet, but that holds no less than this graph.
        A plan whose outputs are held may keep them for its backward, and then does not become as
        small as it could be when the other graphs have taken them.
        """
        planned, assignment = graph.planned, graph.assignment
        if planned is None or not (assignment.is_share_of_unknown and assignment.more_follow):
            return False
        seen = planned.handing_on(ALL_HANDED_ON)
        whole_bytes = assignment.beside.whole_bytes(seen.baseline.peak_bytes, seen.around_bytes)
        budget_bytes = self.options.resolve_budget_bytes(whole_bytes, planned.available_bytes)
        return budget_bytes is not None and seen.chosen.peak_bytes > budget_bytes

    def own_inputs_bytes(self, graph: SharedGraph) -> int:
        """Inputs, parameters left out, of the graph's calls that wait, which no other call has."""
        inputs = input_bytes(
            (w.call, w.call.inputs.keys() - w.call.parameters.keys())
            for w in self.waiting()
            if w.call is not None and w.call.graph is graph and waits(w.node)
        )
        others = {i for c in self.calls if c.graph is not graph for i in (*c.inputs, *c.outputs)}
        return sum(size for identity, size in inputs.items() if identity not in others)

    def received_bytes(self, graph: SharedGraph) -> int:
        """Of the graph's inputs, those that calls which wait seem to have returned.

        They are among its constants, and among what these calls keep.
        """
        returned = Counter(
            size
            for w in self.waiting()
            if w.call is not None and waits(w.node)
            for size in w.call.outputs.values()
        )
        received = returned & Counter(graph.received)
        return sum(size * n for size, n in received.items())

    def compile_first(self, graph: SharedGraph, more_follow: bool) -> None:
        """Compile a new graph, beside the calls that wait for their backward.

        Raises:
            InfeasibleBudgetError: if there is no room for it.
        """
        with self.lock:
            if any(c.is_done for c in self.calls) and not self.anything_waits():
                self.end_step()
            self.drop_evaluations()
        # If only its forward fits, it is refused when the step's first backward begins, and that
        # refusal names what the whole step needs.
        may_run_alone = more_follow and not self.options.is_share
        refusals = self.refusals_of(graph, more_follow, name_minimum=not may_run_alone)
        if refusals and may_run_alone:
            if self.may_run_forward(graph, refusals):
                return
            if any(isinstance(r, UnsearchedBudgetError) for r in refusals):
                refusals = self.refusals_of(graph, more_follow)
        if refusals:
            raise self.advised(graph, min(refusals, key=_minimum_of), more_follow)

    def refusals_of(
        self, graph: SharedGraph, more_follow: bool, *, name_minimum: bool = True
    ) -> list[InfeasibleBudgetError]:
        """Compile a new graph, beside the calls that wait for their backward.

        If there is no room for it, these calls release what they saved, and it is tried again.

        Args:
            name_minimum: have refusals name the smallest budget that can be met.

        Returns:
            The refusals, if no assignment fits; nothing, if one does.
        """
        refusals: list[InfeasibleBudgetError] = []
        tighter: Iterator[tuple[Assignment, int]] | None = None
        missing_bytes = 0

        def fits(assignment: Assignment, next_assignment: NextAssignment | None = None) -> bool:
            assignment = replace(assignment, names_minimum=name_minimum)
            refusal = self.refusal_of(graph, assignment, next_assignment)
            if refusal is not None:
                note_refusal(refusal)
            elif missing_bytes:
                log.warning(_NO_ROOM_FOR_LOSS, format_bytes(missing_bytes))
            return refusal is None

        def note_refusal(refusal: InfeasibleBudgetError) -> None:
            if refusal not in refusals:
                refusals.append(refusal)

        def next_tighter(refusal: InfeasibleBudgetError) -> Assignment | None:
            nonlocal tighter, missing_bytes
            note_refusal(refusal)
            if tighter is None:
                tighter = self.tighter_assignments(
                    graph, assignment, refusal, expects_loss=expecting_loss is not None
                )
            following, missing_bytes = next(tighter, (None, 0))
            return following and replace(following, names_minimum=name_minimum)

        assignment = self.first_assignment(more_follow, graph)
        expecting_loss = self.expecting_loss(assignment, graph)
        # Where nothing can be released, the next is planned without tracing the graph again.
        may_go_on = not (more_follow or self.anything_waits())
        if fits(expecting_loss or assignment, next_tighter if may_go_on else None) and (
            not self.is_above_any_share(graph) or fits(replace(assignment, handed_on=ALL_HANDED_ON))
        ):
            return []
        has_room = self.release_saved()
        if has_room:
            log.info(_RELEASED)
        if has_room or more_follow:
            # Other graphs take what it returns: whether they do is seen when its backward begins.
            handed_on = ALL_HANDED_ON if more_follow else NOTHING_HANDED_ON
            assignment = replace(self.first_assignment(more_follow, graph), handed_on=handed_on)
            expecting_loss = self.expecting_loss(assignment, graph)
            if fits(expecting_loss or assignment):
                return []
        while not more_follow and (following := next_tighter(refusals[-1])) is not None:
            if fits(following, next_tighter):
                return []
        return refusals

    def may_run_forward(
        self, graph: SharedGraph, refusals: Sequence[InfeasibleBudgetError]
    ) -> bool:
        """Compile a new graph, whose plans all exceed the budget, to run its forward alone.

        Returns whether the forward is within the budget.  The step is then refused when its first
        backward begins: by then all graphs are known, and with them the budget that the step needs.

        Args:
            refusals: of the graph.
        """
        if any(isinstance(r, TimeLimitError) for r in refusals):
            return False  # there may be a plan that fits
        assignment = replace(self.first_assignment(True, graph), is_refused=True, note=_REFUSED)
        if self.refusal_of(graph, assignment) is not None:
            return False
        forward_peak_bytes = planned_of(graph).chosen.forward_peak_bytes
        return assignment.others.outside_bytes + forward_peak_bytes <= refusals[0].budget_bytes

    def expecting_loss(self, assignment: Assignment, graph: SharedGraph) -> Assignment | None:
        """The same with room for a loss outside of the graphs; None where none is to be expected.

        What the loss holds is seen when the graph's first backward begins.
        """
        loss_bytes = graph.returned.loss_bytes
        is_open = assignment.is_provisional or self.options.is_whole_peak
        if not loss_bytes or is_open or self.options.budget.kind is BudgetKind.MIN:
            return None
        others = assignment.others
        note = _EXPECTS_LOSS.format(format_bytes(loss_bytes))
        return replace(
            assignment,
            others=replace(
                others,
                between_bytes=others.between_bytes + loss_bytes,
                gradient_bytes=others.gradient_bytes + graph.returned.kept_loss_bytes,
            ),
            note=f"{assignment.note}; {note}".lstrip("; "),
            loss_sizes=graph.sizes,
        )

    def refusal_of(
        self,
        graph: SharedGraph,
        assignment: Assignment,
        next_assignment: NextAssignment | None = None,
    ) -> InfeasibleBudgetError | None:
        """Compile a new graph.  Returns the refusal if it does not fit, None if it does.

        Args:
            next_assignment: as of `SharedGraph.compile_first`.
        """
        try:
            graph.compile_first(assignment, next_assignment)
        except InfeasibleBudgetError as refusal:
            return refusal
        return None

    def tighter_assignments(
        self,
        graph: SharedGraph,
        assignment: Assignment,
        refusal: InfeasibleBudgetError,
        *,
        expects_loss: bool,
    ) -> Iterator[tuple[Assignment, int]]:
        """What else may do for a new graph whose loss, if it has one, is outside of the graphs.

        Its caller may give up what it returns, as in ``loss_of(model(x))``, which is seen when its
        backward begins; and a loss may hold less than most.

        Args:
            refusal: of ``assignment``, or of that with room for a loss, if that ``expects_loss``.

        Yields:
            An assignment, and what it may lack for a loss.
        """
        returned, least_bytes = graph.returned, _minimum_of(refusal)
        is_much = returned.is_much(least_bytes)
        # Else the budget would be too small without all that.
        may_do = least_bytes - returned.loss_bytes - returned.size_bytes <= refusal.budget_bytes
        dropped_bytes = returned.loss_bytes_if_dropped
        if is_much and expects_loss and may_do:
            kept_bytes = returned.kept_loss_bytes
            yield self.assignment_of_dropping(graph, dropped_bytes, kept_bytes), 0
        if is_much:
            loss_bytes = returned.usual_loss_bytes_if_dropped
            missing_bytes = (dropped_bytes - loss_bytes) * expects_loss
            yield self.assignment_of_dropping(graph, loss_bytes, 0), missing_bytes
        if expects_loss and (may_do or not is_much):
            yield assignment, returned.loss_bytes

    def assignment_of_dropping(
        self, graph: SharedGraph, loss_bytes: int, kept_bytes: int
    ) -> Assignment:
        """For a new graph whose caller gives up what it returns.

        Args:
            loss_bytes: what a loss outside holds.
            kept_bytes: what it still holds while the graph's backward runs, beside scalars.
        """
        assignment = self.first_assignment(False, graph)
        others = replace(
            assignment.others,
            between_bytes=loss_bytes,
            gradient_bytes=kept_bytes + _SCALAR_BYTES,
        )
        return replace(assignment, others=others, handed_on=ALL_HANDED_ON)

    def advised(
        self, graph: SharedGraph, refusal: InfeasibleBudgetError, more_follow: bool
    ) -> InfeasibleBudgetError:
        """For a graph that may be one of several."""
        if more_follow or self.waiting_calls():
            advice = _FIRST_STEP
        elif self.options.budget.kind is BudgetKind.SHARE and not graph.returned.has_loss:
            has_no_gradients = not graph.returned.size_bytes
            is_of_step = has_no_gradients and graph.step_peak.size_bytes
            advice = (_SHARE_OF_STEP if is_of_step else _SHARE_OF_ONE).format(self.options.budget)
        else:
            return refusal
        return refusal.with_advice(f"{refusal.advice} {advice}".strip())

    def drop_evaluations(self) -> None:
        """Drop recorded calls whose results are gone, as long as no call with a backward has come.

        They are evaluations, and no part of the training step that begins.
        """
        if not any(c.awaits_backward for c in self.calls):
            self.calls = [c for c in self.calls if c.has_live_results]

    def release_saved(self) -> bool:
        """Make all calls that wait release what they saved; returns whether any of them did."""
        released = [w.release_saved() for w in self.waiting() if not w.is_released]
        return any(released)

    def add(self, graph: SharedGraph) -> None:
        """Register a graph that was compiled."""
        with self.lock:
            self.graphs = [g for g in self.graphs if g() is not None]
            self.graphs.append(weakref.ref(graph))
            planned = graph.planned
            if self.options.is_whole_peak or planned is None:
                return
            others_wait = self.anything_waits()
            if planned.program.boundary is not None or planned.assignment.more_follow:
                self.recording.training_graph_compiled(others_wait=others_wait)
            elif not others_wait:
                # It may begin a training step, whose other graphs have to know what it reads.
                self.recording.inference_graph_compiled()

    def abandon_step(self) -> None:
        """Drop the recorded calls: a graph could not be compiled, so their step never ends."""
        with self.lock:
            self.calls.clear()

    def _alive(self) -> list[SharedGraph]:
        return [graph for g in self.graphs if (graph := g()) is not None]

    def waiting(self) -> list[Waiting]:
        """Calls that hold what they saved.  Some may be done by now: see `drop_done`."""
        return [w for g in self._alive() for w in list(g.waiting.values()) if w.planned is not None]

    def anything_waits(self) -> bool:
        """Whether the backward of any call is still to come."""
        return any(graph.waits() for graph in self._alive())

    def drop_done(self) -> None:
        """Drop all calls whose backward has run.  Takes time for each call that waits."""
        for graph in self._alive():
            graph.drop_done()

    def waiting_calls(self) -> int:
        """Calls whose backward is still to come."""
        self.drop_done()
        return sum(len(g.waiting) for g in self._alive())

    def holding_calls(self) -> Counter[int]:
        """As `waiting`, counted for each graph, by serial."""
        return Counter(
            g.serial
            for g in self._alive()
            for w in list(g.waiting.values())
            if w.planned is not None
        )

    def before_call(self, graph: SharedGraph) -> Counter[int]:
        """A graph is about to be called: end the step before, and see whether the call is foreseen.

        Returns:
            `holding_calls`.
        """
        if self.options.is_whole_peak:
            return Counter()
        with self.lock:
            # Graphs without a backward may begin a step; if there are no others, the first to be
            # called again begins the next.  Of a step whose recording began in a backward, no call
            # is recorded.
            is_begun = self.recording.has_begun_late and not self.calls
            is_begun |= any(c.is_done or c.graph is graph for c in self.calls)
            if is_begun and not self.anything_waits():
                self.end_step()
            self.drop_evaluations()
            holding = self.holding_calls()
            if self.is_recording or not graph.foresees(holding):
                self.drop_done()
                holding = self.holding_calls()
            if holding:
                self.note_together(graph, holding)
            if not graph.foresees(holding):
                self.unforeseen_call(graph)
            if self.is_recording:
                self.make_room(graph)
            return holding

    def make_room(self, graph: SharedGraph) -> None:
        """Make room for a graph that was compiled to be small before its step was known."""
        planned = graph.planned
        if planned is None or not planned.assignment.is_share_of_unknown or not self.calls:
            return
        budget_bytes = self.known_budget_bytes(graph)
        if budget_bytes is not None and (
            self.outside_bytes(graph) + planned.chosen.peak_bytes > budget_bytes
        ):
            self.release_saved()

    def end_step(self) -> None:
        """The recorded step is over: plan its graphs together if it was observed."""
        calls, self.calls = self.calls, []
        if not self.recording.step_is_over():
            return
        form = _KnownForm(calls)
        self.forms = [f for f in self.forms if f.is_alive and f.signature != form.signature]
        self.forms = [*self.forms, form][-_MAX_FORMS:]
        is_abandoned = any(c.graph.kept.are_gone for c in calls)
        if not is_abandoned and not self.step_of(form).is_known_well_enough():
            self.compile_step(form)
        forms = self.forms_with(form)
        for graph in {c.graph for c in form.calls}:
            graph.foreseen.clear()
        for f in forms:
            for call in f.calls:
                call.graph.foreseen.append(call.before)

    def step_of(self, form: _KnownForm) -> TrainingStep:
        """A step of this form, with the other forms that its graphs run in."""
        calls, forms = form.calls, self.forms_with(form)
        kept_bytes = max((c.graph.kept_bytes for c in calls), default=0)
        beside = self.surroundings.current.with_kept(kept_bytes)
        others = [c for f in self.forms if f not in forms for c in f.calls]
        return TrainingStep([f.calls for f in forms], self.options, beside, related(others, calls))

    def compile_step(self, form: _KnownForm) -> None:
        """Plan and compile the graphs of a step for what was seen of it; refuse them if it does
        not fit."""
        # A refusal is not raised here: the caller may belong to another model.
        step = self.step_of(form)
        step.show_peak()
        self.compile_or_refuse(step, form.calls)

    def compile_or_refuse(
        self, step: TrainingStep, calls: Sequence[GraphCall]
    ) -> InfeasibleBudgetError | None:
        """Plan and compile the graphs of a step together.

        Args:
            calls: those whose graphs are refused if the step does not fit.

        Returns:
            The refusal, which every later call of these graphs raises; None if the step fits.
        """
        watching.take_no_more_lines()
        try:
            step.compile()
        except InfeasibleBudgetError as refusal:
            if step.loss_bytes:
                advice = _LOSS_OUTSIDE.format(format_bytes(step.loss_bytes))
                refusal = refusal.with_advice(f"{refusal.advice} {advice}".strip())
            for call in calls:
                call.graph.refuse(refusal)
            return refusal
        return None

    def forget_steps(self) -> None:
        """Drop what is known of steps: all graphs are compiled anew."""
        with self.lock:
            self.calls.clear()
            self.forms.clear()
            self.together.clear()
            self.recording.reset()

    def forms_with(self, form: _KnownForm) -> list[_KnownForm]:
        """The known forms that have a graph in common with ``form``, which is among them."""
        graphs = {c.graph for c in form.calls}
        return [f for f in self.forms if graphs & {c.graph for c in f.calls}]

    def related_calls(self) -> list[GraphCall]:
        """Calls of the known forms that belong to the models of the step that runs.

        Not of a form that is one call: that is another batch, which is no part of a step.
        """
        forms = [calls for form in self.forms if len(calls := form.calls) > 1]
        return related([c for calls in forms for c in calls], self.calls)

    def unforeseen_call(self, graph: SharedGraph) -> None:
        """More calls wait for their backward than the graph's plan foresees.

        There may be many more calls to come, so the graph is compiled to save as little as possible
        until the step is known.
        """
        self.recording.unforeseen_call()
        planned = graph.planned
        if planned is None or planned.program.boundary is None:
            return
        if any(w.planned is None for w in graph.waiting.values()):
            return  # a checkpointed region has to be computed again by the code that it ran with
        while True:
            try:
                self.save_least(graph, planned)
            except InfeasibleBudgetError as refusal:
                if not self.release_saved():
                    raise self.advised(graph, refusal, more_follow=True) from None
                log.info(_RELEASED)
            else:
                return

    def larger_call(self) -> None:
        """A graph runs at sizes for which the loss outside of it was only estimated."""
        self.recording.larger_call(begins_step=not (self.calls or self.anything_waits()))

    def save_least(self, graph: SharedGraph, planned: Planned) -> None:
        """Compile a graph to save as little as possible, unless it is small.

        Raises:
            InfeasibleBudgetError: if there is no room for it beside the calls that wait.
        """
        assignment = self.first_assignment(True, graph)
        chosen, outside_bytes = planned.chosen, assignment.others.outside_bytes
        budget_bytes = None
        if not assignment.is_share_of_unknown:
            whole_bytes = assignment.beside.whole_bytes(
                planned.baseline.peak_bytes, planned.around_bytes
            )
            budget_bytes = self.options.resolve_budget_bytes(whole_bytes, planned.available_bytes)
        own_bytes = chosen.peak_bytes - chosen.constant_bytes
        if not planned.saves_least and not is_small(own_bytes, budget_bytes, outside_bytes):
            graph.compile_again(assignment)
        elif budget_bytes is not None and outside_bytes + chosen.peak_bytes > budget_bytes:
            raise InfeasibleBudgetError(
                budget_bytes, minimum_bytes=outside_bytes + chosen.peak_bytes
            )

    def look_beside(self, graph: SharedGraph, kept_bytes: int) -> None:
        """What lies beside ``graph`` changed: adjust what it may hold before it runs.

        Args:
            kept_bytes: gradients that its own parameters have.

        Raises:
            InfeasibleBudgetError: if there is no room for that.
        """
        with self.lock:
            graph.kept.last_bytes = kept_bytes
            graph.changes = self.surroundings.changes
            graph.kept_bytes = kept_bytes and max(
                kept_bytes, self.surroundings.kept_bytes(self.parameters_beside(graph))
            )
            before, beside = graph.assignment.beside, graph.beside()
            more_bytes = beside.resident_bytes - before.resident_bytes
            if self.options.is_whole_peak:
                more_bytes = 0  # whatever a step holds
            others = graph.assignment.others
            others = replace(others, outside_bytes=others.outside_bytes + more_bytes)
            graph.assignment = replace(graph.assignment, others=others, beside=beside)
            if beside == before or graph.planned is None:
                return
            if graph.kept_bytes > self.most_kept_bytes:
                self.most_kept_bytes = graph.kept_bytes
                is_held = graph.own_bytes(graph.planned) is not None
                log.warning(
                    "%s of gradients from an earlier backward are still in .grad while another step"
                    " runs: %s. That is right where gradients are accumulated; elsewhere, call"
                    " optimizer.zero_grad(set_to_none=True) before each step.",
                    format_bytes(graph.kept_bytes),
                    "they come off the budget" if is_held else "it holds as much more",
                )
            graph.mark_outdated()

    def before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Count an optimizer before its step, if it is new or has other parameters than before.

        Raises:
            InfeasibleBudgetError: if its step does not fit; graphs make room when they are called.
        """
        with self.lock:
            if not self.surroundings.is_news(optimizer):
                return
            self.surroundings.look()
            for graph in self._alive():
                planned = graph.planned
                if planned is None or not planned.trains or self.options.is_whole_peak:
                    continue
                own_bytes = graph.own_bytes(planned)
                if own_bytes is None or graph.assignment.is_share_of_unknown:
                    continue
                budget_bytes = own_bytes + graph.assignment.others.outside_bytes
                self.surroundings.current.check(budget_bytes, planned.around_bytes)

    def parameters_beside(self, graph: SharedGraph) -> list[torch.Tensor]:
        """Parameters of a graph, and of those that were seen in one step with it."""
        serials = self.together.get(graph.serial, {graph.serial})
        alive = [g for g in self._alive() if g is not graph and g.serial in serials]
        return [p for g in [graph, *alive] for p in g.kept.parameters()]

    def note_together(self, graph: SharedGraph, holding: Counter[int]) -> None:
        """Note that graphs which wait for their backward at the same time belong to one step."""
        mine = self.together.setdefault(graph.serial, {graph.serial})
        for serial in holding:
            if serial not in mine:
                mine |= self.together.get(serial, {serial})
                for member in mine:
                    self.together[member] = mine

    def after_call(
        self, graph: SharedGraph, args: Sequence[Any], result: Any, before: Counter[int], node: Any
    ) -> GraphCall:
        """Record the call."""
        with self.lock:
            kept = self.surroundings.shard_gradient_bytes() if self.is_recording else {}
            call = Call.of(graph, args, result, before, node, kept)
            if self.is_recording:
                call.emptied_in_forward = emptied_now(self.calls)
                self.calls.append(call)
            return call

    # In the backward of a step that is recorded

    def collect_garbage(self) -> None:
        """Collect garbage once in an observed step, before its first backward."""
        if self.recording.is_observing and all(c.live_outputs is None for c in self.calls):
            self.n_compiled_when_collected = compilations()
            gc.collect()
        else:
            self.collect_after_compiling()

    def collect_after_compiling(self) -> None:
        """Collect garbage in a recorded step if anything was compiled since.

        Compiling leaves reference cycles that hold the user's frames, and with them tensors that
        the user no longer holds.
        """
        if self.is_recording and compilations() != self.n_compiled_when_collected:
            self.n_compiled_when_collected = compilations()
            gc.collect()

    def before_backward(self, graph: SharedGraph, waiting: Waiting) -> None:
        """The backward of a call is about to run: is there room for it?

        What later graphs hold by then (gradients, first of all) was not known when the call ran.
        A call that finds no room gives up what it saved, and its graph is compiled for the room
        that there is.

        Raises:
            InfeasibleBudgetError: if nothing fits in that.
        """
        planned = waiting.planned
        if planned is None:
            return
        of_step = (graph, *(call.graph for call in self.calls))
        if any(g.assignment.is_refused for g in of_step):
            with self.lock:
                self.plan_refused_step(graph, waiting)
        if not self.is_recording:
            with self.lock:
                self.check_handed_on(graph, waiting, planned)
            return
        with self.lock:
            if waiting.call is not None:
                waiting.call.emptied_in_backward = emptied_now(self.calls)
            budget_bytes = self.known_budget_bytes(graph)
            is_settled = not (planned.assignment.is_provisional or self.recording.is_observing)
            if is_settled and unforeseen_bytes(waiting, planned):
                self.recording.outputs_are_held()
            if budget_bytes is None:
                return
            try:
                self.fit_backward(graph, waiting, planned, budget_bytes)
            except InfeasibleBudgetError:
                self.abandon_step()
                raise

    def plan_refused_step(self, graph: SharedGraph, waiting: Waiting) -> None:
        """The first backward of a step begins, one of whose graphs does not fit by itself.

        All graphs are known now, so they are planned together.

        Raises:
            InfeasibleBudgetError: if that does not help; names what the whole step needs.
        """
        calls = self.calls or [c for c in (waiting.call,) if c is not None]
        taken = {identity for call in calls for identity in call.inputs}
        expected = [call.expected(taken) for call in calls]
        step = TrainingStep([expected], self.options, graph.assignment.beside, self.related_calls())
        refusal = self.compile_or_refuse(step, calls)
        if refusal is not None:
            self.abandon_step()
            raise refusal

    def check_handed_on(self, graph: SharedGraph, waiting: Waiting, planned: Planned) -> None:
        """Make room if the caller still holds outputs or tangents that the plan takes to be gone.

        Raises:
            InfeasibleBudgetError: if there is none.
        """
        assignment = planned.assignment
        more_bytes = unforeseen_bytes(waiting, planned)
        if not more_bytes:
            return
        self.recording.outputs_are_held()
        budget_bytes, others = self.budget_of_holding(graph, planned), assignment.others
        outside_bytes = others.outside_bytes + others.gradient_bytes
        # (Forward, whose peak may be larger, held them as planned.)
        needed_bytes = outside_bytes + more_bytes + planned.chosen.backward_peak_bytes
        if budget_bytes is None or needed_bytes <= budget_bytes:
            return
        if not waiting.release_saved():
            raise InfeasibleBudgetError(budget_bytes, minimum_bytes=needed_bytes)
        with _naming_at_most(needed_bytes, budget_bytes):
            self.compute_again(graph, waiting, planned, budget_bytes, outside_bytes)

    def budget_of_holding(self, graph: SharedGraph, planned: Planned) -> int | None:
        """The budget of a graph whose caller holds all that its plan takes to be gone.

        Such a step holds more without a budget as well, so a share of that is a larger budget.
        """
        budget_bytes = planned.assignment.budget_bytes
        if budget_bytes is None and graph.symbols:
            budget_bytes = graph.budget_bytes(planned)  # of the sizes of the call
        if budget_bytes is None or self.options.budget.kind is not BudgetKind.SHARE:
            return budget_bytes
        programs = planned.handing_on(NOTHING_HANDED_ON).program, planned.program
        held_bytes, given_bytes = (replay(p, as_it_is(p))[1].peak_bytes for p in programs)
        more_bytes = self.options.budget.resolve(held_bytes - given_bytes)
        return budget_bytes + max(0, more_bytes or 0)

    def fit_backward(
        self, graph: SharedGraph, waiting: Waiting, planned: Planned, budget_bytes: int
    ) -> None:
        """As `before_backward`, for a step that is recorded."""
        outside_bytes = self.outside_bytes(graph, waiting)
        needed_bytes = outside_bytes + planned.chosen.backward_peak_bytes
        needed_bytes += unforeseen_bytes(waiting, planned)
        if not waiting.is_released:
            if needed_bytes <= budget_bytes:
                return
            seen = planned.handing_on(self.handed_on(waiting))
            if outside_bytes + seen.chosen.backward_peak_bytes <= budget_bytes:
                return
            if not waiting.release_saved():
                raise InfeasibleBudgetError(budget_bytes, minimum_bytes=needed_bytes)
        with _naming_at_most(needed_bytes, budget_bytes):
            self.compute_again(graph, waiting, planned, budget_bytes, outside_bytes)

    def compute_again(
        self,
        graph: SharedGraph,
        waiting: Waiting,
        planned: Planned,
        budget_bytes: int,
        outside_bytes: int,
    ) -> None:
        """Compile a graph, if need be, for the room in which the backward of a call computes again
        what the call saved.

        Args:
            outside_bytes: what others hold, without what the caller holds of the call.

        Raises:
            InfeasibleBudgetError: if no plan fits in that.
        """
        call = waiting.call
        # Its outputs may be with the caller, beside those that are computed again.
        outside_bytes += planned.returned_bytes if call is None else call.live_bytes
        note = f"beside {format_bytes(outside_bytes)} that the caller and other graphs hold"
        tangent_bytes = planned.program.tangent_bytes
        # Nobody holds what is returned a second time.
        holds_more = call is not None and holds_more_tangents(call, planned.assignment)
        handed_on = replace(ALL_HANDED_ON, tangents=not holds_more)
        for more_bytes in (0, tangent_bytes):
            chosen = planned_of(graph).handing_on_at_most(handed_on).chosen
            # The tangents are there while forward runs.
            peak_bytes = max(chosen.forward_peak_bytes + tangent_bytes, chosen.peak_bytes)
            if outside_bytes + peak_bytes <= budget_bytes:
                return
            others = OtherGraphs(outside_bytes=outside_bytes + more_bytes)
            beside = graph.assignment.beside
            graph.compile_for_backward(
                Assignment(budget_bytes, others, note=note, handed_on=handed_on, beside=beside)
            )

    def handed_on(self, waiting: Waiting) -> HandedOn:
        """The outputs and tangents of a call that nobody holds when its backward begins.

        Tangents of outputs that other graphs took are assumed to be held by nobody else.
        """
        call = waiting.call
        if call is None or call.live_outputs is None:
            return NOTHING_HANDED_ON
        taken = {identity for c in self.calls if c is not call for identity in c.inputs}
        is_taken = any(identity in taken for identity in call.outputs)
        are_given = is_taken or are_unheld(call.holders)
        return HandedOn(call.handed_on.outputs, are_given and ALL_HANDED_ON.tangents)

    def known_budget_bytes(self, graph: SharedGraph) -> int | None:
        """In bytes, a share being one of what is known of the step; None for the smallest."""
        planned = planned_of(graph)
        if self.options.budget.kind is BudgetKind.SHARE:
            if graph.assignment.budget_bytes is not None:
                return self.budget_of_holding(graph, planned)  # of the step it was planned for
            # The backward of those that wait is still to come, as far as is known.
            calls = [
                replace(c, is_unused=None) if c.node is not None and waits(c.node) else c
                for c in self.calls
            ]
            step = TrainingStep([calls], self.options, graph.assignment.beside)
            of_step = step.budget_bytes() if graph in step.graphs else None
            of_model = graph.budget_bytes(planned)  # the largest step seen, which may be another
            return of_step if of_step is None or of_model is None else max(of_step, of_model)
        whole_bytes = graph.assignment.beside.whole_bytes(
            planned.baseline.peak_bytes, planned.around_bytes
        )
        return self.options.resolve_budget_bytes(whole_bytes, planned.available_bytes)

    def outside_bytes(self, graph: SharedGraph, waiting: Waiting | None = None) -> int:
        """What is held beside a graph that is called, or whose call begins its backward."""
        assert graph.planned is not None
        kept_bytes = sum(w.kept_bytes for w in self.waiting() if w is not waiting and waits(w.node))
        made: dict[int, int] = {}
        for call in self.calls:
            if call.is_done:
                made.update(call.parameters)
        # Inputs that come from an earlier graph are among its constants and what that one keeps.
        emptied = emptied_now(self.calls)
        held_bytes = external_bytes(self.calls, self.related_calls(), emptied) + kept_bytes
        held_bytes += graph.assignment.beside.resident_bytes
        return max(0, held_bytes - graph.planned.chosen.constant_bytes) + sum(made.values())


@contextlib.contextmanager
def _naming_at_most(needed_bytes: int, budget_bytes: int) -> Iterator[None]:
    """Where a call finds no room to compute again what it saved, name no more than it needs if it
    need not."""
    try:
        yield
    except InfeasibleBudgetError as refusal:
        # (A call that has released what it saved may need it although there is room for it now.)
        if _minimum_of(refusal) <= needed_bytes or needed_bytes <= budget_bytes:
            raise
        raise InfeasibleBudgetError(
            budget_bytes, minimum_bytes=needed_bytes, advice=refusal.advice
        ) from None


def _minimum_of(refusal: InfeasibleBudgetError) -> int:
    return refusal.minimum_bytes or 0


def unforeseen_bytes(waiting: Waiting, planned: Planned) -> int:
    """Outputs and tangents that somebody holds when backward begins, though the plan takes them to
    be gone."""
    call = waiting.call
    if call is None or call.live_outputs is None:
        return 0
    held_bytes = call.bytes_of(planned.given_up & call.live_outputs)
    if holds_tangents(call, planned.assignment):
        held_bytes += planned.program.tangent_bytes
    return held_bytes


def holds_more_tangents(call: GraphCall, assignment: Assignment) -> bool:
    """Whether more objects hold the tangents than in the step that was looked at.

    Without such a step nobody knows: what holds the gradient of a sum holds a single number.
    """
    is_known = assignment.handed_on.tangents and bool(assignment.holders)
    return is_known and call.holders > assignment.holders


def holds_tangents(call: GraphCall, assignment: Assignment) -> bool:
    """Whether somebody seems to hold the tangents that a plan takes to be gone after their use."""
    if not assignment.handed_on.tangents:
        return False
    if assignment.holders:  # of the step that was looked at
        return holds_more_tangents(call, assignment)
    return not assignment.more_follow and not are_unheld(call.holders)


class _KnownForm:
    """The calls of a step that is over, without keeping its graphs alive.

    Attributes:
        signature: equal for steps of the same form.
    """

    def __init__(self, calls: Sequence[GraphCall]) -> None:
        for call in calls:
            call.see_next_step()
        self._calls = [(weakref.ref(c.graph), replace(c, graph=None)) for c in calls]  # type: ignore[arg-type]
        self.signature = tuple((c.graph.serial, c.awaits_backward) for c in calls)

    @property
    def is_alive(self) -> bool:
        """Whether all of its graphs are still there."""
        return all(graph() is not None for graph, _ in self._calls)

    @property
    def calls(self) -> list[GraphCall]:
        """As they were."""
        return [replace(c, graph=g) for graph, c in self._calls if (g := graph()) is not None]


# Ledgers by options; weak, because the graphs hold theirs.
_LEDGERS: weakref.WeakValueDictionary[str, Ledger] = weakref.WeakValueDictionary()
_LOCK = threading.Lock()


def ledger_of(options: Options) -> Ledger:
    """The ledger that graphs of these options share."""
    key = options.cache_key()
    with _LOCK:
        ledger = _LEDGERS.get(key)
        if ledger is None:
            ledger = _LEDGERS[key] = Ledger(options)
        return ledger


def forget_steps() -> None:
    """``torch._dynamo.reset`` was called: see `Ledger.forget_steps`."""
    with _LOCK:
        ledgers = list(_LEDGERS.values())
    for ledger in ledgers:
        ledger.forget_steps()


def more_graphs_follow(gm: fx.GraphModule) -> bool:
    """Whether this graph is known not to be the whole step."""
    reason = getattr(gm, "compile_subgraph_reason", None)
    if reason is not None and getattr(reason, "graph_break", False):
        return True
    return nn.parallel.DistributedDataParallel._get_active_ddp_module() is not None
