"""Polishing a plan: fewer recomputations in the same bytes.

Works on a *schedule*, the operators in the order in which they run; when a storage is freed
follows from it.  Two moves, repeated until neither helps:

* `tidy`: drop recomputations whose results nobody reads, free everything right after its last
  use;
* *keep*: where a storage is evicted and the bytes in between have room for it, keep it, which
  makes its recomputation useless, and often that of what it was computed from.

Not in the DTR paper, whose runtime cannot see the future.  XLA's and Checkmate's planners have no
such pass either; it is what a greedy one-pass planner leaves on the table.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from dtrcompile.passes.errors import PlanError
from dtrcompile.passes.program.index import ProgramIndex
from dtrcompile.passes.program.liveness import Liveness
from dtrcompile.passes.program.plan import (
    Boundary,
    Compute,
    Free,
    Offload,
    Plan,
    Prefetch,
    Step,
    unknown_step,
)
from dtrcompile.passes.program.program import Program
from dtrcompile.passes.program.replay import replay

BOUNDARY = -1
"""Stands for the boundary in a schedule."""


@dataclass(frozen=True, slots=True)
class Gap:
    """A recomputation, and the evictions that make it necessary.

    Attributes:
        storages: (storage, index of the entry after which it is evicted) for all that it brings
            back.
        stop: index of the recomputation.
        support: entries ``support … stop`` go with it if nothing is evicted.
        cost_ns: of all recomputations that serve only this one, its own included.
    """

    storages: tuple[tuple[int, int], ...]
    stop: int
    support: int
    cost_ns: int


@dataclass(frozen=True, slots=True)
class Schedule:
    """A valid plan in the form that moves need.

    Attributes:
        operators: ids in order, `BOUNDARY` among them.
        frees: for each entry, the storages that are freed after it.
        during_bytes: for each entry, what is held while it runs.
        gaps: all recomputations that keeping storages would make useless.
        cost_ns: of all operators.
        start_bytes: before the first of them.
    """

    operators: list[int]
    frees: list[list[int]]
    during_bytes: list[int]
    gaps: list[Gap]
    cost_ns: int
    start_bytes: int

    @property
    def peak_bytes(self) -> int:
        """The most bytes held."""
        return max(self.during_bytes, default=self.start_bytes)

    @property
    def rank(self) -> tuple[int, int]:
        """The least is the best: the cheaper, then the one that holds less."""
        return self.cost_ns, self.peak_bytes

    def steps(self) -> tuple[Step, ...]:
        """The plan's steps."""
        steps: list[Step] = []
        for o, frees in zip(self.operators, self.frees, strict=True):
            steps.append(Boundary() if o == BOUNDARY else Compute(o))
            steps.extend(Free(s) for s in frees)
        return tuple(steps)


def judged_plan(program: Program, schedule: Schedule, budget_bytes: int, name: str) -> Plan:
    """The schedule as a plan of planner ``name`` that the referee has accepted.

    The account of a schedule is fast; the referee's is the one that counts.

    Raises:
        PlanError: if the two differ, or the plan is over the budget; a bug.
    """
    plan = Plan(schedule.steps(), program.fingerprint, name)
    timeline, stats = replay(program, plan)
    if timeline.peak_bytes > budget_bytes or stats.cost_ns != schedule.cost_ns:
        raise PlanError(
            f"{name} counted {schedule.peak_bytes} bytes and {schedule.cost_ns} ns, the referee"
            f" {timeline.peak_bytes} and {stats.cost_ns}; please report the program"
        )
    return plan


def schedule_of(index: ProgramIndex, steps: Sequence[Step]) -> Schedule:
    """The schedule of a valid plan, tidied."""
    operators: list[int] = []
    frees: list[list[int]] = []
    for step in steps:
        match step:
            case Compute(o):
                operators.append(o)
                frees.append([])
            case Boundary():
                operators.append(BOUNDARY)
                frees.append([])
            case Free(s):
                frees[-1].append(s)
            case Offload() | Prefetch():
                raise PlanError(f"a schedule has no {step}: it cannot say when a copy is made")
            case _:
                raise unknown_step(step)
    return tidy(index, operators, frees)


