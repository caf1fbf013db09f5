"""What the simulator does on programs small enough to follow."""

from __future__ import annotations

import pytest

from dtrcompile.passes.errors import InfeasibleBudgetError
from dtrcompile.passes.planning.heuristics import HLRU, HDTREqNext, HDTRLocal
from dtrcompile.passes.planning.planners import keep_all
from dtrcompile.passes.planning.simulator import (
    Deallocation,
    Simulation,
    SimulatorOptions,
    simulate,
)
from dtrcompile.passes.program.index import ProgramIndex
from dtrcompile.passes.program.plan import Boundary, Compute, Free, Plan
from dtrcompile.passes.program.program import Program, StorageKind
from dtrcompile.passes.program.replay import PlanStats, replay
from workloads.synthetic import ProgramBuilder, training_chain, transformer


def run(program: Program, budget_bytes: int, **options: object) -> tuple[Simulation, PlanStats]:
    simulation = simulate(
        ProgramIndex.of(program),
        budget_bytes,
        SimulatorOptions(**options),  # type: ignore[arg-type]
    )
    timeline, stats = replay(program, Plan(simulation.steps, program.fingerprint, "test"))
    assert timeline.peak_bytes <= budget_bytes
    return simulation, stats


def words(program: Program, simulation: Simulation) -> str:
    """The steps in short: names, ``-name`` for a free, ``|`` for the boundary."""
    out = []
    for step in simulation.steps:
        match step:
            case Compute(o):
                out.append(program.operators[o].name)
            case Free(s):
                out.append("-" + program.storages[s].name)
            case Boundary():
                out.append("|")
    return " ".join(out)


def test_with_room_it_is_the_baseline() -> None:
    program = training_chain(4)
    simulation, stats = run(program, 100)
    assert words(program, simulation) == "f1 f2 f3 f4 -f4 | g4 -f3 g3 -f2 -g4 g2 -f1 -g3 g1 -g2"
    assert not stats.recomputed


def test_one_eviction() -> None:
    # The baseline holds f1 f2 f3 + g4 = 4 (f4 is dead at once).  In 3, one f must go and come
    # back: f1, f2 or f3 for one operator more.
    program = training_chain(4)
    _, stats = run(program, 3)
    assert stats.recomputed_operators == 1


def test_what_is_freed_has_no_use_left() -> None:
    p = ProgramBuilder()
    (a,) = p.operator("a", [], [1])
    (unused,) = p.operator("unused", [a], [1])
    (b,) = p.operator("b", [a], [1])
    program = p.build([b])
    simulation, _ = run(program, 100)
    assert words(program, simulation) == "a unused -unused b -a"
    assert unused == 1


def fork() -> Program:
    """a (1 byte, cost 1) is read early and late; big c in between leaves room for one more."""
    p = ProgramBuilder()
    (a,) = p.operator("a", [], [1], 1)
    (b,) = p.operator("b", [a], [1], 9)
    (c,) = p.operator("c", [b], [4], 9)
    (d,) = p.operator("d", [c], [4], 9)
    (e,) = p.operator("e", [d, a, b], [1], 9)
    return p.build([e])


def test_the_cheap_one_is_evicted_and_comes_back() -> None:
    # During d: b 1 + c 4 + d 4 = 9, with a 10.  In 9 bytes a (cost 1) goes, not b (cost 9).
    program = fork()
    simulation, stats = run(program, 9, heuristic=HDTRLocal())
    assert words(program, simulation) == "a b c -a d -c a e -b -a -d"
    assert stats.cost_ns == stats.baseline_cost_ns + 1
    # In 8 bytes both go, and a first, because b is computed from it.
    simulation, stats = run(program, 8, heuristic=HDTRLocal())
    assert stats.recomputed == {0: 1, 1: 1}


def test_too_small_is_an_error() -> None:
    with pytest.raises(InfeasibleBudgetError) as caught:
        run(fork(), 7)
    assert caught.value.budget_bytes == 7


def test_pinned_storages_stay_until_their_last_reader() -> None:
    p = ProgramBuilder()
    (a,) = p.operator("a", [], [1], 1, pinned="told so")
    (b,) = p.operator("b", [a], [1], 9)
    (c,) = p.operator("c", [b], [4], 9)
    (d,) = p.operator("d", [c], [4], 9)
    (e,) = p.operator("e", [d, a, b], [1], 9)
    program = p.build([e])
    # As in the fork, but a must stay: b goes instead.
    _, stats = run(program, 9)
    assert stats.recomputed == {1: 1}


def test_what_runs_once_is_never_evicted() -> None:
    p = ProgramBuilder()
    (a,) = p.operator("a", [], [1], 1, not_recomputable="random")
    (b,) = p.operator("b", [a], [1], 9)
    (c,) = p.operator("c", [b], [4], 9)
    (d,) = p.operator("d", [c], [4], 9)
    (e,) = p.operator("e", [d, a, b], [1], 9)
    program = p.build([e])
    _, stats = run(program, 9)
    assert stats.recomputed == {1: 1}


def seeded(seed_bytes: int) -> Program:
    """seed (runs once) -> mask 8 -> y 8; the mask is needed at the end, big t in between."""
    p = ProgramBuilder()
    (seed,) = p.operator("seed", [], [seed_bytes], 1, not_recomputable="random")
    (mask,) = p.operator("mask", [seed], [8], 5)
    (y,) = p.operator("y", [mask], [8], 50)
    (t,) = p.operator("t", [y], [16], 5)
    (z,) = p.operator("z", [t], [1], 5)
    (out,) = p.operator("out", [mask, y, z], [1], 5)
    return p.build([out])


