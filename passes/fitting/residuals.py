"""What the compiler's schedule holds beyond the plan, operator by operator.

A plan counts what an operator reads and writes, and the workspace that is known beforehand.  The
kernel that the compiler makes of it may hold more: values inside a fusion that did not stay in
registers, copies in another layout, a buffer that is freed a kernel later.  Or less: a loop that
writes its result over an input which nothing reads later.  Where a schedule was measured, the
difference is known, and the next plan is made of a program in which it is the operator's workspace.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from types import MappingProxyType

from dtrcompile.passes.program.plan import Compute, Plan
from dtrcompile.passes.program.program import Program, StorageKind
from dtrcompile.passes.program.replay import MemoryTimeline

NOTHING: Mapping[int, int] = MappingProxyType({})


def residuals(
    plan: Plan,
    timeline: MemoryTimeline,
    held_bytes: Mapping[int, int],
    known: Mapping[int, int] = NOTHING,
) -> dict[int, int]:
    """Operator -> the most bytes that one of its runs held above what the plan says.

    Only where that is more than what is known of it, 0 if nothing is.

    Args:
        timeline: the referee's, of ``plan``.
        held_bytes: step of ``plan`` -> the most that the compiler's schedule holds in it.
        known: residuals from elsewhere; negative where an operator was seen to write over what it
            reads.
    """
    found: dict[int, int] = {}
    for index, held in held_bytes.items():
        step = plan.steps[index]
        extra = held - timeline.during_bytes[index]
        if isinstance(step, Compute):
            o = step.operator
            if extra > found.get(o, known.get(o, 0)):
                found[o] = extra
    return found


def savings(program: Program, written_over: Iterable[int]) -> dict[int, int]:
    """Operator -> bytes less than its inputs and outputs, as a negative residual.

    Only where the program agrees: it must know an input of the result's size that is dead
    afterwards, in any plan that does not keep it to run something again.

    Args:
        written_over: operators that were seen to write their result over an input.
    """
    found = {}
    for o in sorted(written_over):
        operator = program.operators[o]
        dying = [
            program.storages[s].size_bytes
            for s in {program.tensors[t].storage for t in operator.inputs}
            if program.storages[s].kind is StorageKind.INTERMEDIATE and program.last_reader[s] == o
        ]
        for t in operator.outputs:
            size_bytes = program.storages[program.tensors[t].storage].size_bytes
            if size_bytes in dying:
                found[o] = -size_bytes
    return found


def with_residuals(program: Program, found: Mapping[int, int]) -> Program:
    """The program with each operator's residual as more workspace."""
    if not found:
        return program
    operators = tuple(
        replace(op, workspace_bytes=op.workspace_bytes + found.get(op.id, 0))
        for op in program.operators
    )
    return replace(program, operators=operators)


def without_residuals(plan: Plan, program: Program) -> Plan:
    """The plan of `with_residuals`'s program as one of ``program``."""
    return replace(plan, program=program.fingerprint)
