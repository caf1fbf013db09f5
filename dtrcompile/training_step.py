"""The graphs of one training step, planned together once all of them are known."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from dtrcompile.beside import NOTHING_BESIDE, Beside
from dtrcompile.options import Options
from dtrcompile.passes.allocators import EXACT, Allocator
from dtrcompile.passes.errors import InfeasibleBudgetError, format_bytes
from dtrcompile.passes.planners import keep_all, make_planner, minimum_plan
from dtrcompile.passes.planners.base import Planner
from dtrcompile.passes.replay import replay
from dtrcompile.passes.sharing import (
    Demand,
    GraphBytes,
    Rest,
    cheapest_share,
    rest_of,
    share,
    step_peak_bytes,
    with_rest,
)
from dtrcompile.passes.torch_private import FakeTensor
from dtrcompile.planned import Assignment, Planned
from dtrcompile.shared_graph import SharedGraph

log = logging.getLogger("dtrcompile")

# Times that a share is lowered when the measured graphs turn out larger than the planned ones.
_MOST_TRIES = 4
_LESS = 0.85


@dataclass(frozen=True)
class Call:
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

    @staticmethod
    def of(
        graph: SharedGraph,
        args: Sequence[Any],
        result: Any,
        before: Counter[int],
        *,
        awaits_backward: bool,
    ) -> Call:
        """From what the graph was called with, and returned."""
        results = result if isinstance(result, (tuple, list)) else (result,)
        leaves = [a for a in args if isinstance(a, torch.Tensor) and a.is_leaf]
        parameters = [a for a in leaves if a.requires_grad]
        allocator = EXACT if graph.planned is None else graph.planned.allocator
        inputs, accumulated, outputs = (
            _storages(values, allocator) for values in (args, parameters, results)
        )
        return Call(graph, inputs, accumulated, outputs, before, awaits_backward)


class Step:
    """The graphs of one step, and what they hold together.

    Args:
        calls: all of the step, in order.
        beside: what no graph holds.

    Attributes:
        graphs: those that were planned.
        sequence: the graph of each call of one of them, in order.
        external_bytes: constants of all graphs, as in `rest_of`, and what lies beside them.
        gradient_bytes: of each call, gradients that its backward is the first to make.
        result_bytes: of each call, outputs that stay with the caller.
        around_bytes: constants of all graphs, and results.
    """

    def __init__(
        self, calls: Sequence[Call], options: Options, beside: Beside = NOTHING_BESIDE
    ) -> None:
        self.options = options
        self.beside = beside
        planned = [c.graph for c in calls if c.graph.planned is not None]
        self.graphs = list(dict.fromkeys(planned))
        self.sequence = [self.graphs.index(g) for g in planned]
        constant_bytes = _external_bytes(calls)
        self.external_bytes = constant_bytes + beside.resident_bytes
        self.gradient_bytes = _gradient_bytes(calls)
        self.result_bytes = _result_bytes(calls)
        self.around_bytes = constant_bytes + sum(self.result_bytes)
        planner: Planner = make_planner(options.planner, **options.planner_options())
        # To find who may keep what; the compilation plans with all candidates.
        self.quick = planner.for_minimum()

    def is_known_well_enough(self) -> bool:
        """Whether its graphs were compiled for the step that it turned out to be."""
        plans = [_of(g) for g in self.graphs]
        is_inference = all(p.program.boundary is None for p in plans)
        was_guessed = any(
            p.assignment.more_follow or p.assignment.is_share_of_unknown for p in plans
        )
        return is_inference or (len(self.sequence) < 2 and not was_guessed)

    def compile(self) -> None:
        """Plan the graphs together, and compile them again where that changes anything.

        Raises:
            InfeasibleBudgetError: if the step does not fit.
        """
        plans = [_of(g) for g in self.graphs]
        peak_bytes = self.peak([p.baseline for p in plans]) - self.beside.resident_bytes
        budget_bytes = self.options.resolve_budget_bytes(
            self.beside.whole_bytes(peak_bytes, self.around_bytes), plans[0].available_bytes
        )
        if budget_bytes is not None:
            self.beside.check(budget_bytes, self.around_bytes)
        if budget_bytes is None:
            self.compile_smallest()
        else:
            self.compile_within(budget_bytes)

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
            graph.compile_again(Assignment(rest=rest, note=self.note(rest), beside=self.beside))
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
                note = self.note(rest)
                graph.compile_again(Assignment(budget_bytes, rest, note=note, beside=self.beside))
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


def _of(graph: SharedGraph) -> Planned:
    assert graph.planned is not None
    return graph.planned


def _storages(values: Sequence[Any], allocator: Allocator) -> dict[int, int]:
    """Address -> bytes of the storages of tensors; no tensor is held."""
    return {
        v.untyped_storage().data_ptr(): allocator.block_bytes(v.untyped_storage().nbytes())
        for v in values
        if isinstance(v, torch.Tensor)
        and v.layout is torch.strided
        and not isinstance(v, FakeTensor)
    }


def _external_bytes(calls: Sequence[Call]) -> int:
    """Inputs of all calls, each storage once, without what the calls hand on to one another."""
    inputs: dict[int, int] = {}
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


def _result_bytes(calls: Sequence[Call]) -> list[int]:
    """For each planned call, what it returns that no call takes: the caller may keep it."""
    taken = {address for call in calls for address in call.inputs}
    return [
        sum(size for address, size in call.outputs.items() if address not in taken)
        for call in calls
        if call.graph.planned is not None
    ]
