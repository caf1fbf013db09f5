"""The referee: its arithmetic, and each of its rules broken once."""

from __future__ import annotations

import pytest

from dtrcompile.passes.errors import PlanError
from dtrcompile.passes.planning.planners import keep_all, make_planner
from dtrcompile.passes.program.plan import Boundary, Compute, Free, Plan, Step
from dtrcompile.passes.program.program import Program, StorageKind
from dtrcompile.passes.program.replay import replay
from workloads.synthetic import ProgramBuilder

# Storages: x 1 (input), dy 2 (tangent), a 4, b 8 (pinned), r 16 (runs once), out 32, g 64.
X, DY, A, B, R, OUT, G = range(7)


def program() -> Program:
    p = ProgramBuilder()
    x = p.constant("x", 1, StorageKind.INPUT)
    dy = p.constant("dy", 2, StorageKind.TANGENT)
    (a,) = p.operator("a", [x], [4], 10)
    (b,) = p.operator("b", [a], [8], 20, pinned="told so", workspace_bytes=100)
    (r,) = p.operator("r", [a], [16], 30, not_recomputable="random")
    (out,) = p.operator("out", [b, r], [32], 40)
    p.begin_backward()
    (g,) = p.operator("g", [dy, a, r], [64], 50)
    return p.build([out, g])


def plan(*steps: Step) -> Plan:
    return Plan(steps, program().fingerprint, "test")


FORWARD = (Compute(0), Compute(1), Compute(2), Compute(3), Free(B))
BACKWARD = (Compute(4), Free(A), Free(R))


def test_a_plan_without_steps() -> None:
    p = ProgramBuilder()
    x = p.constant("x", 1, StorageKind.INPUT)
    nothing = p.build([x])
    timeline, stats = replay(nothing, Plan((), nothing.fingerprint, "test"))
    assert (timeline.during_bytes, stats.peak_bytes) == ((), 1)


def test_arithmetic() -> None:
    timeline, stats = replay(program(), plan(*FORWARD, Boundary(), *BACKWARD))
    assert timeline.start_bytes == 1
    # compute a: 1+4; b: 5+8 and 100 of workspace; r: 13+16; out: 29+32; free b: the 8 are still
    # there while it is freed; the boundary brings 2; g brings 64; then a and r go.
    assert timeline.during_bytes == (5, 113, 29, 61, 61, 55, 119, 119, 115)
    assert timeline.after_bytes == (5, 13, 29, 61, 53, 55, 119, 115, 99)
    assert timeline.peak_bytes == 119
    assert timeline.peak_step == 6
    assert timeline.peak_resident == (X, DY, A, R, OUT, G)
    assert stats.peak_operator == "g"
    assert stats.cost_ns == stats.baseline_cost_ns == 150
    assert stats.overhead == 1.0
    assert stats.saved_bytes == 4 + 16  # a and r; out is the caller's
    # What kinds the 119 are: the builder calls everything computed an intermediate.
    assert stats.peak_split == {"input": 1, "tangent": 2, "saved": 20, "intermediate": 96}


def test_an_output_may_be_written_over_a_dying_input() -> None:
    p = ProgramBuilder()
    (a,) = p.operator("a", [], [8], 1)
    (b,) = p.operator("b", [a], [8], 1, workspace_bytes=-8)
    (c,) = p.operator("c", [b], [2], 1)
    program = p.build([c])
    a, b, c = range(3)

    def peaks(*steps: Step) -> tuple[int, ...]:
        return replay(program, Plan(steps, program.fingerprint, "test"))[0].during_bytes

    assert peaks(Compute(a), Compute(b), Free(a), Compute(c), Free(b)) == (8, 8, 8, 10, 10)
    # What is kept all the same is held beside the result, also at the end.
    assert peaks(Compute(a), Compute(b), Compute(c), Free(a), Free(b)) == (8, 16, 18, 18, 10)
    kept = p.build([a, b, c])
    timeline, _ = replay(kept, Plan((Compute(a), Compute(b), Compute(c)), kept.fingerprint, "test"))
    assert timeline.during_bytes == (8, 16, 18)
    # Planners know: in 10 bytes nothing need run again.
    for name in ("auto", "dtr", "keep-all"):
        timeline, stats = replay(program, make_planner(name).plan(program, 10))
        assert timeline.peak_bytes == 10
        assert not stats.recomputed


def test_recomputing_is_counted() -> None:
    _, stats = replay(program(), plan(*FORWARD, Free(A), Boundary(), Compute(0), *BACKWARD))
    assert stats.recomputed == {0: 1}
    assert stats.recomputed_operators == 1
    assert stats.cost_ns == 160
    assert stats.overhead == pytest.approx(160 / 150)


def test_keep_all_is_valid() -> None:
    timeline, stats = replay(program(), keep_all(program()))
    assert timeline.peak_bytes == 119
    assert not stats.recomputed


