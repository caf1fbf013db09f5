"""Checkmate's optimum, its relaxation and its rounding, on programs small enough to prove."""

from __future__ import annotations

import math
import pickle
import random
import subprocess
import sys

import pytest

from dtrcompile.passes.errors import (
    InfeasibleBudgetError,
    MissingExtraError,
    OptionError,
    TimeLimitError,
)
from dtrcompile.passes.planning.planners import keep_all, lower_bound_bytes, make_planner
from dtrcompile.passes.planning.planners.checkmate import CheckmatePlanner, Solution
from dtrcompile.passes.planning.planners.checkmate_lp import (
    CheckmateLPPlanner,
    lp_bound,
    with_least_runs,
)
from dtrcompile.passes.planning.planners.checkmate_model import Memory, Stages, choice_of, steps_of
from dtrcompile.passes.planning.planners.cover import least_cost_ns
from dtrcompile.passes.planning.planners.highs import Status
from dtrcompile.passes.planning.planners.improve import schedule_of
from dtrcompile.passes.program.index import ProgramIndex
from dtrcompile.passes.program.program import Program
from dtrcompile.passes.program.replay import replay
from workloads.random_programs import budgets, random_program
from workloads.synthetic import ProgramBuilder, training_chain, transformer

pytest.importorskip("scipy", minversion="1.9")


def cost_or_inf(program: Program, budget_bytes: int, name: str) -> float:
    """What the planner's plan costs, by the referee, which also holds it to the budget."""
    try:
        plan = make_planner(name).plan(program, budget_bytes)
    except InfeasibleBudgetError:
        return math.inf
    timeline, stats = replay(program, plan)
    assert timeline.peak_bytes <= budget_bytes
    return stats.cost_ns


def solve(
    program: Program, budget_bytes: int, memory: str = "live", start: bool = True
) -> Solution:
    """Solved to the end; the plan is held to the budget and to the bound."""
    solution = CheckmatePlanner(memory=memory, start=start, gap=0.0).solve(program, budget_bytes)
    assert solution.status in (Status.OPTIMAL, Status.INFEASIBLE)
    assert (solution.plan is None) == (solution.status is Status.INFEASIBLE)
    if solution.plan is not None:
        timeline, stats = replay(program, solution.plan)
        assert timeline.peak_bytes <= budget_bytes
        assert stats.cost_ns == solution.cost_ns
        assert solution.gap < 1e-6
    return solution


def test_optimum_of_a_chain() -> None:
    """f1 … f6, g6 … g1; g(i) reads f(i-1).  Each tensor has one byte.

    The most is held while g6 runs: f1 … f5 and g6 itself, 6 bytes (f6 is read by nobody).  With 5
    and 4 bytes one and two of f1 … f4 are missing then and run again: 13 and 14.  While g2 runs it
    needs g3, f1 and g2: not with 2.
    """
    program = training_chain(6)
    assert solve(program, 6).cost_ns == 12
    assert solve(program, 5).cost_ns == 13
    assert solve(program, 4).cost_ns == 14
    assert solve(program, 2).status is Status.INFEASIBLE


@pytest.mark.parametrize("memory", Memory)
@pytest.mark.parametrize("budget_bytes", [3, 4, 5, 6])
def test_relaxation_optimum_and_rounding_in_this_order(memory: Memory, budget_bytes: int) -> None:
    program = training_chain(8)
    bound_ns = lp_bound(program, budget_bytes, memory=memory)
    solution = solve(program, budget_bytes, memory.value)
    optimum_ns = math.inf if solution.cost_ns is None else solution.cost_ns
    assert program.cost_ns <= bound_ns <= optimum_ns + 1e-6
    assert optimum_ns <= cost_or_inf(program, budget_bytes, "checkmate-lp")


def test_the_relaxation_of_live_memory_is_the_tighter() -> None:
    """At the smallest budget of a chain it even is the optimum, 18; by the paper's equations 14."""
    program = training_chain(6)
    paper_ns = lp_bound(program, 3, memory=Memory.PAPER)
    live_ns = lp_bound(program, 3, memory=Memory.LIVE)
    assert paper_ns < live_ns == solve(program, 3).cost_ns


def test_a_relaxation_as_high_as_the_first_plan_ends_the_search() -> None:
    solution = solve(training_chain(8), 7)
    assert solution.status is Status.OPTIMAL
    assert solution.from_start
    assert solution.nodes == 0


