"""Chen's checkpoints and Griewank's binomial schedule, and the line that both are laid along."""

from __future__ import annotations

import math
import os
import subprocess
import sys

import pytest

from dtrcompile.passes.errors import InfeasibleBudgetError, OptionError
from dtrcompile.passes.planning.planners import keep_all, make_planner
from dtrcompile.passes.planning.planners.brute_force import BruteForcePlanner
from dtrcompile.passes.planning.planners.linearize import Linearization, forward_end
from dtrcompile.passes.planning.planners.segments import WAYS
from dtrcompile.passes.planning.planners.treeverse import (
    TreeversePlanner,
    advance,
    capacity,
    forward_steps,
    repetition,
)
from dtrcompile.passes.program.index import ProgramIndex
from dtrcompile.passes.program.program import Program, StorageKind
from dtrcompile.passes.program.replay import replay
from workloads.synthetic import ProgramBuilder, training_chain, transformer, unit_chain


def line_of(program: Program) -> Linearization:
    return Linearization.of(ProgramIndex.of(program))


def names(program: Program, storages: list[int]) -> list[str]:
    return [program.storages[s].name for s in storages]


def peak_and_cost(program: Program, name: str, budget_bytes: int, **options: object) -> list[int]:
    plan = make_planner(name, **options).plan(program, budget_bytes)
    timeline, stats = replay(program, plan)
    assert timeline.peak_bytes <= budget_bytes
    return [timeline.peak_bytes, stats.cost_ns]


# The line


def residual_program() -> Program:
    """x -> a -> b, c = a + b, d, and a mask m of a that only backward reads."""
    p = ProgramBuilder()
    x = p.constant("x", 1, StorageKind.INPUT)
    (z,) = p.operator("z", [x], [1])
    (a,) = p.operator("a", [z], [1])
    (m,) = p.operator("m", [a], [2])
    (b,) = p.operator("b", [a], [4])
    (c,) = p.operator("c", [a, b], [8])
    (d,) = p.operator("d", [c], [16])
    p.begin_backward()
    (g,) = p.operator("g", [d, m, b], [1])
    (h,) = p.operator("h", [g, a, z], [1])
    return p.build([h])


def test_articulation_points_leave_out_ends_side_branches_and_what_a_skip_passes() -> None:
    program = residual_program()
    # Without a, z is cut off; without c, d is.  b has a -> c beside it, m is not part of d.
    assert names(program, line_of(program).articulation_points()) == ["a", "c"]


def test_every_inner_value_of_a_chain_is_an_articulation_point() -> None:
    program = unit_chain(2000)
    assert len(line_of(program).articulation_points()) == 1999  # f2 … f2000; f1 and loss are ends


def test_crossings() -> None:
    program = residual_program()
    line = line_of(program)
    # Before z, a, m, b, c, d, and after d: m, d and what is only read in backward cross nothing.
    crossings = [names(program, sorted(c)) for c in line.crossings(range(7))]
    assert crossings == [[], ["z"], ["a"], ["a"], ["a", "b"], ["c"], []]
    assert line.crossing_bytes() == [0, 1, 1, 1, 5, 8, 0]
    assert line.windows(1) == [0, 1, 2, 3, 4, 5]
    assert line.windows(3) == [0, 1, 4]  # among 1, 2, 3 the first of equals; 5 bytes before 8


def test_where_backward_begins() -> None:
    assert forward_end(ProgramIndex.of(residual_program())) == 6
    p = ProgramBuilder()
    (a,) = p.operator("a", [], [4])
    (b,) = p.operator("b", [a], [4])
    (c,) = p.operator("c", [a, b], [1])
    (d,) = p.operator("d", [c], [1])
    # No boundary: 4, 8, 9 and 2 bytes; the peak is at c, and what follows it is taken for backward.
    assert forward_end(ProgramIndex.of(p.build([d]))) == 3


# Chen


@pytest.mark.parametrize("way", ["any", *WAYS])
def test_chen_sqrt_by_hand(way: str) -> None:
    program = unit_chain(16)
    # Of the 17 forward values (the loss is one) every 4th: f4, f8, f12, f16.  Three operators of
    # each of the four segments run again, 33 + 12.  Peak at g15: f4 f8 f12, f13 f14 f15, g16, g15.
    # Of the 15 articulation points f2 ... f16 every 4th: f5, f9, f13.  The last segment is there
    # when backward begins, of the others 4, 3 and 3 run again, 33 + 10.  Peak at g16: f5 f9 f13,
    # f14 f15 f16, the loss and g16.
    expected = [8, 43] if way in ("any", "articulation-points") else [8, 45]
    assert peak_and_cost(program, "chen-sqrt", 17, way=way) == expected
    with pytest.raises(InfeasibleBudgetError):
        make_planner("chen-sqrt", way=way).plan(program, 7)


def test_chen_greedy_with_segments_of_three_bytes_is_the_same_set() -> None:
    program = unit_chain(16)
    # The sum passes 3 at each 4th value.
    assert peak_and_cost(program, "chen-greedy", 17, segment_bytes=3) == [8, 45]


def test_chen_greedy_takes_longer_segments_for_smaller_budgets() -> None:
    program = unit_chain(64)
    ample = peak_and_cost(program, "chen-greedy", 60)
    tight = peak_and_cost(program, "chen-greedy", 20)
    # Segments of two: every other value again.
    assert ample[1] == program.cost_ns + 32
    assert program.cost_ns + 32 < tight[1] <= program.cost_ns + 64
    # 2 √N is what the paper promises, up to the gradient and the one made from it.
    assert peak_and_cost(program, "chen-greedy", 2 * math.isqrt(64) + 2)[1] <= 3 * 64 + 1
    with pytest.raises(InfeasibleBudgetError):
        make_planner("chen-greedy").plan(program, 12)


