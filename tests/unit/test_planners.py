"""The planners, the registry, the smallest budget, and the error that names it."""

from __future__ import annotations

import math
import pickle
import subprocess
import sys
from itertools import combinations

import pytest

from dtrcompile.passes.errors import InfeasibleBudgetError, OptionError
from dtrcompile.passes.planning.heuristics import HEURISTICS
from dtrcompile.passes.planning.planners import (
    PLANNERS,
    infeasible,
    keep_all,
    lower_bound_bytes,
    make_planner,
    minimum_plan,
)
from dtrcompile.passes.planning.planners.auto import default_planning_s
from dtrcompile.passes.planning.planners.base import Planner
from dtrcompile.passes.planning.planners.improve import keep_what_fits, schedule_of
from dtrcompile.passes.program.index import ProgramIndex
from dtrcompile.passes.program.plan import Compute, Free, Plan, Step
from dtrcompile.passes.program.program import Program
from dtrcompile.passes.program.replay import replay
from workloads.synthetic import ProgramBuilder, training_chain, transformer, unit_chain


def baseline_bytes(program: Program) -> int:
    return replay(program, keep_all(program))[0].peak_bytes


# The registry


def test_make_planner() -> None:
    assert make_planner("dtr", heuristic="h_lru").name == "dtr"
    with pytest.raises(OptionError, match="Did you mean 'auto'"):
        make_planner("auot")
    with pytest.raises(OptionError, match="unknown option of planner 'dtr' 'heuristik'"):
        make_planner("dtr", heuristik="h_lru")
    with pytest.raises(OptionError, match="Did you mean 'h_lru'"):
        make_planner("dtr", heuristic="h_lruu")
    with pytest.raises(OptionError, match="unknown deallocation"):
        make_planner("dtr", deallocation="lazy")
    with pytest.raises(OptionError, match="unknown heuristic"):
        make_planner("auto", heuristic="best")


@pytest.mark.parametrize("name", PLANNERS)
def test_every_planner(name: str) -> None:
    planner = make_planner(name)
    assert planner.name == name
    assert planner == pickle.loads(pickle.dumps(planner))
    program = transformer(2)
    peak = baseline_bytes(program)
    timeline, stats = replay(program, planner.plan(program, peak))
    assert timeline.peak_bytes <= peak
    assert not stats.recomputed
    with pytest.raises(InfeasibleBudgetError):
        planner.plan(program, lower_bound_bytes(program) - 1)


@pytest.mark.parametrize("heuristic", HEURISTICS)
@pytest.mark.parametrize("name", ["auto", "dtr"])
def test_every_heuristic(name: str, heuristic: str) -> None:
    program = transformer(3)
    budget_bytes = int(0.7 * baseline_bytes(program))
    plan = make_planner(name, heuristic=heuristic).plan(program, budget_bytes)
    timeline, stats = replay(program, plan)
    assert timeline.peak_bytes <= budget_bytes
    assert 1 < stats.overhead < 2


def test_an_ample_budget_is_the_baseline_step_by_step() -> None:
    program = transformer(2)
    assert make_planner("auto").plan(program, baseline_bytes(program)) == keep_all(program)


# What DTR promises (Kirisame et al., section 3): N layers forward and backward, unit sizes, unit
# costs.  A budget of B means B tensors in memory.


@pytest.mark.parametrize("layers", [16, 64, 256, 1024])
def test_theorem_3_1_with_two_root_n_memory_the_work_is_linear(layers: int) -> None:
    """Theorem 3.1: with B = 2⌈√N⌉, O(N) operations.  Every layer runs at most twice more."""
    program = training_chain(layers)
    budget_bytes = 2 * math.ceil(math.sqrt(layers))
    for planner in (make_planner("auto"), make_planner("dtr", heuristic="h_dtr_eq")):
        _, stats = replay(program, planner.plan(program, budget_bytes))
        # 2N without recomputation; the best possible is about 3N.
        assert stats.cost_ns <= 4 * layers


@pytest.mark.parametrize("layers", [16, 64, 256, 1024])
def test_with_log_n_memory_the_work_is_n_log_n(layers: int) -> None:
    """Section 3: "as little as Ω(log N) memory" is where checkpointing reaches N log N work."""
    program = training_chain(layers)
    log_layers = math.ceil(math.log2(layers))
    for planner in (make_planner("auto"), make_planner("dtr", heuristic="h_dtr_eq")):
        _, stats = replay(program, planner.plan(program, log_layers + 4))
        assert stats.cost_ns <= layers * (log_layers + 2)


# Brute force: no planner beats the optimum, and auto finds it where it is easy.


