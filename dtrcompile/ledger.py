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

import itertools
import logging
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import fx, nn

from dtrcompile.options import BudgetKind, Options
from dtrcompile.passes.capture import Captured, output_arguments
from dtrcompile.passes.errors import InfeasibleBudgetError, format_bytes
from dtrcompile.passes.measured import Measured
from dtrcompile.passes.pipeline import Outcome, Terms, placeholders
from dtrcompile.passes.plan import Plan
from dtrcompile.passes.planners import keep_all, make_planner, minimum_plan
from dtrcompile.passes.planners.base import Planner
from dtrcompile.passes.program import Program, StorageKind
from dtrcompile.passes.replay import PlanStats, replay
from dtrcompile.passes.sharing import (
    Demand,
    GraphBytes,
    Rest,
    cheapest_share,
    rest_of,
    share,
    step_peak_bytes,
    with_rest,
    without_rest,
)
from dtrcompile.passes.torch_private import FakeTensor, top_saved_tensors_hooks

log = logging.getLogger("dtrcompile")

# A graph that others follow keeps its default split in the first step if that takes no more than
# this part of what is left, so that an ample budget costs no second compile.
_SMALL = 1 / 8
# Times that a share is lowered when the measured graphs turn out larger than the planned ones.
_MOST_TRIES = 4
_LESS = 0.85
_SEVERAL_GRAPHS = (
    "Or pass options={'several_graphs': True}: an earlier graph of this step was compiled as if it"
    " were alone, and then each saves as little as it can until all of the step are known."
)
# Times that a step is looked at because calls came that were not foreseen.
_MOST_SURPRISES = 4


@dataclass(frozen=True, slots=True)
class Assignment:
    """What a graph was told when it was last compiled.

    Attributes:
        budget_bytes: of the step, None: resolve the options' for this graph.
        rest: the other graphs, as far as they are known.
        more_follow: other graphs will run between this one's forward and backward, which ones is
            not known yet.
        is_share_of_unknown: the budget is a share of the whole step's peak, which is not known yet.
        note: for the report.
    """

    budget_bytes: int | None = None
    rest: Rest = field(default_factory=Rest)
    more_follow: bool = False
    is_share_of_unknown: bool = False
    note: str = ""

    def terms(self, measured: Measured, budget_bytes: int | None) -> Terms:
        """The terms of a graph whose default split holds ``measured``.

        Args:
            budget_bytes: what the options come to for this graph; None for the smallest.
        """
        if self.budget_bytes is not None:
            budget_bytes = self.budget_bytes
        more_follow = self.more_follow and measured.backward_peak_bytes > 0  # else it saves nothing
        if self.is_share_of_unknown:
            return Terms(None, more_follow=more_follow)
        own_bytes = measured.peak_bytes - _constants(measured)
        is_small = _is_small(own_bytes, budget_bytes, self.rest.outside_bytes)
        return Terms(budget_bytes, self.rest, more_follow and not is_small)


def _is_small(own_bytes: int, budget_bytes: int | None, outside_bytes: int) -> bool:
    """Whether a graph need not be made smaller yet, though others follow."""
    return budget_bytes is not None and own_bytes <= _SMALL * (budget_bytes - outside_bytes)


def _constants(measured: Measured) -> int:
    return measured.split.get("parameters", 0) + measured.split.get("inputs", 0)


