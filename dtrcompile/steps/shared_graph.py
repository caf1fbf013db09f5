"""A compiled graph that can be compiled again: the callable that Dynamo runs.

A `SharedGraph` is always in one state:

===============  ===========================================================  ======================
state            meaning                                                      next
===============  ===========================================================  ======================
``NEW``          not compiled yet                                             ``PROVISIONAL``,
                                                                              ``PLANNED``
``PROVISIONAL``  compiled before its step was known: one plan for all sizes,  ``PLANNED``,
                 to be made anew when the step is known                       ``OUTDATED``,
                                                                              ``REFUSED``
``PLANNED``      compiled for the step: each call takes the plan that suits   ``PROVISIONAL``,
                 its sizes                                                    ``OUTDATED``,
                                                                              ``REFUSED``
``OUTDATED``     what lies beside the graph changed (kept gradients, an       ``PROVISIONAL``,
                 optimizer), so the next call chooses or compiles anew        ``PLANNED``,
                                                                              ``REFUSED``
``REFUSED``      its step was found not to fit: every call raises that        none
===============  ===========================================================  ======================

``use`` (what was compiled runs from the next call on) and a call that has chosen lead to
``PROVISIONAL`` or ``PLANNED``, as the assignment says; ``mark_outdated`` and ``refuse`` lead to the
states of those names.
"""

from __future__ import annotations

import enum
import itertools
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol, TypeAlias

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from dtrcompile.options import BudgetKind, Options
from dtrcompile.outside.step_check import Expected, StepCheck, check_of
from dtrcompile.outside.surroundings import (
    KeptGradients,
    OptimizerSteps,
    SurroundingBytes,
    Surroundings,
)
from dtrcompile.outside.uncompiled import called_at, look_at_backward
from dtrcompile.outside.watching import running
from dtrcompile.passes.errors import InfeasibleBudgetError
from dtrcompile.passes.graphs.capture import NOTHING_HANDED_ON
from dtrcompile.passes.planning.planners import make_planner
from dtrcompile.passes.program.sizes import Sizes
from dtrcompile.passes.torch_private import (
    SkipFrame,
    TensorifyScalarRestartAnalysis,
    exceptions_allowed_to_be_fallback,
    top_saved_tensors_hooks,
)
from dtrcompile.passes.untraced import untraced
from dtrcompile.report import drop_report
from dtrcompile.steps.autograd_nodes import backward_node, waits
from dtrcompile.steps.calls import Call
from dtrcompile.steps.family import Family, Values
from dtrcompile.steps.planned import Assignment, Code, NextAssignment, Planned
from dtrcompile.steps.step_peak import StepPeak
from dtrcompile.steps.symbols import Symbols
from dtrcompile.steps.waiting import Arguments, Waiting

_KEPT_GRADIENTS = (
    "Gradients of an earlier backward that are still in .grad are a part of that: call"
    " optimizer.zero_grad(set_to_none=True) before the step, if they are not meant to be added up."
)
# Raised by a compilation, these have Dynamo end the graph elsewhere, and the step goes on.
_DYNAMO_GOES_ON = (
    *exceptions_allowed_to_be_fallback,
    SkipFrame,
    TensorifyScalarRestartAnalysis,
)
_SERIALS = itertools.count()
# What is returned is much if it is this part of the smallest peak.
_LARGE_RETURNED_PART = 0.02


class Compile(Protocol):
    """Compiles a graph; see `dtrcompile.compilation.source.GraphSource.compile`."""

    def __call__(
        self, assignment: Assignment, next_assignment: NextAssignment | None = None
    ) -> Code:
        """Compile it for an assignment, or for the next where that is asked for."""


