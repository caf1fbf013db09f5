"""How far from the optimum?  Every planner against Checkmate's MILP, relaxation and rounding.

Two tables, on the Checkmate graphs beside the repository (see `public_graphs.shared_data`; it
says so where they are absent).  The first has one row a budget; costs are overheads
(planned / baseline):

    milp     the optimum or what was found in time, its status and proven bound, seconds
    paper    the same from the paper's own equations, without a first plan (--paper)
    file     what the file's reference run of the MILP says (``~``: not proven)
    lp       the relaxation's bound; lp-paper: of the paper's equations
    chk-lp   checkmate-lp; polished: with evictions undone while there is room
    auto/opt auto's cost over the optimum's where it is proven, here or in the file, else over the
             bound (``<``)
    time     seconds of the MILP over seconds of auto; file-t: of the file's run of it, which knew
             no plan to start from, on the machine of the file

The second has the smallest budget, by bisection on the MILP where it decides, against what
`minimum_plan` finds.

    python -m bench.planner_milp [--quick] [--only NAME] [--limit SECONDS] [--paper] [--out FILE]
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from bench.measure import format_table, machine, say, write_json_line
from dtrcompile.passes.errors import DTRError, TimeLimitError
from dtrcompile.passes.planning.planners import (
    PLANNERS,
    lower_bound_bytes,
    make_planner,
    minimum_plan,
)
from dtrcompile.passes.planning.planners.checkmate import CheckmatePlanner, Solution
from dtrcompile.passes.planning.planners.checkmate_lp import CheckmateLPPlanner, lp_bound
from dtrcompile.passes.planning.planners.checkmate_model import Memory
from dtrcompile.passes.planning.planners.highs import Status
from dtrcompile.passes.program.plan import Plan
from dtrcompile.passes.program.program import Program
from dtrcompile.passes.program.replay import replay
from workloads.public_graphs import CheckmateReference, from_checkmate_json, shared_data

_OWN_COLUMNS = ("auto", "checkmate", "checkmate-lp", "keep-all")
_NAMES = {
    Status.OPTIMAL: "proven",
    Status.FEASIBLE: "found",
    Status.INFEASIBLE: "infeasible",
    Status.TIME_LIMIT: "time",
}


@dataclass(frozen=True, slots=True)
class Timed:
    """A planner's overhead, NaN where it has no plan, and its seconds."""

    overhead: float
    planning_s: float


def timed(program: Program, budget_bytes: int, plan: Callable[[], Plan]) -> Timed:
    """Plan, and let the referee say what it costs; refuse a plan above the budget."""
    start_s = time.perf_counter()
    try:
        found = plan()
    except DTRError:
        return Timed(math.nan, time.perf_counter() - start_s)
    planning_s = time.perf_counter() - start_s
    timeline, stats = replay(program, found)
    if timeline.peak_bytes > budget_bytes:
        raise AssertionError(f"{found.planner} is above the budget of {budget_bytes}")
    return Timed(stats.overhead, planning_s)


def overhead_of(solution: Solution, program: Program) -> float:
    """NaN where there is no plan."""
    return math.nan if solution.cost_ns is None else solution.cost_ns / program.cost_ns


def bound_or_nan(program: Program, budget_bytes: int, memory: Memory, limit_s: float) -> float:
    """The relaxation's bound as an overhead; infinite where it has no solution."""
    try:
        bound_ns = lp_bound(program, budget_bytes, memory=memory, time_limit_s=limit_s)
    except TimeLimitError:
        return math.nan
    return bound_ns / program.cost_ns


