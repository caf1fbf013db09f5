"""Liveness over a plan: drop recomputations that nothing reads, free every copy at its last read.

A planner decides while it walks forward, so it may keep a copy a little too long or make one that
nothing reads after all.  The result computes a subset of the plan's steps in the same order and
never holds more at any of them; emission relies on its frees being the last uses.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

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
from dtrcompile.passes.program.program import Program


def tighten(program: Program, plan: Plan) -> Plan:
    """The plan without dead recomputations and late frees; ``plan`` must be valid.

    Raises:
        UnsupportedPlanError: if it copies to the host.
    """
    kept = _needed_steps(program, refuse_copies(plan, "tighten"))
    return replace(plan, steps=tuple(_with_frees(program, kept)))


@dataclass(frozen=True, slots=True)
class _Kept:
    """A step that stays, and the storages that it allocates anew in the given plan."""

    step: Compute | Boundary
    allocates: frozenset[int]


def _needed_steps(program: Program, steps: Sequence[DeviceStep]) -> list[_Kept]:
    """Computations and the boundary, without recomputations whose results nothing reads."""
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
    live = {t for t in program.outputs if program.tensors[t].storage not in program.handed_on}
    for index in range(len(steps) - 1, -1, -1):
        step = steps[index]
        match step:
            case Boundary():
                live.update(_held(program))
                needed.append(_Kept(step, frozenset()))
            case Compute(o):
                op = program.operators[o]
                if first_run[o] != index and live.isdisjoint(op.outputs):
                    continue
                needed.append(_Kept(step, allocates[index]))
                for t in op.outputs:
                    storage = program.tensors[t].storage
                    # The duplicate of a multi-output operator is dropped; the older copy lives on.
                    if program.root_tensor[storage] != t or storage in allocates[index]:
                        live.discard(t)
                live.update(op.inputs)
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
    """Tensors that must be there at the boundary and from then on."""
    return [t for t in program.outputs if program.tensors[t].storage in program.held_from_boundary]


def _with_frees(program: Program, kept: list[_Kept]) -> list[Step]:
    """Insert a free after the last read of each copy."""
    end = len(kept)
    copies: dict[int, list[int]] = {}  # storage -> for each copy, the index of its last use

    def touch(t: int, index: int) -> None:
        storage = program.tensors[t].storage
        if storage in copies:  # else a constant
            copies[storage][-1] = max(copies[storage][-1], index)

    for index, item in enumerate(kept):
        if isinstance(item.step, Boundary):
            for s in sorted(program.handed_on):
                if program.storages[s].is_constant:
                    copies[s] = [index]
            for t in _held(program):
                is_given_up = program.tensors[t].storage in program.handed_on
                touch(t, index if is_given_up else end)
            continue
        op = program.operators[item.step.operator]
        for t in op.inputs:
            touch(t, index)
        for storage in sorted(item.allocates):
            copies.setdefault(storage, []).append(index)
        for t in op.outputs:
            if program.root_tensor[program.tensors[t].storage] != t:
                touch(t, index)
    for t in program.outputs:
        if program.tensors[t].storage not in program.handed_on:
            touch(t, end)

    frees: list[list[int]] = [[] for _ in range(end + 1)]
    for storage, ends in copies.items():
        for last in ends:
            frees[last].append(storage)
    result: list[Step] = []
    resident: set[int] = set()
    for index, item in enumerate(kept):
        result.append(item.step)
        done = set(frees[index])
        if isinstance(item.step, Compute):
            for storage in _roots(program, item.step.operator) - resident:
                resident.add(storage)
                if storage not in item.allocates:
                    done.add(storage)  # a duplicate whose older copy was freed early
        result.extend(Free(s) for s in sorted(done))
        resident -= done
    return result