@dataclass(frozen=True)
class Returned:
    """What a graph returns to a caller who may give it up before backward.

    Attributes:
        size_bytes: 0 where nothing can be given up.
        float_bytes: the same of what a loss may be computed from, in float32 at least.
        has_loss: a loss is among it, so that nothing is likely to be computed from the rest.
    """

    size_bytes: int = 0
    float_bytes: int = 0
    has_loss: bool = False

    @property
    def loss_bytes(self) -> int:
        """About what a loss outside holds at most above it, until that can be seen.

        It is more for few losses only (tests/unit/test_loss_bytes.py).
        """
        return 0 if self.has_loss else 4 * self.float_bytes

    @property
    def loss_bytes_if_dropped(self) -> int:
        """The same where what was returned itself is gone by then."""
        return max(0, self.loss_bytes - self.size_bytes)

    @property
    def usual_loss_bytes_if_dropped(self) -> int:
        """The same for cross-entropy.

        It keeps the logarithms of probabilities; its backward reads their gradient, and makes that
        of the scores.
        """
        return 0 if self.has_loss else max(0, 3 * self.float_bytes - self.size_bytes)

    @property
    def kept_loss_bytes(self) -> int:
        """About what a loss outside holds at most while the graph's backward runs.

        The mean that some of PyTorch's losses return is in the storage of the values that it is of
        (`dtrcompile.outside.loss`).
        """
        return 0 if self.has_loss else self.float_bytes

    def is_much(self, peak_bytes: int) -> bool:
        """Whether a graph of that peak may be smaller by much if it is given up."""
        return self.size_bytes > _LARGE_RETURNED_PART * peak_bytes


class GraphState(enum.Enum):
    """See the table above."""

    NEW = enum.auto()
    PROVISIONAL = enum.auto()
    PLANNED = enum.auto()
    OUTDATED = enum.auto()
    REFUSED = enum.auto()


class StepLedger(Protocol):
    """What a graph asks of the ledger that shares a budget out over the graphs of a step."""

    options: Options
    surroundings: Surroundings
    optimizer_steps: OptimizerSteps
    step_check: StepCheck | None

    @property
    def is_recording(self) -> bool:
        """Whether calls are recorded, and may release what they saved."""

    def compile_first(self, graph: SharedGraph, more_follow: bool) -> None:
        """Compile a new graph beside what waits for its backward."""

    def add(self, graph: SharedGraph) -> None:
        """A graph was compiled."""

    def abandon_step(self) -> None:
        """A graph could not be compiled."""

    def holding_calls(self) -> Counter[int]:
        """Of each graph, by serial, the calls that hold what they saved."""

    def anything_waits(self) -> bool:
        """Whether the backward of any call is still to come."""

    def look_beside(self, graph: SharedGraph, kept_bytes: int) -> None:
        """What lies beside a graph changed."""

    def before_call(self, graph: SharedGraph) -> Counter[int]:
        """A graph is about to be called."""

    def after_call(
        self, graph: SharedGraph, args: Sequence[Any], result: Any, before: Counter[int], node: Any
    ) -> Call[SharedGraph]:
        """A graph was called."""

    def unforeseen_call(self, graph: SharedGraph) -> None:
        """The step takes a form that the graph was not planned for."""

    def larger_call(self) -> None:
        """The loss outside of a graph is estimated from smaller calls."""

    def collect_garbage(self) -> None:
        """A backward begins in a step that may be recorded."""

    def collect_after_compiling(self) -> None:
        """A graph is called in a step that may be recorded."""

    def before_backward(self, graph: SharedGraph, waiting: Waiting) -> None:
        """The backward of a call is about to run."""