def optimum_ns(program: Program, budget_bytes: int, most_runs: int) -> int | None:
    """Least cost over all plans with at most ``most_runs`` computations: Dijkstra over states.

    A state is what is in memory and which operators have run; for programs without views.
    """
    import heapq

    sizes = [s.size_bytes for s in program.storages]
    keep = program.output_storages
    done_all = (1 << len(program.operators)) - 1
    queue: list[tuple[int, int, int, int]] = [(0, 0, 0, 0)]
    seen: set[tuple[int, int]] = set()
    while queue:
        cost_ns, runs, resident, done = heapq.heappop(queue)
        if (resident, done) in seen:
            continue
        seen.add((resident, done))
        if done == done_all and all(resident >> s & 1 for s in keep):
            return cost_ns
        if runs == most_runs:
            continue
        held = [s for s in range(len(sizes)) if resident >> s & 1]
        for count in range(len(held) + 1):
            for freed in combinations(held, count):
                left = resident & ~sum(1 << s for s in freed)
                live = sum(sizes[s] for s in held if s not in freed)
                for op in program.operators:
                    reads = [program.tensors[t].storage for t in op.inputs]
                    makes = [program.tensors[t].storage for t in op.outputs]
                    if not all(left >> s & 1 for s in reads):
                        continue
                    if live + sum(sizes[s] for s in makes) > budget_bytes:
                        continue
                    after = left
                    for s in makes:
                        after |= 1 << s
                    state = (cost_ns + op.cost_ns, runs + 1, after, done | 1 << op.id)
                    heapq.heappush(queue, state)
    return None


def skip_program(costs: tuple[int, int, int, int], sizes: tuple[int, int, int, int]) -> Program:
    """a -> b -> c -> d, where d also reads a, and e reads d and b."""
    p = ProgramBuilder()
    (a,) = p.operator("a", [], [sizes[0]], costs[0])
    (b,) = p.operator("b", [a], [sizes[1]], costs[1])
    (c,) = p.operator("c", [b], [sizes[2]], costs[2])
    (d,) = p.operator("d", [c, a], [sizes[3]], costs[3])
    (e,) = p.operator("e", [d, b], [1], 1)
    return p.build([e])


@pytest.mark.parametrize(
    # Budgets that both planners meet, and plans of either that compute something again.
    ("costs", "sizes", "met_by_all", "recomputing"),
    [
        ((1, 1, 1, 1), (1, 1, 1, 1), 2, 2),
        ((1, 9, 2, 1), (2, 1, 3, 2), 2, 2),
        ((5, 1, 1, 3), (1, 3, 2, 1), 3, 4),
    ],
)
def test_no_planner_beats_the_optimum(
    costs: tuple[int, int, int, int],
    sizes: tuple[int, int, int, int],
    met_by_all: int,
    recomputing: int,
) -> None:
    program = skip_program(costs, sizes)
    peak = baseline_bytes(program)
    met = {"auto": 0, "dtr": 0}
    dearer = 0
    for budget_bytes in range(lower_bound_bytes(program), peak + 1):
        best = optimum_ns(program, budget_bytes, most_runs=9)
        for name in ("auto", "dtr"):
            try:
                plan = make_planner(name).plan(program, budget_bytes)
            except InfeasibleBudgetError:
                # What auto does not find must not exist here.
                assert name == "dtr" or best is None
                continue
            cost_ns = replay(program, plan)[1].cost_ns
            assert best is not None
            assert cost_ns >= best
            if name == "auto":
                assert cost_ns == best
            met[name] += 1
            dearer += cost_ns > program.cost_ns
    # At all of the budgets that can be met, some of which take recomputation.
    assert met == {"auto": met_by_all, "dtr": met_by_all}
    assert dearer == recomputing


# Polishing


def test_an_eviction_with_room_is_undone() -> None:
    program = skip_program((1, 9, 2, 1), (2, 1, 3, 2))
    wasteful: tuple[Step, ...] = (
        Compute(0), Compute(1), Free(1), Compute(1), Compute(2), Free(0), Compute(0), Free(1),
        Compute(3), Free(2), Compute(1), Compute(4), Free(0), Free(1), Free(3),
    )  # fmt: skip
    replay(program, Plan(wasteful, program.fingerprint, "test"))
    index = ProgramIndex.of(program)
    schedule = schedule_of(index, wasteful)
    assert schedule.cost_ns == program.cost_ns + 9 + 1 + 9  # nothing of it is useless as it stands
    better = keep_what_fits(index, schedule, baseline_bytes(program))
    assert better.cost_ns == program.cost_ns
    assert better.peak_bytes == baseline_bytes(program)


def test_useless_recomputation_is_dropped() -> None:
    program = skip_program((1, 9, 2, 1), (2, 1, 3, 2))
    wasteful: tuple[Step, ...] = (
        Compute(0), Compute(1), Compute(2), Compute(2), Compute(3), Compute(0), Compute(4),
        Free(0), Free(1), Free(2), Free(3),
    )  # fmt: skip
    schedule = schedule_of(ProgramIndex.of(program), wasteful)
    assert schedule.operators == [0, 1, 2, 3, 4]
    assert schedule.peak_bytes == baseline_bytes(program)


# The smallest budget


