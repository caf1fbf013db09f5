"""The oracle: against an enumeration of all plans, and against every planner."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest

from dtrcompile.passes.errors import InfeasibleBudgetError, PlanError, ProgramTooLargeError
from dtrcompile.passes.planning.planners import keep_all, lower_bound_bytes, make_planner
from dtrcompile.passes.planning.planners.brute_force import BruteForcePlanner
from dtrcompile.passes.program.plan import Boundary, Compute, Free, Plan, Step
from dtrcompile.passes.program.program import Program
from dtrcompile.passes.program.replay import replay
from workloads.random_programs import check_oracle, random_program
from workloads.synthetic import ProgramBuilder, transformer, unit_chain

ORACLE = BruteForcePlanner()


def orders(program: Program, most_runs: int) -> Iterator[list[int]]:
    """All sequences of operators that run every one; for programs without views."""

    def extend(order: list[int]) -> Iterator[list[int]]:
        done = set(order)
        if len(done) == len(program.operators):
            yield order
        if len(order) == most_runs:
            return
        for op in program.operators:
            producers = {program.tensors[t].producer for t in op.inputs} - {None}
            if producers <= done and (op.not_recomputable is None or op.id not in done):
                yield from extend([*order, op.id])

    yield from extend([])


def freeing_at_once(program: Program, order: list[int]) -> Plan:
    """The plan of least memory in this order: each copy goes after its last read."""
    steps: list[Step] = []
    for at, o in enumerate(order):
        if o == program.boundary and o not in order[:at]:
            steps.append(Boundary())
        steps.append(Compute(o))
        for storage in program.storages:
            makers = {program.tensors[t].producer for t in program.tensors_of[storage.id]}
            made = [k for k, other in enumerate(order[: at + 1]) if other in makers]
            if storage.is_constant or not made:
                continue
            again = [k for k, other in enumerate(order) if other in makers and k > at]
            until = again[0] if again else len(order)
            read = [
                k
                for k in range(made[-1], until)
                if any(program.tensors[t].storage == storage.id
                       for t in program.operators[order[k]].inputs)
            ]  # fmt: skip
            held = not again and storage.id in program.output_storages
            if max(read, default=made[-1]) == at and not held:
                steps.append(Free(storage.id))
    return Plan(tuple(steps), program.fingerprint, "test")


def optima(program: Program, most_runs: int) -> dict[int, int]:
    """Peak -> the least cost of all plans with that peak, by the referee."""
    best: dict[int, int] = {}
    for order in orders(program, most_runs):
        try:
            timeline, stats = replay(program, freeing_at_once(program, order))
        except PlanError:
            continue  # reads a copy that is gone, or breaks the order of the phases
        peak = timeline.peak_bytes
        best[peak] = min(best.get(peak, stats.cost_ns), stats.cost_ns)
    return best


def skip(sizes: tuple[int, ...], costs: tuple[int, ...], once: int = -1) -> Program:
    """a -> b -> c, and d reads c and a."""
    p = ProgramBuilder()
    made: list[list[int]] = []
    for k, name in enumerate("abcd"):
        inputs = [[], [0], [1], [2, 0]][k]
        reason = "test" if k == once else None
        made.append(
            p.operator(
                name, [made[i][0] for i in inputs], [sizes[k]], costs[k], not_recomputable=reason
            )
        )
    return p.build(made[3])


def two_branches() -> Program:
    """Whichever branch runs first leaves 1 byte; the other way round it leaves 3."""
    p = ProgramBuilder()
    (a,) = p.operator("a", [], [3], 2)
    (b,) = p.operator("b", [], [2], 5)
    (c,) = p.operator("c", [b], [1], 1)
    (d,) = p.operator("d", [a, c], [1], 1)
    return p.build([d])


@pytest.mark.parametrize(
    "program",
    [
        skip((1, 1, 1, 1), (1, 1, 1, 1)),
        skip((4, 1, 3, 1), (2, 7, 1, 3)),
        skip((3, 2, 4, 1), (9, 1, 1, 1), once=0),
        two_branches(),
        unit_chain(2),
    ],
    ids=["skip", "large source", "source once", "branches", "chain"],
)
def test_against_all_plans(program: Program) -> None:
    most_runs = len(program.operators) + (2 if len(program.operators) > 4 else 3)
    best = optima(program, most_runs)
    assert ORACLE.smallest_budget_bytes(program) == min(best)
    for budget_bytes in range(min(best), max(best) + 1):
        plan = ORACLE.plan(program, budget_bytes)
        fitting = min(cost for peak, cost in best.items() if peak <= budget_bytes)
        assert replay(program, plan)[1].cost_ns == fitting
    with pytest.raises(InfeasibleBudgetError):
        ORACLE.plan(program, min(best) - 1)


def test_an_order_of_its_own() -> None:
    program = two_branches()
    # In the program's order a (3) waits while b (2) and c (1) run: 6 bytes.  b and c first: c (1)
    # and a (3), then d (1): 5 bytes, and nothing runs twice.
    plan = ORACLE.plan(program, 5)
    assert not replay(program, plan)[1].recomputed
    # With a first it has to run again after b and c.
    fixed = BruteForcePlanner(reorder=False)
    assert replay(program, fixed.plan(program, 5))[1].recomputed == {0: 1}


@pytest.mark.parametrize("seed", range(40))
def test_no_planner_does_better(seed: int) -> None:
    check_oracle(random_program(random.Random(seed).randint, 7))


def test_large_programs_are_refused() -> None:
    program = transformer(3)
    assert ORACLE.plan(program, replay(program, keep_all(program))[0].peak_bytes).steps
    with pytest.raises(ProgramTooLargeError, match="at most 32 operators"):
        ORACLE.plan(program, lower_bound_bytes(program))
    with pytest.raises(ProgramTooLargeError, match="raise most_operators"):
        ORACLE.smallest_budget_bytes(program)
    with pytest.raises(ProgramTooLargeError, match="raise most_states"):
        make_planner("brute-force", most_states=3).plan(unit_chain(4), 4)
