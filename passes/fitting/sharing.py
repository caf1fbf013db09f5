"""One budget over several graphs: what each may hold while the others are there.

A graph break, DDP's buckets or a second compiled module make several graphs of one training step.
Their forwards run in order, their backwards in the opposite order, so while graph *k* runs

* the constants of all graphs are there, and what graphs before it saved and returned;
* in backward also the gradients of the graphs after it, and the results that they returned;

and between the forward and the backward of graph *k* the later graphs run whole.  `OtherGraphs` is
all that graph *k* has to know of this.  A planner needs to know nothing of it: `with_other_graphs`
puts it into the program, as an operator at the boundary that needs a workspace.

`share` decides who may save how much: every graph keeps the same share of what saving buys it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from dtrcompile.passes.program.plan import Compute, Plan, Step
from dtrcompile.passes.program.program import Operator, Phase, Program, Storage, StorageKind, Tensor

OTHER_GRAPHS_NAME = "rest_of_the_step"
TANGENTS_NAME = "tangents_from_later_graphs"
GRADIENTS_NAME = "gradients_of_later_graphs"
# Shares that are tried, from all to nothing, before the last interval is halved, or, where the
# cheapest is looked for, both beside it.
_STEPS, _HALVINGS = 8, 2


@dataclass(frozen=True, slots=True)
class OtherGraphs:
    """The other graphs of the step, as one graph sees them.

    Attributes:
        outside_bytes: held beside it from its first operator to its last.
        between_bytes: held above its own saved bytes, between its forward and its backward.
        gradient_bytes: held beside it during its backward: gradients and results of later graphs.
    """

    outside_bytes: int = 0
    between_bytes: int = 0
    gradient_bytes: int = 0


ALONE = OtherGraphs()


@dataclass(frozen=True, slots=True)
class GraphBytes:
    """What one graph holds under its plan, as if alone.

    Attributes:
        constant_bytes: its parameters, buffers and inputs.
        forward_peak_bytes, backward_peak_bytes: constants included; 0 for a missing backward.
        boundary_bytes: constants, saved tensors and outputs, when forward has returned.
        gradient_bytes: what stays when its backward is done: gradients of parameters, results.
    """

    constant_bytes: int
    forward_peak_bytes: int
    backward_peak_bytes: int
    boundary_bytes: int
    gradient_bytes: int

    @property
    def kept_bytes(self) -> int:
        """What it leaves for its backward, and returns."""
        return self.boundary_bytes - self.constant_bytes

    @property
    def peak_bytes(self) -> int:
        """Alone."""
        return max(self.forward_peak_bytes, self.backward_peak_bytes)

    def peak_with(self, others: OtherGraphs) -> int:
        """The most that is held while this graph runs or waits; what is outside is left out."""
        peaks = [self.forward_peak_bytes]
        if self.backward_peak_bytes:
            peaks.append(self.backward_peak_bytes + others.gradient_bytes)
        if others.between_bytes:
            peaks.append(self.boundary_bytes + others.between_bytes)
        return max(peaks)


def other_graphs_of(graphs: Sequence[GraphBytes], k: int, external_bytes: int) -> OtherGraphs:
    """What graph ``k`` of a step sees of the others.

    Args:
        graphs: in the order of their forwards.
        external_bytes: constants of all graphs together, each storage once, without what graphs
            hand on to one another.
    """
    between = 0
    above = 0
    later_gradients = sum(g.gradient_bytes for g in graphs[k + 1 :])
    gradients = later_gradients
    for graph in graphs[k + 1 :]:
        gradients -= graph.gradient_bytes
        backward = graph.backward_peak_bytes + gradients if graph.backward_peak_bytes else 0
        peak = max(graph.forward_peak_bytes, backward) - graph.constant_bytes
        between = max(between, above + peak)
        above += graph.kept_bytes
    before = sum(g.kept_bytes for g in graphs[:k])
    # Inputs that come from an earlier graph are among its constants and in ``before`` as well.
    outside = external_bytes - graphs[k].constant_bytes + before
    return OtherGraphs(max(outside, 0), between, later_gradients)


def step_peak_bytes(graphs: Sequence[GraphBytes], external_bytes: int) -> int:
    """The most that the step holds."""
    others_of_calls = [other_graphs_of(graphs, k, external_bytes) for k in range(len(graphs))]
    return max(
        r.outside_bytes + g.peak_with(r) for g, r in zip(graphs, others_of_calls, strict=True)
    )


def with_other_graphs(program: Program, others: OtherGraphs) -> Program:
    """The program as a planner has to see it: with the other graphs, less what is outside of it.

    The later graphs are the workspace of an operator at the boundary; their gradients stay, like a
    tangent.  Gradients and tangents are among what the later graphs hold, so that the peak of the
    program is `GraphBytes.peak_with`.  What is handed on is read by that operator, if it is an
    output that nobody holds afterwards, or made by a second one when these are gone, if it is a
    tangent that nobody else holds: to a planner they are values like others, which it can free.
    """
    boundary = program.boundary
    handed_on = program.handed_on
    if boundary is None or not (others.between_bytes or others.gradient_bytes or handed_on):
        return program
    given = tuple(t for t in program.outputs if program.tensors[t].storage in handed_on)
    received = _received(program)
    among_later = others.gradient_bytes + sum(
        s.size_bytes
        for s in program.storages
        if s.kind is StorageKind.TANGENT and s.id not in handed_on
    )
    later_graphs = Operator(
        boundary,
        OTHER_GRAPHS_NAME,
        Phase.BACKWARD,
        tuple(dict.fromkeys(given)),
        (),
        0,
        max(0, others.between_bytes - among_later),
        not_recomputable="the other graphs of the step run here",
        is_barrier=True,
    )
    inserted = [later_graphs]
    if received:
        tangents = replace(
            later_graphs,
            id=boundary + 1,
            name=TANGENTS_NAME,
            inputs=(),
            outputs=received,
            workspace_bytes=0,
        )
        inserted.append(tangents)
    gradients = Storage(
        len(program.storages), GRADIENTS_NAME, others.gradient_bytes, StorageKind.TANGENT
    )

    def moved(t: Tensor) -> Tensor:
        if t.producer is None:
            return replace(t, producer=inserted[-1].id) if t.id in received else t
        return replace(t, producer=t.producer + len(inserted) * (t.producer >= boundary))

    return Program(
        storages=(*map(_kept_until_read, program.storages), gradients),
        tensors=(
            *map(moved, program.tensors),
            Tensor(len(program.tensors), GRADIENTS_NAME, gradients.id),
        ),
        operators=(
            *program.operators[:boundary],
            *inserted,
            *(replace(op, id=op.id + len(inserted)) for op in program.operators[boundary:]),
        ),
        outputs=tuple(t for t in program.outputs if t not in given),
        boundary=boundary,
        name=program.name,
    )


def _received(program: Program) -> tuple[int, ...]:
    """The tangents that nobody else holds."""
    handed_on = program.handed_on
    return tuple(
        t.id
        for t in program.tensors
        if t.storage in handed_on and program.storages[t.storage].is_constant
    )


def _kept_until_read(storage: Storage) -> Storage:
    """What is handed on, as a value that is there until its last use and not computed again."""
    if not storage.is_handed_on:
        return storage
    return replace(
        storage,
        kind=StorageKind.INTERMEDIATE,
        pinned="another graph of the step reads it, or made it",
        is_handed_on=False,
    )


def without_other_graphs(plan: Plan, program: Program) -> Plan:
    """The plan of `with_other_graphs`'s program as one of ``program``."""
    if plan.program == program.fingerprint:
        return plan
    boundary = program.boundary
    assert boundary is not None
    inserted = 2 if _received(program) else 1
    steps: list[Step] = []
    for step in plan.steps:
        if isinstance(step, Compute) and step.operator >= boundary:
            if step.operator >= boundary + inserted:
                steps.append(Compute(step.operator - inserted))
        else:
            steps.append(step)
    return replace(plan, steps=tuple(steps), program=program.fingerprint)