@pytest.mark.parametrize("seed", range(12))
def test_random_programs(seed: int) -> None:
    """Views, several outputs, pins, operators that run once: relaxation ≤ optimum ≤ the others.

    Both accounts of memory, and with and without a first plan.
    """
    pick = random.Random(seed).randint
    program = random_program(pick, 8)
    for budget_bytes in budgets(program, pick):
        optimum = solve(program, budget_bytes)
        optimum_ns = math.inf if optimum.cost_ns is None else optimum.cost_ns
        assert solve(program, budget_bytes, start=False).cost_ns == optimum.cost_ns
        paper_ns = solve(program, budget_bytes, "paper").cost_ns
        assert optimum_ns <= (math.inf if paper_ns is None else paper_ns)
        assert lp_bound(program, budget_bytes, memory=Memory.PAPER) <= optimum_ns + 1e-6
        assert lp_bound(program, budget_bytes) <= optimum_ns + 1e-6
        assert least_cost_ns(ProgramIndex.of(program), budget_bytes) <= optimum_ns
        assert optimum_ns <= cost_or_inf(program, budget_bytes, "checkmate-lp")
        assert optimum_ns <= cost_or_inf(program, budget_bytes, "program-order")


def dead_output_program() -> tuple[Program, int]:
    """The budget at which a dead output that may not be dropped at once is too much.

    a makes x (1) and y (4), which b reads; c (5) is alone; d reads x and c.
    """
    p = ProgramBuilder()
    x, y = p.operator("a", [], [1, 4])
    (b,) = p.operator("b", [y], [1])
    (c,) = p.operator("c", [], [4])
    (d,) = p.operator("d", [x, c, b], [1])
    # x + c + b + d = 7 bytes at d, which is the most: nothing runs again.
    return p.build([d]), 7


@pytest.mark.parametrize("memory", ["paper", "live"])
def test_several_outputs(memory: str) -> None:
    program, budget_bytes = dead_output_program()
    assert solve(program, budget_bytes, memory).cost_ns == 4
    assert solve(program, budget_bytes - 1, memory).status is Status.INFEASIBLE


def test_outputs_may_be_computed_again_at_the_end() -> None:
    """The stage of the end: a's value is not there while c runs, and is made again for the end.

    a (4) and b (1, reads a) and c (4, reads b) and d (1, reads c); a and d are the outputs.  While
    c and d run: 1 + 4, 4 + 1.  At the end 4 + 1.  5 bytes do if a goes after b.
    """
    p = ProgramBuilder()
    (a,) = p.operator("a", [], [4])
    (b,) = p.operator("b", [a], [1])
    (c,) = p.operator("c", [b], [4])
    (d,) = p.operator("d", [c], [1])
    program = p.build([a, d])
    assert solve(program, 9).cost_ns == 4
    assert solve(program, 5).cost_ns == 5
    assert solve(program, 4).status is Status.INFEASIBLE


def test_what_runs_once_stays() -> None:
    """The same program: 9 = a + c + d bytes if a may not run again."""
    for fixed in ({"not_recomputable": "random"}, {}):
        p = ProgramBuilder()
        (a,) = p.operator("a", [], [4], **fixed)  # type: ignore[arg-type]
        (b,) = p.operator("b", [a], [1])
        (c,) = p.operator("c", [b], [4])
        (d,) = p.operator("d", [c], [1])
        least = 9 if fixed else 5
        program = p.build([a, d])
        assert solve(program, least).plan is not None
        assert solve(program, least - 1).plan is None


def test_a_pinned_output_of_forward_stays_before_the_boundary_too() -> None:
    """The same program once more, in forward: a is read by a last operator e, and pinned till then.

    What e makes takes no bytes, so the most is a + c + d while d runs.
    """
    p = ProgramBuilder()
    (a,) = p.operator("a", [], [4], pinned="test")
    (b,) = p.operator("b", [a], [1])
    (c,) = p.operator("c", [b], [4])
    (d,) = p.operator("d", [c], [1])
    (e,) = p.operator("e", [a], [0])
    p.begin_backward()
    program = p.build([a, d, e])
    assert solve(program, 9).cost_ns == 5
    assert solve(program, 8).status is Status.INFEASIBLE