@dataclass(frozen=True)
class Planned:
    """What the ledger knows of a compiled graph."""

    program: Program
    assignment: Assignment
    available_bytes: int | None
    baseline: GraphBytes
    chosen: GraphBytes
    is_default: bool
    saves_least: bool

    @staticmethod
    def of(outcome: Outcome, assignment: Assignment, available_bytes: int | None) -> Planned:
        """From what the compilation found."""
        captured = outcome.captured
        constant_bytes = captured.program.constant_bytes
        gradient_bytes = _parameter_gradient_bytes(captured)
        return Planned(
            captured.program,
            assignment,
            available_bytes,
            outcome.baseline_measured.graph_bytes(constant_bytes, gradient_bytes),
            outcome.measured.graph_bytes(constant_bytes, gradient_bytes),
            outcome.chosen is None,
            outcome.saves_least,
        )

    def stats_of(self, plan: Plan) -> PlanStats:
        """Of another plan, made of the program with the rest of a step."""
        return replay(self.program, without_rest(plan, self.program))[1]

    def planned_bytes(self, stats: PlanStats) -> GraphBytes:
        """What a plan holds."""
        return GraphBytes(
            self.program.constant_bytes,
            stats.forward_peak_bytes,
            stats.backward_peak_bytes,
            stats.boundary_bytes,
            self.chosen.gradient_bytes,
        )


def _parameter_gradient_bytes(captured: Captured) -> int:
    """Bytes of the gradients that stay after backward: those of parameters."""
    if captured.backward is None:
        return 0
    program = captured.program
    # Backward returns one gradient for each input of forward.
    storages = {
        captured.storage_of.get(captured.owner(gradient))
        for primal, gradient in zip(
            placeholders(captured.forward), output_arguments(captured.backward), strict=False
        )
        if isinstance(gradient, fx.Node)
        and (s := captured.storage_of.get(primal)) is not None
        and program.storages[s].kind is StorageKind.PARAMETER
    }
    return sum(program.storages[s].size_bytes for s in storages if s is not None)


@dataclass(frozen=True)
class Code:
    """A compiled graph.

    Attributes:
        function: to call.
        what_is_known: tells what is known of it: more when its backward was compiled too.
        restore: makes its report the graph's again, after what was compiled since.
    """

    function: Callable[..., Any]
    what_is_known: Callable[[], Planned | None]
    restore: Callable[[], None]


Compile = Callable[[Assignment], Code]


class SharedGraph:
    """The callable that Dynamo runs: a compiled graph that can be compiled again."""

    def __init__(self, ledger: Ledger, compile_with: Compile, more_follow: bool) -> None:
        self.ledger = ledger
        self.serial = next(_SERIALS)
        self.compile_with = compile_with
        # Autograd nodes of calls whose backward may be still to come -> what these calls ran with;
        # None for those that hold nothing, because hooks took what they saved.
        self.waiting: dict[weakref.ref[Any], Planned | None] = {}
        # Of the step that this graph is one of: it must not run over its budget later on.
        self.refusal: InfeasibleBudgetError | None = None
        assignment = ledger.first_assignment(more_follow or ledger.options.several_graphs)
        # Calls, by graph, that the plan knows to wait for their backward when this graph is called.
        self.foreseen = ledger.holding_calls()
        try:
            with ledger.advising():
                self.code = compile_with(assignment)
        except BaseException:
            ledger.abandon_step()
            raise
        ledger.add(self)

    @property
    def planned(self) -> Planned | None:
        """What is known of the compiled graph; None where there was nothing to plan."""
        return self.code.what_is_known()

    def __call__(self, *args: Any) -> Any:
        ledger = self.ledger
        before = ledger.before_call(self)
        if self.refusal is not None:
            raise self.refusal
        # A checkpointed region, or what is saved elsewhere.
        is_hooked = top_saved_tensors_hooks(True) is not None
        result = self.code.function(*args)
        node = _backward_node(result)
        if node is not None:
            planned = None if is_hooked else self.planned
            self.waiting[weakref.ref(node, self._forget)] = planned
        if ledger.observing:
            ledger.after_call(self, args, result, before, awaits_backward=node is not None)
        return result

    def _forget(self, node: weakref.ref[Any]) -> None:
        self.waiting.pop(node, None)

    def compile_again(self, assignment: Assignment) -> None:
        """Replace the compiled code; used from the next call on.

        Raises:
            InfeasibleBudgetError: then the old code stays.
        """
        self.code = self.compile_with(assignment)

    def use(self, code: Code) -> None:
        """Go back to what it was compiled to earlier."""
        self.code = code
        code.restore()

    def waits(self) -> bool:
        """Whether the backward of any of its calls is still to come."""
        return any(_waits(n) for n in list(self.waiting))

    def drop_done(self) -> None:
        """Forget the calls whose backward has run, though somebody holds their result."""
        for node in [n for n in list(self.waiting) if not _waits(n)]:
            self._forget(node)