def tidy(index: ProgramIndex, operators: Sequence[int], frees: Sequence[Sequence[int]]) -> Schedule:
    """Drop useless recomputations and free at last use; the rest keeps its order.

    Linear in the schedule.  Each storage's residency only shrinks, so the peak does not rise.
    """
    inputs, outputs, roots = index.inputs, index.outputs, index.roots
    storage_of, size_bytes = index.storage_of, index.size_bytes

    # Forwards: which tensors does each entry define that were not defined before it?
    defined = [False] * len(index.producer)
    has_run = [False] * index.n_operators
    again = [False] * len(operators)
    defines: list[tuple[int, ...]] = []
    for at, o in enumerate(operators):
        if o == BOUNDARY:
            defines.append(())
        else:
            again[at] = has_run[o]
            has_run[o] = True
            new = tuple(t for t in outputs[o] if not defined[t])
            for t in new:
                defined[t] = True
            defines.append(new)
        for s in frees[at]:
            for t in index.tensors_of[s]:
                defined[t] = False

    # Backwards: what is read later?
    live = Liveness(storage_of, index.n_storages)
    n_live = live.n_live
    live_bytes = index.program.constant_bytes
    if index.program.boundary is not None:
        live_bytes += index.tangent_bytes
    live_bytes += sum(size_bytes[s] for s in live.read(index.end_outputs))
    kept: list[int] = []
    kept_frees: list[list[int]] = []
    during: list[int] = []
    for at in range(len(operators) - 1, -1, -1):
        o = operators[at]
        if o == BOUNDARY:
            live_bytes += sum(size_bytes[s] for s in live.read(index.boundary_outputs))
            kept.append(at)
            kept_frees.append([])
            during.append(live_bytes)
            live_bytes -= index.tangent_bytes
            continue
        new = defines[at]
        if again[at] and not live.any_live(new):
            continue
        dying = live.dead((*index.input_storages[o], *roots[o]))
        wanted = [s for s in roots[o] if n_live[s]]
        at_bytes = live_bytes + index.workspace_bytes[o] + sum(size_bytes[s] for s in dying)
        live_bytes -= sum(size_bytes[s] for s in live.define(new))
        # Still live: in memory from before, so this run's copy is held beside it.
        at_bytes += sum(size_bytes[s] for s in wanted if n_live[s])
        live_bytes += sum(size_bytes[s] for s in live.read(inputs[o]))
        kept.append(at)
        kept_frees.append(dying)
        during.append(at_bytes)
    kept.reverse()
    kept_frees.reverse()
    during.reverse()
    kept_operators = [operators[at] for at in kept]
    return Schedule(
        operators=kept_operators,
        frees=kept_frees,
        during_bytes=during,
        gaps=_gaps(index, kept_operators, kept_frees),
        cost_ns=sum(index.operator_cost_ns[o] for o in kept_operators if o != BOUNDARY),
        start_bytes=index.program.constant_bytes,
    )


def _gaps(
    index: ProgramIndex, operators: Sequence[int], frees: Sequence[Sequence[int]]
) -> list[Gap]:
    """All recomputations that could be spared, with what they cost."""
    inputs, outputs = index.inputs, index.outputs
    has_run = [False] * index.n_operators
    defined_at = [-1] * len(index.producer)
    evicted_at = [-1] * index.n_storages
    nobody, several = -1, -2
    reader = [nobody] * len(operators)
    brings: dict[int, tuple[tuple[int, int], ...]] = {}
    for at, o in enumerate(operators):
        if o == BOUNDARY:
            for t in index.boundary_outputs:
                reader[defined_at[t]] = several
            continue
        for t in inputs[o]:
            source = defined_at[t]
            if reader[source] == nobody:
                reader[source] = at
            elif reader[source] != at:
                reader[source] = several
        dropped = frees[at]
        if has_run[o]:
            # A view's storage may be in memory; then there is no storage to keep.
            back = tuple(
                (s, evicted_at[s])
                for s in index.roots[o]
                if evicted_at[s] >= 0 and s not in dropped
            )
            brings[at] = back
        has_run[o] = True
        for t in outputs[o]:
            if defined_at[t] < 0:
                defined_at[t] = at
        for s in index.roots[o]:
            evicted_at[s] = -1
        for s in dropped:
            evicted_at[s] = at
            for t in index.tensors_of[s]:
                defined_at[t] = -1
    for t in index.end_outputs:
        reader[defined_at[t]] = several

    support_ns: dict[int, int] = {}
    gaps = []
    for at, back in brings.items():
        # Ascending, so what serves this one has been added up already.
        cost_ns = index.operator_cost_ns[operators[at]] + support_ns.get(at, 0)
        if reader[at] >= 0 and reader[at] in brings:
            support_ns[reader[at]] = support_ns.get(reader[at], 0) + cost_ns
        if not back:
            continue
        first = at
        # Its only reader is in the run that goes, so it goes too.
        while first - 1 in brings and first <= reader[first - 1] <= at:
            first -= 1
        gaps.append(Gap(back, at, first, cost_ns))
    return gaps


def keep_what_fits(index: ProgramIndex, schedule: Schedule, budget_bytes: int) -> Schedule:
    """Undo evictions while there is room, those that cost most per byte and step first."""
    while True:
        better = _keep_round(index, schedule, budget_bytes, careful=False)
        if better is not None and better.peak_bytes > budget_bytes:
            better = _keep_round(index, schedule, budget_bytes, careful=True)
        if better is None or better.cost_ns >= schedule.cost_ns:
            return schedule
        schedule = better


def _keep_round(
    index: ProgramIndex, schedule: Schedule, budget_bytes: int, careful: bool
) -> Schedule | None:
    """Undo what fits by the present account; None where nothing does.

    Entries that are expected to go are not counted, unless ``careful``: when two undone evictions
    meet, such an entry can stay after all.
    """
    size_bytes = index.size_bytes
    during = np.array(schedule.during_bytes, dtype=np.int64)
    frees: list[list[int]] | None = None

    def density(gap: Gap) -> tuple[float, int]:
        area = sum(max(size_bytes[s], 1) * (gap.support - start) for s, start in gap.storages)
        return (-gap.cost_ns / max(area, 1), gap.stop)

    for gap in sorted(schedule.gaps, key=density):
        size = sum(size_bytes[s] for s, _ in gap.storages)
        start = min(start for _, start in gap.storages)
        span = during[start + 1 : gap.stop + 1 if careful else gap.support]
        if len(span) and int(span.max()) + size > budget_bytes:
            continue
        if frees is None:
            frees = [list(f) for f in schedule.frees]
        for s, at in gap.storages:
            during[at + 1 : gap.stop + 1] += size_bytes[s]
            frees[at].remove(s)
    return None if frees is None else tidy(index, schedule.operators, frees)
