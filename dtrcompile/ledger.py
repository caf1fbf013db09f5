"""One budget, several graphs: what each graph of a training step is compiled with.

A graph break, DDP's buckets or a second compiled module make several graphs of one step, and a
`Ledger` (one for each set of options) shares the budget out among them (`passes.sharing`):

* while the first step runs, graphs are compiled one by one, and what comes later is not known.  A
  graph that others follow is compiled to save as little as it can, unless it is small; one that
  ends the step gets what the earlier ones leave;
* when the first step is over, the order is known and so is what each graph needs: the graphs are
  planned and compiled again, once.

A step is over when a graph is called and no graph waits for its backward any more, if one did.  If
graphs of a step had run before it was known that others follow, the next step is the one that is
looked at.  A model that is one graph is compiled once, and costs one look at its outputs a call.

A graph may also be called more often in a step than its plan knows of, first of all one that is
compiled for each block of a model.  It then saves as little as it can, and the next step is looked
at.
"""

from __future__ import annotations

import logging
import threading
import weakref
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import fx, nn

from dtrcompile.beside import (
    NOTHING_BESIDE,
    Beside,
    OptimizerSteps,
    Surroundings,
    before_steps,
)
from dtrcompile.options import BudgetKind, Options
from dtrcompile.passes.errors import InfeasibleBudgetError, format_bytes
from dtrcompile.passes.sharing import Rest
from dtrcompile.planned import Assignment, is_small
from dtrcompile.shared_graph import SharedGraph
from dtrcompile.step_check import StepCheck
from dtrcompile.step_peak import StepPeaks
from dtrcompile.training_step import Call, Step

log = logging.getLogger("dtrcompile")

_SEVERAL_GRAPHS = (
    "Or pass options={'several_graphs': True}: an earlier graph of this step was compiled as if it"
    " were alone, and then each saves as little as it can until all of the step are known."
)
# Times that a step is looked at because calls came that were not foreseen.
_MOST_SURPRISES = 4


