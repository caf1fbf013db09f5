"""How good are the plans?  ``auto`` against every heuristic, the MILP optimum and DTR's simulator.

Beside them a lower bound (`lower_bound`), so that the room left is known.  Heuristics are run by
our simulator and, in column ``simrd``, by the authors' (the best of all).  Loads the public graphs
beside the repository (see `public_graphs.shared_data`); says so where they are absent.  Overhead is
planned cost / baseline cost; ``-`` means that no plan was found.

    python -m bench.planner_quality [--quick] [--out results.jsonl]
"""

from __future__ import annotations

import argparse
import csv
import json
import math
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from dtrcompile.passes.errors import InfeasibleBudgetError
from dtrcompile.passes.planning.heuristics import HEURISTICS
from dtrcompile.passes.planning.planners import make_planner
from dtrcompile.passes.program.program import Program
from dtrcompile.passes.program.replay import replay
from workloads.bounds import lower_bound_overhead
from workloads.public_graphs import from_checkmate_json, from_simrd_log, shared_data

_PAPER = ("h_dtr", "h_dtr_eq", "h_dtr_local", "h_msps", "h_lru", "h_size")
SIMRD_NAMES = {
    "h_DTR": "h_dtr",
    "h_DTR_eq": "h_dtr_eq",
    "h_DTR_local": "h_dtr_local",
    "h_MSPS": "h_msps",
    "h_LRU": "h_lru",
    "h_size (largest)": "h_size",
}
_RATIOS = (0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2, 0.1)


@dataclass(frozen=True, slots=True)
class Case:
    """A program, a budget, and what others reached: name -> overhead."""

    program: Program
    label: str
    budget_bytes: int
    others: dict[str, float]


def checkmate_cases(data: Path) -> Iterator[Case]:
    """Every budget of every Checkmate graph that has a proven or found optimum."""
    for path in sorted((data / "checkmate").glob("*.json")):
        program, references = from_checkmate_json(path)
        for reference in references:
            if reference.milp_overhead is None:
                continue
            best = min(reference.simrd_overhead.values(), default=math.nan)
            yield Case(
                program,
                f"{program.name} {reference.budget_bytes}",
                reference.budget_bytes,
                {"milp": reference.milp_overhead, "simrd": best},
            )


def simrd_cases(data: Path, ratios: Iterable[float]) -> Iterator[Case]:
    """Every log at every ratio of the authors' baseline."""
    with (data / "simrd" / "reference.csv").open() as lines:
        rows = list(csv.DictReader(lines))
    for path in sorted((data / "simrd").glob("*.log.gz")):
        program = from_simrd_log(path)
        for ratio in ratios:
            here = [
                row
                for row in rows
                if row["log"] == program.name
                and float(row["ratio"]) == ratio
                and row["heuristic"] in SIMRD_NAMES
            ]
            done = [float(row["overhead"]) for row in here if row["status"] == "ok"]
            yield Case(
                program,
                f"{program.name} {ratio}",
                int(here[0]["budget_bytes"]),
                {"simrd": min(done, default=math.nan)},
            )


def overhead(program: Program, budget_bytes: int, name: str) -> tuple[float, float]:
    """(overhead, planning seconds) of a planner or heuristic; NaN where it finds no plan."""
    planner = make_planner("dtr", heuristic=name) if name in HEURISTICS else make_planner(name)
    start = time.perf_counter()
    try:
        plan = planner.plan(program, budget_bytes)
    except InfeasibleBudgetError:
        return math.nan, time.perf_counter() - start
    planning_s = time.perf_counter() - start
    return replay(program, plan)[1].overhead, planning_s


def run(cases: Iterable[Case], out: Path | None) -> list[dict[str, float]]:
    """Print a table; returns the overheads of each case by name, NaN where there is no plan."""
    columns = ("bound", "milp", "simrd", "auto", *_PAPER)
    print(f"{'':34}" + "".join(f"{c:>12}" for c in columns) + "   seconds")
    overheads = []
    for case in cases:
        found = dict(case.others)
        found["bound"] = lower_bound_overhead(case.program, case.budget_bytes)
        found["auto"], auto_s = overhead(case.program, case.budget_bytes, "auto")
        for name in _PAPER:
            found[name], _ = overhead(case.program, case.budget_bytes, name)
        cells = [found.get(c, math.nan) for c in columns]
        text = "".join(f"{'-' if math.isnan(c) else format(c, '.4f'):>12}" for c in cells)
        print(f"{case.label:34}{text}   {auto_s:7.2f}", flush=True)
        overheads.append(found)
        if out is not None:
            with out.open("a") as lines:
                record = {
                    "case": case.label,
                    "budget_bytes": case.budget_bytes,
                    "planning_s": auto_s,
                    **{k: None if math.isnan(v) else v for k, v in found.items()},
                }
                lines.write(json.dumps(record) + "\n")
    return overheads


def summarize(overheads: Sequence[dict[str, float]]) -> str:
    """Extra compute of ``auto``, and of the bound, against the best heuristic of each case.

    Twice: the heuristics as the authors' simulator runs them, and as ours does, which knows the
    last use of every storage, frees it there, and so is the harder one to be ahead of.
    """
    lines = []
    for title, names in (("authors' simulator", ("simrd",)), ("our simulator", _PAPER)):
        best = [
            (found, min(plans) - 1)
            for found in overheads
            if (plans := [found[n] for n in names if not math.isnan(found.get(n, math.nan))])
        ]
        for name in ("auto", "bound"):
            both = [
                (found[name] - 1, extra)
                for found, extra in best
                if extra > 0 and not math.isnan(found[name])
            ]
            if not both:
                continue
            ratios = [ours / theirs for ours, theirs in both]
            lines.append(
                f"extra compute of {name:5} / best heuristic, {title + ':':19}"
                f" mean of ratios {sum(ratios) / len(ratios):.3f},"
                f" of sums {sum(a for a, _ in both) / sum(b for _, b in both):.3f},"
                f" worst {max(ratios):.3f}, {len(both)} budgets"
            )
    return "\n".join(lines) or "nothing to compare"


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--quick", action="store_true", help="small graphs and few budgets")
    parser.add_argument("--out", type=Path, help="append JSON lines to this file")
    parser.add_argument("--ratios", help="of the logs, comma-separated; default: 0.9 to 0.1")
    parser.add_argument("--only", default="", help="cases whose label holds this")
    args = parser.parse_args()
    data = shared_data()
    if data is None:
        print("no shared data beside the repository; set DTRCOMPILE_SHARED")
        return 0
    ratios: tuple[float, ...] = (0.5,) if args.quick else _RATIOS
    if args.ratios:
        ratios = tuple(float(ratio) for ratio in args.ratios.split(","))
    for title, cases in (
        ("Checkmate graphs", checkmate_cases(data)),
        ("simrd logs", simrd_cases(data, ratios)),
    ):
        print(title)
        wanted = (
            case
            for case in cases
            if args.only in case.label and not (args.quick and len(case.program.operators) > 400)
        )
        print(summarize(run(wanted, args.out)) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
