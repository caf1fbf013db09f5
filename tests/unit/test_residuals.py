"""What a schedule holds beyond its plan, and programs that know it."""

from __future__ import annotations

from dtrcompile.passes.fitting.residuals import residuals, with_residuals, without_residuals
from dtrcompile.passes.planning.planners import keep_all, make_planner
from dtrcompile.passes.program.plan import Compute
from dtrcompile.passes.program.replay import replay
from workloads.synthetic import training_chain as chain


def test_what_is_held_above_the_plan_is_the_operators() -> None:
    program = chain(4)
    plan = keep_all(program)
    timeline, _ = replay(program, plan)
    first, second = [i for i, step in enumerate(plan.steps) if isinstance(step, Compute)][:2]
    held = {first: timeline.during_bytes[first] + 7, second: timeline.during_bytes[second] - 7}
    # Less than planned is no residual.
    assert residuals(plan, timeline, held) == {plan.steps[first].operator: 7}  # type: ignore[union-attr]


def test_the_most_of_several_runs_counts() -> None:
    program = chain(8)
    peak_bytes = replay(program, keep_all(program))[0].peak_bytes
    plan = make_planner("auto").plan(program, peak_bytes * 6 // 10)
    timeline, stats = replay(program, plan)
    again = next(iter(stats.recomputed))
    runs = [i for i, step in enumerate(plan.steps) if step == Compute(again)]
    held = {i: timeline.during_bytes[i] + k + 1 for k, i in enumerate(runs)}
    assert len(runs) > 1
    assert residuals(plan, timeline, held) == {again: len(runs)}


def test_a_program_with_residuals_holds_them_while_the_operator_runs() -> None:
    program = chain(8)
    plan = keep_all(program)
    timeline, _ = replay(program, plan)
    step = plan.steps[timeline.during_bytes.index(timeline.peak_bytes)]
    assert isinstance(step, Compute)
    known = with_residuals(program, {step.operator: 2})
    assert replay(known, keep_all(known))[0].peak_bytes == timeline.peak_bytes + 2
    # Its plans are plans of the program.
    planned = make_planner("auto").plan(known, timeline.peak_bytes + 1)
    assert replay(known, planned)[1].recomputed
    _, stats = replay(program, without_residuals(planned, program))
    assert stats.peak_bytes <= timeline.peak_bytes + 1


def test_nothing_learned_changes_nothing() -> None:
    program = chain(4)
    assert with_residuals(program, {}) is program
