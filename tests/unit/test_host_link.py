"""Copies to the host: what they hold compute up, by hand."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from dtrcompile.passes.errors import OptionError, PlanError, UnsupportedPlanError
from dtrcompile.passes.planning.hoist import hoist
from dtrcompile.passes.planning.planners import infeasible, keep_all, make_planner
from dtrcompile.passes.planning.planners.improve import schedule_of
from dtrcompile.passes.planning.simulator import SimulatorOptions, simulate
from dtrcompile.passes.program.host_link import HostLink
from dtrcompile.passes.program.index import ProgramIndex
from dtrcompile.passes.program.plan import (
    Boundary,
    Compute,
    Free,
    Offload,
    Plan,
    Prefetch,
    Step,
    refuse_copies,
)
from dtrcompile.passes.program.program import Program, StorageKind
from dtrcompile.passes.program.replay import MemoryTimeline, PlanStats, replay
from workloads.synthetic import ProgramBuilder, training_chain

A, B, C, D = range(4)


def there_and_back() -> Program:
    """a and b (8 and 4 bytes) are made first and read last; c, which needs room, and d take their
    time in between."""
    p = ProgramBuilder()
    (a,) = p.operator("a", [], [8], 10)
    (b,) = p.operator("b", [], [4], 10)
    (c,) = p.operator("c", [], [1], 10, workspace_bytes=8)
    (d,) = p.operator("d", [c], [1], 10)
    (e,) = p.operator("e", [a, b, d], [1], 10)
    return p.build([e])


LATE: tuple[Step, ...] = (Compute(0), Compute(1), Offload(A), Free(A), Compute(2), Compute(3))
EARLY: tuple[Step, ...] = (Compute(0), Offload(A), Compute(1), Free(A), Compute(2), Prefetch(A))
END: tuple[Step, ...] = (Compute(4), Free(A), Free(B), Free(C), Free(D))


def played(
    steps: tuple[Step, ...],
    bytes_per_ns: float,
    latency_ns: int = 0,
    program: Program | None = None,
) -> tuple[MemoryTimeline, PlanStats]:
    program = program or there_and_back()
    return replay(
        program, Plan(steps, program.fingerprint, "test", HostLink(bytes_per_ns, latency_ns))
    )


def test_a_transfer_takes_latency_and_bytes_over_bandwidth_rounded_up() -> None:
    assert HostLink(2.0).transfer_ns(7) == 4
    assert HostLink(2.0, latency_ns=3).transfer_ns(7) == 7
    assert HostLink(math.inf).transfer_ns(10**12) == 0
    for arguments in ((0.0,), (-1.0,), (math.nan,), (1.0, -1)):
        with pytest.raises(OptionError):
            HostLink(*arguments)


def test_copies_that_compute_hides_cost_nothing() -> None:
    # 8 bytes at 1 byte/ns: out from 10 to 18, beside b (10 to 20); back from 30 to 38, beside d
    # (30 to 40); e runs from 40 to 50.
    timeline, stats = played((*EARLY, Compute(3), *END), 1.0)
    assert stats.stall_ns == 0
    assert stats.cost_ns == 50
    assert stats.overhead == 1.0
    assert stats.offloaded_bytes == 8
    # a 8; the copy; b: 12; a goes: 4; c: 5, and 8 while it runs; a comes: 13; d: 14; e: 15; then
    # all but e (1) goes.
    assert timeline.during_bytes == (8, 8, 12, 12, 13, 13, 14, 15, 15, 7, 3, 2)
    assert timeline.after_bytes == (8, 8, 12, 4, 5, 13, 14, 15, 7, 3, 2, 1)


def test_a_copy_that_begins_before_an_input_is_freed_leaves_it_written_over() -> None:
    p = ProgramBuilder()
    (x,) = p.operator("x", [], [2])
    (a,) = p.operator("a", [], [8])
    (b,) = p.operator("b", [a], [8], workspace_bytes=-8)
    (c,) = p.operator("c", [b, x], [1])
    program = p.build([c])
    steps = (*map(Compute, range(3)), Offload(0), Free(1), Free(0), Prefetch(0), Compute(3))
    plan = Plan((*steps, Free(0), Free(2)), program.fingerprint, "test", HostLink(1.0))
    timeline, _ = replay(program, plan)
    # x 2; a: 10; b writes over a: 10 still, also while the copy of x begins; a and x go: 8.
    assert timeline.during_bytes[:6] == (2, 10, 10, 10, 10, 10)
    assert timeline.after_bytes[5] == 8


def test_copies_that_compute_hides_in_part() -> None:
    # At 0.5 byte/ns: out from 10 to 26, but b is done at 20: 6 ns at the free.  c from 26 to 36;
    # back from 36 to 52, d from 36 to 46: e waits 6 ns more.
    _, stats = played((*EARLY, Compute(3), *END), 0.5)
    assert stats.stall_ns == 6 + 6
    assert stats.cost_ns == 50 + 12
    # 2 ns of latency for each copy, at 1 byte/ns: 10 to 20 and 30 to 40: just in time.
    assert played((*EARLY, Compute(3), *END), 1.0, 2)[1].stall_ns == 0
    assert played((*EARLY, Compute(3), *END), 1.0, 3)[1].stall_ns == 1 + 1


def test_copies_at_the_last_moment_are_waited_for() -> None:
    # Out from 20 to 28 and back from 48 to 56, with nothing to compute meanwhile.
    _, stats = played((*LATE, Prefetch(A), *END), 1.0)
    assert stats.stall_ns == 8 + 8


def test_copies_in_one_direction_wait_for_each_other() -> None:
    # a and b are offloaded at 20: a is sent at 28, b at 32.  c from 32 to 42, then both come back:
    # a at 50, b at 54; d from 42 to 52; e waits until 54.
    both = (Offload(A), Offload(B), Free(A), Free(B))
    back = (Prefetch(A), Prefetch(B), Compute(3))
    _, stats = played((Compute(0), Compute(1), *both, Compute(2), *back, *END), 1.0)
    assert stats.stall_ns == 12 + 2
    assert stats.offloaded_bytes == 12


def test_the_two_directions_do_not_wait_for_each_other() -> None:
    # a is back from 30 to 38 while b goes out from 30 to 34; d from 30 to 40; b is back by 44.
    steps = (*EARLY, Offload(B), Compute(3), Free(B), Prefetch(B), *END)
    assert played(steps, 1.0)[1].stall_ns == 4


def test_a_second_stay_needs_no_second_copy() -> None:
    again = (Compute(3), Free(A), Prefetch(A))
    _, stats = played((*EARLY, *again, *END), 1.0)
    # Freed at 40, two ns after it is back; back again at 48.
    assert stats.stall_ns == 8
    assert stats.offloaded_bytes == 8


def test_a_free_waits_for_the_copy_back() -> None:
    # Prefetched at 30, freed at once: the engine still writes until 38.
    steps = (*EARLY, Free(A), Prefetch(A), Compute(3), *END)
    # From 38 d runs to 48 while a comes back again until 46.
    assert played(steps, 1.0)[1].stall_ns == 8


def test_an_output_that_is_fetched_last_is_waited_for() -> None:
    p = ProgramBuilder()
    (a,) = p.operator("a", [], [8], 10)
    p.operator("b", [], [1], 10)
    program = p.build([a])
    steps = (Compute(0), Offload(0), Compute(1), Free(1), Free(0), Prefetch(0))
    assert played(steps, 1.0, 0, program)[1].stall_ns == 8


def test_a_prefetch_defines_what_was_defined_when_it_was_offloaded() -> None:
    p = ProgramBuilder()
    (a,) = p.operator("a", [], [4])
    v = p.view("v", a)
    (b,) = p.operator("b", [v], [8])
    program = p.build([b])
    seen = (Compute(0), Compute(1), Offload(0), Free(0), Prefetch(0), Compute(2), Free(0))
    played(seen, 1.0, 0, program)
    unseen = (Compute(0), Offload(0), Compute(1), Free(0), Prefetch(0), Compute(2), Free(0))
    with pytest.raises(PlanError, match="reads 'v', not in memory"):
        played(unseen, 1.0, 0, program)


def test_what_may_not_run_again_may_be_moved() -> None:
    p = ProgramBuilder()
    (r,) = p.operator("random", [], [4], not_recomputable="draws from the generator")
    (big,) = p.operator("big", [], [8])
    (small,) = p.operator("small", [big], [1])
    (out,) = p.operator("out", [small, r], [1])
    program = p.build([out])
    # Computing again cannot help: r must be there beside big and small (13).  On the host it can,
    # or later.
    link = HostLink(math.inf)
    assert infeasible(program, 10, make_planner("program-order")).minimum_bytes == 13
    assert make_planner("auto").plan(program, 9).steps[0] == Compute(1)
    plan = make_planner("offload", host_link=link).plan(program, 9)
    timeline, stats = replay(program, plan)
    assert timeline.peak_bytes == 9
    assert stats.overhead == 1.0
    assert infeasible(program, 8, make_planner("offload", host_link=link)).minimum_bytes == 9


def rules() -> Program:
    p = ProgramBuilder()
    x = p.constant("x", 1, StorageKind.INPUT)
    p.constant("dy", 1, StorageKind.TANGENT)
    (pinned,) = p.operator("pinned", [x], [2], pinned="told so")
    (empty,) = p.operator("empty", [pinned], [0])
    (out,) = p.operator("out", [empty], [2])
    p.begin_backward()
    (g,) = p.operator("g", [pinned, out], [2])
    return p.build([out, g])


@pytest.mark.parametrize(
    ("steps", "message"),
    [
        ((Offload(9),), "storage 9 does not exist"),
        ((Prefetch(9),), "storage 9 does not exist"),
        ((Offload(0),), "'x' comes from outside and cannot be offloaded"),
        ((Offload(2),), "'pinned' is offloaded but is not in memory"),
        ((Compute(0), Offload(2), Free(2)), "is evicted but is pinned: told so"),
        ((Compute(0), Compute(1), Offload(3)), "'empty' has no bytes to offload"),
        ((Compute(0), Prefetch(2)), "'pinned' is prefetched but was never offloaded"),
        (
            (*(Compute(o) for o in range(3)), Offload(4), Prefetch(4)),
            "'out' is prefetched but is in memory",
        ),
        (
            (*(Compute(o) for o in range(3)), Boundary(), Offload(4)),
            "is a forward output, which the caller holds",
        ),
    ],
)
def test_each_rule(steps: tuple[Step, ...], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        played(steps, 1.0, 0, rules())


def test_a_plan_with_copies_needs_a_link() -> None:
    program = there_and_back()
    plan = Plan((*EARLY, Compute(3), *END), program.fingerprint, "test")
    with pytest.raises(PlanError, match="does not say over which link"):
        replay(program, plan)


def test_what_cannot_emit_copies_refuses_them() -> None:
    program = there_and_back()
    plan = Plan((*EARLY, Compute(3), *END), program.fingerprint, "test")
    with pytest.raises(UnsupportedPlanError, match=r"compiling .*step 1 .*Plan without host_link"):
        refuse_copies(plan, "compiling")
    with pytest.raises(PlanError, match="a schedule has no"):
        schedule_of(ProgramIndex.of(program), plan.steps)
    refuse_copies(keep_all(program), "compiling")


def test_hoisting_hides_what_can_be_hidden() -> None:
    program = there_and_back()
    late = (*LATE, Prefetch(A), *END)
    # Within 14 bytes a (8) may be back while d runs (b 4, c 1, d 1), not while c does (21).
    steps = hoist(ProgramIndex.of(program), late, 14, HostLink(1.0))
    timeline, stats = played(steps, 1.0)
    assert stats.stall_ns == 0
    assert timeline.peak_bytes == 14
    assert steps.index(Offload(A)) < steps.index(Compute(1)) < steps.index(Free(A))
    assert steps.index(Compute(2)) < steps.index(Prefetch(A)) < steps.index(Compute(3))


def test_hoisting_drops_what_is_not_needed() -> None:
    program = there_and_back()
    late = (*LATE, Prefetch(A), *END)
    # In 21 bytes a never has to go; nor does a copy that nobody fetches.
    assert not any(
        isinstance(step, (Offload, Prefetch))
        for step in hoist(ProgramIndex.of(program), late, 21, HostLink(1.0))
    )
    unread = (Compute(0), Compute(1), Offload(A), Compute(2), Compute(3), *END)
    assert Offload(A) not in hoist(ProgramIndex.of(program), unread, 21, HostLink(1.0))


def test_the_simulator_copies_what_is_dear_and_computes_again_what_is_cheap() -> None:
    program = training_chain(8)
    index = ProgramIndex.of(program)

    def steps(link: HostLink | None) -> tuple[Step, ...]:
        return simulate(index, 5, SimulatorOptions(host_link=link)).steps

    assert not any(isinstance(s, (Offload, Prefetch)) for s in steps(None))
    assert not any(isinstance(s, (Offload, Prefetch)) for s in steps(HostLink(1e-3)))
    fast = steps(HostLink(math.inf))
    assert any(isinstance(s, Offload) for s in fast)
    assert sum(isinstance(s, Compute) for s in fast) == len(program.operators)


def test_without_a_link_it_is_the_base_planner() -> None:
    program = training_chain(8)
    base = make_planner("auto").plan(program, 5)
    assert make_planner("offload").plan(program, 5) == base
    slow = make_planner("offload", host_link=HostLink(1e-6)).plan(program, 5)
    assert replace(slow, planner=base.planner) == base


def test_a_link_never_makes_a_chain_dearer() -> None:
    program = training_chain(12)
    for budget_bytes in (5, 8):
        base_ns = replay(program, make_planner("auto").plan(program, budget_bytes))[1].cost_ns
        costs = []
        for bytes_per_ns in (0.5, math.inf):
            link = HostLink(bytes_per_ns)
            plan = make_planner("offload", host_link=link).plan(program, budget_bytes)
            timeline, stats = replay(program, plan)
            assert timeline.peak_bytes <= budget_bytes
            costs.append(stats.cost_ns)
        # A copy takes two runs of an operator: it pays where several are computed again.
        assert program.cost_ns <= costs[0] <= base_ns
        assert costs[1] == program.cost_ns < base_ns
