"""A plan's peaks as formulas: what the referee counts, with a term for each storage.

Walks a plan that `replay.replay` has accepted, and counts as it does; the two are compared where
formulas are made.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from dtrcompile.passes.fitting.peak_formula import Moment, Moments
from dtrcompile.passes.program.plan import (
    Boundary,
    Compute,
    Free,
    Offload,
    Plan,
    Prefetch,
    unknown_step,
)
from dtrcompile.passes.program.program import Program, StorageKind
from dtrcompile.passes.program.sizes import Term


def plan_moments(
    program: Program, plan: Plan, sizes: Sequence[Term], workspaces: Mapping[int, Term]
) -> Moments:
    """What a plan holds at each of its steps.

    Args:
        sizes: of each storage.
        workspaces: operator -> what it holds only while it runs.
    """
    storages = program.storages
    resident = {s.id for s in storages if s.is_constant and s.kind is not StorageKind.TANGENT}
    held: Counter[Term] = Counter(sizes[s] for s in resident)
    forward: list[Moment] = [dict(held)]
    backward: list[Moment] = []
    boundary: Moment = {}
    saved: Moment = {}
    moments = forward
    for step in plan.steps:
        match step:
            case Compute(o):
                operator = program.operators[o]
                extra: Counter[Term] = Counter()
                for t in operator.outputs:
                    s = program.tensors[t].storage
                    if program.root_tensor[s] != t:
                        continue
                    if s in resident:
                        extra[sizes[s]] += 1
                    else:
                        resident.add(s)
                        held[sizes[s]] += 1
                if o in workspaces:
                    extra[workspaces[o]] += 1
                moments.append(held + extra)
            case Prefetch(s):
                resident.add(s)
                held[sizes[s]] += 1
            case Offload():
                pass
            case Free(s):
                resident.remove(s)
                held[sizes[s]] -= 1
            case Boundary():
                boundary = +held
                saved = Counter(
                    sizes[s]
                    for s in resident - program.held_from_boundary
                    if storages[s].kind is StorageKind.INTERMEDIATE
                )
                moments = backward
                for storage in storages:
                    if storage.kind is StorageKind.TANGENT and storage.id not in resident:
                        resident.add(storage.id)
                        held[sizes[storage.id]] += 1
                moments.append(dict(held))
            case _:
                raise unknown_step(step)
    if program.boundary is None:
        boundary = +held
    return Moments(forward, backward, boundary, saved)