class SharedGraph:
    """The callable that Dynamo runs: a compiled graph that can be compiled again."""

    def __init__(
        self,
        ledger: StepLedger,
        compile_with: Compile,
        more_follow: bool,
        *,
        graph: int,
        symbols: Symbols,
        step_peak: StepPeak,
        parameters: Iterable[nn.Parameter],
        read: Mapping[int, StorageWeakRef],
        received: Sequence[int],
        returned: Returned,
    ) -> None:
        """
        Args:
            read: the storages, by identity, that its first call reads whole.
            received: bytes of the inputs that were computed from what needs gradients.
            returned: the outputs that may be given up before backward.
        """
        self.read = read
        self.received = received
        self.returned = returned
        self.ledger = ledger
        self.graph = graph
        self.serial = next(_SERIALS)
        self.compile_with = compile_with
        self.symbols = symbols
        self.code: Code
        # The unbudgeted peak of the training step that the code was chosen for.
        self.decided_with = 0
        # The values of the symbols in the present call, or the last.
        self.values: Values = symbols.hints()
        # The values of the symbols that the step was planned for.
        self.step_values = self.values
        # Of each symbol, the largest value at which a loss outside of the graph was looked at.
        self.loss_values = self.values
        self.step_peak = step_peak
        options = ledger.options
        self.family = Family(
            symbols,
            self._compile_for,
            self.own_bytes,
            lambda number: drop_report(graph, number),
            make_planner(options.planner, **options.planner_options()),
            options.most_plans,
        )
        # Autograd nodes of calls whose backward may be still to come -> what these calls hold.
        self.waiting: dict[weakref.ref[Any], Waiting] = {}
        self.state = GraphState.NEW
        # What its calls raise in the state ``REFUSED``.
        self.refusal: InfeasibleBudgetError | None = None
        self.has_run_backward = False
        # What its parameters have in ``.grad`` when it is called, as far as it was planned for it.
        self.kept = KeptGradients()
        self.kept_bytes = ledger.surroundings.kept_bytes(parameters)
        # Where it changed what lies beside the graphs, the plan has to be looked at again.
        self.changes = ledger.surroundings.changes
        # Gradients that an optimizer has used are stale.  Many loops drop them only between forward
        # and backward, so that they are in the way of forward alone; that is learned.
        self.is_stale = self.drops_stale = False
        self.steps_before = ledger.optimizer_steps.count
        # Calls, by graph, that the plan knows to wait for their backward when this graph is called:
        # one entry for each form that a step of it has.
        self.foreseen: list[Counter[int]] = []
        try:
            ledger.compile_first(self, more_follow or options.several_graphs)
        except _DYNAMO_GOES_ON:
            raise
        except BaseException:
            ledger.abandon_step()
            raise
        self.foreseen.append(ledger.holding_calls())
        ledger.add(self)
        if ledger.step_check is None and self.planned is not None:
            ledger.step_check = check_of(torch.device(self.planned.graph.device))

    @property
    def planned(self) -> Planned | None:
        """What is known of the compiled graph, at the sizes of its last call; None where there was
        nothing to plan."""
        if not self.symbols:
            return self.code.what_is_known()
        return self.code.at(self.symbols.sizes(self.values))

    def promised_bytes(self) -> int | None:
        """What the step holds at most while this graph runs, or waits for its backward."""
        planned = self.planned
        if planned is None:
            return None
        others = planned.assignment.others
        return others.outside_bytes + planned.chosen.peak_with(others)

    def counts_kept_gradients(self) -> bool:
        """Whether the promise holds gradients of an earlier backward."""
        return self.beside().kept_bytes > 0

    def counts_optimizers(self) -> bool:
        """Whether the promise holds the state of optimizers."""
        return self.ledger.options.counts_optimizers

    def _begin_step(self, check: StepCheck) -> None:
        """A step begins: have the allocator's peak of the step before compared with the budget."""
        options, planned = self.ledger.options, self.planned
        promised_bytes = self.promised_bytes()
        if planned is None or promised_bytes is None:
            return
        own_bytes = self.own_bytes(planned)
        if own_bytes is None or options.budget.kind is BudgetKind.SHARE:
            return  # of what the graphs hold; nothing was said of the device
        outside_bytes = planned.assignment.others.outside_bytes
        reserved_bytes = options.reserve.resolve(planned.baseline.peak_bytes) or 0
        check.begin(
            Expected(
                allowed_bytes=own_bytes + outside_bytes + reserved_bytes,
                promised_bytes=promised_bytes,
                constant_bytes=planned.chosen.constant_bytes + outside_bytes,
                called_at=called_at(),
            )
        )

    def budget_bytes(self, planned: Planned) -> int | None:
        """The budget of the step, at the sizes of ``planned``; None for the least that can be."""
        assignment = self.assignment
        if assignment.budget_bytes is not None:
            return assignment.budget_bytes
        return self.step_peak.budget_bytes(
            self.ledger.options,
            planned.baseline_peak_bytes,
            planned.available_bytes,
            trains=planned.trains,
            beside=assignment.beside,
        )

    def own_bytes(self, planned: Planned) -> int | None:
        """What the graph may hold of the budget, at the sizes of ``planned``; None for the least
        that can be."""
        budget_bytes = self.budget_bytes(planned)
        outside_bytes = self.assignment.others.outside_bytes
        return None if budget_bytes is None else budget_bytes - outside_bytes

    @property
    def sizes(self) -> Sizes | None:
        """Of the present call, or the last; None where all sizes are fixed."""
        return self.symbols.sizes(self.values) if self.symbols else None

    def _compile_for(self, values: Values, number: int) -> Code:
        sizes = self.symbols.sizes(values)
        assignment = replace(self.assignment, sizes=sizes, number=number)
        known = self.code.what_is_known()
        return self.compile_with(
            assignment if known is None else known.with_loss_at(sizes, assignment)
        )

    def _choose(self, values: Values) -> None:
        """Take the code that suits a call of these sizes; plan and compile it where there is none.

        Raises:
            InfeasibleBudgetError: if no plan holds the budget at these sizes.
        """
        options = self.ledger.options
        if options.is_share and self.symbols:
            at_call = self.code.at(self.symbols.sizes(values))
            if at_call is not None and at_call.trains:
                self.step_peak.see(at_call.baseline.peak_bytes, at_call.around_bytes)
        step_bytes = self.step_peak.size_bytes
        if self.decided_with != step_bytes:
            self.family.reconsider()
        if not (options.is_whole_peak or self.assignment.is_provisional):
            self.code = self._chosen(values)
        elif self.state is GraphState.OUTDATED and not options.is_whole_peak:
            self._hold_provisionally()
        if self.state is GraphState.OUTDATED:
            known = self.code.what_is_known()
            if known is not None and self.assignment.beside != known.assignment.beside:
                self.code.change_assignment(self.assignment)
        # (Not where no plan fits: the next call is refused again.)
        self.values, self.decided_with = values, step_bytes
        self._code_suits()

    def _outgrows(self, values: Values) -> bool:
        """Whether the step that the graph was planned for has to be planned anew, because other
        graphs of it hold more at these sizes too."""
        assignment, others = self.assignment, self.assignment.others
        # (A loss outside of the graph is estimated for any sizes.)
        others_follow = assignment.loss_sizes is None and (
            others.between_bytes or others.gradient_bytes
        )
        is_alone = others.outside_bytes <= assignment.beside.resident_bytes and not (
            others_follow or assignment.is_provisional
        )
        if is_alone or self.ledger.options.is_whole_peak:
            return False
        return any(v > w for v, w in zip(values, self.step_values, strict=True))

    def _look_at_loss(self, values: Values) -> None:
        """Have the loss outside of the graph looked at in a call that is larger than all before."""
        largest = tuple(map(max, values, self.loss_values))
        if largest != self.loss_values:
            self.loss_values = largest
            self.ledger.larger_call()

    def _chosen(self, values: Values) -> Code:
        beside = self.assignment.beside
        try:
            planned = self.code.at(self.symbols.sizes(values)) if beside.step_name else None
            if planned is not None and planned.trains:
                own_bytes = self.own_bytes(planned)
                if own_bytes is not None:
                    budget_bytes = own_bytes + self.assignment.others.outside_bytes
                    beside.check(budget_bytes, planned.around_bytes)
            return self.family.choose(values)
        except InfeasibleBudgetError as refusal:
            if not self.kept_bytes:
                raise
            advised = refusal.with_advice(f"{refusal.advice} {_KEPT_GRADIENTS}".strip())
            if not self.is_stale or self.drops_stale:
                raise advised from None
        return self._chosen_for_dropped(values, advised)

    def _chosen_for_dropped(self, values: Values, refusal: InfeasibleBudgetError) -> Code:
        """Choose as if the present gradients were dropped before backward; that is checked then.

        Raises:
            InfeasibleBudgetError: ``refusal``, if there is no room for them in forward either.
        """
        self.drops_stale = True
        self.ledger.look_beside(self, self.kept.last_bytes)
        try:
            code = self.family.choose(values)
            planned = code.at(self.symbols.sizes(values))
            if planned is not None and self._forward_fits(planned):
                return code
        except InfeasibleBudgetError:
            pass
        self.drops_stale = False
        self.ledger.look_beside(self, self.kept.last_bytes)
        raise refusal

    def _forward_fits(self, planned: Planned) -> bool:
        """Whether forward holds the budget with the gradients that are there."""
        own_bytes = self.own_bytes(planned)
        held_bytes = planned.chosen.forward_peak_bytes + self.kept_bytes
        return own_bytes is None or held_bytes <= own_bytes

    def look_at_kept(self, parameters: list[torch.Tensor], planned: Planned | None) -> None:
        """Backward begins: see whether gradients that existed before forward have been dropped.

        Raises:
            InfeasibleBudgetError: if the budget rests on their being gone.
        """
        are_dropped = all(p.grad is None for p in parameters)
        if are_dropped == self.drops_stale:
            return
        relied, self.drops_stale = self.drops_stale, are_dropped
        self.changes = -1  # to be looked at again
        if not relied or planned is None:
            return
        own_bytes = self.own_bytes(planned)
        held_bytes = planned.own_peak_bytes + self.kept_bytes
        if own_bytes is not None and held_bytes > own_bytes:
            outside_bytes = self.assignment.others.outside_bytes
            raise InfeasibleBudgetError(
                own_bytes + outside_bytes,
                minimum_bytes=held_bytes + outside_bytes,
                advice=_KEPT_GRADIENTS,
            )

    def _hold_provisionally(self) -> None:
        """Compile a provisional graph again if what lies beside it leaves too little room."""
        planned = self.planned
        if planned is None or self.assignment.is_share_of_unknown:
            return
        own_bytes = self.own_bytes(planned)
        if own_bytes is not None and planned.own_peak_bytes > own_bytes:
            self.compile_again(self.assignment)

    def beside(self) -> SurroundingBytes:
        """What lies beside the graphs now, with the gradients that its parameters have."""
        is_dropped = self.is_stale and self.drops_stale
        return self.ledger.surroundings.current.with_kept(0 if is_dropped else self.kept_bytes)

    def _raise_if_refused(self) -> None:
        if self.refusal is not None:
            raise self.refusal

    def __call__(self, *args: Any) -> Any:
        ledger = self.ledger
        self._raise_if_refused()
        kept_bytes = self.kept.bytes_of(args)
        is_stale = False
        if kept_bytes and torch.is_grad_enabled():
            is_stale = ledger.optimizer_steps.count != self.steps_before
        if (
            kept_bytes != self.kept.last_bytes
            or is_stale != self.is_stale
            or ledger.surroundings.changes != self.changes
        ):
            self.is_stale = is_stale
            ledger.look_beside(self, kept_bytes)
        before = ledger.before_call(self)
        if ledger.step_check is not None and not ledger.anything_waits():
            self._begin_step(ledger.step_check)
        self._raise_if_refused()  # when the step before ended
        values = self.symbols.values(args)
        has_other_sizes = values != self.values
        if has_other_sizes and self._outgrows(values):
            self.values = values
            ledger.unforeseen_call(self)
        if has_other_sizes and self.assignment.loss_sizes is not None:
            self._look_at_loss(values)
        if (
            has_other_sizes
            or self.family.loss
            or self.decided_with != self.step_peak.size_bytes
            or self.state is GraphState.OUTDATED
        ):
            self._choose(values)
        ledger.collect_after_compiling()
        # A checkpointed region, or what is saved elsewhere.
        is_hooked = top_saved_tensors_hooks(True) is not None
        planned = None if is_hooked else self.planned
        arguments = None
        is_watched = ledger.is_recording or self.relies_on_others
        if is_watched and planned is not None and planned.graph.can_run_again:
            arguments = Arguments.of(args, draws=planned.graph.draws)
        with running(self, args):
            result = self.code.function(*args)
        node = backward_node(result)
        call = ledger.after_call(self, args, result, before, node) if is_watched else None
        if node is not None:
            self.steps_before = ledger.optimizer_steps.count
            if is_stale:
                node.register_prehook(_looking_at_kept(self, args))
            waiting = Waiting(self, planned, node, arguments, call)
            self.waiting[weakref.ref(node, self._forget)] = waiting
            if planned is not None and not self.has_run_backward:
                self.has_run_backward = True
                saved_bytes = planned.chosen.kept_bytes - planned.returned_bytes
                look_at_backward(node, planned.chosen.peak_bytes, saved_bytes, called_at())
        return result

    @property
    def relies_on_others(self) -> bool:
        """Whether its budget holds only if the caller drops what the graph hands on."""
        return self.assignment.handed_on != NOTHING_HANDED_ON

    def foresees(self, holding: Counter[int]) -> bool:
        """Whether its plan allows for so many calls that wait when it is called."""
        return any(holding <= foreseen for foreseen in self.foreseen)

    @untraced
    def _forget(self, node: weakref.ref[Any]) -> None:
        self.waiting.pop(node, None)

    def compile_first(
        self, assignment: Assignment, next_assignment: NextAssignment | None = None
    ) -> None:
        """Compile it for the first time.

        Args:
            next_assignment: what else may do, if no plan fits; it need not be asked.

        Raises:
            InfeasibleBudgetError: if no plan fits.
        """
        self.assignment = assignment
        self.use(self.compile_with(assignment, next_assignment))

    def compile_again(self, assignment: Assignment) -> None:
        """Compile it for another assignment, and use that code from the next call on.

        Raises:
            InfeasibleBudgetError: if no plan fits; the old code then stays.
        """
        sizes = self.sizes if self.symbols else self.code.sizes
        self.use(self.compile_with(replace(assignment, sizes=sizes)))

    def compile_for_backward(self, assignment: Assignment) -> None:
        """Compile it for the room that the backward of one call finds.

        Raises:
            InfeasibleBudgetError: if no plan fits; the old code then stays.
        """
        before = self.assignment
        self.compile_again(assignment)
        if self.symbols and not before.is_provisional:
            # Calls of other sizes leave other room: they choose among the plans as before.
            self.assignment = before
            self.mark_outdated()

    def keep(self, assignment: Assignment) -> None:
        """Go on with the code that is there, which is right for this assignment too."""
        self.use(self._told(self.code, assignment))

    def tell(self, assignment: Assignment) -> None:
        """Go on with all plans that are there: the next call chooses among them for its sizes.

        What the caller gives up is freed by plans that are made from here on.
        """
        for number, code in list(self.family.codes.items()):
            handed_on = assignment.handed_on & code.assignment.handed_on
            told = self._told(code, replace(assignment, handed_on=handed_on))
            self.family.codes[number] = told
            if code is self.code:
                self.code = told
        self.assignment = replace(assignment, names_minimum=True)
        self.mark_outdated()

    def _told(self, code: Code, assignment: Assignment) -> Code:
        """The same code for another assignment, which may be of other sizes."""
        known = code.what_is_known()
        if known is not None and self.symbols:
            own_sizes = code.sizes or self.symbols.sizes(self.symbols.hints())
            assignment = known.with_loss_at(own_sizes, assignment)
        code.change_assignment(assignment)
        own = code.assignment
        return replace(code, assignment=replace(assignment, sizes=own.sizes, number=own.number))

    def _code_suits(self) -> None:
        """The code that is there is what the next call runs."""
        if self.state is not GraphState.REFUSED:
            is_provisional = self.assignment.is_provisional
            self.state = GraphState.PROVISIONAL if is_provisional else GraphState.PLANNED

    def mark_outdated(self) -> None:
        """What lies beside the graph changed: the next call chooses its plan anew."""
        self.family.reconsider()
        if self.state is not GraphState.REFUSED:
            self.state = GraphState.OUTDATED

    def refuse(self, refusal: InfeasibleBudgetError) -> None:
        """Its step does not fit: every call raises this from here on."""
        self.state, self.refusal = GraphState.REFUSED, refusal

    def use(self, code: Code) -> None:
        """Run this from the next call on, whatever was compiled before or since."""
        self.code = code
        # A later refusal reaches the user, so it names a minimum.
        self.assignment = replace(code.assignment, sizes=None, number=0, names_minimum=True)
        self.decided_with = self.step_peak.size_bytes
        self.step_values = self.values
        self._code_suits()
        self.family.restart(code)
        code.restore()

    @property
    def is_recorded(self) -> bool:
        """Whether the step that runs is recorded."""
        return self.ledger.is_recording

    def collect_garbage(self) -> None:
        """A backward begins: see the ledger."""
        self.ledger.collect_garbage()

    def before_backward(self, waiting: Waiting) -> None:
        """The backward of one of its calls is about to run.

        Raises:
            InfeasibleBudgetError: if there is no room for it.
        """
        self.ledger.before_backward(self, waiting)

    def waits(self) -> bool:
        """Whether the backward of any of its calls is still to come."""
        return any(waits(n) for n in list(self.waiting))

    def drop_done(self) -> None:
        """Drop the calls whose backward has run, though somebody still holds their results."""
        for node in [n for n in list(self.waiting) if not waits(n)]:
            self._forget(node)


GraphCall: TypeAlias = Call[SharedGraph]


def planned_of(graph: SharedGraph) -> Planned:
    """What is known of a graph that was planned."""
    assert graph.planned is not None
    return graph.planned


def _looking_at_kept(graph: SharedGraph, args: Sequence[Any]) -> Callable[[Any], None]:
    planned, parameters = graph.planned, graph.kept.of(args)

    @untraced
    def look(_gradients: Any) -> None:
        graph.look_at_kept(parameters, planned)

    return look