def _backward_node(result: Any) -> Any:
    """The autograd node of a compiled graph's outputs, None without one."""
    if not torch.is_grad_enabled():
        return None
    for output in result if isinstance(result, (tuple, list)) else (result,):
        node = output.grad_fn if isinstance(output, torch.Tensor) else None
        # An output that is a view is made from the compiled function's by autograd.  Asked of the
        # type, because reading the attribute unpacks what was saved, or raises if it is gone.
        while node is not None and not hasattr(type(node), "saved_tensors"):
            node = node.next_functions[0][0] if node.next_functions else None
        if node is not None:
            return node
    return None


def _waits(reference: weakref.ref[Any]) -> bool:
    """Whether a node still holds its saved tensors: it lives, and backward has not run."""
    node = reference()
    if node is None:
        return False
    try:
        # (``saved_tensors`` would unpack them, and so compute a checkpointed block again.)
        return node._raw_saved_tensors is not None
    except RuntimeError:
        return False


@dataclass(frozen=True)
class _Call:
    """One call of a graph: addresses and bytes of its tensors.

    Attributes:
        parameters: inputs that gradients are accumulated for.
        before: calls of each graph that held what they saved.
    """

    graph: SharedGraph
    inputs: dict[int, int]
    parameters: dict[int, int]
    outputs: dict[int, int]
    before: Counter[int]
    awaits_backward: bool


class Ledger:
    """The graphs of one set of options, and who may hold how much."""

    def __init__(self, options: Options) -> None:
        self.options = options
        self.lock = threading.RLock()
        self.graphs: list[weakref.ref[SharedGraph]] = []
        self.calls: list[_Call] = []
        self.observing = False
        self.is_partial = False  # the step being observed had begun before
        self.surprises = 0

    # While the first step runs

    def first_assignment(
        self, more_follow: bool, of_graph: SharedGraph | None = None
    ) -> Assignment:
        """For a graph that is compiled now, while others may wait for their backward.

        Args:
            of_graph: where it was compiled before; then it may itself be among those that wait.
        """
        if self.options.is_whole_peak:
            return Assignment()  # the whole peak of the step: every graph may have its own
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
            return Assignment(more_follow=more_follow, is_share_of_unknown=True, note=note)
        note = ""
        if waiting:
            note = f"{waiting} earlier graph(s) of the step hold {format_bytes(outside)}"
        if more_follow:
            note = f"{note}; more graphs follow".lstrip("; ")
        return Assignment(rest=Rest(outside_bytes=outside), more_follow=more_follow, note=note)

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
            self.settle(calls)
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
        assignment = self.first_assignment(more_follow=True, of_graph=graph)
        chosen, outside_bytes = planned.chosen, assignment.rest.outside_bytes
        budget_bytes = None
        if not assignment.is_share_of_unknown:
            budget_bytes = self.options.resolve_budget_bytes(
                planned.baseline.peak_bytes, planned.available_bytes
            )
        own_bytes = chosen.peak_bytes - chosen.constant_bytes
        with self.advising():
            if not planned.saves_least and not _is_small(own_bytes, budget_bytes, outside_bytes):
                graph.compile_again(assignment)
            elif budget_bytes is not None and outside_bytes + chosen.peak_bytes > budget_bytes:
                raise InfeasibleBudgetError(
                    budget_bytes, minimum_bytes=outside_bytes + chosen.peak_bytes
                )

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
            results = result if isinstance(result, (tuple, list)) else (result,)
            leaves = [a for a in args if isinstance(a, torch.Tensor) and a.is_leaf]
            parameters = _storages([a for a in leaves if a.requires_grad])
            inputs, outputs = _storages(args), _storages(results)
            self.calls.append(_Call(graph, inputs, parameters, outputs, before, awaits_backward))

    # When it is over

    def settle(self, calls: Sequence[_Call]) -> None:
        """Plan the graphs of a step together, and compile them again where that changes anything.

        Raises:
            InfeasibleBudgetError: if the step does not fit.
        """
        sequence = [c.graph for c in calls if c.graph.planned is not None]
        graphs = list(dict.fromkeys(sequence))
        is_inference = all(_of(g).program.boundary is None for g in graphs)
        was_guessed = any(
            (a := _of(g).assignment).more_follow or a.is_share_of_unknown for g in graphs
        )
        if is_inference or (len(sequence) < 2 and not was_guessed):
            return
        step = _Step(
            graphs,
            [graphs.index(g) for g in sequence],
            _external_bytes(calls),
            _gradient_bytes(calls),
            _result_bytes(calls),
            self.options,
        )
        baseline_bytes = step.peak([_of(g).baseline for g in graphs])
        budget_bytes = self.options.resolve_budget_bytes(
            baseline_bytes, _of(graphs[0]).available_bytes
        )
        if budget_bytes is None:
            step.compile_smallest()
        else:
            step.compile_within(budget_bytes)