@pytest.mark.parametrize("name", ["chen-sqrt", "chen-greedy"])
def test_segments_run_at_most_twice_on_a_transformer(name: str) -> None:
    program = transformer(8)
    peak = replay(program, keep_all(program))[0].peak_bytes
    planned, cost_ns = peak_and_cost(program, name, peak // 2)
    assert planned <= peak // 2
    assert program.boundary is not None
    forward_ns = sum(op.cost_ns for op in program.operators[: program.boundary])
    assert program.cost_ns < cost_ns <= program.cost_ns + forward_ns


def test_options_are_checked() -> None:
    with pytest.raises(OptionError, match="Did you mean 'linearized'"):
        make_planner("chen-sqrt", way="linearised")
    with pytest.raises(OptionError, match="unknown way"):
        make_planner("treeverse", way="crossings")
    with pytest.raises(OptionError, match="grid"):
        make_planner("chen-greedy", grid=1)
    with pytest.raises(OptionError, match="segment_bytes"):
        make_planner("chen-greedy", segment_bytes=-1)
    with pytest.raises(OptionError, match="window"):
        make_planner("treeverse", window=0)


# Treeverse


def test_the_formulas_are_the_recursion() -> None:
    best: dict[tuple[int, int], int] = {}
    for snapshots in range(1, 12):
        for steps in range(1, 40):
            choices = {
                m: m + best[steps - m, snapshots - 1] + best[m, snapshots]
                for m in range(1, steps)
                if (steps - m, snapshots - 1) in best
            }
            # With one snapshot every state is reached from the start.
            if snapshots == 1:
                best[steps, 1] = steps * (steps - 1) // 2
            elif steps == 1:
                best[steps, snapshots] = 0
            else:
                best[steps, snapshots] = min(choices.values())
                assert choices[advance(steps, snapshots)] == min(choices.values())
            assert forward_steps(steps, snapshots) == best[steps, snapshots]


def test_repetition_is_the_least_that_suffices() -> None:
    assert [capacity(3, r) for r in range(4)] == [1, 4, 10, 20]
    assert [repetition(steps, 3) for steps in (1, 2, 4, 5, 10, 11)] == [0, 1, 1, 2, 2, 3]


def formula_ns(layers: int, memory: int) -> int:
    """What `unit_chain` costs with that many bytes.

    Backward holds a gradient and makes one: memory - 2 snapshots, the start (which has no bytes)
    and the state counted.  The states are the start and f1 … fN; then the loss and the gradients.
    """
    return forward_steps(layers + 1, memory - 2) + 1 + layers


@pytest.mark.parametrize("layers", [*range(1, 17), 25])
def test_treeverse_is_the_formula_at_every_memory(layers: int) -> None:
    program = unit_chain(layers)
    planner = TreeversePlanner(way="linearized", window=1)
    for memory in range(3, layers + 3):
        _, stats = replay(program, planner.plan(program, memory))
        assert stats.cost_ns == formula_ns(layers, memory), memory
    assert stats.cost_ns == program.cost_ns
    with pytest.raises(InfeasibleBudgetError):
        planner.plan(program, 2)


@pytest.mark.parametrize("memory", [3, 4, 10, 64, 127, 129, 130])
def test_treeverse_is_the_formula_on_a_longer_chain(memory: int) -> None:
    program = unit_chain(128)
    _, stats = replay(program, make_planner("treeverse").plan(program, memory))
    assert stats.cost_ns == formula_ns(128, memory)


@pytest.mark.parametrize("layers", [2, 3, 5])
def test_the_formula_is_the_optimum(layers: int) -> None:
    program = unit_chain(layers)
    for memory in range(3, layers + 3):
        _, stats = replay(program, BruteForcePlanner().plan(program, memory))
        assert stats.cost_ns == formula_ns(layers, memory)


def test_treeverse_reaches_logarithmic_memory() -> None:
    program = training_chain(256)
    _, cost_ns = peak_and_cost(program, "treeverse", 10)
    # 8 snapshots: r = 3 as β(8, 3) = 165 < 256 ≤ β(8, 4) = 495, so no step runs more than 4 times.
    assert program.cost_ns < cost_ns <= program.cost_ns + 4 * 256


@pytest.mark.parametrize("way", ["articulation-points", "linearized"])
def test_treeverse_on_a_transformer(way: str) -> None:
    program = transformer(8)
    peak = replay(program, keep_all(program))[0].peak_bytes
    _, cost_ns = peak_and_cost(program, "treeverse", int(0.4 * peak), way=way)
    assert program.cost_ns < cost_ns < 1.4 * program.cost_ns
    with pytest.raises(InfeasibleBudgetError):
        make_planner("treeverse", way=way, most_runs=100).plan(program, int(0.4 * peak))
    with pytest.raises(InfeasibleBudgetError):
        make_planner("treeverse", way=way, most_stages=2, window=1).plan(program, int(0.4 * peak))


def test_plans_do_not_depend_on_the_hash_seed() -> None:
    code = (
        "from workloads.synthetic import transformer, unit_chain\n"
        "from dtrcompile.passes.planning.planners import make_planner\n"
        "for name in ('chen-sqrt', 'chen-greedy', 'treeverse'):\n"
        "    print(make_planner(name).plan(transformer(3), 25000).to_text())\n"
        "print(make_planner('brute-force').plan(unit_chain(5), 4).to_text())\n"
    )
    plans = {
        subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "PYTHONHASHSEED": seed},
            check=True,
            capture_output=True,
            text=True,
        ).stdout
        for seed in ("1", "2")
    }
    assert len(plans) == 1