def test_a_resident_output_is_held_twice_while_its_operator_runs_again() -> None:
    p = ProgramBuilder()
    u, v = p.operator("uv", [], [3, 5])
    (w,) = p.operator("w", [u, v], [7])
    (z,) = p.operator("z", [w, u], [1])
    both = p.build([z])
    again = Plan(
        (Compute(0), Compute(1), Free(0), Compute(0), Compute(2), Free(0), Free(1), Free(2)),
        both.fingerprint,
        "test",
    )
    timeline, _ = replay(both, again)
    # v (5) and w (7) are there; u (3) comes back, with a second v (5) that is dropped at once.
    assert timeline.during_bytes[3] == 5 + 7 + 3 + 5
    assert timeline.after_bytes[3] == 5 + 7 + 3


def test_freeing_a_storage_undefines_its_views() -> None:
    p = ProgramBuilder()
    (a,) = p.operator("a", [], [4])
    v = p.view("v", a)
    (b,) = p.operator("b", [v], [8])
    views = p.build([b])
    steps = (Compute(0), Compute(1), Free(0), Compute(0), Compute(2), Free(0))
    with pytest.raises(PlanError, match="reads 'v', not in memory"):
        replay(views, Plan(steps, views.fingerprint, "test"))


@pytest.mark.parametrize(
    ("steps", "message"),
    [
        ((*FORWARD, *BACKWARD), "backward operator 'g' runs before the boundary"),
        ((Compute(0), Compute(9)), "operator 9 does not exist"),
        ((Compute(0), Free(9)), "storage 9 does not exist"),
        ((Compute(1),), "reads 'a', not in memory"),
        ((Compute(0), Free(A), Free(A)), "is not in memory"),
        ((Free(X),), "comes from outside"),
        ((Compute(0), Compute(1), Free(B)), "is evicted but is pinned: told so"),
        ((Compute(0), Compute(2), Compute(2)), "may not run again: random"),
        ((*FORWARD[:3], Boundary()), "forward operator 'out' did not run"),
        ((*FORWARD, Free(OUT), Boundary()), "forward output 'out' is not in memory"),
        ((*FORWARD, Boundary(), Free(OUT)), "which the caller holds"),
        ((*FORWARD, Boundary(), Boundary()), "a second boundary"),
        (FORWARD, "the plan has no boundary"),
        ((*FORWARD, Boundary()), "operator 'g' did not run"),
        ((*FORWARD, Boundary(), *BACKWARD, Free(G)), "output 'g' is not in memory at the end"),
        ((*FORWARD, Boundary(), *BACKWARD[:2]), "'r' is never freed"),
    ],
)
def test_each_rule(steps: tuple[Step, ...], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        replay(program(), plan(*steps))


def test_forward_runs_first_in_forward() -> None:
    p = ProgramBuilder()
    p.operator("a", [], [1])
    p.begin_backward()
    late = p.build([])
    with pytest.raises(PlanError, match="did not run"):
        replay(late, Plan((Boundary(), Compute(0), Free(0)), late.fingerprint, "test"))


def test_operators_that_run_once_keep_their_order() -> None:
    p = ProgramBuilder()
    p.operator("first", [], [1], not_recomputable="random")
    p.operator("second", [], [1], not_recomputable="random")
    ordered = p.build([])
    steps = (Compute(1), Free(1), Compute(0), Free(0))
    with pytest.raises(PlanError, match="out of order"):
        replay(ordered, Plan(steps, ordered.fingerprint, "test"))


def test_a_forward_output_that_is_a_view_is_there_at_the_boundary() -> None:
    p = ProgramBuilder()
    (a,) = p.operator("a", [], [1])
    v = p.view("v", a)
    p.begin_backward()
    (b,) = p.operator("b", [a], [1])
    program = p.build([v, b])

    def steps(*again: Step) -> Plan:
        forward = (Compute(0), Compute(1), Free(0), Compute(0))
        return Plan((*forward, *again, Compute(2)), program.fingerprint, "test")

    replay(program, steps(Compute(1), Boundary()))
    # The storage is in memory, but forward has nothing to return.
    with pytest.raises(PlanError, match="forward output 'v' is not defined"):
        replay(program, steps(Boundary(), Compute(1)))


def test_a_program_without_backward_has_no_boundary() -> None:
    p = ProgramBuilder()
    p.operator("a", [], [1])
    forward_only = p.build([])
    with pytest.raises(PlanError, match="no boundary"):
        replay(forward_only, Plan((Compute(0), Boundary()), forward_only.fingerprint, "test"))


def test_a_plan_of_another_program_is_refused() -> None:
    with pytest.raises(PlanError, match="plan again for this program"):
        replay(program(), Plan((), "0" * 16, "test"))


def test_errors_show_the_neighbourhood() -> None:
    with pytest.raises(PlanError) as caught:
        replay(program(), plan(Compute(0), Compute(1), Free(A), Compute(2)))
    assert "> 3: compute 2 (r)" in str(caught.value)
    assert "2: free 2 (a)" in str(caught.value)
