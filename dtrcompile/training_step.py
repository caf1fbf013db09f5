"""The graphs of one training step, planned together once all of them are known."""

from __future__ import annotations

import functools
import logging
import operator
import weakref
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeGuard

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from dtrcompile.beside import NOTHING_BESIDE, Beside
from dtrcompile.options import Options
from dtrcompile.outside import LossBytes
from dtrcompile.passes.device.allocators import EXACT, Allocator
from dtrcompile.passes.errors import InfeasibleBudgetError, format_bytes
from dtrcompile.passes.fitting.fit import as_it_is
from dtrcompile.passes.fitting.sharing import (
    Demand,
    GraphBytes,
    Rest,
    cheapest_share,
    rest_of,
    share,
    step_peak_bytes,
    with_rest,
)
from dtrcompile.passes.graphs.capture import ALL_HANDED_ON, NOTHING_HANDED_ON, HandedOn
from dtrcompile.passes.planning.planners import make_planner, minimum_plan
from dtrcompile.passes.planning.planners.base import Planner
from dtrcompile.passes.program.replay import replay
from dtrcompile.passes.torch_private import FakeTensor, storage_use_count
from dtrcompile.planned import Assignment, Planned
from dtrcompile.shared_graph import SharedGraph
from dtrcompile.waiting import PYTHONS_HOLD, are_unheld, saved_tensors, waits

log = logging.getLogger("dtrcompile")

# Times that a share is lowered when the measured graphs turn out larger than the planned ones.
_MOST_TRIES = 4
_LESS = 0.85
# A graph that is the whole step is planned again if this part of its peak is not there.
_WORTHWHILE = 0.02


@dataclass
class Call:
    """One call of a graph: addresses and bytes of its tensors.

    Attributes:
        parameters: inputs that gradients are accumulated for.
        before: calls of each graph that held what they saved.
        node: autograd's, of a call that awaits its backward.
        given: storages of its inputs by address.
        storages, addresses: of what it returned; None for what is no tensor.
        has_gradient: of what it returned, whether autograd made it a part of its graph.
        live_outputs: indices of what was still held when its backward began.
        loss: what is held between it and the loss, above what it returned and nobody held any more;
            None where that is not known.
        holders: of the gradients that its backward was given.
        held_tangent_bytes: of these gradients, what somebody held when its backward was done; None
            before that.
        is_unused: its backward has not run; None where that is not known.
        outliving: of `inputs`, those that were still there when the next step began.
    """

    graph: SharedGraph
    inputs: dict[int, int]
    parameters: dict[int, int]
    outputs: dict[int, int]
    before: Counter[int]
    awaits_backward: bool
    node: weakref.ref[Any] | None = None
    given: dict[int, StorageWeakRef] = field(default_factory=dict)
    storages: Sequence[StorageWeakRef | None] = ()
    addresses: Sequence[int] = ()
    has_gradient: Sequence[bool] = ()
    live_outputs: frozenset[int] | None = None
    loss: LossBytes | None = None
    holders: tuple[int, ...] = ()
    held_tangent_bytes: int | None = None
    is_unused: bool | None = None
    outliving: dict[int, int] = field(default_factory=dict)

    @staticmethod
    def of(
        graph: SharedGraph, args: Sequence[Any], result: Any, before: Counter[int], node: Any
    ) -> Call:
        """From what the graph was called with, and returned."""
        results = result if isinstance(result, (tuple, list)) else (result,)
        leaves = [a for a in args if isinstance(a, torch.Tensor) and a.is_leaf]
        parameters = [a for a in leaves if a.requires_grad]
        allocator = EXACT if graph.planned is None else graph.planned.allocator
        inputs, accumulated, outputs = (
            _storages(values, allocator) for values in (args, parameters, results)
        )
        is_training = node is not None
        reference = weakref.ref(node) if is_training else None
        storages = [StorageWeakRef(r.untyped_storage()) if is_counted(r) else None for r in results]
        given = {
            s.data_ptr(): StorageWeakRef(s)
            for a in args
            if is_counted(a)
            for s in [a.untyped_storage()]
        }
        addresses = [r.untyped_storage().data_ptr() if is_counted(r) else 0 for r in results]
        return Call(
            graph,
            inputs,
            accumulated,
            outputs,
            before,
            is_training,
            reference,
            given,
            storages,
            addresses,
            [isinstance(r, torch.Tensor) and r.grad_fn is not None for r in results],
        )

    def see_next_step(self) -> None:
        """Another step begins: which of the inputs are there beside its own?"""
        self.outliving = {
            address: size
            for address, size in self.inputs.items()
            if address in self.given and not self.given[address].expired()
        }

    @property
    def has_live_results(self) -> bool:
        """Whether somebody holds something that it returned."""
        return any(s is not None and not s.expired() for s in self.storages)

    @property
    def live_bytes(self) -> int:
        """Of the outputs that were still held when its backward began, its inputs left out."""
        return self.bytes_of(self.live_outputs or ())

    def bytes_of(self, indices: Iterable[int]) -> int:
        """Of outputs, each storage once, without what the call was given."""
        addresses = {self.addresses[i] for i in indices} - self.inputs.keys()
        return sum(size for address, size in self.outputs.items() if address in addresses)

    def gone_bytes(self, taken: set[int]) -> int:
        """Of the outputs that no call takes, those that nobody held when its backward began."""
        gone = self.handed_on.outputs or frozenset()
        addresses = {self.addresses[i] for i in gone} - taken
        return sum(size for address, size in self.outputs.items() if address in addresses)

    def see_backward(self, holders: tuple[int, ...], node: Any, loss: LossBytes | None) -> None:
        """The backward of ``node`` begins; what the graph itself saved is not held by others.

        Args:
            loss: what is held between graphs and the loss.
        """
        counts = {
            i: storage_use_count(s.cdata)
            for i, s in enumerate(self.storages)
            if s is not None and not s.expired()
        }
        saved = saved_tensors(node) or ()
        own = Counter(t.untyped_storage()._cdata for t in saved if is_counted(t))
        del saved
        storages = {i: s.cdata for i, s in enumerate(self.storages) if s is not None}
        # Autograd saves a tensor of its own in place of an output with a gradient, so that saving
        # makes no cycle.  Of any other output it saves the tensor itself, which the caller may
        # hold too.
        self.live_outputs = frozenset(
            i
            for i, n in counts.items()
            if not self.has_gradient[i] or n > own[storages[i]] + PYTHONS_HOLD
        )
        self.holders = holders
        if loss is not None:
            # What the operators read and nobody else holds is gone when they are done.
            gone_bytes = self.gone_bytes(set())
            self.loss = replace(loss, peak_bytes=max(0, loss.peak_bytes - gone_bytes))

    @property
    def handed_on(self) -> HandedOn:
        """What nobody held in its backward."""
        if self.live_outputs is None:
            return NOTHING_HANDED_ON
        returned = {i for i, s in enumerate(self.storages) if s is not None}
        are_given = self.held_tangent_bytes == 0 and are_unheld(self.holders)
        return HandedOn(frozenset(returned - self.live_outputs), are_given)

    @property
    def kept_tangent_bytes(self) -> int:
        """Of the gradients that its backward was given, what is held beyond that.

        Before PyTorch 2.13 autograd holds all of them until backward returns, and no longer.
        """
        return (self.held_tangent_bytes or 0) if ALL_HANDED_ON.tangents else 0

    @property
    def is_done(self) -> bool:
        """Whether its backward has run."""
        return self.node is not None and not self.is_unused and not waits(self.node)


