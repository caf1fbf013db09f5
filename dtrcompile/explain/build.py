"""From a program, its plan and the compiler's schedule to what is explained of them."""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import replace

from dtrcompile.explain.explained import (
    Explained,
    ExplainedOperator,
    ExplainedTensor,
    Fate,
    ModuleAccount,
    ScheduledBuffer,
    Stay,
    format_ns,
)
from dtrcompile.passes.errors import format_bytes
from dtrcompile.passes.inductor.schedule_trace import Cause, Event, ScheduleTrace, category
from dtrcompile.passes.program.plan import (
    Boundary,
    Compute,
    Free,
    Offload,
    Plan,
    Prefetch,
    unknown_step,
)
from dtrcompile.passes.program.program import Phase, Program, StorageKind
from dtrcompile.passes.program.replay import replay
from dtrcompile.passes.program.sources import NOWHERE, Source, Sources, TensorForm


def explain(
    program: Program,
    plan: Plan,
    default: Plan,
    sources: Sources,
    trace: ScheduleTrace | None = None,
    *,
    scheduled: Plan | None = None,
    title: str = "",
    facts: Mapping[str, str] | None = None,
) -> Explained:
    """Explain a plan.

    Args:
        default: the plan without a budget, of the same program.
        trace: of the schedule that the compiler made of the plan.
        scheduled: the plan whose steps the trace names, if its caller gave up something else; None:
            ``plan``.

    Raises:
        PlanError: if a plan breaks a rule of the referee.
    """
    explainer = _Explainer(program, plan, default, sources, scheduled or plan)
    return explainer.explained(trace, title, facts or {})


class _Walk:
    """When each storage is in memory, by the runs of a plan."""

    def __init__(self, program: Program, plan: Plan) -> None:
        self.program = program
        self.runs: list[int] = []
        self.begun: dict[int, int] = {}
        self.stays: dict[int, list[Stay]] = defaultdict(list)
        self.computed: Counter[int] = Counter()  # by storage
        self.fetched: set[int] = set()  # storages that come back from the host
        self.boundary: int | None = None
        for storage in program.storages:
            if storage.is_constant and storage.kind is not StorageKind.TANGENT:
                self.begun[storage.id] = 0
        self.at_boundary = frozenset(self.begun)
        for step in plan.steps:
            match step:
                case Compute(o):
                    self._compute(o)
                case Free(s):
                    first = self.begun.pop(s)
                    self.stays[s].append(Stay(first, max(first, len(self.runs) - 1)))
                case Boundary():
                    self._boundary()
                case Prefetch(s):
                    self.fetched.add(s)
                    self.begun[s] = len(self.runs)
                case Offload():
                    pass
                case _:
                    raise unknown_step(step)
        end = max(0, len(self.runs) - 1)
        for s, first in self.begun.items():
            self.stays[s].append(Stay(min(first, end), end))
        if self.boundary is None:
            self.boundary = len(self.runs)

    def _compute(self, o: int) -> None:
        for t in self.program.operators[o].outputs:
            s = self.program.tensors[t].storage
            if self.program.root_tensor[s] == t:
                self.computed[s] += 1
                self.begun.setdefault(s, len(self.runs))
        self.runs.append(o)

    def _boundary(self) -> None:
        self.boundary = len(self.runs)
        self.at_boundary = frozenset(self.begun)
        for storage in self.program.storages:
            if storage.kind is StorageKind.TANGENT:
                self.begun[storage.id] = len(self.runs)


