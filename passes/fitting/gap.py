"""Where a plan and the schedule that the compiler made of it differ, operator by operator."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from dtrcompile.passes.errors import format_bytes
from dtrcompile.passes.inductor.schedule_trace import Cause, ScheduleTrace
from dtrcompile.passes.program.plan import Compute, Plan
from dtrcompile.passes.program.program import Program
from dtrcompile.passes.program.replay import replay

_COPIES = (Cause.TANGENT_COPY, Cause.GRADIENT_COPY)
_COUNTED_APART = (Cause.WORKSPACE, Cause.ROUNDING, *_COPIES)


@dataclass(frozen=True)
class Gap:
    """A step of a plan, as planned and as scheduled.

    Attributes:
        step: of the plan.
        operator: its name.
        planned_bytes: held while it runs, as the referee counts.
        held_bytes: the most that the schedule holds when one of its buffers is allocated, without
            what is freed late on purpose (`Event.late_bytes`).
        by_cause: of what the schedule holds then, what no storage of the program is.
        planned_workspace_bytes: what the plan counts for its library call.
        line: of the wrapper.
    """

    step: int
    operator: str
    planned_bytes: int
    held_bytes: int
    by_cause: dict[Cause, int]
    planned_workspace_bytes: int
    line: str

    @property
    def more_bytes(self) -> int:
        """What the schedule holds above the plan; negative where it holds less."""
        return self.held_bytes - self.planned_bytes

    @property
    def storage_bytes(self) -> int:
        """Of that, storages: allocated earlier, freed later, or not at all."""
        apart = sum(self.by_cause.values()) - self.planned_workspace_bytes
        return self.more_bytes - apart


def gaps(program: Program, plan: Plan, trace: ScheduleTrace) -> list[Gap]:
    """Of each step of ``plan`` whose buffers the schedule allocates, in the plan's order."""
    timeline, _ = replay(program, plan)
    found: dict[int, Gap] = {}
    apart: Counter[Cause] = Counter()
    live_bytes = 0
    for event in trace.events:
        live_bytes += event.size_bytes
        if event.cause in _COUNTED_APART:
            apart[event.cause] += event.size_bytes
        step = event.step
        if step is None or event.is_given_back or not 0 <= step < len(plan.steps):
            continue
        planned = plan.steps[step]
        if not isinstance(planned, Compute):
            continue
        held_bytes = live_bytes - event.late_bytes
        if step not in found or held_bytes > found[step].held_bytes:
            operator = program.operators[planned.operator]
            found[step] = Gap(
                step,
                operator.name,
                timeline.during_bytes[step],
                held_bytes,
                {cause: n for cause, n in apart.items() if n},
                operator.workspace_bytes,
                event.line,
            )
    return [found[step] for step in sorted(found)]


def gap_text(program: Program, plan: Plan, trace: ScheduleTrace, most: int = 20) -> str:
    """A table of the steps that differ most, below the two peaks."""
    _, stats = replay(program, plan)
    peak = max(trace.moments(), key=lambda m: m.live_bytes)
    lines = [
        f"planned peak    {format_bytes(stats.peak_bytes)} at {stats.peak_operator or 'the start'}",
        f"scheduled peak  {format_bytes(peak.live_bytes)} at {peak.taken.line}",
    ]
    found = gaps(program, plan, trace)
    if not found:
        lines.append(
            "The schedule names no step of the plan: it is that of the default split, or of code"
            " that was not lowered from this plan."
        )
        return "\n".join(lines)
    differing = sorted((g for g in found if g.more_bytes), key=lambda g: -abs(g.more_bytes))
    lines.append(
        f"{len(found)} of {len(plan.steps)} steps allocate something; {len(differing)} of them hold"
        " something else than planned"
    )
    rows = [_HEADER, *map(_row, differing[:most])]
    widths = [max(len(row[i]) for row in rows) for i in range(len(_HEADER))]
    for row in rows:
        cells = (
            cell.ljust(width) if i in (1, len(row) - 1) else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        lines.append("  ".join(cells).rstrip())
    if len(differing) > most:
        lines.append(f"and {len(differing) - most} more")
    return "\n".join(lines)


_HEADER = (
    "step",
    "operator",
    "planned",
    "scheduled",
    "more",
    "storages",
    "workspace",
    "copies",
    "rounding",
    "line of the wrapper",
)
_LINE_LENGTH = 60


def _row(gap: Gap) -> Sequence[str]:
    workspace = gap.by_cause.get(Cause.WORKSPACE, 0) - gap.planned_workspace_bytes
    numbers = (
        gap.planned_bytes,
        gap.held_bytes,
        gap.more_bytes,
        gap.storage_bytes,
        workspace,
        sum(gap.by_cause.get(cause, 0) for cause in _COPIES),
        gap.by_cause.get(Cause.ROUNDING, 0),
    )
    return (str(gap.step), gap.operator, *map(str, numbers), gap.line[:_LINE_LENGTH])