class Form:
    """A form that a step takes: what its calls hold beside their plans.

    Args:
        calls: all of the step, in order.
        graphs: those that were planned, of all forms.
        others: the calls of the other forms, whose inputs may still be there.
        beside: what no graph holds.

    Attributes:
        sequence: the graph of each planned call, in order.
        external_bytes: constants of all graphs, as in `rest_of`, and what lies beside them.
        gradient_bytes: of each call, gradients that its backward is the first to make.
        result_bytes: of each call, outputs and tangents that stay with the caller.
        loss: what is held between the last graph and the loss.
        around_bytes: constants of all graphs, and results.
    """

    def __init__(
        self,
        calls: Sequence[Call],
        graphs: Sequence[SharedGraph],
        others: Sequence[Call],
        beside: Beside,
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

    def rests(self, held: Sequence[GraphBytes], i: int) -> list[Rest]:
        """What each call of graph ``i`` sees of the others."""
        calls = self.in_order(held)
        return [
            rest_of(calls, k, self.external_bytes) for k, j in enumerate(self.sequence) if j == i
        ]


class Step:
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
        forms: Sequence[Sequence[Call]],
        options: Options,
        beside: Beside = NOTHING_BESIDE,
        outliving: Sequence[Call] = (),
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
        return not was_guessed and all(len(form.sequence) < 2 for form in self.forms)

    def is_worth_planning_again(self) -> bool:
        """Whether a graph that is the whole step had better be planned for what was seen.

        Its caller may have given up what it returned, so that there is more room; or what runs
        between it and the loss takes the step past the budget.
        """
        if len(self.graphs) != 1 or self.graphs[0].symbols:
            return False
        planned, seen = planned_of(self.graphs[0]), self.planned(0)
        if not planned.is_default:
            gained_bytes = planned.chosen.peak_bytes - seen.chosen.peak_bytes
            return gained_bytes >= _WORTHWHILE * planned.chosen.peak_bytes
        budget_bytes = self.budget_bytes()
        return budget_bytes is not None and self.peak(self.held()) > budget_bytes

    def planned(self, i: int) -> Planned:
        """What is known of graph ``i``, which hands on what was seen."""
        planned = planned_of(self.graphs[i])
        if i not in self._planned or self._planned[i][0] is not planned:
            self._planned[i] = planned, planned.handing_on(self.handed_on[i])
        return self._planned[i][1]

    def compile(self) -> None:
        """Plan the graphs together, and compile them again where that changes anything.

        Raises:
            InfeasibleBudgetError: if the step does not fit.
        """
        budget_bytes = self.budget_bytes()
        if budget_bytes is not None:
            self.beside.check(budget_bytes, max(form.around_bytes for form in self.forms))
        if budget_bytes is None:
            self.compile_smallest()
            self.keep_all(None)
        else:
            self.compile_within(budget_bytes)

    def budget_bytes(self) -> int | None:
        """The options', of this step; None for the smallest."""
        plans = [self.planned(i) for i in range(len(self.graphs))]
        peak_bytes = self.peak([p.baseline for p in plans]) - self.beside.resident_bytes
        around_bytes = max(form.around_bytes for form in self.forms)
        whole_bytes = self.beside.whole_bytes(peak_bytes, around_bytes)
        return self.options.resolve_budget_bytes(whole_bytes, plans[0].available_bytes)

    def peak(self, held: Sequence[GraphBytes]) -> int:
        return max(form.peak(held) for form in self.forms)

    def calls_of(self, i: int) -> int:
        """How often graph ``i`` runs in a step."""
        return max(form.sequence.count(i) for form in self.forms)

    def rest(self, held: Sequence[GraphBytes], i: int) -> Rest:
        """What graph ``i`` sees of the others; the strictest, where it runs several times."""
        rests = [rest for form in self.forms for rest in form.rests(held, i)]
        outside = max(r.outside_bytes for r in rests)
        waiting = max(r.outside_bytes + r.between_bytes for r in rests)
        backward = max(r.outside_bytes + r.gradient_bytes for r in rests)
        return Rest(outside, waiting - outside, backward - outside)

    def rest_of_calls(self, held: Sequence[GraphBytes], i: int, peak_bytes: int) -> Rest:
        """What graph ``i`` sees, so that it keeps no more than ``held`` if it is called again.

        It is then among its own others, which is only right if its plan keeps what they do.
        """
        rest = self.rest(held, i)
        if self.calls_of(i) == 1:
            return rest
        room_bytes = peak_bytes - rest.outside_bytes - held[i].boundary_bytes
        return replace(rest, between_bytes=max(rest.between_bytes, room_bytes))

    def assignment(self, budget_bytes: int | None, rest: Rest, i: int) -> Assignment:
        """What graph ``i`` is told."""
        calls = [c for c in self.calls if c.graph is self.graphs[i]]
        holders = max((c.holders for c in calls), default=())
        handed_on = self.handed_on[i]
        return Assignment(
            budget_bytes,
            rest,
            note=self.note(rest),
            handed_on=handed_on,
            holders=holders,
            beside=self.beside,
        )

    def note(self, rest: Rest) -> str:
        """For the report."""
        graphs = max(len(form.sequence) for form in self.forms)
        if graphs == 1:
            return ""
        return (
            f"one of {graphs} graphs of the step: the others hold"
            f" {format_bytes(rest.outside_bytes)} beside it, and"
            f" {format_bytes(rest.between_bytes)} between its forward and its backward"
        )

    def compile_within(self, budget_bytes: int) -> None:
        """Compile every graph for the step's budget."""
        demands = [self.demand(i) for i in range(len(self.graphs))]
        # What the first step ran with saves the least; it is there, if nothing better is found.
        codes = [g.code for g in self.graphs]
        first_bytes = self.peak(self.held())
        peak_operator = ""
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
                if last:
                    peak_operator = refusal.operator
                    break
            scale *= _LESS
        for graph, code in zip(self.graphs, codes, strict=True):
            if graph.code is not code:
                graph.use(code)
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
            graph.keep(self.assignment(budget_bytes, self.rest(held, i), i))

    def held(self) -> list[GraphBytes]:
        """What each graph holds with the code that it has."""
        return [self.planned(i).chosen for i in range(len(self.graphs))]

    def compile_smallest(self, enough_bytes: int = 0) -> None:
        """Compile again what the step's peak occurs in, as long as that makes it smaller.

        Args:
            enough_bytes: a peak that is small enough.
        """
        tried: set[int] = set()
        while True:
            held = self.held()
            peak_bytes = self.peak(held)
            if peak_bytes <= enough_bytes:
                return
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
            # (A share without a number would be one of this graph's peak, not of the step's.)
            graph.compile_again(self.assignment(enough_bytes or None, rest, i))
            held[i] = self.planned(i).chosen
            if self.peak(held) >= peak_bytes:
                graph.use(code)

    def can_be_smaller(self, i: int, rest: Rest, peak_bytes: int) -> bool:
        """Whether a graph that the step's peak stands at was made for another rest of the step."""
        planned = self.planned(i)
        if planned.assignment.more_follow:
            # It was to save the least, at the price of its own peak.
            own_bytes = planned.chosen.peak_with(replace(rest, between_bytes=0))
            return rest.outside_bytes + own_bytes >= peak_bytes
        return rest.between_bytes > 0 or planned.assignment.handed_on != self.handed_on[i]

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
        plan = minimum_plan(with_rest(program, Rest(between_bytes=between)), self.quick)
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
            rest = self.rest(held, i)
            own_bytes = budget_bytes - rest.outside_bytes
            baseline = planned.baseline
            if baseline.kept_bytes <= quotas[i] and baseline.peak_with(rest) <= own_bytes:
                held[i] = baseline
                cost_ns += self.calls_of(i) * program.cost_ns
                continue
            between = max(0, own_bytes - program.constant_bytes - quotas[i])
            is_last = self.calls_of(i) == 1 and all(
                i not in form.sequence or i == form.sequence[-1] for form in self.forms
            )
            if is_last:
                between = rest.between_bytes
            elif planned.baseline.kept_bytes <= quotas[i]:
                between = 0
            try:
                whole = with_rest(program, replace(rest, between_bytes=between))
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
            rest = self.rest_of_calls(held, i, budget_bytes)
            planned = self.planned(i)
            fits_as_it_is = planned.is_default and (
                rest.outside_bytes + planned.chosen.peak_with(rest) <= budget_bytes
            )
            assignment = self.assignment(budget_bytes, rest, i)
            if fits_as_it_is:
                graph.keep(assignment)
            else:
                graph.compile_again(assignment)
            held[i] = self.planned(i).chosen
        peak = self.peak(held)
        log.info(
            "a step of %d graphs: promised %s of %s",
            max(len(form.sequence) for form in self.forms),
            format_bytes(peak),
            format_bytes(budget_bytes),
        )
        if peak > budget_bytes:
            raise InfeasibleBudgetError(budget_bytes)
        # A graph that runs several times was given all the room that its own calls may take.
        self.keep_all(budget_bytes)


def planned_of(graph: SharedGraph) -> Planned:
    """What is known of a graph that was planned."""
    assert graph.planned is not None
    return graph.planned


def _storages(values: Sequence[Any], allocator: Allocator) -> dict[int, int]:
    """Address -> bytes of the storages of tensors; no tensor is held."""
    return {
        v.untyped_storage().data_ptr(): allocator.block_bytes(v.untyped_storage().nbytes())
        for v in values
        if is_counted(v)
    }


def is_counted(value: object) -> TypeGuard[torch.Tensor]:
    """Whether this has bytes of its own."""
    return (
        isinstance(value, torch.Tensor)
        and value.layout is torch.strided
        and not isinstance(value, FakeTensor)
    )


def external_bytes(calls: Sequence[Call], others: Sequence[Call] = ()) -> int:
    """Inputs of all calls, each storage once, without what the calls hand on to one another.

    Args:
        others: calls of other forms of the step; of their inputs, those that outlived them.
    """
    inputs: dict[int, int] = {}
    for call in others:
        inputs.update(call.outliving)
    for call in calls:
        inputs.update(call.inputs)
    for call in calls:
        for address in call.outputs:
            inputs.pop(address, None)
    return sum(inputs.values())


def _gradient_bytes(calls: Sequence[Call]) -> list[int]:
    """For each planned call, gradients that no later call, whose backward runs before, has made."""
    made: dict[int, int] = {}
    new_bytes: list[int] = []
    for call in reversed(calls):
        if call.graph.planned is not None:
            before = sum(made.values())
            made.update(call.parameters)
            new_bytes.append(sum(made.values()) - before)
    return new_bytes[::-1]


def _handed_on(calls: Sequence[Call]) -> list[HandedOn]:
    """Of each call; nothing of one whose outputs are taken by operators that nobody counted."""
    taken = {address for call in calls for address in call.inputs}
    return [
        c.handed_on
        if c.loss is not None or any(a in taken for a in c.outputs)
        else NOTHING_HANDED_ON
        for c in calls
    ]


def _result_bytes(calls: Sequence[Call]) -> list[int]:
    """For each planned call, what it returns that no call takes, and what its backward is given
    that somebody holds on to, such as the gradient of the loss: the caller may keep it."""
    taken = {address for call in calls for address in call.inputs}
    return [
        sum(size for address, size in call.outputs.items() if address not in taken)
        - call.gone_bytes(taken)
        + call.kept_tangent_bytes
        for call in calls
        if call.graph.planned is not None
    ]
