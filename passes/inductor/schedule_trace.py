"""A schedule as it takes and gives back memory: a list of events, and what can be read from it.

All that is said of a schedule's memory is a view of its `ScheduleTrace`: the peak and what is live
at it, what each operator and each step of a plan held, the formula of the peak, the report, the
final check, and where a plan and its schedule differ.
"""

from __future__ import annotations

import enum
import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from dtrcompile.passes.errors import ProgramError
from dtrcompile.passes.program.program import Phase
from dtrcompile.passes.program.sizes import Term


class Cause(enum.Enum):
    """Why bytes are taken."""

    PARAMETER = "parameter"  # there before the step; also buffers, and constants of the graphs
    INPUT = "input"  # there before the step
    TANGENT = "tangent"  # given to backward
    STORAGE = "storage"  # allocated by the wrapper
    WORKSPACE = "workspace"  # held inside a library call
    TANGENT_COPY = "copy of a tangent"  # in the layout that was traced
    GRADIENT_COPY = "copy of a gradient"  # in its parameter's layout
    ROUNDING = "rounding to a block"  # what the allocator counts beyond what it was asked for

    @property
    def is_resident(self) -> bool:
        """Whether the bytes are there from outside, before the wrapper runs."""
        return self in (Cause.PARAMETER, Cause.INPUT, Cause.TANGENT)


@dataclass(frozen=True, slots=True)
class Event:
    """Bytes that are taken, or given back.

    Attributes:
        size_bytes: positive where they are taken, negative where they are given back.
        cause: why they are held.
        phase: of the graph that runs.
        moment: counted from 0.  Something is taken at each; what was given back since the moment
            before has the same number.
        serial: of what is held: the same where it is taken, where its bytes are rounded up, and
            where it is given back.
        buffer: the wrapper's name for it, or the program's where it is resident.
        line: of the wrapper.
        operator: of the program, where it is a library call's.
        maker: operator of the program whose storage it is, where it is known.
        step: of the plan, where there is one.
        late_bytes: held beside it that the plan has freed by then, and the schedule frees later,
            without a higher peak than the plan's.
        size: in symbols, where the wrapper was run on symbols; before rounding.
        is_given_back: tells the two kinds apart where there are no bytes.
    """

    size_bytes: int
    cause: Cause
    phase: Phase
    moment: int
    serial: int
    buffer: str = ""
    line: str = ""
    operator: int | None = None
    maker: int | None = None
    step: int | None = None
    late_bytes: int = 0
    size: Term | None = None
    is_given_back: bool = False


@dataclass(frozen=True)
class ScheduleTrace:
    """What a step's wrappers take and give back, in order.

    Attributes:
        outputs, saved, gradients: serial numbers of what forward returns to the caller, of what it
            leaves for backward, and of what backward returns.
        written_over: operators whose result takes the place of an input that is read for the last
            time.
        draws: operators that draw random numbers, in the order in which they are called.
        has_conditions: the wrapper branches on the value of a tensor.
    """

    events: tuple[Event, ...]
    outputs: frozenset[int] = frozenset()
    saved: frozenset[int] = frozenset()
    gradients: frozenset[int] = frozenset()
    written_over: frozenset[int] = frozenset()
    draws: tuple[int, ...] = ()
    has_conditions: bool = False

    def moments(self) -> Iterator[Moment]:
        """Each moment with the bytes that are held at it."""
        live_bytes = 0
        last: Event | None = None
        for event in self.events:
            if last is not None and event.moment != last.moment:
                yield Moment(live_bytes, last)
                last = None
            live_bytes += event.size_bytes
            if not event.is_given_back and event.cause is not Cause.ROUNDING:
                last = event
        if last is not None:
            yield Moment(live_bytes, last)

    def peak(self, phase: Phase) -> Moment | None:
        """The first moment of a phase at which the most is held; None where it has no moments."""
        of_phase = (m for m in self.moments() if m.taken.phase is phase)
        return max(of_phase, key=lambda m: m.live_bytes, default=None)

    def live(self, moment: int) -> dict[int, list[Event]]:
        """What is held at a moment: serial number -> the events that took it."""
        live: dict[int, list[Event]] = {}
        for event in self.events:
            if event.moment > moment:
                break
            if event.is_given_back:
                live.pop(event.serial, None)
            else:
                live.setdefault(event.serial, []).append(event)
        return live

    def boundary_bytes(self) -> int:
        """Held when forward has returned."""
        return sum(e.size_bytes for e in self.events if e.phase is Phase.FORWARD)

    def saved_bytes(self) -> int:
        """Of that, what forward leaves for backward."""
        return sum(
            e.size_bytes
            for e in self.events
            if e.serial in self.saved and not e.is_given_back and e.phase is Phase.FORWARD
        )

    def step_bytes(self) -> dict[int, int]:
        """Step of the plan -> the most that is held when it takes something, without late frees."""
        found: dict[int, int] = {}
        for moment in self.moments():
            step = moment.taken.step
            if step is not None:
                held_bytes = moment.live_bytes - moment.taken.late_bytes
                found[step] = max(held_bytes, found.get(step, 0))
        return found

    def workspace_bytes(self) -> dict[int, int]:
        """Operator -> the most that one of its library calls holds beside what it returns."""
        sizes: Counter[int] = Counter()  # by serial, rounding included
        operators: dict[int, int] = {}
        for event in self.events:
            if not event.is_given_back and event.operator is not None:
                sizes[event.serial] += event.size_bytes
                if event.cause is Cause.WORKSPACE:
                    operators[event.serial] = event.operator
        found: dict[int, int] = {}
        for serial, operator in operators.items():
            found[operator] = max(sizes[serial], found.get(operator, 0))
        return found


