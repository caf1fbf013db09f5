"""How far is each planner from the optimum, where the optimum is known?

* Checkmate's graphs beside the repository, at their budgets: the MILP optimum where it is proven.
* Tiny random programs: planner ``brute-force``, over all orders, then over the program's own order
  (in which most planners run operators for the first time); budgets are the smallest feasible one,
  the baseline's peak less one byte, and half way.

``cost`` is planned cost over the optimum's, mean and worst over the cases for which the planner has
a plan; ``plans`` counts these, of all cases in which there is a plan.  ``least`` is the smallest
budget that the planner meets over the smallest there is (on the tiny programs only).  The MILP
holds an operator's inputs until the end of its stage, so a cost can come in just below it.

    python -m bench.planner_gaps [--count 200] [--operators 9] [--quick]
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

from dtrcompile.passes.errors import InfeasibleBudgetError, ProgramTooLargeError
from dtrcompile.passes.planning.planners import PLANNERS, keep_all, make_planner, minimum_plan
from dtrcompile.passes.planning.planners.base import Planner
from dtrcompile.passes.planning.planners.brute_force import BruteForcePlanner
from dtrcompile.passes.program.program import Program
from dtrcompile.passes.program.replay import replay
from workloads.public_graphs import from_checkmate_json, shared_data
from workloads.random_programs import random_program

# The oracle itself, and what bench.planner_milp compares.
SLOW = frozenset({"brute-force", "checkmate", "checkmate-lp"})


@dataclass(slots=True)
class Gap:
    """What was seen of one planner."""

    cases: int = 0
    costs: list[float] = field(default_factory=list)
    least: list[float] = field(default_factory=list)
    planning_s: float = 0.0

    def row(self) -> str:
        """Its cells of the table."""
        return (
            f"{len(self.costs):6}/{self.cases:<4}"
            + _mean_and_worst(self.costs)
            + _mean_and_worst(self.least)
            + f"{self.planning_s / max(self.cases, 1):10.3f}"
        )


def _mean_and_worst(values: list[float]) -> str:
    if not values:
        return f"{'-':>9}{'-':>9}"
    return f"{sum(values) / len(values):9.4f}{max(values):9.4f}"


def planned_ns(planner: Planner, program: Program, budget_bytes: int) -> int | None:
    """The referee's cost of the plan; None where there is none."""
    try:
        plan = planner.plan(program, budget_bytes)
    except InfeasibleBudgetError:
        return None
    return replay(program, plan)[1].cost_ns


def count_case(
    gaps: dict[str, Gap],
    planners: dict[str, Planner],
    program: Program,
    budget_bytes: int,
    optimum_ns: float,
) -> None:
    """Add one case to each planner's gap."""
    for name, planner in planners.items():
        start = time.perf_counter()
        cost_ns = planned_ns(planner, program, budget_bytes)
        gap = gaps[name]
        gap.planning_s += time.perf_counter() - start
        gap.cases += 1
        if cost_ns is not None:
            gap.costs.append(cost_ns / optimum_ns if optimum_ns else 1.0)


def public_graphs(planners: dict[str, Planner], quick: bool) -> None:
    """Against the MILP."""
    data = shared_data()
    if data is None:
        print("no shared data beside the repository; set DTRCOMPILE_SHARED")
        return
    for path in sorted((data / "checkmate").glob("*.json"))[: 1 if quick else None]:
        program, references = from_checkmate_json(path)
        gaps = {name: Gap() for name in planners}
        for reference in references:
            if reference.milp_status == "optimal" and reference.milp_overhead is not None:
                optimum_ns = reference.milp_overhead * program.cost_ns
                count_case(gaps, planners, program, reference.budget_bytes, optimum_ns)
        print_table(f"{program.name}, against the MILP", gaps)


def tiny_programs(
    oracle: BruteForcePlanner, count: int, operators: int
) -> Iterator[tuple[Program, int]]:
    """Random programs for which there is something to plan, with the smallest budget."""
    for seed in range(count):
        program = random_program(random.Random(seed).randint, operators)
        try:
            smallest_bytes = oracle.smallest_budget_bytes(program)
        except ProgramTooLargeError:
            continue
        if smallest_bytes < replay(program, keep_all(program))[0].peak_bytes:
            yield program, smallest_bytes


def random_programs(
    oracle: BruteForcePlanner, planners: dict[str, Planner], count: int, operators: int
) -> None:
    """Against brute force."""
    gaps = {name: Gap() for name in planners}
    programs = 0
    for program, smallest_bytes in tiny_programs(oracle, count, operators):
        programs += 1
        peak_bytes = replay(program, keep_all(program))[0].peak_bytes
        half_bytes = (smallest_bytes + peak_bytes) // 2
        for budget_bytes in dict.fromkeys((smallest_bytes, half_bytes, peak_bytes - 1)):
            try:
                optimum_ns = planned_ns(oracle, program, budget_bytes)
            except ProgramTooLargeError:
                continue
            assert optimum_ns is not None
            count_case(gaps, planners, program, budget_bytes, optimum_ns)
        for name, planner in planners.items():
            found_bytes = replay(program, minimum_plan(program, planner))[0].peak_bytes
            gaps[name].least.append(found_bytes / max(smallest_bytes, 1))
    order = "all orders" if oracle.reorder else "the program's order"
    print_table(
        f"{programs} random programs of at most {operators} operators, against the optimum of"
        f" {order}",
        gaps,
    )


def print_table(title: str, gaps: dict[str, Gap]) -> None:
    """One row a planner."""
    print(title)
    print(f"  {'':22}{'plans':>8}   {'cost':>9}{'worst':>9}{'least':>9}{'worst':>9}{'seconds':>10}")
    for name, gap in gaps.items():
        print(f"  {name:22}{gap.row()}", flush=True)


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--count", type=int, default=200, help="random programs")
    parser.add_argument("--operators", type=int, default=9, help="most operators of one")
    parser.add_argument("--planners", help="comma-separated names; default: all but the solvers")
    parser.add_argument("--quick", action="store_true", help="twenty programs, one graph")
    args = parser.parse_args()
    names = args.planners.split(",") if args.planners else sorted({*PLANNERS} - SLOW)
    planners = {name: make_planner(name) for name in names}
    public_graphs(planners, args.quick)
    count = 20 if args.quick else args.count
    for oracle in (BruteForcePlanner(), BruteForcePlanner(reorder=False)):
        random_programs(oracle, planners, count, args.operators)
    return 0


if __name__ == "__main__":
    sys.exit(main())