def measure(
    program: Program, reference: CheckmateReference, limit_s: float, paper: bool
) -> dict[str, Any]:
    """One row of the first table, as a record."""
    budget_bytes = reference.budget_bytes
    solution = CheckmatePlanner(time_limit_s=limit_s).solve(program, budget_bytes)
    record: dict[str, Any] = {
        "graph": program.name,
        "budget_bytes": budget_bytes,
        "milp": overhead_of(solution, program),
        "status": _NAMES[solution.status],
        "bound": solution.bound_ns / program.cost_ns,
        "milp_s": solution.solve_s,
        "file": math.nan if reference.milp_overhead is None else reference.milp_overhead,
        "file_status": reference.milp_status,
        "file_s": math.nan if reference.milp_s is None else reference.milp_s,
        "lp": bound_or_nan(program, budget_bytes, Memory.LIVE, limit_s),
        "lp-paper": bound_or_nan(program, budget_bytes, Memory.PAPER, limit_s),
    }
    if paper:
        planner = CheckmatePlanner(time_limit_s=limit_s, memory=Memory.PAPER.value, start=False)
        by_paper = planner.solve(program, budget_bytes)
        record["paper"] = overhead_of(by_paper, program)
        record["paper_status"] = _NAMES[by_paper.status]
        record["paper_s"] = by_paper.solve_s
    planners: dict[str, Callable[[], Plan]] = {
        "auto": lambda: make_planner("auto").plan(program, budget_bytes),
        "checkmate-lp": lambda: CheckmateLPPlanner(time_limit_s=limit_s).plan(
            program, budget_bytes
        ),
        "polished": lambda: CheckmateLPPlanner(time_limit_s=limit_s, polish=True).plan(
            program, budget_bytes
        ),
    }
    for name in other_planners():
        planners[name] = lambda name=name: make_planner(name).plan(program, budget_bytes)  # type: ignore[misc]
    for name, plan in planners.items():
        # Milliseconds are measured three times, for something else may run meanwhile.
        found = timed(program, budget_bytes, plan)
        again = [timed(program, budget_bytes, plan) for _ in range(2 * (found.planning_s < 1.0))]
        record[name] = found.overhead
        record[f"{name}_s"] = min(run.planning_s for run in (found, *again))
    return record


def other_planners() -> list[str]:
    """Registered planners without a column of their own."""
    return [name for name in PLANNERS if name not in _OWN_COLUMNS]


def optimum(record: dict[str, Any]) -> float:
    """What is proven here, or in the file; NaN where neither is."""
    if record["status"] == "proven":
        return float(record["milp"])
    return float(record["file"]) if record["file_status"] == "optimal" else math.nan


def ratio_to_optimum(record: dict[str, Any]) -> float:
    """auto / optimum where it is proven, else auto / bound."""
    best = optimum(record)
    return float(record["auto"] / (record["bound"] if math.isnan(best) else best))


def cells(record: dict[str, Any], paper: bool) -> list[str]:
    """One row of the first table, as text."""

    def number(value: float, digits: int = 4) -> str:
        return "-" if not math.isfinite(value) else f"{value:.{digits}f}"

    unproven = "" if record["file_status"] in ("optimal", "infeasible") else "~"
    ratio = ratio_to_optimum(record)
    mark = "<" if math.isnan(optimum(record)) and math.isfinite(ratio) else ""
    row = [
        f"{record['graph']} {record['budget_bytes']}",
        number(record["milp"]),
        record["status"],
        number(record["bound"]),
        number(record["milp_s"], 2),
    ]
    if paper:
        row += [number(record["paper"]), record["paper_status"], number(record["paper_s"], 2)]
    row += [
        unproven + number(record["file"]),
        number(record["lp"]),
        number(record["lp-paper"]),
        number(record["checkmate-lp"]),
        number(record["polished"]),
        number(record["auto"]),
        number(record["auto_s"], 2),
        mark + number(ratio),
        number(record["milp_s"] / record["auto_s"], 0),
        number(record["file_s"] / record["auto_s"], 0),
    ]
    return row + [number(record[name]) for name in other_planners()]


def header(paper: bool) -> list[str]:
    """Of the first table."""
    by_paper = ["paper", "status", "s"] if paper else []
    return [
        "graph, budget", "milp", "status", "bound", "s", *by_paper, "file", "lp", "lp-paper",
        "chk-lp", "polished", "auto", "s", "auto/opt", "time", "file-t",
        *other_planners(),
    ]  # fmt: skip


