"""What an explanation says beside a program and its plan, for programs that come from no model."""

from __future__ import annotations

from dataclasses import replace

from dtrcompile.passes.inductor.schedule_trace import Cause, Event, ScheduleTrace
from dtrcompile.passes.program.plan import Compute, Plan
from dtrcompile.passes.program.program import Phase, Program, StorageKind
from dtrcompile.passes.program.sources import Frame, Source, Sources, TensorForm


def sources_of(program: Program) -> Sources:
    """Modules, lines and forms for a program that comes from no model."""

    def source(o: int) -> Source:
        inner = Frame("/home/user/model.py", 10 + o, "forward", f"x = layer_{o}(x)  # </script>")
        return Source(f"blocks.{o // 2}", (Frame("/home/user/train.py", 3, "step"), inner))

    return Sources(
        tuple(source(o.id) for o in program.operators),
        tuple(
            TensorForm(f"blocks.{s.id}.weight", (2, 3), "float32")
            if s.kind is StorageKind.PARAMETER
            else TensorForm("", (4,), "float32")
            for s in program.storages
        ),
    )


def schedule_of(program: Program, plan: Plan) -> ScheduleTrace:
    """What compiled code would allocate that takes and gives back what the plan does."""
    events: list[Event] = []
    held: dict[int, Event] = {}
    moment = 0
    for storage in program.storages:
        if storage.is_constant and storage.kind is not StorageKind.TANGENT:
            cause = Cause.PARAMETER if storage.kind is StorageKind.PARAMETER else Cause.INPUT
            events.append(
                Event(storage.size_bytes, cause, Phase.FORWARD, 0, len(events) + 1, storage.name)
            )
    for index, step in enumerate(plan.steps):
        if isinstance(step, Compute):
            operator = program.operators[step.operator]
            for t in operator.outputs:
                storage = program.storages[program.tensors[t].storage]
                if storage.id in held:
                    continue
                moment += 1
                event = Event(
                    storage.size_bytes,
                    Cause.STORAGE,
                    operator.phase,
                    moment,
                    len(events) + 1,
                    f"buf{index}",
                    step=index,
                    maker=operator.id,
                )
                held[storage.id] = event
                events.append(event)
        elif hasattr(step, "storage") and step.storage in held:
            event = held.pop(step.storage)
            events.append(
                replace(event, size_bytes=-event.size_bytes, moment=moment + 1, is_given_back=True)
            )
    return ScheduleTrace(tuple(events))
