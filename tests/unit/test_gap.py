"""Where a plan and its schedule differ; and schedules as files."""

from __future__ import annotations

from pathlib import Path

import pytest

from dtrcompile.cli import main
from dtrcompile.passes.errors import ProgramError
from dtrcompile.passes.fitting.gap import gap_text, gaps
from dtrcompile.passes.inductor.schedule_trace import (
    Cause,
    Event,
    ScheduleTrace,
    from_json,
    is_floor,
    to_json,
)
from dtrcompile.passes.planning.planners.base import keep_all
from dtrcompile.passes.program import io
from dtrcompile.passes.program.plan import Compute, Plan
from dtrcompile.passes.program.program import Phase, Program
from dtrcompile.passes.program.replay import replay
from workloads.synthetic import training_chain


def planned() -> tuple[Program, Plan]:
    program = training_chain(4)
    return program, keep_all(program)


def schedule_of(program: Program, plan: Plan, more: dict[int, dict[Cause, int]]) -> ScheduleTrace:
    """Holds what the referee counts at each step, and ``more`` at some: by cause."""
    timeline, _ = replay(program, plan)
    events: list[Event] = []
    live_bytes = 0
    for index, step in enumerate(plan.steps):
        if not isinstance(step, Compute):
            continue
        phase = program.operators[step.operator].phase
        moment, serial = 2 * index, 10 * index
        for cause, size_bytes in more.get(index, {}).items():
            serial += 1
            apart = Event(size_bytes, cause, phase, moment, serial, "buf", "inside", step=None)
            events.append(apart)
        wanted = timeline.during_bytes[index] - live_bytes
        events.append(
            Event(
                wanted,
                Cause.STORAGE,
                phase,
                moment,
                10 * index,
                f"buf{index}",
                f"buf{index} = empty_strided_cpu()",
                operator=step.operator,
                step=index,
            )
        )
        live_bytes += wanted
        for k, (cause, size_bytes) in enumerate(more.get(index, {}).items(), 1):
            given = Event(
                -size_bytes,
                cause,
                phase,
                moment + 1,
                10 * index + k,
                "buf",
                "inside",
                is_given_back=True,
            )
            events.append(given)
    return ScheduleTrace(tuple(events))


def test_a_schedule_that_is_as_planned_has_no_gap() -> None:
    program, plan = planned()
    found = gaps(program, plan, schedule_of(program, plan, {}))
    assert [g.step for g in found] == [
        i for i, step in enumerate(plan.steps) if isinstance(step, Compute)
    ]
    assert all(g.more_bytes == g.storage_bytes == 0 for g in found)


def test_a_gap_is_told_with_its_operator_and_cause() -> None:
    program, plan = planned()
    steps = [i for i, step in enumerate(plan.steps) if isinstance(step, Compute)]
    more = {
        steps[2]: {Cause.WORKSPACE: 1000, Cause.ROUNDING: 24},
        steps[4]: {Cause.TANGENT_COPY: 300},
    }
    found = {g.step: g for g in gaps(program, plan, schedule_of(program, plan, more))}
    first, second = found[steps[2]], found[steps[4]]
    assert (first.more_bytes, first.storage_bytes) == (1024, 0)
    assert first.by_cause == {Cause.WORKSPACE: 1000, Cause.ROUNDING: 24}
    assert (second.more_bytes, second.by_cause) == (300, {Cause.TANGENT_COPY: 300})
    text = gap_text(program, plan, schedule_of(program, plan, more))
    assert "2 of them hold something else than planned" in text
    rows = [line.split() for line in text.splitlines()[4:]]
    assert [(row[0], row[4]) for row in rows] == [
        (str(steps[2]), "1024"),
        (str(steps[4]), "300"),
    ]


def test_a_schedule_of_something_else_is_told() -> None:
    program, plan = planned()
    event = Event(5, Cause.STORAGE, Phase.FORWARD, 0, 1, "buf0", "buf0 = empty()")
    assert "no step of the plan" in gap_text(program, plan, ScheduleTrace((event,)))


def test_schedules_as_files() -> None:
    program, plan = planned()
    trace = schedule_of(program, plan, {3: {Cause.WORKSPACE: 7}})
    trace = ScheduleTrace(
        trace.events,
        frozenset({1}),
        frozenset({2, 3}),
        frozenset(),
        frozenset({4}),
        (2, 1),
        True,
    )
    assert from_json(to_json(trace)) == trace
    assert from_json(to_json(ScheduleTrace(()))) == ScheduleTrace(())


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"format": "dtrcompile-schedule 9"}', '{"format": 1', "null"]
)
def test_what_is_no_schedule_is_refused(text: str) -> None:
    with pytest.raises(ProgramError):
        from_json(text)


def test_a_schedule_that_was_cut_off_is_refused_at_every_length() -> None:
    program, plan = planned()
    text = to_json(schedule_of(program, plan, {})).rstrip()
    for length in range(0, len(text), 97):
        with pytest.raises(ProgramError):
            from_json(text[:length])


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    program, plan = planned()
    files = [tmp_path / name for name in ("program.json", "plan.txt", "schedule.json")]
    schedule = to_json(schedule_of(program, plan, {0: {Cause.WORKSPACE: 64}}))
    for path, text in zip(files, (io.to_json(program), plan.to_text(), schedule), strict=True):
        path.write_text(text, encoding="utf-8")
    assert main(["gap", *map(str, files)]) == 0
    assert "64" in capsys.readouterr().out
    files[2].write_text("{", encoding="utf-8")
    assert main(["gap", *map(str, files)]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert "not a schedule" in line


@pytest.mark.parametrize(
    ("cause", "is_result", "expected"),
    [
        (Cause.PARAMETER, False, True),
        (Cause.GRADIENT_COPY, False, True),
        (Cause.STORAGE, True, True),
        (Cause.STORAGE, False, False),  # a temporary, which another plan need not hold
        (Cause.WORKSPACE, False, False),
    ],
)
def test_what_every_plan_holds(cause: Cause, is_result: bool, expected: bool) -> None:
    first = Event(8, Cause.PARAMETER, Phase.FORWARD, 0, 1)
    freed = Event(8, Cause.STORAGE, Phase.FORWARD, 1, 2)
    last = Event(8, cause, Phase.BACKWARD, 2, 3)
    given_back = Event(-8, Cause.STORAGE, Phase.BACKWARD, 2, 2, is_given_back=True)
    schedule = ScheduleTrace(
        (first, freed, given_back, last), gradients=frozenset({3} if is_result else ())
    )
    assert is_floor(schedule, 2) is expected
    assert not is_floor(schedule, 1)