def test_minimum_plan_reaches_the_lower_bound_of_a_chain() -> None:
    program = training_chain(16)
    plan = minimum_plan(program, make_planner("auto"))
    peak = replay(program, plan)[0].peak_bytes
    # A gradient, the one made from it, and a forward value: 3; the walk back needs one more at
    # most.
    assert lower_bound_bytes(program) == 3
    assert peak <= 4
    assert replay(program, make_planner("auto").plan(program, peak))[0].peak_bytes <= peak


def test_the_error_names_a_budget_that_works() -> None:
    program = transformer(3)
    planner = make_planner("auto")
    error = infeasible(program, 1000, planner)
    assert error.budget_bytes == 1000
    assert error.minimum_bytes is not None
    assert error.minimum_bytes < 0.5 * baseline_bytes(program)
    assert error.operator in {o.name for o in program.operators}
    sizes = [size for _, size in error.largest]
    assert len(sizes) == 5
    assert sizes == sorted(sizes, reverse=True)
    plan = planner.plan(program, error.minimum_bytes)
    assert replay(program, plan)[0].peak_bytes <= error.minimum_bytes
    assert str(error.minimum_bytes) in str(error)


def test_the_minimum_is_searched_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Equal programs have one; another planner, or another program, has its own."""
    asked: list[int] = []
    plan = PLANNERS["dtr"].plan

    def counted(self: Planner, program: Program, budget_bytes: int) -> Plan:
        asked.append(budget_bytes)
        return plan(self, program, budget_bytes)

    monkeypatch.setattr(PLANNERS["dtr"], "plan", counted)
    names = [name for name in HEURISTICS if "rand" not in name][:2]
    one, other = (make_planner("dtr", heuristic=name) for name in names)
    found = minimum_plan(transformer(2), one)
    n_first = len(asked)
    assert n_first > 1
    assert minimum_plan(transformer(2), one) is found
    assert infeasible(transformer(2), 1000, one).minimum_bytes is not None
    assert len(asked) == n_first
    minimum_plan(transformer(2), other)
    n_other = len(asked)
    assert n_other > n_first
    minimum_plan(unit_chain(9), one)
    assert len(asked) > n_other


def test_minimum_of_a_program_where_nothing_can_be_evicted() -> None:
    p = ProgramBuilder()
    (a,) = p.operator("a", [], [4], 1, not_recomputable="random")
    (b,) = p.operator("b", [a], [4], 1, not_recomputable="random")
    (c,) = p.operator("c", [a, b], [4], 1)
    program = p.build([c])
    assert minimum_plan(program, make_planner("auto")).steps == keep_all(program).steps


@pytest.mark.parametrize("name", ["auto", "dtr", "keep-all"])
def test_a_program_that_only_holds_constants(name: str) -> None:
    p = ProgramBuilder()
    x = p.constant("x", 8)
    program = p.build([x])
    assert make_planner(name).plan(program, 8).steps == ()
    with pytest.raises(InfeasibleBudgetError):
        make_planner(name).plan(program, 7)
    assert infeasible(program, 7, make_planner(name)).minimum_bytes == 8


def test_more_planning_time_makes_no_worse_plan_and_none_is_allowed() -> None:
    program = transformer(6)
    budget_bytes = baseline_bytes(program) // 2
    costs = []
    for planning_s in (0, 0.05, 0.5):
        plan = make_planner("auto", planning_s=planning_s).plan(program, budget_bytes)
        timeline, stats = replay(program, plan)
        assert timeline.peak_bytes <= budget_bytes
        costs.append(stats.cost_ns)
    # The first stops after its first candidate; the others search on.
    assert costs[0] > costs[1] > costs[2]
    with pytest.raises(OptionError, match="planning_s is -1"):
        make_planner("auto", planning_s=-1)


def test_more_operators_get_more_time_and_a_thousand_less_than_a_second() -> None:
    seconds = [default_planning_s(n) for n in (1, 10, 100, 1000, 10_000, 100_000)]
    assert seconds == sorted(seconds)
    assert seconds[3] < 1
    assert seconds[-1] < 10


@pytest.mark.parametrize("memory", [3, 6, 12])
def test_auto_takes_the_binomial_schedule_where_it_is_best(memory: int) -> None:
    program = unit_chain(48)
    plan = make_planner("auto").plan(program, memory)
    best = make_planner("treeverse", way="linearized", window=1).plan(program, memory)
    assert replay(program, plan)[1].cost_ns <= replay(program, best)[1].cost_ns


def test_planning_is_the_same_in_another_process() -> None:
    code = (
        "from workloads.synthetic import transformer\n"
        "from dtrcompile.passes.planning.planners import make_planner\n"
        "print(make_planner('auto').plan(transformer(3), 20000).to_text(), end='')\n"
    )
    runs = {
        subprocess.run(
            [sys.executable, "-c", code], check=True, capture_output=True, text=True
        ).stdout
        for _ in range(2)
    }
    assert runs == {make_planner("auto").plan(transformer(3), 20000).to_text()}


def test_nothing_up_to_the_planners_imports_torch() -> None:
    code = (
        "import sys\n"
        "import dtrcompile.passes.planning.planners, dtrcompile.passes.program.io\n"
        "sys.exit('torch' in sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