@dataclass(frozen=True, slots=True)
class Moment:
    """A moment of a schedule.

    Attributes:
        live_bytes: held at it.
        taken: what was taken last.
    """

    live_bytes: int
    taken: Event


def split_of(trace: ScheduleTrace, moment: int) -> dict[str, int]:
    """Bytes held at a moment, by the categories of the report."""
    split = dict.fromkeys(
        ("parameters", "inputs", "saved", "temporaries", "gradients", "outputs"), 0
    )
    for serial, events in trace.live(moment).items():
        split[category(trace, serial, events)] += sum(e.size_bytes for e in events)
    return split


def is_floor(trace: ScheduleTrace, moment: int) -> bool:
    """Whether all that is held at a moment is held then by any plan.

    The constants of the step, its results, and the copies that PyTorch makes of results.
    """
    kinds = {"parameters", "inputs", "gradients", "outputs"}
    return all(
        events[0].cause in (Cause.TANGENT_COPY, Cause.GRADIENT_COPY)
        or category(trace, serial, events) in kinds
        for serial, events in trace.live(moment).items()
    )


def category(trace: ScheduleTrace, serial: int, events: Sequence[Event]) -> str:
    """Which line of the report something that is held belongs to."""
    cause = events[0].cause
    if cause is Cause.PARAMETER:
        return "parameters"
    if cause.is_resident:
        return "inputs"
    groups: Mapping[str, frozenset[int]] = {
        "outputs": trace.outputs,
        "saved": trace.saved,
        "gradients": trace.gradients,
    }
    return next((name for name, serials in groups.items() if serial in serials), "temporaries")


_FORMAT = "dtrcompile-schedule 1"
_FIELDS = (
    "size_bytes",
    "moment",
    "serial",
    "buffer",
    "line",
    "operator",
    "maker",
    "step",
    "late_bytes",
)


def to_json(trace: ScheduleTrace) -> str:
    """The text form, an event a line; sizes in symbols are left out."""
    header = {
        "format": _FORMAT,
        "outputs": sorted(trace.outputs),
        "saved": sorted(trace.saved),
        "gradients": sorted(trace.gradients),
        "written_over": sorted(trace.written_over),
        "draws": list(trace.draws),
        "has_conditions": trace.has_conditions,
    }
    events = ",\n  ".join(
        json.dumps(
            {
                **{name: getattr(event, name) for name in _FIELDS},
                "cause": event.cause.value,
                "phase": event.phase.value,
                "is_given_back": event.is_given_back,
            }
        )
        for event in trace.events
    )
    return f'{json.dumps(header)[:-1]}, "events": [\n  {events}]}}\n'


def from_json(text: str) -> ScheduleTrace:
    """What `to_json` wrote.

    Raises:
        ProgramError: if it is something else.
    """
    try:
        data = json.loads(text)
        if data["format"] != _FORMAT:
            raise ProgramError(f"the format is {data['format']!r}; this reads {_FORMAT!r}.")
        events = tuple(
            Event(
                cause=Cause(row["cause"]),
                phase=Phase(row["phase"]),
                is_given_back=row["is_given_back"],
                **{name: row[name] for name in _FIELDS},
            )
            for row in data["events"]
        )
        return ScheduleTrace(
            events,
            frozenset(data["outputs"]),
            frozenset(data["saved"]),
            frozenset(data["gradients"]),
            frozenset(data["written_over"]),
            tuple(data["draws"]),
            data["has_conditions"],
        )
    except (ValueError, KeyError, TypeError) as error:
        raise ProgramError(
            "not a schedule that dtrcompile wrote (DTRCOMPILE_ARTIFACTS writes"
            f" graph*-schedule.json): {error}"
        ) from error
