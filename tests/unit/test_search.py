"""Retention intervals and the search; the property tests compare them with the referee."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import combinations

import numpy as np
import pytest

from dtrcompile.passes.errors import PlanError
from dtrcompile.passes.planning.planners import keep_all, make_planner
from dtrcompile.passes.planning.planners.brute_force import BruteForcePlanner
from dtrcompile.passes.planning.planners.cover import least_cost_ns, least_cover
from dtrcompile.passes.planning.planners.improve import judged_plan, schedule_of
from dtrcompile.passes.planning.planners.intervals import Intervals
from dtrcompile.passes.planning.planners.search import Search, _range_max
from dtrcompile.passes.program.index import ProgramIndex
from dtrcompile.passes.program.program import Program
from dtrcompile.passes.program.replay import replay
from workloads.bounds import lower_bound_overhead
from workloads.synthetic import ProgramBuilder, training_chain, transformer


def shared_parent() -> Program:
    """a (cost 9) is read by b and at the end; b (cost 1) is computed from a and read before it."""
    p = ProgramBuilder()
    (a,) = p.operator("a", [], [4], 9)
    (b,) = p.operator("b", [a], [4], 1)
    (wide,) = p.operator("wide", [], [8], 5)
    (c,) = p.operator("c", [b, wide], [1], 5)
    (d,) = p.operator("d", [a, c], [1], 5)
    return p.build([d])


def test_an_eviction_pulls_forward_what_is_made_again_later_anyway() -> None:
    program = shared_parent()
    # Stages a, b, wide, c, d, end hold 4, 8, 16, 17, 6, 1.  Where there is no room for a in the
    # stages between, evicting it makes it again in stage d.
    state = Intervals(ProgramIndex.of(program), budget_bytes=13)
    assert state.held_bytes.tolist() == [4, 8, 16, 17, 6, 1]
    state.evict(0, 4)  # a, read by d
    state.settle()
    assert state.cost_ns == program.cost_ns + 9
    assert state.held_bytes.tolist() == [4, 8, 12, 13, 6, 1]
    # b then needs a in stage c.  So a is made there, once, and held from there to d: b's eviction
    # costs what b does, 1, and not what both do.
    mark = len(state.journal)
    state.evict(1, 3)  # b, read by c
    state.settle()
    assert state.cost_ns == program.cost_ns + 9 + 1
    assert state.runs == {3: [0, 1]}
    state.journal.roll_back(mark)
    assert state.cost_ns == program.cost_ns + 9
    state.keep(0, 4)
    assert (state.cost_ns, state.runs) == (program.cost_ns, {})


def test_repair_fits_the_budget_or_says_that_it_cannot() -> None:
    program = shared_parent()
    index = ProgramIndex.of(program)
    # c needs b, wide and its own output: 13.  a goes, and is made again for d.
    search = Search(Intervals(index, budget_bytes=13))
    assert search.repair()
    assert search.state.cost_ns == program.cost_ns + 9
    assert not Search(Intervals(index, budget_bytes=12)).repair()
    assert not Search(Intervals(index, budget_bytes=13)).repair(work_limit=-1)


def test_the_search_only_gets_better_and_is_deterministic() -> None:
    program = transformer(6)
    index = ProgramIndex.of(program)
    budget_bytes = replay(program, keep_all(program))[0].peak_bytes // 2
    results = []
    for _ in range(2):
        search = Search(Intervals(index, budget_bytes))
        assert search.repair()
        seed_ns = search.state.cost_ns
        search.run(200_000)
        assert search.fits
        assert search.state.cost_ns < seed_ns
        results.append(search.state.schedule().operators)
    assert results[0] == results[1]


@pytest.mark.parametrize("memory", [5, 8, 12])
def test_a_loaded_plan_costs_what_it_cost(memory: int) -> None:
    program = training_chain(16)
    index = ProgramIndex.of(program)
    steps = make_planner("dtr", heuristic="h_dtr").plan(program, memory).steps
    schedule = schedule_of(index, steps)
    state = Intervals(index, memory)
    state.load(schedule)
    assert state.cost_ns == schedule.cost_ns
    assert state.schedule().cost_ns == schedule.cost_ns
    assert int(state.held_bytes.max()) <= memory


def test_range_max_is_the_maximum_of_each_slice() -> None:
    rng = random.Random(0)
    values = np.array([rng.randrange(100) for _ in range(37)], dtype=np.int64)
    start = np.array([rng.randrange(37) for _ in range(200)], dtype=np.int64)
    stop = np.array([rng.randrange(a, 38) for a in start.tolist()], dtype=np.int64)
    found = _range_max(values, start, stop)
    for a, b, most in zip(start.tolist(), stop.tolist(), found.tolist(), strict=True):
        assert most == (max(values[a:b].tolist()) if a < b else np.iinfo(np.int64).min)


def test_no_plan_is_below_the_lower_bound() -> None:
    pytest.importorskip("scipy")
    # The unit chain of 8 holds 8 values at most.  In 7, one of them must go: 1 of 16 operators.
    assert lower_bound_overhead(training_chain(8), 8) == 1.0
    assert lower_bound_overhead(training_chain(8), 7) == pytest.approx(1 + 1 / 16)
    for program in (training_chain(24), transformer(3)):
        peak_bytes = replay(program, keep_all(program))[0].peak_bytes
        for share in (0.8, 0.6, 0.45):
            plan = make_planner("auto").plan(program, int(share * peak_bytes))
            bound = lower_bound_overhead(program, int(share * peak_bytes))
            assert 1.0 < bound <= replay(program, plan)[1].overhead + 1e-9


def test_the_least_cover_is_that_of_all_subsets() -> None:
    rng = random.Random(0)
    for _ in range(300):
        items = [(rng.randrange(9), rng.randrange(1, 9)) for _ in range(rng.randrange(1, 8))]
        need = rng.randrange(1, sum(size for _, size in items) + 1)
        exact = min(
            sum(cost for cost, _ in chosen)
            for n in range(len(items) + 1)
            for chosen in combinations(items, n)
            if sum(size for _, size in chosen) >= need
        )
        assert least_cover(items, need) == exact


def test_the_least_of_very_many_covers_is_bounded_from_below() -> None:
    rng = random.Random(0)
    for _ in range(20):
        items = [(rng.randrange(1000, 2000), rng.randrange(1, 99)) for _ in range(40)]
        need = sum(size for _, size in items) // 3
        cost_of = [0, *([10**9] * need)]  # for each size, of the cheapest items that reach it
        for cost, size in items:
            for reached in range(need, 0, -1):
                with_it = cost_of[max(reached - size, 0)] + cost
                cost_of[reached] = min(cost_of[reached], with_it)
        # One item may be split: the bound is less than what that item costs below the optimum.
        assert cost_of[need] - 2000 < least_cover(items, need) <= cost_of[need]


def test_an_optimal_plan_is_known_to_be_one() -> None:
    program = training_chain(8)
    index = ProgramIndex.of(program)
    assert least_cost_ns(index, 8) == program.cost_ns
    for memory, bound_is_met in ((7, True), (6, True), (5, True), (4, False)):
        plan = make_planner("auto").plan(program, memory)
        cost_ns = replay(program, plan)[1].cost_ns
        assert program.cost_ns < least_cost_ns(index, memory) <= cost_ns
        # In four, layers run a third time, which the fullest stage alone does not tell.
        assert (least_cost_ns(index, memory) == cost_ns) is bound_is_met


def test_the_bound_counts_what_an_operator_that_runs_once_makes_a_view_of() -> None:
    """a, which costs less than b, is let go for what is wide, and made again for the view."""
    p = ProgramBuilder()
    (a,) = p.operator("a", [], [6], 4)
    (b,) = p.operator("b", [], [6], 20)
    (nothing,) = p.operator("nothing", [], [0], 1)
    (wide,) = p.operator("wide", [], [9], 8)
    (narrow,) = p.operator("narrow", [wide], [1], 1)
    p.view("view of nothing", nothing)
    p.operators[-1] = replace(p.operators[-1], not_recomputable="it counts its runs")
    view = p.view("view", a)
    p.operators[-1] = replace(p.operators[-1], not_recomputable="it counts its runs")
    (end,) = p.operator("end", [view, narrow, b], [1], 1)
    program = p.build([end])
    plan = BruteForcePlanner(reorder=False).plan(program, 16)
    extra_ns = replay(program, plan)[1].cost_ns - program.cost_ns
    assert extra_ns == 4
    assert least_cost_ns(ProgramIndex.of(program), 16) == program.cost_ns + extra_ns


def test_a_schedule_that_the_referee_counts_otherwise_is_no_plan() -> None:
    program = training_chain(8)
    baseline = keep_all(program)
    schedule = schedule_of(ProgramIndex.of(program), baseline.steps)
    assert judged_plan(program, schedule, 8, "keep-all").steps == schedule.steps()
    with pytest.raises(PlanError, match="counted 8 bytes and 16 ns, the referee 8 and 16"):
        judged_plan(program, schedule, 7, "keep-all")
    cheaper = replace(schedule, cost_ns=15)
    with pytest.raises(PlanError, match="counted 8 bytes and 15 ns, the referee 8 and 16"):
        judged_plan(program, cheaper, 8, "keep-all")