def _of(graph: SharedGraph) -> Planned:
    assert graph.planned is not None
    return graph.planned


def _storages(values: Sequence[Any]) -> dict[int, int]:
    """Address -> bytes of the storages of tensors; no tensor is held."""
    return {
        v.untyped_storage().data_ptr(): v.untyped_storage().nbytes()
        for v in values
        if isinstance(v, torch.Tensor)
        and v.layout is torch.strided
        and not isinstance(v, FakeTensor)
    }


def _external_bytes(calls: Sequence[_Call]) -> int:
    """Inputs of all calls, each storage once, without what the calls hand on to one another."""
    inputs: dict[int, int] = {}
    for call in calls:
        inputs.update(call.inputs)
    for call in calls:
        for address in call.outputs:
            inputs.pop(address, None)
    return sum(inputs.values())


def _gradient_bytes(calls: Sequence[_Call]) -> list[int]:
    """For each planned call, gradients that no later call, whose backward runs before, has made."""
    made: dict[int, int] = {}
    new_bytes: list[int] = []
    for call in reversed(calls):
        if call.graph.planned is not None:
            before = sum(made.values())
            made.update(call.parameters)
            new_bytes.append(sum(made.values()) - before)
    return new_bytes[::-1]


def _result_bytes(calls: Sequence[_Call]) -> list[int]:
    """For each planned call, what it returns that no call takes: the caller may keep it."""
    taken = {address for call in calls for address in call.inputs}
    return [
        sum(size for address, size in call.outputs.items() if address not in taken)
        for call in calls
        if call.graph.planned is not None
    ]