def summarize(records: list[dict[str, Any]]) -> str:
    """Where ``auto`` stands, in three lines."""
    proven = [r for r in records if math.isfinite(optimum(r)) and math.isfinite(r["auto"])]
    beyond = [r for r in proven if ratio_to_optimum(r) > 1.01]
    rivals = ("checkmate-lp", "polished", *other_planners())
    beaten = [(r, name) for r in records for name in rivals if r[name] < r["auto"] * (1 - 1e-9)]
    missed = [r for r in records if math.isnan(r["auto"]) and not math.isnan(r["milp"])]
    lines = [
        f"auto is within 1 % of the optimum at {len(proven) - len(beyond)} of {len(proven)} budgets"
        f" where it is proven, at most {max(map(ratio_to_optimum, proven), default=math.nan):.4f}"
    ]
    lines += [
        f"  beyond: {r['graph']} {r['budget_bytes']}: {ratio_to_optimum(r):.4f}" for r in beyond
    ]
    times = sorted(r["file_s"] / r["auto_s"] for r in records if math.isfinite(r["file_s"]))
    if times:
        lines.append(
            f"the file's MILP takes {times[0]:.0f} to {times[-1]:.0f} times as long as auto,"
            f" median {times[len(times) // 2]:.0f}"
        )
    lines += [f"  no plan: {r['graph']} {r['budget_bytes']}" for r in missed]
    lines += [f"  beaten by {n}: {r['graph']} {r['budget_bytes']}" for r, n in beaten]
    return "\n".join(lines)


@dataclass(frozen=True, slots=True)
class Minimum:
    """The smallest budget: ``low`` is proven too small, ``high`` enough; the MILP cannot say more.

    Attributes:
        ours: what `minimum_plan` finds.
    """

    low: int
    high: int
    ours: int
    seconds: float


def smallest_budget(program: Program, limit_s: float) -> Minimum:
    """By bisection, to a thousandth, or until the MILP decides no more within its time."""
    ours = replay(program, minimum_plan(program, make_planner("auto")))[0].peak_bytes
    start_s = time.perf_counter()
    low, high = lower_bound_bytes(program) - 1, ours
    planner = CheckmatePlanner(time_limit_s=limit_s, gap=math.inf, start=False)
    while high - low > max(1, high // 1024):
        budget_bytes = (low + high) // 2
        solution = planner.solve(program, budget_bytes)
        if solution.plan is not None:
            high = replay(program, solution.plan)[0].peak_bytes
        elif solution.status is Status.INFEASIBLE:
            low = budget_bytes
        else:
            break
    return Minimum(low, high, ours, time.perf_counter() - start_s)


def jsonable(record: dict[str, Any]) -> dict[str, Any]:
    """JSON has neither NaN nor infinity."""
    return {
        k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in record.items()
    }


def graphs(
    data: Path, quick: bool, only: str
) -> Iterator[tuple[Program, Sequence[CheckmateReference]]]:
    """The graphs with their budgets; the smallest and three budgets if ``quick``."""
    for path in sorted((data / "checkmate").glob("*.json")):
        program, references = from_checkmate_json(path)
        if only not in program.name or (quick and len(program.operators) > 40):
            continue
        yield program, references[:5:2] if quick else references


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--quick", action="store_true", help="one small graph, three budgets")
    parser.add_argument("--only", default="", help="graphs whose name holds this")
    parser.add_argument("--limit", type=float, help="seconds a solve (default 60; 5 if quick)")
    parser.add_argument("--paper", action="store_true", help="also solve the paper's equations")
    parser.add_argument("--out", type=Path, help="append JSON lines to this file")
    args = parser.parse_args()
    limit_s = args.limit or (5.0 if args.quick else 60.0)
    data = shared_data()
    if data is None:
        print("no shared data beside the repository; set DTRCOMPILE_SHARED")
        return 0
    records = []
    minima = []
    for program, references in graphs(data, args.quick, args.only):
        for reference in references:
            say(f"{program.name} {reference.budget_bytes}")
            record = measure(program, reference, limit_s, args.paper)
            records.append(record)
            write_json_line(args.out, {**jsonable(record), **machine(torch.device("cpu"))})
        say(f"{program.name} minimum")
        least = smallest_budget(program, limit_s)
        minima.append(
            [
                program.name,
                str(least.low),
                str(least.high),
                str(least.ours),
                f"{least.ours / least.high:.4f}",
                f"{least.ours / (least.low + 1):.4f}",
                f"{least.seconds:.1f}",
            ]
        )
    print(format_table(header(args.paper), [cells(r, args.paper) for r in records]))
    print(summarize(records) + "\n")
    columns = ["graph", "too small", "enough", "minimum_plan", "/ enough", "/ proven", "s"]
    print(format_table(columns, minima))
    return 0


if __name__ == "__main__":
    sys.exit(main())
