"""One budget over several graphs: the account of a step, and what a planner sees of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from dtrcompile.passes.errors import PlanError
from dtrcompile.passes.fitting.fit import holding
from dtrcompile.passes.fitting.sharing import (
    ALONE,
    Demand,
    GraphBytes,
    OtherGraphs,
    cheapest_share,
    other_graphs_of,
    share,
    step_peak_bytes,
    with_other_graphs,
    without_other_graphs,
)
from dtrcompile.passes.planning.planners import keep_all, make_planner, minimum_plan
from dtrcompile.passes.program.plan import Boundary, Compute, Free, Plan
from dtrcompile.passes.program.program import Program, StorageKind
from dtrcompile.passes.program.replay import replay
from dtrcompile.passes.program.tighten import tighten
from workloads.synthetic import ProgramBuilder
from workloads.synthetic import training_chain as chain

# Two graphs, 10 bytes of constants each; the first hands 5 bytes on to the second, which has them
# among its constants.
FIRST = GraphBytes(
    constant_bytes=10,
    forward_peak_bytes=40,
    backward_peak_bytes=50,
    boundary_bytes=35,
    gradient_bytes=3,
)
SECOND = GraphBytes(
    constant_bytes=15,
    forward_peak_bytes=60,
    backward_peak_bytes=70,
    boundary_bytes=45,
    gradient_bytes=4,
)
EXTERNAL = 20


def test_the_first_graph_sees_the_second_between_its_forward_and_its_backward() -> None:
    # The second's own 55 bytes above its constants; beside the first, the second's 10 constants.
    assert other_graphs_of([FIRST, SECOND], 0, EXTERNAL) == OtherGraphs(10, 55, 4)


def test_the_second_graph_sees_what_the_first_kept_without_counting_the_handover_twice() -> None:
    # 20 external + 25 kept by the first, less the 15 that are the second's constants.
    assert other_graphs_of([FIRST, SECOND], 1, EXTERNAL) == OtherGraphs(30, 0, 0)


def test_a_graph_sees_the_later_ones_above_what_those_between_keep() -> None:
    third = GraphBytes(
        constant_bytes=10,
        forward_peak_bytes=30,
        backward_peak_bytes=80,
        boundary_bytes=25,
        gradient_bytes=2,
    )
    # The second: 70 in backward and the third's gradients, less its 15 of constants: 57.  The
    # third: 80 - 10 above the 45 - 15 that the second keeps meanwhile: 100.  30 external, of which
    # 10 are the first's own; 4 + 2 of gradients.
    assert other_graphs_of([FIRST, SECOND, third], 0, 30) == OtherGraphs(20, 100, 6)


def test_the_peak_of_a_step_is_where_the_second_runs_over_what_the_first_keeps() -> None:
    assert step_peak_bytes([FIRST, SECOND], EXTERNAL) == 30 + 70
    assert step_peak_bytes([FIRST], 10) == 50


def test_gradients_of_later_graphs_count_in_backward_only() -> None:
    assert FIRST.peak_with(OtherGraphs(gradient_bytes=1)) == 51
    assert FIRST.peak_with(ALONE) == 50
    forward_only = GraphBytes(10, 40, 0, 35, 0)
    assert forward_only.peak_with(OtherGraphs(gradient_bytes=100)) == 40


def test_the_rest_of_the_step_stands_at_the_boundary_of_the_program() -> None:
    program = chain(6)
    plan = keep_all(program)
    _, alone = replay(program, plan)
    others = OtherGraphs(between_bytes=1000, gradient_bytes=7)
    whole = with_other_graphs(program, others)
    _, stats = replay(whole, keep_all(whole))
    assert stats.forward_peak_bytes == alone.forward_peak_bytes
    held = GraphBytes(
        0, alone.forward_peak_bytes, alone.backward_peak_bytes, alone.boundary_bytes, 0
    )
    # The gradients of the later graphs are among the 1,000 bytes that these hold.
    assert stats.peak_bytes == held.peak_with(others) == alone.boundary_bytes + 1000
    assert without_other_graphs(keep_all(whole), program).steps == plan.steps
    assert with_other_graphs(program, ALONE) is program


def test_gradients_of_later_graphs_are_there_in_all_of_backward() -> None:
    program = chain(6)
    _, alone = replay(program, keep_all(program))
    whole = with_other_graphs(program, OtherGraphs(between_bytes=8, gradient_bytes=7))
    _, stats = replay(whole, keep_all(whole))
    assert stats.peak_bytes == alone.backward_peak_bytes + 7 > alone.forward_peak_bytes


def test_a_plan_under_a_long_rest_saves_less() -> None:
    program = chain(12)
    planner = make_planner("auto")
    _, alone = replay(program, keep_all(program))
    whole = with_other_graphs(program, OtherGraphs(between_bytes=alone.peak_bytes))
    plan = without_other_graphs(minimum_plan(whole, planner), program)
    _, stats = replay(program, plan)
    assert stats.boundary_bytes < alone.boundary_bytes
    assert stats.recomputed


def test_a_plan_made_under_a_rest_is_valid_alone() -> None:
    program = chain(9)
    whole = with_other_graphs(program, OtherGraphs(between_bytes=5))
    steps = without_other_graphs(keep_all(whole), program).steps
    assert steps.count(Boundary()) == 1
    assert {s.operator for s in steps if isinstance(s, Compute)} == set(
        range(len(program.operators))
    )


def graph_of_a_step(layers: int) -> Program:
    """A chain that returns 7 bytes, which its backward does not read, and is given 5 for them."""
    b = ProgramBuilder()
    value = b.constant("x", 0, StorageKind.INPUT)
    gradient = b.constant("dy", 5, StorageKind.TANGENT)
    values = [value]
    for i in range(layers):
        values += b.operator(f"f{i}", [values[-1]], [1])
    (output,) = b.operator("out", [values[-1]], [7])
    b.begin_backward()
    for i in reversed(range(layers)):
        (gradient,) = b.operator(f"g{i}", [gradient, values[i]], [1])
    return b.build([output, gradient], "graph")


def handing_on(program: Program) -> Program:
    """The program, whose forward outputs and tangents nobody else holds."""
    given = program.held_from_boundary | {
        s.id for s in program.storages if s.kind is StorageKind.TANGENT
    }
    storages = tuple(replace(s, is_handed_on=s.id in given) for s in program.storages)
    return replace(program, storages=storages)


def test_what_is_handed_on_is_freed_at_its_last_use() -> None:
    program = graph_of_a_step(4)
    _, held = replay(program, tighten(program, keep_all(program)))
    # In the first operator of backward: what was returned and given, f0 to f2, g3.
    assert held.backward_peak_bytes == 7 + 5 + 3 + 1
    given = handing_on(program)
    timeline, stats = replay(given, tighten(given, keep_all(given)))
    # What was returned is gone, and after that operator so is what was given.
    assert stats.backward_peak_bytes == stats.boundary_bytes == 7 + 3
    assert timeline.after_bytes[-1] == 1


def test_a_planner_sees_what_is_handed_on_as_values_that_it_can_free() -> None:
    program = handing_on(graph_of_a_step(9))
    whole = with_other_graphs(program, OtherGraphs(between_bytes=40, gradient_bytes=2))
    assert not whole.handed_on
    plan = minimum_plan(whole, make_planner("auto"))
    _, stats = replay(program, tighten(program, without_other_graphs(plan, program)))
    # Returned are 7 bytes; nothing is saved, as the input is there.
    assert stats.boundary_bytes == 7
    assert replay(whole, plan)[1].peak_bytes == 7 + 40
    assert stats.recomputed


def test_what_is_handed_on_is_not_computed_again_for_the_later_graphs() -> None:
    program = handing_on(graph_of_a_step(3))
    whole = with_other_graphs(program, OtherGraphs(between_bytes=40))
    (made,) = (o.id for o in whole.operators if o.name == "out")
    (storage,) = (s.id for s in whole.storages if s.name == "out")
    steps = keep_all(whole).steps
    at = steps.index(Compute(made)) + 1
    twice = Plan((*steps[:at], Free(storage), Compute(made), *steps[at:]), whole.fingerprint, "")
    with pytest.raises(PlanError, match="'out' is evicted but is pinned: another graph"):
        replay(whole, twice)


def test_tangents_come_when_the_outputs_that_nobody_holds_are_gone() -> None:
    program = handing_on(graph_of_a_step(4))
    _, alone = replay(program, tighten(program, keep_all(program)))
    others = OtherGraphs(between_bytes=2)  # less than the tangent's 5 bytes
    whole = with_other_graphs(program, others)
    plan = tighten(whole, keep_all(whole))
    held = replay(whole, plan)[1]
    assert held.peak_bytes == alone.boundary_bytes + others.between_bytes
    assert replay(program, without_other_graphs(plan, program))[1].cost_ns == program.cost_ns


def test_what_is_handed_on_must_be_there_when_forward_returns() -> None:
    program = handing_on(graph_of_a_step(3))
    plan = keep_all(program)
    (output,) = program.held_from_boundary
    index = plan.steps.index(Boundary())
    early = replace(plan, steps=(*plan.steps[:index], Free(output), *plan.steps[index:]))
    with pytest.raises(PlanError, match="forward output 'out' is not in memory"):
        replay(program, early)


def test_an_output_that_forward_makes_twice_may_be_handed_on() -> None:
    program = graph_of_a_step(3)
    steps = keep_all(program).steps
    (made,) = (o.id for o in program.operators if o.name == "out")
    (output,) = program.held_from_boundary
    at = steps.index(Compute(made)) + 1
    twice = Plan((*steps[:at], Free(output), Compute(made), *steps[at:]), program.fingerprint, "")
    # It is held until the end there; whoever makes the plan does not know yet who will hold it.
    assert replay(program, tighten(program, twice))[1].recomputed == {made: 1}
    given = handing_on(program)
    _, stats = replay(given, tighten(given, holding(given, twice)))
    assert stats.recomputed == {made: 1}
    # As if it was made once: what was returned is gone in backward.
    once = replay(given, tighten(given, keep_all(given)))[1]
    assert stats.backward_peak_bytes == once.backward_peak_bytes


@pytest.mark.parametrize(("room", "expected"), [(100, 100), (60, 55), (20, 10)])
def test_share_gives_the_most_that_fits(room: int, expected: int) -> None:
    demands = [Demand(10, 100)]
    found = share(demands, lambda quotas: quotas[0] if quotas[0] <= room else None)
    assert found is not None
    assert expected <= found <= room


def test_share_finds_what_fits_where_the_least_does_not() -> None:
    # Keeping next to nothing costs room elsewhere: only a middle share fits.
    demands = [Demand(0, 100)]
    assert share(demands, lambda q: q[0] if 40 <= q[0] <= 60 else None) is not None
    assert share(demands, lambda _: None) is None


def test_the_cheapest_share_need_not_be_the_largest() -> None:
    """As where a graph runs twice: what one call saves is room that the other has not."""
    demands = [Demand(0, 1000)]

    def fit(quotas: Sequence[int]) -> int | None:
        return quotas[0] if quotas[0] <= 900 else None

    found = cheapest_share(demands, fit, lambda kept: abs(kept - 400))
    assert found is not None
    assert abs(found - 400) <= 1000 / 32
    assert cheapest_share(demands, lambda _: None, lambda _: 0.0) is None
