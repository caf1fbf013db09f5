"""The referee: runs a plan step by step and is the only definition of its peak.

It is deliberately naive: it keeps sets of what is resident and defined, applies one step at a time,
and checks every rule.  Faster code elsewhere is compared with it.

Memory at a step (the two-step accounting of XLA's HloRematerialization): a `plan.Compute` holds
everything resident, its new outputs and its workspace together; a `plan.Free` then takes its
storage away.  A `plan.Prefetch` allocates its storage at once, and a `plan.Offload` changes
nothing.  A negative workspace says that outputs are written over inputs: inputs that the frees
right after the operator take away are then not counted beside the outputs; inputs that stay are.
When an operator with several outputs runs again while some of them are resident,
the duplicates are held for that step and dropped at its end.

Time matters only to plans that copy to the host (`host_link.LinkClock` adds it up): compute waits
at an operator for the copies that the operator reads, at a free for the copies of that storage, and
at the boundary and at the end for the outputs that must be there.  The waits are part of a plan's
cost.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from dtrcompile.passes.errors import PlanError
from dtrcompile.passes.program.host_link import LinkClock
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
from dtrcompile.passes.program.program import Operator, Phase, Program, Storage, StorageKind


@dataclass(frozen=True)
class MemoryTimeline:
    """Bytes held at each step of a plan.

    Attributes:
        during_bytes: while the step runs, one entry for each step.
        after_bytes: when the step is done, one entry for each step.
        start_bytes: before the first step (the constants).
        peak_step: index of the first step at which the peak occurs, -1 if it occurs at the start.
        peak_resident: storages held at the peak, new outputs included, ascending.
    """

    during_bytes: tuple[int, ...]
    after_bytes: tuple[int, ...]
    start_bytes: int
    peak_step: int
    peak_resident: tuple[int, ...]

    @property
    def peak_bytes(self) -> int:
        """The most bytes held at any moment."""
        return max(self.during_bytes, default=self.start_bytes)


@dataclass(frozen=True)
class PlanStats:
    """What a plan costs.

    Attributes:
        peak_bytes: the referee's peak.
        cost_ns: cost of all computations, and of the waits for copies.
        baseline_cost_ns: cost of running each operator once.
        recomputed: operator id -> number of extra runs, only for operators that have any.
        forward_peak_bytes, backward_peak_bytes: of each phase; 0 for a missing backward.
        boundary_bytes: everything resident when forward has returned, before the tangents come.
        saved_bytes: intermediates resident at the boundary.
        peak_operator: name of the operator at the peak, "" if the peak is not at an operator.
        peak_split: bytes at the peak by `StorageKind` value, plus "saved" (intermediates that were
            resident at the boundary and still are at a peak in backward) and "workspace".
        stall_ns: how long compute waits for copies.
        offloaded_bytes: bytes that are copied to the host, in all.
    """

    peak_bytes: int
    cost_ns: int
    baseline_cost_ns: int
    recomputed: dict[int, int]
    forward_peak_bytes: int
    backward_peak_bytes: int
    boundary_bytes: int
    saved_bytes: int
    peak_operator: str
    peak_split: dict[str, int]
    stall_ns: int = 0
    offloaded_bytes: int = 0

    @property
    def overhead(self) -> float:
        """Planned cost / baseline cost; 1.0 means that nothing is computed twice or waited for."""
        return self.cost_ns / self.baseline_cost_ns if self.baseline_cost_ns else 1.0

    @property
    def recomputed_operators(self) -> int:
        """The number of extra runs of all operators together."""
        return sum(self.recomputed.values())


def replay(program: Program, plan: Plan) -> tuple[MemoryTimeline, PlanStats]:
    """Run ``plan`` and return what it holds and costs.

    Raises:
        PlanError: if a rule is broken; the message prints the neighbouring steps.
    """
    if plan.program != program.fingerprint:
        raise PlanError(
            f"the plan is for program {plan.program}, this one is {program.fingerprint};"
            " plan again for this program"
        )
    return _Replay(program, plan).run()


class _Replay:
    def __init__(self, program: Program, plan: Plan) -> None:
        self.program = program
        self.plan = plan
        self.clock = None if plan.host_link is None else LinkClock(plan.host_link)
        self.on_host: dict[int, frozenset[int]] = {}  # storage -> its tensors when it was copied
        self.index = 0
        self.in_backward = False
        self.resident = {
            s.id for s in program.storages if s.is_constant and s.kind is not StorageKind.TANGENT
        }
        self.defined = {
            t.id for t in program.tensors if t.producer is None and t.storage in self.resident
        }
        self.live_bytes = sum(program.storages[s].size_bytes for s in self.resident)
        self.runs: Counter[int] = Counter()
        self.last_once_operator = -1
        self.overwritten: set[int] = set()  # constants of which the given value is gone
        self.saved: frozenset[int] = frozenset()
        self.last_reader = {s.id: max(program.readers[s.id], default=-1) for s in program.storages}

    def fail(self, message: str) -> PlanError:
        lines = [f"step {self.index}: {message}"]
        low, high = max(0, self.index - 3), self.index + 4
        for i, step in enumerate(self.plan.steps[low:high], start=low):
            lines.append(f"  {'>' if i == self.index else ' '} {i}: {self.describe(step)}")
        return PlanError("\n".join(lines))

    def describe(self, step: Step) -> str:
        operators, storages = self.program.operators, self.program.storages
        match step:
            case Compute(o):
                return f"compute {_named(o, operators)}"
            case Free(s):
                return f"free {_named(s, storages)}"
            case Offload(s):
                return f"offload {_named(s, storages)}"
            case Prefetch(s):
                return f"prefetch {_named(s, storages)}"
            case Boundary():
                return "boundary"
            case _:
                raise unknown_step(step)

    def run(self) -> tuple[MemoryTimeline, PlanStats]:
        program, steps = self.program, self.plan.steps
        start_bytes = peak_bytes = self.live_bytes
        forward_peak_bytes, backward_peak_bytes, boundary_bytes = start_bytes, 0, 0
        peak_step, peak_resident = -1, frozenset(self.resident)
        peak_in_backward, peak_operator, peak_workspace = False, "", 0
        during: list[int] = []
        after: list[int] = []
        at_step = start_bytes
        for index, (step, following) in enumerate(zip(steps, [*steps[1:], None], strict=False)):
            self.index = index
            at_step, workspace, operator = min(self.live_bytes, at_step), 0, ""
            match step:
                case Compute(o):
                    workspace = self.compute(o)
                    at_step = self.live_bytes + workspace
                    operator = program.operators[o].name
                case Free(s):
                    self.free(s)
                case Offload(s):
                    self.offload(s)
                case Prefetch(s):
                    self.prefetch(s)
                    at_step = self.live_bytes
                case Boundary():
                    boundary_bytes = self.live_bytes
                    self.boundary()
                    # What is handed on is gone when the tangents come; that both are there while
                    # another graph makes these is in what that one holds.
                    at_step = max(boundary_bytes, self.live_bytes - self.given_up_bytes())
                case _:
                    raise unknown_step(step)
            if not isinstance(following, Free | Offload):
                # What was not freed after an operator was not written over by it.
                at_step = max(at_step, self.live_bytes)
            if self.in_backward:
                backward_peak_bytes = max(backward_peak_bytes, at_step)
            else:
                forward_peak_bytes = max(forward_peak_bytes, at_step)
            if at_step > peak_bytes:
                peak_bytes, peak_step = at_step, self.index
                peak_resident = frozenset(self.resident)
                peak_in_backward, peak_operator = self.in_backward, operator
                peak_workspace = workspace
            during.append(at_step)
            after.append(self.live_bytes)
        self.finish()
        if program.boundary is None:
            boundary_bytes = self.live_bytes

        split: Counter[str] = Counter()
        for s in peak_resident:
            kind = program.storages[s].kind.value
            if peak_in_backward and s in self.saved and kind == "intermediate":
                kind = "saved"
            split[kind] += program.storages[s].size_bytes
        if peak_workspace:
            split["workspace"] = peak_workspace
        cost_ns = sum(program.operators[o].cost_ns * n for o, n in self.runs.items())
        stall_ns = 0 if self.clock is None else self.clock.stall_ns
        return (
            MemoryTimeline(
                tuple(during), tuple(after), start_bytes, peak_step, tuple(sorted(peak_resident))
            ),
            PlanStats(
                peak_bytes=peak_bytes,
                cost_ns=cost_ns + stall_ns,
                baseline_cost_ns=program.cost_ns,
                recomputed={o: n - 1 for o, n in sorted(self.runs.items()) if n > 1},
                forward_peak_bytes=forward_peak_bytes,
                backward_peak_bytes=backward_peak_bytes,
                boundary_bytes=boundary_bytes,
                saved_bytes=sum(
                    program.storages[s].size_bytes
                    for s in self.saved
                    if program.storages[s].kind is StorageKind.INTERMEDIATE
                ),
                peak_operator=peak_operator,
                peak_split=dict(split),
                stall_ns=stall_ns,
                offloaded_bytes=0 if self.clock is None else self.clock.copied_bytes,
            ),
        )

    def compute(self, o: int) -> int:
        """Run operator ``o``; returns the bytes held only while it runs."""
        program = self.program
        if not 0 <= o < len(program.operators):
            raise self.fail(f"operator {o} does not exist")
        op = program.operators[o]
        if op.phase is Phase.BACKWARD and not self.in_backward:
            raise self.fail(f"backward operator {op.name!r} runs before the boundary")
        if op.phase is Phase.FORWARD and self.in_backward and not self.runs[o]:
            raise self.fail(f"forward operator {op.name!r} runs for the first time in backward")
        if op.not_recomputable is not None:
            if self.runs[o]:
                raise self.fail(f"{op.name!r} may not run again: {op.not_recomputable}")
            if o < self.last_once_operator:
                raise self.fail(f"{op.name!r} runs out of order; it may run only once")
            self.last_once_operator = o
        if program.barriers and not self.runs[o]:
            self.check_barriers(o)
        for t in op.inputs:
            if t not in self.defined:
                raise self.fail(f"{op.name!r} reads {program.tensors[t].name!r}, not in memory")
            if program.tensors[t].storage in self.overwritten:
                name = program.tensors[t].name
                raise self.fail(f"{op.name!r} reads {name!r}, which was overwritten before")
        self.overwritten.update(op.overwrites)
        if self.clock is not None:
            self.clock.wait_for(program.tensors[t].storage for t in op.inputs)
            self.clock.run(op.cost_ns)
        self.runs[o] += 1
        duplicate_bytes = 0
        for t in op.outputs:
            s = program.tensors[t].storage
            if program.root_tensor[s] == t:
                if s in self.resident:
                    duplicate_bytes += program.storages[s].size_bytes
                else:
                    self.resident.add(s)
                    self.live_bytes += program.storages[s].size_bytes
            self.defined.add(t)
        return duplicate_bytes + op.workspace_bytes

    def check_barriers(self, o: int) -> None:
        """Operator ``o``, which has not run yet, is on its side of every barrier."""
        operators = self.program.operators
        for barrier in self.program.barriers:
            if barrier < o and not self.runs[barrier]:
                raise self.fail(f"{operators[o].name!r} runs before {operators[barrier].name!r}")
            if barrier == o and not all(self.runs[before] for before in range(o)):
                raise self.fail(f"{operators[o].name!r} runs before what comes before it")

    def free(self, s: int) -> None:
        program = self.program
        self.check_may_leave(s, "freed")
        storage = program.storages[s]
        if (
            storage.pinned is not None
            and not self.runs[self.last_reader[s]]
            and (self.last_reader[s] >= 0)
        ):
            raise self.fail(f"{storage.name!r} is evicted but is pinned: {storage.pinned}")
        if self.clock is not None:
            self.clock.free(s)
        self.resident.remove(s)
        self.live_bytes -= storage.size_bytes
        for tensor in program.tensors_of[s]:
            self.defined.discard(tensor)

    def offload(self, s: int) -> None:
        program = self.program
        self.check_may_leave(s, "offloaded")
        if not program.storages[s].size_bytes:
            raise self.fail(f"{program.storages[s].name!r} has no bytes to offload")
        self.link_clock().offload(s, program.storages[s].size_bytes)
        self.on_host[s] = frozenset(self.defined.intersection(program.tensors_of[s]))

    def prefetch(self, s: int) -> None:
        program = self.program
        if not 0 <= s < len(program.storages):
            raise self.fail(f"storage {s} does not exist")
        storage = program.storages[s]
        if s not in self.on_host:
            raise self.fail(f"{storage.name!r} is prefetched but was never offloaded")
        if s in self.resident:
            raise self.fail(f"{storage.name!r} is prefetched but is in memory")
        self.link_clock().prefetch(s, storage.size_bytes)
        self.resident.add(s)
        self.live_bytes += storage.size_bytes
        self.defined |= self.on_host[s]

    def link_clock(self) -> LinkClock:
        if self.clock is None:
            raise self.fail("the plan copies to the host, but does not say over which link")
        return self.clock

    def check_may_leave(self, s: int, what: str) -> None:
        program = self.program
        if not 0 <= s < len(program.storages):
            raise self.fail(f"storage {s} does not exist")
        storage = program.storages[s]
        if storage.is_constant and not (self.in_backward and s in program.handed_on):
            raise self.fail(f"{storage.name!r} comes from outside and cannot be {what}")
        if s not in self.resident:
            raise self.fail(f"{storage.name!r} is {what} but is not in memory")
        if self.in_backward and s in program.held_in_backward:
            raise self.fail(f"{storage.name!r} is a forward output, which the caller holds")

    def boundary(self) -> None:
        program = self.program
        if program.boundary is None:
            raise self.fail("this program has no backward, so no boundary")
        if self.in_backward:
            raise self.fail("a second boundary")
        for op in program.operators[: program.boundary]:
            if not self.runs[op.id]:
                raise self.fail(f"forward operator {op.name!r} did not run")
        for s in sorted(program.held_from_boundary - self.resident):
            raise self.fail(f"forward output {program.storages[s].name!r} is not in memory")
        for t in program.outputs:
            producer = program.tensors[t].producer
            if producer is not None and producer < program.boundary and t not in self.defined:
                raise self.fail(f"forward output {program.tensors[t].name!r} is not defined")
        if self.clock is not None:
            self.clock.wait_for(sorted(program.held_from_boundary))
        self.saved = (
            frozenset(s for s in self.resident if not program.storages[s].is_constant)
            - program.held_from_boundary
        )
        self.in_backward = True
        for tensor in program.tensors:
            storage = program.storages[tensor.storage]
            if storage.kind is StorageKind.TANGENT and tensor.producer is None:
                if tensor.storage not in self.resident:
                    self.resident.add(tensor.storage)
                    self.live_bytes += storage.size_bytes
                self.defined.add(tensor.id)

    def given_up_bytes(self) -> int:
        """Outputs that are handed on, and freed right after the boundary."""
        program = self.program
        freed = itertools.takewhile(
            lambda step: isinstance(step, Free), self.plan.steps[self.index + 1 :]
        )
        return sum(
            program.storages[step.storage].size_bytes
            for step in freed
            if isinstance(step, Free)
            and not program.storages[step.storage].is_constant
            and step.storage in program.handed_on
        )

    def finish(self) -> None:
        program = self.program
        self.index = len(self.plan.steps)
        if program.boundary is not None and not self.in_backward:
            raise self.fail("the plan has no boundary")
        for op in program.operators:
            if not self.runs[op.id]:
                raise self.fail(f"operator {op.name!r} did not run")
        for t in program.outputs:
            if t not in self.defined and program.tensors[t].storage not in program.handed_on:
                raise self.fail(f"output {program.tensors[t].name!r} is not in memory at the end")
        if self.clock is not None:
            self.clock.wait_for(sorted(program.output_storages))
        for s in sorted(self.resident - program.output_storages):
            if not program.storages[s].is_constant:
                raise self.fail(f"{program.storages[s].name!r} is never freed")


def _named(i: int, of: Sequence[Operator] | Sequence[Storage]) -> str:
    """A number of a plan, which may be out of range, with the name of what it refers to."""
    return f"{i} ({of[i].name})" if 0 <= i < len(of) else str(i)
