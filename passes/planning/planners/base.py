"""What every planner is: a program and a budget in, a plan out.

A planner raises `InfeasibleBudgetError` where it finds no plan; it never returns one that the
referee puts over the budget.  Adding a planner is adding one file.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

from dtrcompile.passes.errors import InfeasibleBudgetError
from dtrcompile.passes.program.plan import Boundary, Compute, Free, Plan, Step
from dtrcompile.passes.program.program import Program
from dtrcompile.passes.program.replay import replay


class Planner(ABC):
    """Interface of the planners.  Subclasses are frozen dataclasses whose fields are options."""

    name: ClassVar[str]

    @abstractmethod
    def plan(self, program: Program, budget_bytes: int) -> Plan:
        """A plan of ``program`` whose replayed peak is at most ``budget_bytes``.

        Raises:
            InfeasibleBudgetError: if this planner finds none.
        """

    def for_minimum(self) -> Planner:
        """The variant to search the smallest budget with: finds the same budgets, but faster."""
        return self

    def minimum_searches(self) -> tuple[Planner, ...]:
        """Variants that together find what `for_minimum` finds; each goes on below the last."""
        return (self.for_minimum(),)


@dataclass(frozen=True)
class KeepAllPlanner(Planner):
    """Planner ``keep-all``: the baseline, or nothing."""

    name: ClassVar[str] = "keep-all"

    def plan(self, program: Program, budget_bytes: int) -> Plan:
        plan = keep_all(program)
        timeline, _ = replay(program, plan)
        if timeline.peak_bytes > budget_bytes:
            raise InfeasibleBudgetError(budget_bytes)
        return plan


def keep_all(program: Program) -> Plan:
    """The baseline: every operator once, in order, each storage freed after its last reader."""
    last_use: dict[int, int] = {}
    for op in program.operators:
        for t in (*op.inputs, *op.outputs):
            last_use[program.tensors[t].storage] = op.id
    ends: list[list[int]] = [[] for _ in program.operators]
    for s, o in sorted(last_use.items()):
        if not program.storages[s].is_constant and s not in program.output_storages:
            ends[o].append(s)
    steps: list[Step] = []
    for op in program.operators:
        if op.id == program.boundary:
            steps.append(Boundary())
        steps.append(Compute(op.id))
        steps.extend(Free(s) for s in ends[op.id])
    if program.boundary == len(program.operators):
        steps.append(Boundary())
    return Plan(tuple(steps), program.fingerprint, "keep-all")


def lower_bound_bytes(program: Program) -> int:
    """No plan can have a lower peak: each operator with what it reads and makes, once.

    Constants are there all the time, tangents and forward outputs in backward.
    """
    sizes = [0 if s.is_constant else s.size_bytes for s in program.storages]
    held = program.held_from_boundary
    held_bytes = sum(sizes[s] for s in held)
    bound = sum(sizes[s] for s in program.output_storages)
    if program.boundary is not None:
        bound += program.tangent_bytes
    for op in program.operators:
        storages = {program.tensors[t].storage for t in (*op.inputs, *op.outputs)}
        here = op.workspace_bytes
        if program.boundary is not None and op.id >= program.boundary:
            storages -= held
            here += held_bytes + program.tangent_bytes
        bound = max(bound, here + sum(sizes[s] for s in storages))
    return program.constant_bytes + bound