class Ledger:
    """The graphs of one set of options, and who may hold how much."""

    def __init__(self, options: Options) -> None:
        self.options = options
        self.surroundings = Surroundings(options)
        self.lock = threading.RLock()
        self.graphs: list[weakref.ref[SharedGraph]] = []
        self.calls: list[Call] = []
        self.observing = False
        self.is_partial = False  # the step being observed had begun before
        self.surprises = 0
        self.step_peaks = StepPeaks()
        self.together: dict[int, set[int]] = {}  # graphs by serial, of one step
        self.optimizer_steps = OptimizerSteps()
        self.most_kept_bytes = 0  # gradients in ``.grad`` that the user was told of
        if options.counts_optimizers:
            before_steps(weakref.ref(self), Ledger.before_optimizer_step)
        self.step_check: StepCheck | None = None

    # While the first step runs

    def first_assignment(
        self,
        more_follow: bool,
        of_graph: SharedGraph | None = None,
        beside: Beside = NOTHING_BESIDE,
    ) -> Assignment:
        """For a graph that is compiled now, while others may wait for their backward.

        Args:
            of_graph: where it was compiled before; then it may itself be among those that wait.
            beside: what no graph holds.
        """
        if self.options.is_whole_peak:
            # The whole peak of the step: every graph may have its own.
            return Assignment(beside=beside)
        waiting = self.waiting_calls()
        outside = 0
        for graph in self._alive():
            if graph.waiting and graph.planned is not None:
                outside += sum(p.chosen.kept_bytes for p in list(graph.waiting.values()) if p)
                if graph is not of_graph:
                    outside += graph.planned.chosen.constant_bytes
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
        rest = Rest(outside_bytes=outside + beside.resident_bytes)
        return Assignment(rest=rest, more_follow=more_follow, note=note, beside=beside)

    def add(self, graph: SharedGraph) -> None:
        """A graph was compiled."""
        with self.lock:
            self.graphs = [g for g in self.graphs if g() is not None]
            self.graphs.append(weakref.ref(graph))
            assignment = graph.planned.assignment if graph.planned is not None else Assignment()
            others_wait = self.anything_waits()
            is_shared = assignment.more_follow or others_wait
            if is_shared and not self.observing and not self.options.is_whole_peak:
                self.observing, self.is_partial = True, others_wait

    def abandon_step(self) -> None:
        """A graph could not be compiled, so the step that it belongs to never ends."""
        with self.lock:
            self.calls.clear()

    def _alive(self) -> list[SharedGraph]:
        return [graph for g in self.graphs if (graph := g()) is not None]

    def anything_waits(self) -> bool:
        """Whether the backward of any call is still to come."""
        return any(graph.waits() for graph in self._alive())

    def drop_done(self) -> None:
        """Forget all calls whose backward has run; looks at each of them."""
        for graph in self._alive():
            graph.drop_done()

    def waiting_calls(self) -> int:
        """Calls whose backward is still to come."""
        self.drop_done()
        return sum(len(g.waiting) for g in self._alive())

    def holding_calls(self) -> Counter[int]:
        """Of each graph, calls that hold what they saved, or did: see `drop_done`."""
        return Counter(
            g.serial for g in self._alive() for p in list(g.waiting.values()) if p is not None
        )

    def before_call(self, graph: SharedGraph) -> Counter[int]:
        """A graph is about to be called: is the step before it over, is it as was foreseen?

        Returns:
            `holding_calls`.
        """
        if self.options.is_whole_peak:
            return Counter()
        with self.lock:
            # Graphs without a backward may begin a step; if there are no others, the first to be
            # called again begins the next.
            is_begun = any(c.awaits_backward or c.graph is graph for c in self.calls)
            if is_begun and not self.anything_waits():
                self.end_step()
            holding = self.holding_calls()
            if self.observing or not holding <= graph.foreseen:
                self.drop_done()
                holding = self.holding_calls()
            if holding:
                self.note_together(graph, holding)
            if not holding <= graph.foreseen:
                self.surprise(graph)
            return holding

    def end_step(self) -> None:
        """What was observed is over."""
        calls, self.calls = self.calls, []
        if self.is_partial:
            self.is_partial = False
            return
        self.observing = False
        try:
            kept_bytes = max((c.graph.kept_bytes for c in calls), default=0)
            step = Step(calls, self.options, self.surroundings.current.with_kept(kept_bytes))
            if not step.is_known_well_enough():
                step.compile()
        except InfeasibleBudgetError as refusal:
            # Not raised here: the caller may belong to another model.
            for call in calls:
                call.graph.refusal = refusal
        for call in calls:
            call.graph.foreseen = call.before  # of several calls in a step, the last sees the most

    def surprise(self, graph: SharedGraph) -> None:
        """More calls wait for their backward than the graph's plan knows of.

        From here on it saves as little as it can, until the step is known: its next calls may be
        many.  A step that is another one each time is looked at a few times only.
        """
        if not self.observing and self.surprises < _MOST_SURPRISES:
            self.surprises += 1
            self.observing, self.is_partial = True, True
        planned = graph.planned
        if planned is None or planned.program.boundary is None:
            return
        if None in graph.waiting.values():
            return  # a checkpointed region has to be computed again by the code that it ran with
        assignment = self.first_assignment(True, graph, graph.beside())
        chosen, outside_bytes = planned.chosen, assignment.rest.outside_bytes
        budget_bytes = None
        if not assignment.is_share_of_unknown:
            whole_bytes = assignment.beside.whole_bytes(
                planned.baseline.peak_bytes, planned.around_bytes
            )
            budget_bytes = self.options.resolve_budget_bytes(whole_bytes, planned.available_bytes)
        own_bytes = chosen.peak_bytes - chosen.constant_bytes
        with self.advising():
            if not planned.saves_least and not is_small(own_bytes, budget_bytes, outside_bytes):
                graph.compile_again(assignment)
            elif budget_bytes is not None and outside_bytes + chosen.peak_bytes > budget_bytes:
                raise InfeasibleBudgetError(
                    budget_bytes, minimum_bytes=outside_bytes + chosen.peak_bytes
                )

    def look_beside(self, graph: SharedGraph, kept_bytes: int) -> None:
        """What lies beside ``graph`` changed; its budget holds all the same, before it runs.

        Args:
            kept_bytes: gradients that its own parameters have.

        Raises:
            InfeasibleBudgetError: if it cannot.
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
            rest = graph.assignment.rest
            rest = replace(rest, outside_bytes=rest.outside_bytes + more_bytes)
            graph.assignment = replace(graph.assignment, rest=rest, beside=beside)
            if beside == before or graph.planned is None:
                return
            if graph.kept_bytes > self.most_kept_bytes:
                self.most_kept_bytes = graph.kept_bytes
                is_held = graph.own_bytes(graph.planned) is not None
                log.warning(
                    "%s of gradients from an earlier backward are still in .grad while another step"
                    " runs: %s. If they are not meant to be added up, call"
                    " optimizer.zero_grad(set_to_none=True) before each step.",
                    format_bytes(graph.kept_bytes),
                    "they come off the budget" if is_held else "it holds as much more",
                )
            graph.family.reconsider()
            graph.has_to_choose = True

    def before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        """An optimizer that was made late, or given more to do, is counted before it steps.

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
                budget_bytes = own_bytes + graph.assignment.rest.outside_bytes
                self.surroundings.current.check(budget_bytes, planned.around_bytes)

    def parameters_beside(self, graph: SharedGraph) -> list[torch.Tensor]:
        """Parameters of a graph, and of those that were seen in one step with it."""
        serials = self.together.get(graph.serial, {graph.serial})
        alive = [g for g in self._alive() if g is not graph and g.serial in serials]
        return [p for g in [graph, *alive] for p in g.kept.parameters()]

    def note_together(self, graph: SharedGraph, holding: Counter[int]) -> None:
        """Graphs that wait for their backward at one time are of one step."""
        mine = self.together.setdefault(graph.serial, {graph.serial})
        for serial in holding:
            if serial not in mine:
                mine |= self.together.get(serial, {serial})
                for member in mine:
                    self.together[member] = mine

    @contextmanager
    def advising(self) -> Iterator[None]:
        """Say what to do where a graph has no room because an earlier one took it."""
        try:
            yield
        except InfeasibleBudgetError as refusal:
            plans = [p for g in self._alive() for p in list(g.waiting.values()) if p]
            if self.options.several_graphs or all(p.saves_least for p in plans):
                raise
            raise refusal.with_advice(_SEVERAL_GRAPHS) from refusal

    def after_call(
        self,
        graph: SharedGraph,
        args: Sequence[Any],
        result: Any,
        before: Counter[int],
        *,
        awaits_backward: bool,
    ) -> None:
        """Remember the call, as one of the step's."""
        with self.lock:
            self.calls.append(Call.of(graph, args, result, before, awaits_backward=awaits_backward))


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


def more_graphs_follow(gm: fx.GraphModule) -> bool:
    """Whether this graph is known not to be the whole step."""
    reason = getattr(gm, "compile_subgraph_reason", None)
    if reason is not None and getattr(reason, "graph_break", False):
        return True
    return nn.parallel.DistributedDataParallel._get_active_ddp_module() is not None