def test_a_seed_outlives_its_last_reader_for_what_depends_on_it() -> None:
    # During t: mask 8 + y 8 + t 16 = 32, the seed 33.  In 26 the mask must go, and it can come
    # back only because the seed of 1 byte was kept although the program reads it no more.
    program = seeded(1)
    simulation, stats = run(program, 26)
    assert stats.recomputed == {1: 1}
    assert words(program, simulation).index("-seed") > words(program, simulation).index("-t")
    # A source as big as what depends on it is not worth keeping: one of the two must stay.
    simulation, stats = run(seeded(9), 33)
    assert words(seeded(9), simulation).startswith("seed mask -seed y t")
    assert not stats.recomputed
    with pytest.raises(InfeasibleBudgetError):
        run(seeded(9), 31)


def test_views_come_back_with_their_storage() -> None:
    p = ProgramBuilder()
    (a,) = p.operator("a", [], [4], 1)
    v = p.view("v", a)
    (b,) = p.operator("b", [v], [1], 9)
    (c,) = p.operator("c", [b], [8], 9)
    (d,) = p.operator("d", [c], [1], 9)
    (e,) = p.operator("e", [d, v], [1], 9)
    program = p.build([e])
    # During c: a 4 + b 1 + c 8 = 13.
    simulation, _ = run(program, 12)
    assert words(program, simulation) == "a v b -a c -b d -c a v e -a -d"


def test_forward_outputs_are_there_at_the_boundary_and_after() -> None:
    p = ProgramBuilder()
    x = p.constant("x", 1, StorageKind.INPUT)
    dy = p.constant("dy", 1, StorageKind.TANGENT)
    (hidden,) = p.operator("hidden", [x], [4], 1)
    (a,) = p.operator("a", [hidden], [8], 9)
    (b,) = p.operator("b", [a], [8], 9)
    (y,) = p.operator("y", [b], [1], 9)
    p.begin_backward()
    (g,) = p.operator("g", [dy, hidden], [4], 9)
    program = p.build([hidden, y, g])
    # During b: x 1 + hidden 4 + a 8 + b 8 = 21.  In 20 hidden goes and is computed again for the
    # boundary.
    simulation, stats = run(program, 20)
    assert stats.recomputed == {0: 1}
    assert words(program, simulation) == "hidden a -hidden b -a y -b hidden | g"


def test_gradients_are_not_evicted() -> None:
    # Every gradient must be there at the end: one that is evicted costs the whole backward again.
    program = transformer(6)
    baseline_bytes = replay(program, keep_all(program))[0].peak_bytes
    gradients = {s.id for s in program.storages if s.kind is StorageKind.GRADIENT}
    for share in (0.6, 0.4, 0.3):
        simulation, _ = run(program, int(share * baseline_bytes))
        freed = {step.storage for step in simulation.steps if isinstance(step, Free)}
        assert not freed & gradients


@pytest.mark.parametrize("deallocation", Deallocation)
def test_policies(deallocation: Deallocation) -> None:
    program = transformer(4)
    baseline_bytes = replay(program, keep_all(program))[0].peak_bytes
    _, stats = run(program, int(0.6 * baseline_bytes), deallocation=deallocation)
    assert 0 < stats.recomputed_operators < 60


def test_banishing_locks_what_is_computed_from_it() -> None:
    # In the fork with eager eviction, b may go after a; banished a cannot come back.
    p = ProgramBuilder()
    (a,) = p.operator("a", [], [1], 1)
    (b,) = p.operator("b", [a], [4], 1)
    (c,) = p.operator("c", [b], [4], 9)
    (d,) = p.operator("d", [c], [4], 9)
    (e,) = p.operator("e", [d, b], [1], 9)
    program = p.build([e])
    assert run(program, 9)[1].recomputed == {0: 1, 1: 1}
    with pytest.raises(InfeasibleBudgetError):
        run(program, 9, deallocation=Deallocation.BANISH)


def test_long_chains_need_no_recursion() -> None:
    # In 5 bytes nearly everything is evicted, so rematerialization goes back to the start.
    program = training_chain(3000)
    simulation, stats = run(program, 2000, heuristic=HDTREqNext())
    assert stats.overhead < 1.5
    p = ProgramBuilder()
    x = p.constant("x", 0, StorageKind.INPUT)
    tensors = [x]
    for i in range(10_000):
        tensors += p.operator(f"f{i}", tensors[-1:], [1])
    middle = tensors[-1]
    (end,) = p.operator("wide", [middle], [3])
    (last,) = p.operator("last", [end, tensors[5000], middle], [1])
    program = p.build([last])
    # 'wide' needs 4 bytes with its input, so f5000 is evicted and computed again, all 5,000 of it.
    simulation, stats = run(program, 6, heuristic=HLRU())
    assert stats.overhead < 2.5
    assert len(simulation.steps) > 20_000


def test_the_cost_limit_ends_thrashing() -> None:
    program = training_chain(64)
    with pytest.raises(InfeasibleBudgetError):
        run(program, 4, cost_limit=1.5)