class _Step:
    """The graphs of one step, and what they hold together.

    Args:
        sequence: the graph of each call, in order.
        external_bytes: constants of all graphs, as in `rest_of`.
        gradient_bytes: of each call, gradients that its backward is the first to make.
        result_bytes: of each call, outputs that stay with the caller.
    """

    def __init__(
        self,
        graphs: list[SharedGraph],
        sequence: list[int],
        external_bytes: int,
        gradient_bytes: list[int],
        result_bytes: list[int],
        options: Options,
    ) -> None:
        self.graphs = graphs
        self.sequence = sequence
        self.external_bytes = external_bytes
        self.gradient_bytes = gradient_bytes
        self.result_bytes = result_bytes
        planner: Planner = make_planner(options.planner, **options.planner_options())
        # To find who may keep what; the compilation plans with all candidates.
        self.quick = planner.for_minimum()

    def peak(self, held: Sequence[GraphBytes]) -> int:
        return step_peak_bytes(self.in_order(held), self.external_bytes)

    def in_order(self, held: Sequence[GraphBytes]) -> list[GraphBytes]:
        """One entry a call; its results stay after its backward, as gradients do."""
        calls = zip(self.sequence, self.gradient_bytes, self.result_bytes, strict=True)
        return [
            replace(held[i], gradient_bytes=min(held[i].gradient_bytes, new_bytes) + result_bytes)
            for i, new_bytes, result_bytes in calls
        ]

    def rest(self, held: Sequence[GraphBytes], i: int) -> Rest:
        """What graph ``i`` sees of the others; the strictest, where it runs several times."""
        calls = self.in_order(held)
        rests = [
            rest_of(calls, k, self.external_bytes) for k, j in enumerate(self.sequence) if j == i
        ]
        outside = max(r.outside_bytes for r in rests)
        waiting = max(r.outside_bytes + r.between_bytes for r in rests)
        backward = max(r.outside_bytes + r.gradient_bytes for r in rests)
        return Rest(outside, waiting - outside, backward - outside)

    def rest_of_calls(self, held: Sequence[GraphBytes], i: int, peak_bytes: int) -> Rest:
        """What graph ``i`` sees, so that it keeps no more than ``held`` if it is called again.

        It is then among its own others, which is only right if its plan keeps what they do.
        """
        rest = self.rest(held, i)
        if self.sequence.count(i) == 1:
            return rest
        room_bytes = peak_bytes - rest.outside_bytes - held[i].boundary_bytes
        return replace(rest, between_bytes=max(rest.between_bytes, room_bytes))

    def note(self, rest: Rest) -> str:
        """For the report."""
        if len(self.sequence) == 1:
            return ""
        return (
            f"one of {len(self.sequence)} graphs of the step: the others hold"
            f" {format_bytes(rest.outside_bytes)} beside it, and"
            f" {format_bytes(rest.between_bytes)} between its forward and its backward"
        )

    def compile_within(self, budget_bytes: int) -> None:
        """Compile every graph for the step's budget."""
        demands = [self.demand(i) for i in range(len(self.graphs))]
        # What the first step ran with saves the least; it is there, if nothing better is found.
        codes = [g.code for g in self.graphs]
        first_bytes = self.peak([_of(g).chosen for g in self.graphs])
        scale = 1.0
        for attempt in range(_MOST_TRIES):
            planned = self.shared(demands, scale, budget_bytes)
            last = attempt == _MOST_TRIES - 1 or planned is None
            if planned is None and first_bytes > budget_bytes:
                planned = [self.least(i) for i in range(len(self.graphs))]
            if planned is None:
                break
            try:
                self.compile_all(planned, budget_bytes)
                return
            except InfeasibleBudgetError as refusal:
                if last and first_bytes > budget_bytes:
                    raise InfeasibleBudgetError(
                        budget_bytes, minimum_bytes=first_bytes, operator=refusal.operator
                    ) from refusal
            scale *= _LESS
        for graph, code in zip(self.graphs, codes, strict=True):
            if graph.code is not code:
                graph.use(code)

    def compile_smallest(self) -> None:
        """Compile again what the step's peak stands at, as long as that makes it smaller."""
        tried: set[int] = set()
        while True:
            held = [_of(g).chosen for g in self.graphs]
            peak_bytes = self.peak(held)
            rests = [self.rest(held, i) for i in range(len(self.graphs))]
            stands_at = [
                i
                for i, (h, rest) in enumerate(zip(held, rests, strict=True))
                if i not in tried
                and rest.outside_bytes + h.peak_with(rest) >= peak_bytes
                and self.can_be_smaller(i, rest, peak_bytes)
            ]
            if not stands_at:
                return
            i = stands_at[0]
            tried.add(i)
            graph, code = self.graphs[i], self.graphs[i].code
            rest = self.rest_of_calls(held, i, peak_bytes)
            graph.compile_again(Assignment(rest=rest, note=self.note(rest)))
            held[i] = _of(graph).chosen
            if self.peak(held) >= peak_bytes:
                graph.use(code)

    def can_be_smaller(self, i: int, rest: Rest, peak_bytes: int) -> bool:
        """Whether a graph that the step's peak stands at was made for another rest of the step."""
        planned = _of(self.graphs[i])
        if planned.assignment.more_follow:
            # It was to save the least, at the price of its own peak.
            own_bytes = planned.chosen.peak_with(replace(rest, between_bytes=0))
            return rest.outside_bytes + own_bytes >= peak_bytes
        return rest.between_bytes > 0

    def shared(
        self, demands: Sequence[Demand], scale: float, budget_bytes: int
    ) -> list[GraphBytes] | None:
        """The plans at the share that costs the least, quotas multiplied by ``scale``."""

        def fit(quotas: Sequence[int]) -> tuple[float, list[GraphBytes]] | None:
            return self.plan([int(q * scale) for q in quotas], budget_bytes)

        if len(self.sequence) > len(self.graphs):
            found = cheapest_share(demands, fit, lambda planned: planned[0])
        else:
            found = share(demands, fit)
        return None if found is None else found[1]

    def demand(self, i: int) -> Demand:
        return Demand(self.least(i).kept_bytes, _of(self.graphs[i]).baseline.kept_bytes)

    def least(self, i: int) -> GraphBytes:
        """The plan that keeps the least, as the referee sees it."""
        planned = _of(self.graphs[i])
        program = planned.program
        if program.boundary is None:
            return planned.chosen
        between = replay(program, keep_all(program))[1].peak_bytes
        plan = minimum_plan(with_rest(program, Rest(between_bytes=between)), self.quick)
        return planned.planned_bytes(planned.stats_of(plan))

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
            for g, quota in zip(self.graphs, quotas, strict=True)
            for b in [_of(g).baseline]
        ]
        cost_ns = 0.0
        for i, graph in enumerate(self.graphs):
            planned = _of(graph)
            program = planned.program
            rest = self.rest(held, i)
            own_bytes = budget_bytes - rest.outside_bytes
            between = max(0, own_bytes - program.constant_bytes - quotas[i])
            is_last = i == self.sequence[-1] and self.sequence.count(i) == 1
            if is_last or planned.baseline.kept_bytes <= quotas[i]:
                between = 0
            try:
                whole = with_rest(program, replace(rest, between_bytes=between))
                plan = self.quick.plan(whole, own_bytes)
            except InfeasibleBudgetError:
                return None
            stats = planned.stats_of(plan)
            held[i] = planned.planned_bytes(stats)
            cost_ns += self.sequence.count(i) * stats.cost_ns
        return (cost_ns, held) if self.peak(held) <= budget_bytes else None

    def compile_all(self, held: Sequence[GraphBytes], budget_bytes: int) -> None:
        """Compile the graphs in order; each sees what those before it really hold."""
        held = list(held)
        for i, graph in enumerate(self.graphs):
            rest = self.rest_of_calls(held, i, budget_bytes)
            planned = _of(graph)
            fits_as_it_is = planned.is_default and (
                rest.outside_bytes + planned.chosen.peak_with(rest) <= budget_bytes
            )
            if not fits_as_it_is:
                graph.compile_again(Assignment(budget_bytes, rest, note=self.note(rest)))
            held[i] = _of(graph).chosen
        peak = self.peak(held)
        log.info(
            "a step of %d graphs: promised %s of %s",
            len(self.sequence),
            format_bytes(peak),
            format_bytes(budget_bytes),
        )
        if peak > budget_bytes:
            raise InfeasibleBudgetError(budget_bytes)


_SERIALS = itertools.count()

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
