"""What becomes of each tensor of a plan, what is live when, and what that costs, as plain values.

Two axes of time: the *runs* of a plan (each computation of an operator, in order) and the *moments*
of the compiler's schedule (each allocation, in order).  The schedule is what the promise is made
of; the plan says why the schedule is what it is.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass

from dtrcompile.passes.program.sources import Frame

CATEGORIES = ("parameters", "inputs", "saved", "temporaries", "gradients", "outputs")
"""What is live is counted by these, as in a report."""


class Fate(enum.Enum):
    """What a plan does with a tensor."""

    CONSTANT = "constant"  # a parameter, buffer, input or tangent: there from outside
    KEPT = "kept"  # computed in forward, read in backward, and held in between
    RECOMPUTED = "recomputed"  # freed, and computed again
    OFFLOADED = "offloaded"  # copied to the host, freed, and copied back; never computed again
    TEMPORARY = "temporary"  # freed after its last reader, and needed no more
    RESULT = "result"  # an output or a gradient: the caller holds it


@dataclass(frozen=True, slots=True)
class Stay:
    """Runs between which a tensor is in memory, both included."""

    first: int
    last: int


@dataclass(frozen=True, slots=True)
class ExplainedOperator:
    """An operator of the program.

    Attributes:
        phase: ``"forward"`` or ``"backward"``.
        module: path of the submodule that it belongs to.
        frames: of the user's program, the outermost first.
        cost_ns: of one run, by the cost model.
        runs: how often the plan runs it.
        workspace_bytes: held only while it runs.
        why_once: why it may not run again; empty where it may.
    """

    name: str
    phase: str
    module: str
    frames: tuple[Frame, ...]
    cost_ns: int
    runs: int
    workspace_bytes: int
    why_once: str


@dataclass(frozen=True, slots=True)
class ExplainedTensor:
    """A storage of the program, by the tensor that owns it.

    Attributes:
        shape, dtype: of its owner.
        kind: as `StorageKind`.
        category: one of `CATEGORIES`.
        operator: index of the operator that computes it; None for a constant.
        module: path of the submodule that it belongs to.
        fate: what the plan does with it.
        why: the reason, in a sentence.
        stays: when it is in memory.
        recompute_ns: what it costs to compute it in backward from what the plan keeps; 0 for what
            is neither kept nor recomputed.
        is_at_peak: it is in memory at the peak of the plan.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    size_bytes: int
    kind: str
    category: str
    operator: int | None
    module: str
    fate: Fate
    why: str
    stays: tuple[Stay, ...]
    recompute_ns: int
    is_at_peak: bool


@dataclass(frozen=True, slots=True)
class ScheduledBuffer:
    """What the compiled code allocates, or finds in memory.

    Attributes:
        name: in the code.
        cause: as `schedule_trace.Cause`.
        category: one of `CATEGORIES`.
        size_bytes: with what the allocator rounds up.
        first, last: moments between which it is held, both included.
        operator: index of the operator that it is computed by, where that is known.
        tensor: index of the tensor that it holds, where that is known.
    """

    name: str
    cause: str
    category: str
    size_bytes: int
    first: int
    last: int
    operator: int | None
    tensor: int | None


@dataclass(frozen=True, slots=True)
class ModuleAccount:
    """What a submodule pays and saves.

    Attributes:
        kept_bytes: of what its forward computes, what is held between forward and backward.
        default_kept_bytes: the same without a budget.
        peak_bytes: held of it at the peak of the plan.
        cost_ns: of its operators, each once.
        recompute_ns: of their further runs.
    """

    module: str
    kept_bytes: int
    default_kept_bytes: int
    peak_bytes: int
    cost_ns: int
    recompute_ns: int

    @property
    def saved_bytes(self) -> int:
        """What it keeps less than without a budget."""
        return self.default_kept_bytes - self.kept_bytes


@dataclass(frozen=True)
class Explained:
    """What a plan does, and what comes of it.

    Attributes:
        title: of the graph, for people.
        facts: name -> value, of the report.
        peak_bytes: of the schedule where there is one, else of the plan.
        planned_peak_bytes: of the plan.
        baseline_peak_bytes: without a budget, as the plan's account has it.
        operators, tensors: of the program, in its order.
        runs: the operator of each run.
        boundary: the first run of backward; the number of runs where there is none.
        peak_run: the run at which the plan holds the most; -1: before the first.
        buffers: of the schedule, in the order in which they are taken; empty where there is none.
        moments: how many moments the schedule has.
        peak_moment: at which it holds the most; -1 without a schedule.
        boundary_moment: the first of backward; ``moments`` where there is none.
    """

    title: str
    facts: Mapping[str, str]
    peak_bytes: int
    planned_peak_bytes: int
    baseline_peak_bytes: int
    operators: tuple[ExplainedOperator, ...]
    tensors: tuple[ExplainedTensor, ...]
    runs: tuple[int, ...]
    boundary: int
    peak_run: int
    modules: tuple[ModuleAccount, ...]
    buffers: tuple[ScheduledBuffer, ...] = ()
    moments: int = 0
    peak_moment: int = -1
    boundary_moment: int = 0

    @property
    def at_peak(self) -> list[ScheduledBuffer]:
        """What the schedule holds at its peak, the largest first."""
        live = [b for b in self.buffers if b.first <= self.peak_moment <= b.last]
        return sorted(live, key=lambda b: -b.size_bytes)


def format_ns(cost_ns: float) -> str:
    """A time for people."""
    for unit, size in (("s", 1e9), ("ms", 1e6), ("µs", 1e3)):
        if cost_ns >= size:
            return f"{cost_ns / size:.3g} {unit}"
    return f"{cost_ns:.0f} ns"