@dataclass(frozen=True, slots=True)
class Demand:
    """The room that a graph can do with, and the room that it would like.

    Attributes:
        least_kept_bytes, most_kept_bytes: saved and returned, by the plan that saves least, and by
            the baseline.
    """

    least_kept_bytes: int
    most_kept_bytes: int

    def quota_bytes(self, share: float) -> int:
        """Kept bytes at a share in [0, 1] of what saving would buy."""
        return self.least_kept_bytes + int(share * (self.most_kept_bytes - self.least_kept_bytes))


Fitted = TypeVar("Fitted")


def share(
    demands: Sequence[Demand], fit: Callable[[Sequence[int]], Fitted | None]
) -> Fitted | None:
    """What fits at the largest share of saving that every graph may have.

    Args:
        fit: given each graph's quota of kept bytes, a solution, or None where there is none.  Not
            monotone: a graph that may keep very little can need more while it runs.

    Returns:
        None where no share fits.
    """
    above = 1.0
    for step in range(_STEPS, -1, -1):
        low = step / _STEPS
        best = fit([d.quota_bytes(low) for d in demands])
        if best is None:
            above = low
            continue
        for _ in range(_HALVINGS if low < 1 else 0):
            middle = (low + above) / 2
            found = fit([d.quota_bytes(middle) for d in demands])
            if found is None:
                above = middle
            else:
                low, best = middle, found
        return best
    return None


def cheapest_share(
    demands: Sequence[Demand],
    fit: Callable[[Sequence[int]], Fitted | None],
    cost: Callable[[Fitted], float],
) -> Fitted | None:
    """As `share`, where a larger share can cost more than a smaller one.

    A graph that runs several times is among its own others: the more each call may save, the less
    room is left for the call that runs, which may then save nothing.
    """
    best_cost, best_part, best = float("inf"), 0.0, None

    def look_at(part: float) -> None:
        nonlocal best_cost, best_part, best
        found = fit([d.quota_bytes(part) for d in demands])
        if found is not None and cost(found) < best_cost:
            best_cost, best_part, best = cost(found), part, found

    for step in range(_STEPS, -1, -1):
        look_at(step / _STEPS)
    distance = 1 / _STEPS
    for _ in range(_HALVINGS if best is not None else 0):
        distance /= 2
        middle = best_part
        for part in (middle + distance, middle - distance):
            if 0 <= part <= 1:
                look_at(part)
    return best
