"""Other orders of a program's operators, and planning in them."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from dtrcompile.passes.errors import InfeasibleBudgetError, PlanError
from dtrcompile.passes.planning.orders import orders, permuted, plan_of_permuted
from dtrcompile.passes.planning.planners import keep_all, make_planner, minimum_plan
from dtrcompile.passes.program.io import from_json, to_json
from dtrcompile.passes.program.program import Program, StorageKind
from dtrcompile.passes.program.replay import replay
from workloads.random_programs import budgets, cost_or_none, random_program
from workloads.synthetic import ProgramBuilder


def branches(n: int) -> Program:
    """Branches that each need much and leave little, traced one layer after the other."""
    p = ProgramBuilder()
    x = p.constant("x", 1, StorageKind.INPUT)
    wide = [p.operator(f"wide{i}", [x], [100], 10)[0] for i in range(n)]
    small = [p.operator(f"small{i}", [w], [1], 10)[0] for i, w in enumerate(wide)]
    (end,) = p.operator("end", small, [1], 10)
    return p.build([end])


def random_programs(n: int) -> list[tuple[Program, random.Random]]:
    found = []
    for seed in range(n):
        source = random.Random(seed)
        found.append((random_program(source.randint, 12), source))
    return found


def test_one_branch_after_the_other() -> None:
    program = branches(4)
    own = minimum_plan(program, make_planner("program-order"))
    assert replay(program, keep_all(program))[0].peak_bytes > 400
    budget_bytes = 1 + 100 + 4
    plan = make_planner("auto").plan(program, budget_bytes)
    timeline, stats = replay(program, plan)
    assert timeline.peak_bytes <= budget_bytes
    assert not stats.recomputed
    assert replay(program, own)[1].recomputed


def test_an_order_keeps_what_has_to_be_kept() -> None:
    n_orders = 0
    for program, _ in random_programs(300):
        for order in orders(program):
            assert sorted(order) == list(range(len(program.operators)))
            other = permuted(program, order)  # checks itself
            plan = plan_of_permuted(program, order, keep_all(other), "test")
            timeline, stats = replay(program, plan)
            assert timeline.peak_bytes == replay(other, keep_all(other))[0].peak_bytes
            assert stats.cost_ns == program.cost_ns
            n_orders += 1
    assert n_orders > 100


def test_what_overwrites_a_constant_waits_for_its_readers() -> None:
    p = ProgramBuilder()
    w = p.constant("w", 8, StorageKind.PARAMETER)
    (a,) = p.operator("a", [w], [100], 10)
    (b,) = p.operator("b", [w], [100], 10)
    (c,) = p.operator("c", [b], [1], 10)
    (d,) = p.operator("d", [a], [1], 10)
    p.operator("write", [w], [], 5, not_recomputable="an effect", overwrites=[w])
    program = p.build([c, d])
    found = list(orders(program))
    assert found
    for order in found:
        assert set(order[: order.index(4)]) >= {0, 1}


def test_never_more_expensive_than_in_the_programs_order() -> None:
    n_cheaper = 0
    for program, source in random_programs(60):
        for budget_bytes in budgets(program, source.randint):
            own = cost_or_none(program, make_planner("program-order"), budget_bytes)
            found = cost_or_none(program, make_planner("auto"), budget_bytes)
            if own is not None:
                assert found is not None and found <= own
            n_cheaper += found is not None and (own is None or found < own)
    assert n_cheaper >= 5


def test_a_budget_below_every_order() -> None:
    with pytest.raises(InfeasibleBudgetError):
        make_planner("auto").plan(branches(2), 50)


def test_nothing_crosses_a_barrier() -> None:
    """It stands for other graphs of the step, which run at that moment and at no other."""
    p = ProgramBuilder()
    x = p.constant("x", 1, StorageKind.INPUT)
    once = "it draws"
    before = [p.operator(f"before{i}", [x], [100], not_recomputable=once)[0] for i in range(3)]
    p.operator("barrier", [], [], not_recomputable="others run", is_barrier=True)
    after = [p.operator(f"after{i}", [b], [1])[0] for i, b in enumerate(before)]
    program = p.build(after)
    needed_bytes = 1 + 3 * 100 + 1
    assert replay(program, keep_all(program))[0].peak_bytes == needed_bytes
    assert make_planner("brute-force").smallest_budget_bytes(program) == needed_bytes
    assert not list(orders(program))
    order = (0, 4, 1, 5, 2, 3, 6)
    with pytest.raises(PlanError, match="'after0' runs before 'barrier'"):
        replay(program, plan_of_permuted(program, order, keep_all(without(program, order)), "test"))
    order = (0, 1, 3, 4, 2, 5, 6)
    with pytest.raises(PlanError, match="'barrier' runs before what comes before it"):
        replay(program, plan_of_permuted(program, order, keep_all(without(program, order)), "test"))
    assert from_json(to_json(program)) == program


def without(program: Program, order: tuple[int, ...]) -> Program:
    """The program in that order, and without barriers."""
    other = permuted(program, order)
    return replace(other, operators=tuple(replace(o, is_barrier=False) for o in other.operators))
