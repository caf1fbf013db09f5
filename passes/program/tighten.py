"""Shorten a plan: drop recomputations that nothing reads, free every copy at its last read.

A planner decides while it walks forward, so it may keep a copy a little too long or make one that
nothing reads after all.  The result computes a subset of the plan's steps in the same order and
never holds more at any of them; emission relies on its frees being the last uses.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from dtrcompile.passes.program.liveness import Liveness
from dtrcompile.passes.program.plan import (
    Boundary,
    Compute,
    DeviceStep,
    Free,
    Plan,
    Step,
    refuse_copies,
    unknown_step,
)
from dtrcompile.passes.program.program import Phase, Program


def tighten(program: Program, plan: Plan) -> Plan:
    """The plan without dead recomputations and late frees; ``plan`` must be valid.

    A plan with copies to the host is returned as it is, since `planning.hoist` has left out what it
    does not need.
    """
    if plan.makes_copies:
        return plan
    steps: list[Step] = []
    for kept in _needed_steps(program, refuse_copies(plan, "tighten")):
        steps.append(kept.step)
        steps.extend(Free(s) for s in kept.frees)
    return replace(plan, steps=tuple(steps))


@dataclass(frozen=True, slots=True)
class _Kept:
    """A step that stays, and the storages that nothing uses after it."""

    step: Compute | Boundary
    frees: list[int]


def _needed_steps(program: Program, steps: Sequence[DeviceStep]) -> list[_Kept]:
    """Computations and the boundary, without recomputations whose results nothing reads.

    The frees of the given plan only tell which copy of a storage an operator allocates.
    """
    first_run: dict[int, int] = {}
    resident: set[int] = set()
    allocates: list[frozenset[int]] = []
    for index, step in enumerate(steps):
        new: frozenset[int] = frozenset()
        match step:
            case Compute(o):
                first_run.setdefault(o, index)
                new = _roots(program, o) - resident
                resident |= new
            case Free(s):
                resident.discard(s)
            case Boundary():
                pass
            case _:
                raise unknown_step(step)
        allocates.append(new)

    needed: list[_Kept] = []
    storage_of = [tensor.storage for tensor in program.tensors]
    live = Liveness(storage_of, len(program.storages))
    live.read(t for t in program.outputs if storage_of[t] not in program.handed_on)
    may_be_freed = {s.id for s in program.storages if not s.is_constant}
    tangents = program.handed_on - may_be_freed
    if program.boundary is not None:
        may_be_freed |= tangents  # which are there from the boundary on
    for index in range(len(steps) - 1, -1, -1):
        step = steps[index]
        match step:
            case Boundary():
                # What is handed on is given up here, unless backward reads it.
                given_up = (program.handed_on & program.held_from_boundary) | tangents
                needed.append(_Kept(step, sorted(live.dead(given_up))))
                live.read(_held(program))
                may_be_freed -= tangents
            case Compute(o):
                op = program.operators[o]
                if first_run[o] != index and not live.any_live(op.outputs):
                    continue
                used = _roots(program, op.id).union(storage_of[t] for t in op.inputs)
                needed.append(_Kept(step, sorted(live.dead(used & may_be_freed))))
                for t in op.outputs:
                    # The duplicate of a multi-output operator is dropped; the older copy lives on.
                    storage = storage_of[t]
                    if program.root_tensor[storage] != t or storage in allocates[index]:
                        live.define([t])
                live.read(op.inputs)
            case Free():
                pass  # made anew at the last use
            case _:
                raise unknown_step(step)
    needed.reverse()
    return needed


def _roots(program: Program, operator: int) -> frozenset[int]:
    """Storages that an operator allocates; its other outputs are views."""
    return frozenset(
        program.tensors[t].storage
        for t in program.operators[operator].outputs
        if program.root_tensor[program.tensors[t].storage] == t
    )


def _held(program: Program) -> list[int]:
    """Tensors of forward that must be there at the boundary and from then on.

    A view that backward makes of one of their storages is none of them.
    """
    return [
        t
        for t in program.outputs
        if program.tensors[t].storage in program.held_from_boundary
        and (producer := program.tensors[t].producer) is not None
        and program.operators[producer].phase is Phase.FORWARD
    ]
