"""Planner ``brute-force``: the cheapest legal plan there is, for programs of a few operators.

An oracle for tests.  It searches all plans that the referee (`replay.replay`) accepts: operators
in any legal order, any number of recomputations, any evictions.  No paper: uniform-cost search
over what has run and what is in memory, with the cost of the operators that have not run yet left
out (all must run once; so the search is A* with an exact part of the bound).

Two rules keep it small without losing the optimum, both because freeing costs nothing and can be
done later:

* storages are freed only when the next operator does not fit, and then no more than it needs;
* a state is passed over if a cheaper or equal one has run the same operators and holds all that it
  holds, and perhaps more.

What cannot be freed later (a pinned storage before its last reader, a forward output in backward)
is in memory in both states, so the second rule holds for it too.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import combinations
from typing import ClassVar

from dtrcompile.passes.errors import InfeasibleBudgetError, PlanError, ProgramTooLargeError
from dtrcompile.passes.planning.planners.base import Planner, keep_all, lower_bound_bytes
from dtrcompile.passes.planning.planners.improve import schedule_of
from dtrcompile.passes.planning.planners.rematerialize import baseline_if_it_fits
from dtrcompile.passes.program.index import ProgramIndex
from dtrcompile.passes.program.plan import Boundary, Compute, Free, Plan, Step
from dtrcompile.passes.program.program import Phase, Program, StorageKind
from dtrcompile.passes.program.replay import replay


@dataclass(frozen=True)
class BruteForcePlanner(Planner):
    """See the module docstring.

    Attributes:
        reorder: False: operators run for the first time in the program's order, as all other
            planners have them.
        most_operators: larger programs are refused.
        most_states: a search that looks at more states gives up.
    """

    name: ClassVar[str] = "brute-force"

    reorder: bool = True
    most_operators: int = 32
    most_states: int = 200_000

    def plan(self, program: Program, budget_bytes: int) -> Plan:
        """As for every planner; `InfeasibleBudgetError` is a proof here.

        Raises:
            ProgramTooLargeError: if the program, or the search, passes a limit.
        """
        index = ProgramIndex.of(program)
        cheapest = baseline_if_it_fits(program, index, budget_bytes)
        if cheapest.best is None:
            steps = self._search(program, budget_bytes, by_cost=True)
            if steps is None:
                raise InfeasibleBudgetError(budget_bytes)
            if not cheapest.offer(schedule_of(index, steps)):
                raise PlanError("brute-force found a plan that tidying makes larger; a bug")
        return cheapest.plan(self.name)

    def smallest_budget_bytes(self, program: Program) -> int:
        """The smallest budget that any plan meets; exact.

        Raises:
            ProgramTooLargeError: if the program, or the search, passes a limit.
        """
        low = lower_bound_bytes(program)
        high = replay(program, keep_all(program))[0].peak_bytes
        while low < high:
            middle = (low + high) // 2
            if self._search(program, middle, by_cost=False) is not None:
                high = middle
            else:
                low = middle + 1
        return high

    def _search(self, program: Program, budget_bytes: int, by_cost: bool) -> list[Step] | None:
        if len(program.operators) > self.most_operators:
            raise ProgramTooLargeError(
                f"brute-force takes programs of at most {self.most_operators} operators, and"
                f" {program.name!r} has {len(program.operators)}. Use planner 'auto', or raise"
                " most_operators."
            )
        return _Search(program, budget_bytes, by_cost, self).run()


@dataclass(frozen=True, slots=True)
class _State:
    """Bit masks: operators that have run, tensors in memory; and whether backward has begun."""

    done: int
    defined: int
    in_backward: bool


@dataclass(frozen=True, slots=True)
class _Move:
    """How a state was reached: what was freed, then what was run, -1 for the boundary."""

    before: _State
    freed: tuple[int, ...]
    operator: int


class _Search:
    def __init__(
        self, program: Program, budget_bytes: int, by_cost: bool, options: BruteForcePlanner
    ) -> None:
        self.program = program
        self.budget_bytes = budget_bytes
        self.by_cost = by_cost
        self.reorder = options.reorder
        self.most_states = options.most_states
        n = len(program.operators)
        self.all_done = (1 << n) - 1
        self.once = _mask(op.id for op in program.operators if op.not_recomputable is not None)
        self.forward = _mask(op.id for op in program.operators if op.phase is Phase.FORWARD)
        self.inputs = [_mask(op.inputs) for op in program.operators]
        overwriters: dict[int, list[int]] = {}
        for op in program.operators:
            for s in op.overwrites:
                overwriters.setdefault(s, []).append(op.id)
        # For each operator, those that have to have run before it.
        self.waits_for = [
            _mask(iter(range(op.id)))
            if op.is_barrier
            else _mask(b for b in program.barriers if b < op.id)
            for op in program.operators
        ]
        # For each operator, those that overwrite what it reads.
        self.overwriters = [
            _mask(o for t in op.inputs for o in overwriters.get(program.tensors[t].storage, ()))
            & ~(1 << op.id)
            for op in program.operators
        ]
        self.outputs = [_mask(op.outputs) for op in program.operators]
        self.tensors_of = [_mask(ts) for ts in program.tensors_of]
        self.end = _mask(program.outputs)
        self.forward_outputs = _mask(
            t
            for t in program.outputs
            if program.boundary is not None
            and (producer := program.tensors[t].producer) is not None
            and producer < program.boundary
        )
        self.tangents = _mask(
            t.id
            for t in program.tensors
            if t.producer is None and program.storages[t.storage].kind is StorageKind.TANGENT
        )
        self.tangent_bytes = sum(
            s.size_bytes for s in program.storages if s.kind is StorageKind.TANGENT
        )
        self.computed = [s.id for s in program.storages if not s.is_constant]

    @cached_property
    def roots(self) -> list[list[int]]:
        """For each operator, the storages that it allocates."""
        program = self.program
        return [
            [s for t in op.outputs if program.root_tensor[s := program.tensors[t].storage] == t]
            for op in program.operators
        ]

    def run(self) -> list[Step] | None:
        """The steps of the cheapest plan, None if there is no plan."""
        constants = _mask(t.id for t in self.program.tensors if t.producer is None)
        start = _State(0, constants & ~self.tangents, False)
        # Extra cost, then operators to go, then order of discovery.
        queue: list[tuple[int, int, int, _State]] = [(0, 0, 0, start)]
        reached: dict[_State, tuple[int, _Move | None]] = {start: (0, None)}
        settled: dict[tuple[int, bool], list[int]] = {}
        pushes = 0
        while queue:
            extra_ns, _, _, state = heapq.heappop(queue)
            others = settled.setdefault((state.done, state.in_backward), [])
            if any(state.defined & ~other == 0 for other in others):
                continue
            others.append(state.defined)
            if self.finished(state):
                return self.steps_to(state, reached)
            if len(reached) > self.most_states:
                raise ProgramTooLargeError(
                    f"brute-force looked at {self.most_states} states of {self.program.name!r}"
                    " without an answer. Use planner 'auto', or raise most_states."
                )
            for after, move, again_ns in self.moves(state):
                cost_ns = extra_ns + (again_ns if self.by_cost else 0)
                if after not in reached or cost_ns < reached[after][0]:
                    reached[after] = (cost_ns, move)
                    to_go = (self.all_done & ~after.done).bit_count()
                    pushes += 1
                    heapq.heappush(queue, (cost_ns, to_go, pushes, after))
        return None

    def finished(self, state: _State) -> bool:
        return (
            state.done == self.all_done
            and (state.in_backward or self.program.boundary is None)
            and self.end & ~state.defined == 0
        )

    def moves(self, state: _State) -> Iterator[tuple[_State, _Move, int]]:
        """States one operator, or the boundary, further; and what it costs beyond its first run."""
        held_bytes = self.program.constant_bytes + (self.tangent_bytes if state.in_backward else 0)
        resident = [s for s in self.computed if self.is_resident(state, s)]
        held_bytes += sum(self.program.storages[s].size_bytes for s in resident)
        if self.boundary_is_next(state):
            needed = self.program.held_from_boundary
            for freed in self.ways_to_free(state, held_bytes + self.tangent_bytes, needed):
                defined = self.without(state.defined, freed) | self.tangents
                yield _State(state.done, defined, True), _Move(state, freed, -1), 0
        for op in self.program.operators:
            o = op.id
            if not self.may_run(state, o):
                continue
            new_bytes = op.workspace_bytes
            new_bytes += sum(self.program.storages[s].size_bytes for s in self.roots[o])
            reads = frozenset(self.program.tensors[t].storage for t in op.inputs)
            for freed in self.ways_to_free(state, held_bytes + new_bytes, reads):
                defined = self.without(state.defined, freed) | self.outputs[o]
                after = _State(state.done | 1 << o, defined, state.in_backward)
                yield after, _Move(state, freed, o), op.cost_ns if state.done >> o & 1 else 0

    def boundary_is_next(self, state: _State) -> bool:
        return (
            self.program.boundary is not None
            and not state.in_backward
            and self.forward & ~state.done == 0
            and self.forward_outputs & ~state.defined == 0
        )

    def may_run(self, state: _State, o: int) -> bool:
        """Whether the referee lets operator ``o`` run, and it does something."""
        has_run = state.done >> o & 1
        if state.done & self.overwriters[o] or self.waits_for[o] & ~state.done:
            return False
        is_forward = self.forward >> o & 1
        if self.inputs[o] & ~state.defined or (has_run and not self.outputs[o] & ~state.defined):
            return False
        if not has_run and not self.reorder and state.done.bit_count() != o:
            return False
        if self.once >> o & 1 and (has_run or (self.once & state.done) >> o):
            return False
        return bool(has_run or not is_forward if state.in_backward else is_forward)

    def ways_to_free(
        self, state: _State, wanted_bytes: int, needed: frozenset[int]
    ) -> Iterator[tuple[int, ...]]:
        """Sets of storages to free so that it fits, none of which contains another."""
        excess = wanted_bytes - self.budget_bytes
        if excess <= 0:
            yield ()
            return
        size = {
            s: self.program.storages[s].size_bytes
            for s in self.computed
            if s not in needed and self.is_resident(state, s) and self.may_free(state, s)
        }
        found: list[frozenset[int]] = []
        for count in range(1, len(size) + 1):
            for freed in combinations(size, count):
                if sum(size[s] for s in freed) >= excess and not any(f <= {*freed} for f in found):
                    found.append(frozenset(freed))
                    yield freed

    def is_resident(self, state: _State, s: int) -> bool:
        return bool(state.defined >> self.program.root_tensor[s] & 1)

    def may_free(self, state: _State, s: int) -> bool:
        storage = self.program.storages[s]
        last = self.program.last_reader[s]
        return (
            storage.size_bytes > 0
            and not (state.in_backward and s in self.program.held_from_boundary)
            and (storage.pinned is None or last < 0 or bool(state.done >> last & 1))
        )

    def without(self, defined: int, freed: tuple[int, ...]) -> int:
        for s in freed:
            defined &= ~self.tensors_of[s]
        return defined

    def steps_to(
        self, state: _State, reached: dict[_State, tuple[int, _Move | None]]
    ) -> list[Step]:
        steps: list[Step] = [
            Free(s)
            for s in self.computed
            if self.is_resident(state, s) and s not in self.program.output_storages
        ]
        move = reached[state][1]
        while move is not None:
            steps.append(Compute(move.operator) if move.operator >= 0 else Boundary())
            steps.extend(Free(s) for s in move.freed)
            move = reached[move.before][1]
        steps.reverse()
        return steps


def _mask(bits: Iterator[int] | tuple[int, ...]) -> int:
    mask = 0
    for bit in bits:
        mask |= 1 << bit
    return mask