class _Explainer:
    def __init__(
        self, program: Program, plan: Plan, default: Plan, sources: Sources, scheduled: Plan
    ) -> None:
        self.program = program
        self.scheduled = scheduled
        self.walk, self.default_walk = _Walk(program, plan), _Walk(program, default)
        self.timeline, self.stats = replay(program, plan)
        _, self.default_stats = replay(program, default)
        self.sources = sources
        self.run_counts = Counter(self.walk.runs)
        steps = [i for i, step in enumerate(plan.steps) if isinstance(step, Compute)]
        self.run_of_step = {step: run for run, step in enumerate(steps)}
        # (The step before which the peak occurs may be a free, or the boundary.)
        self.peak_run = max(
            (run for step, run in self.run_of_step.items() if step <= self.timeline.peak_step),
            default=-1,
        )

    def explained(
        self, trace: ScheduleTrace | None, title: str, facts: Mapping[str, str]
    ) -> Explained:
        found = Explained(
            title,
            dict(facts),
            self.stats.peak_bytes,
            self.stats.peak_bytes,
            self.default_stats.peak_bytes,
            tuple(self.operators()),
            tuple(self.tensors()),
            tuple(self.walk.runs),
            self.walk.boundary or 0,
            self.peak_run,
            tuple(self.modules()),
        )
        return found if trace is None else self.with_schedule(found, trace)

    def source(self, o: int | None) -> Source:
        if o is None or o >= len(self.sources.operators):
            return NOWHERE
        return self.sources.operators[o]

    def operators(self) -> Iterable[ExplainedOperator]:
        for operator in self.program.operators:
            source = self.source(operator.id)
            yield ExplainedOperator(
                operator.name,
                operator.phase.value,
                source.module,
                source.frames,
                operator.cost_ns,
                self.run_counts[operator.id],
                operator.workspace_bytes,
                operator.not_recomputable or "",
            )

    # --- tensors ----------------------------------------------------------------------------------

    def tensors(self) -> Iterable[ExplainedTensor]:
        at_peak = frozenset(self.timeline.peak_resident)
        for storage in self.program.storages:
            producer = self.program.tensors[self.program.root_tensor[storage.id]].producer
            form = self.form(storage.id)
            fate = self.fate(storage.id)
            may_run = fate in (Fate.KEPT, Fate.RECOMPUTED, Fate.OFFLOADED)
            recompute_ns = self.recompute_ns(storage.id) if may_run else 0
            yield ExplainedTensor(
                form.name or storage.name,
                form.shape,
                form.dtype,
                storage.size_bytes,
                storage.kind.value,
                self.category(storage.id),
                producer,
                self.module(storage.id),
                fate,
                self.why(storage.id, fate, recompute_ns),
                tuple(self.walk.stays[storage.id]),
                recompute_ns,
                storage.id in at_peak,
            )

    def form(self, s: int) -> TensorForm:
        return self.sources.storages[s] if s < len(self.sources.storages) else _FORMLESS

    def module(self, s: int) -> str:
        """Of a constant: of what its name is an attribute of."""
        producer = self.program.tensors[self.program.root_tensor[s]].producer
        if producer is not None:
            return self.source(producer).module
        return self.form(s).name.rpartition(".")[0]

    def category(self, s: int) -> str:
        kind = self.program.storages[s].kind
        named = {
            StorageKind.PARAMETER: "parameters",
            StorageKind.INPUT: "inputs",
            StorageKind.TANGENT: "inputs",
            StorageKind.OUTPUT: "outputs",
            StorageKind.GRADIENT: "gradients",
        }
        return named.get(kind) or ("saved" if s in self.walk.at_boundary else "temporaries")

    def is_kept_by(self, walk: _Walk, s: int) -> bool:
        """Whether a plan holds a forward value between forward and backward, to read it there."""
        kind = self.program.storages[s].kind
        return (
            self.program.boundary is not None
            and kind is StorageKind.INTERMEDIATE
            and s in walk.at_boundary
        )

    def fate(self, s: int) -> Fate:
        storage = self.program.storages[s]
        if storage.is_constant:
            return Fate.CONSTANT
        if self.walk.computed[s] > 1:
            return Fate.RECOMPUTED
        if s in self.walk.fetched:
            return Fate.OFFLOADED
        if self.is_kept_by(self.walk, s):
            return Fate.KEPT
        is_result = storage.kind in (StorageKind.OUTPUT, StorageKind.GRADIENT)
        return Fate.RESULT if is_result else Fate.TEMPORARY

    def recompute_ns(self, s: int) -> int:
        """What it costs to compute it in backward from what the plan keeps.

        The evicted neighborhood of DTR (Kirisame et al., section 4.1), toward its ancestors.
        """
        producer = self.program.tensors[self.program.root_tensor[s]].producer
        if producer is None or self.program.operators[producer].phase is Phase.BACKWARD:
            return 0
        needed, left = {producer}, [producer]
        while left:
            for t in self.program.operators[left.pop()].inputs:
                tensor = self.program.tensors[t]
                if tensor.producer is None or tensor.producer in needed:
                    continue
                if tensor.storage not in self.walk.at_boundary:
                    needed.add(tensor.producer)
                    left.append(tensor.producer)
        return sum(self.program.operators[o].cost_ns for o in needed)

    def why(self, s: int, fate: Fate, recompute_ns: int) -> str:
        storage, walk = self.program.storages[s], self.walk
        size, cost = format_bytes(storage.size_bytes), format_ns(recompute_ns)
        away = sum(b.first - a.last - 1 for a, b in itertools.pairwise(walk.stays[s]))
        if fate is Fate.RECOMPUTED:
            further = walk.computed[s] - 1
            again = "once more" if further == 1 else f"{further} times more"
            return f"computed {again} ({cost} each), instead of holding {size} over {away} runs"
        if fate is Fate.OFFLOADED:
            return f"copied to the host and back, instead of holding {size} over {away} runs"
        if fate is Fate.KEPT:
            once = self._why_once(s)
            if once:
                return f"kept: it may not be computed again ({once})"
            return f"kept: computing it again would take {cost}"
        if fate is Fate.CONSTANT:
            return "there before the step, and after it"
        if fate is Fate.RESULT:
            return "the caller holds it from here on"
        return "freed after its last reader"

    def _why_once(self, s: int) -> str:
        storage = self.program.storages[s]
        producer = self.program.tensors[self.program.root_tensor[s]].producer
        once = None if producer is None else self.program.operators[producer].not_recomputable
        return storage.pinned or once or ""

    # --- modules ----------------------------------------------------------------------------------

    def modules(self) -> Iterable[ModuleAccount]:
        kept: Counter[str] = Counter()
        default_kept: Counter[str] = Counter()
        peak: Counter[str] = Counter()
        cost: Counter[str] = Counter()
        recompute: Counter[str] = Counter()
        at_peak = frozenset(self.timeline.peak_resident)
        for storage in self.program.storages:
            module = self.module(storage.id)
            for walk, found in ((self.walk, kept), (self.default_walk, default_kept)):
                if self.is_kept_by(walk, storage.id):
                    found[module] += storage.size_bytes
            if storage.id in at_peak:
                peak[module] += storage.size_bytes
        for operator in self.program.operators:
            module = self.source(operator.id).module
            cost[module] += operator.cost_ns
            recompute[module] += operator.cost_ns * (self.run_counts[operator.id] - 1)
        names = dict.fromkeys([*cost, *peak, *kept, *default_kept])
        for name in names:
            yield ModuleAccount(
                name, kept[name], default_kept[name], peak[name], cost[name], recompute[name]
            )

    # --- the schedule -----------------------------------------------------------------------------

    def with_schedule(self, found: Explained, trace: ScheduleTrace) -> Explained:
        moments = 1 + max((e.moment for e in trace.events), default=-1)
        peak = max(trace.moments(), key=lambda m: m.live_bytes)
        in_backward = (e.moment for e in trace.events if e.phase is Phase.BACKWARD)
        return replace(
            found,
            peak_bytes=peak.live_bytes,
            buffers=tuple(self.buffers(trace, moments)),
            moments=moments,
            peak_moment=peak.taken.moment,
            boundary_moment=min(in_backward, default=moments),
        )

    def buffers(self, trace: ScheduleTrace, moments: int) -> Iterable[ScheduledBuffer]:
        taken: dict[int, list[Event]] = {}
        ends: dict[int, int] = {}
        for event in trace.events:
            if event.is_given_back:
                ends[event.serial] = event.moment - 1
            else:
                taken.setdefault(event.serial, []).append(event)
        constants = {s.name: s.id for s in self.program.storages if s.is_constant}
        held: dict[tuple[int, int | None], set[int]] = defaultdict(set)
        for serial, events in taken.items():
            first = events[0]
            o = self.maker(first)
            tensor = constants.get(first.buffer) if first.cause.is_resident else None
            if tensor is None and o is not None and first.cause is Cause.STORAGE:
                tensor = self.tensor_of(o, first.size_bytes, held[o, first.step])
            yield ScheduledBuffer(
                first.buffer,
                first.cause.value,
                category(trace, serial, events),
                sum(e.size_bytes for e in events),
                first.moment,
                max(first.moment, ends.get(serial, moments - 1)),
                o,
                tensor,
            )

    def maker(self, event: Event) -> int | None:
        """The operator that a buffer is computed by: of its step, else of where it was lowered."""
        if event.step is not None and 0 <= event.step < len(self.scheduled.steps):
            step = self.scheduled.steps[event.step]
            if isinstance(step, Compute):
                return step.operator
        return event.maker if event.maker is not None else event.operator

    def tensor_of(self, o: int, size_bytes: int, held: set[int]) -> int | None:
        """Which of an operator's storages a buffer is: one of its size that no other buffer is."""
        outputs = self.program.operators[o].outputs
        storages = dict.fromkeys(self.program.tensors[t].storage for t in outputs)
        left = [
            s
            for s in storages
            if s not in held and self.program.storages[s].size_bytes >= size_bytes
        ]
        best = min(left, key=lambda s: self.program.storages[s].size_bytes, default=None)
        if best is None or self.program.storages[best].size_bytes > 2 * size_bytes + _BLOCK_BYTES:
            return None
        held.add(best)
        return best


# Blocks of an allocator: a buffer may be counted as that much more in the program.
_BLOCK_BYTES = 512
_FORMLESS = TensorForm("", (), "")
