"""Other orders in which a program's operators may run for the first time.

A program has the order in which it was traced.  Where branches do not depend on one another,
another order may hold less: what frees more than it allocates had better run at once, what
allocates had better wait.  This is list scheduling by memory; for trees, Liu has the optimum ("An
Application of Generalized Tree Pebbling to Sparse Matrix Factorization", SIAM Journal on Algebraic
Discrete Methods 8, 1987).

What must keep its order keeps it: forward before backward, what may run only once in its order,
what reads a constant before what overwrites it, and everything on its side of a barrier.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import replace

from dtrcompile.passes.program.plan import Compute, Plan, Step
from dtrcompile.passes.program.program import Program


def orders(program: Program) -> Iterator[tuple[int, ...]]:
    """Orders of the operators that hold less, if each runs once; the program's own is left out.

    The one that is the better more often comes first.
    """
    found = {tuple(range(len(program.operators)))}
    for waits in (True, False):
        order = _Listing(program, waits=waits).run()
        if order not in found:
            found.add(order)
            yield order


def permuted(program: Program, order: Sequence[int]) -> Program:
    """The same program with its operators in another order; storages and tensors keep their ids."""
    place = {o: i for i, o in enumerate(order)}
    return replace(
        program,
        tensors=tuple(
            t if t.producer is None else replace(t, producer=place[t.producer])
            for t in program.tensors
        ),
        operators=tuple(replace(program.operators[o], id=i) for i, o in enumerate(order)),
    )


def plan_of_permuted(program: Program, order: Sequence[int], plan: Plan, name: str) -> Plan:
    """A plan of ``permuted(program, order)`` as one of ``program``, in the same order."""
    steps: list[Step] = [
        Compute(order[step.operator]) if isinstance(step, Compute) else step for step in plan.steps
    ]
    return Plan(tuple(steps), program.fingerprint, name)


class _Listing:
    """Runs all operators once; of those that are ready, first the one that adds the least.

    Args:
        waits: among those that do not free, too, the one that allocates the least; else the one
            that comes first in the program.
    """

    def __init__(self, program: Program, *, waits: bool) -> None:
        self.program = program
        self.waits = waits
        self.followers: list[list[int]] = [[] for _ in program.operators]
        self.waits_for = [0] * len(program.operators)
        self.to_read = [len(readers) for readers in program.readers]
        self.is_done = [False] * len(program.operators)
        tensors = program.tensors
        self.read = [
            list(dict.fromkeys(tensors[t].storage for t in op.inputs)) for op in program.operators
        ]
        self.made = [
            [s for t in o.outputs if program.root_tensor[s := tensors[t].storage] == t]
            for o in program.operators
        ]
        # What stays frees nothing, whoever reads it.
        stays = program.output_storages | {s.id for s in program.storages if s.is_constant}
        self.freed_bytes = [0 if s.id in stays else s.size_bytes for s in program.storages]
        self._add_dependences()

    def _add_dependences(self) -> None:
        program = self.program
        latest_once = latest_barrier = -1
        for op in program.operators:
            before = {
                producer for t in op.inputs if (producer := program.tensors[t].producer) is not None
            }
            if op.not_recomputable is not None:
                before.add(latest_once)
                latest_once = op.id
            for s in op.overwrites:
                before.update(program.readers[s])
            before.add(latest_barrier)
            if op.is_barrier:
                before.update(range(latest_barrier + 1, op.id))
                latest_barrier = op.id
            for o in before - {-1, op.id}:
                self.followers[o].append(op.id)
                self.waits_for[op.id] += 1

    def run(self) -> tuple[int, ...]:
        """The order."""
        n = len(self.program.operators)
        boundary = n if self.program.boundary is None else self.program.boundary
        order: list[int] = []
        for phase in (range(boundary), range(boundary, n)):
            order += self._run(phase)
        return tuple(order)

    def _run(self, phase: range) -> list[int]:
        order: list[int] = []
        queue = [(self._rank(o), o) for o in phase if not self.waits_for[o]]
        heapq.heapify(queue)
        while queue:
            _, o = heapq.heappop(queue)
            if self.is_done[o]:
                continue  # it was put in again, when it came to free more
            self.is_done[o] = True
            order.append(o)
            for s in self.read[o]:
                self.to_read[s] -= 1
            changed = [self._last_reader(s) for s in self.read[o] if self.to_read[s] == 1]
            for follower in self.followers[o]:
                self.waits_for[follower] -= 1
                changed.append(follower)
            for other in changed:
                if other in phase and not self.waits_for[other]:
                    heapq.heappush(queue, (self._rank(other), other))
        return order

    def _last_reader(self, s: int) -> int:
        return next(o for o in self.program.readers[s] if not self.is_done[o])

    def _rank(self, o: int) -> tuple[int, int]:
        """Less is earlier: the bytes that an operator adds, then its place in the program."""
        added = sum(self.program.storages[s].size_bytes for s in self.made[o])
        added -= sum(self.freed_bytes[s] for s in self.read[o] if self.to_read[s] == 1)
        return (added if self.waits else min(added, 0)), o