def test_the_error_says_that_time_was_up() -> None:
    program = transformer(2)
    budget_bytes = lower_bound_bytes(program) + 1
    planner = CheckmatePlanner(time_limit_s=0.0, start=False)
    solution = planner.solve(program, budget_bytes)
    assert solution.status is Status.TIME_LIMIT
    assert solution.gap == math.inf
    with pytest.raises(TimeLimitError, match="within 0 s") as caught:
        planner.plan(program, budget_bytes)
    again = pickle.loads(pickle.dumps(caught.value))
    assert (again.budget_bytes, again.time_limit_s, str(again)) == (
        budget_bytes,
        0.0,
        str(caught.value),
    )


def test_out_of_time_the_first_plan_is_the_answer() -> None:
    program = training_chain(12)
    solution = CheckmatePlanner(time_limit_s=0.0).solve(program, 7)
    assert solution.from_start
    assert solution.status is Status.FEASIBLE
    assert solution.cost_ns == cost_or_inf(program, 7, "auto")


def test_without_scipy_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "scipy.optimize", None)
    for name in ("checkmate", "checkmate-lp"):
        with pytest.raises(MissingExtraError, match=r"pip install 'dtrcompile\[milp\]'") as caught:
            make_planner(name).plan(training_chain(6), 5)
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)


def test_options() -> None:
    with pytest.raises(OptionError, match="Did you mean 'paper'"):
        CheckmatePlanner(memory="papr")
    with pytest.raises(OptionError, match="unknown memory"):
        CheckmateLPPlanner(memory="")
    with pytest.raises(OptionError, match="Did you mean 'randomized'"):
        CheckmateLPPlanner(rounding="random")


def test_a_program_too_large_to_write_down_is_refused() -> None:
    program = training_chain(400)
    with pytest.raises(OptionError, match="up to 700 operators, this one has 801"):
        lp_bound(program, 100)


@pytest.mark.parametrize("rounding", ["deterministic", "randomized"])
def test_roundings_are_plans_and_polishing_does_not_harm(rounding: str) -> None:
    program = training_chain(10)
    plain = CheckmateLPPlanner(rounding=rounding).plan(program, 6)
    polished = CheckmateLPPlanner(rounding=rounding, polish=True).plan(program, 6)
    costs = []
    for plan in (polished, plain):
        timeline, stats = replay(program, plan)
        assert timeline.peak_bytes <= 6
        costs.append(stats.cost_ns)
    assert costs == sorted(costs)


def test_a_seed_is_a_rounding() -> None:
    program = training_chain(10)
    first = CheckmateLPPlanner(rounding="randomized", samples=1).plan(program, 7)
    assert CheckmateLPPlanner(rounding="randomized", samples=1).plan(program, 7) == first
    others = {CheckmateLPPlanner(rounding="randomized", samples=1, seed=s).plan(program, 7).steps
              for s in range(1, 6)}  # fmt: skip
    assert others != {first.steps}


def test_keeping_nothing_runs_everything_before() -> None:
    """Stage t of a chain of forward values without anything kept runs 0 … t."""
    program = training_chain(4)
    stages = Stages.of(ProgramIndex.of(program))
    nothing = choice_of(stages, keep_all(program).steps)
    assert nothing is not None
    nothing.kept[:] = False
    choice = with_least_runs(stages, nothing.kept)
    assert [int(row.sum()) for row in choice.runs[:4]] == [1, 2, 3, 4]


@pytest.mark.parametrize("seed", range(30))
def test_a_plan_survives_being_written_as_stages(seed: int) -> None:
    """What keep-all does is a decision, and its steps have the same cost and peak."""
    program = random_program(random.Random(seed).randint, 12)
    stages = Stages.of(ProgramIndex.of(program))
    choice = choice_of(stages, keep_all(program).steps)
    assert choice is not None
    again = schedule_of(stages.index, steps_of(stages, choice))
    assert again.cost_ns == program.cost_ns
    assert again.peak_bytes == replay(program, keep_all(program))[0].peak_bytes


def test_planning_is_the_same_in_another_process() -> None:
    code = (
        "from workloads.synthetic import training_chain\n"
        "from dtrcompile.passes.planning.planners import make_planner\n"
        "for name in ('checkmate', 'checkmate-lp'):\n"
        "    print(make_planner(name).plan(training_chain(8), 5).to_text(), end='')\n"
    )
    out = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    program = training_chain(8)
    assert out.stdout == "".join(
        make_planner(name).plan(program, 5).to_text() for name in ("checkmate", "checkmate-lp")
    )
