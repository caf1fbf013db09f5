"""What is another order of first runs worth: planner ``auto`` against ``program-order``.

Planned overhead and smallest peak in the program's own order, and in the better one of two, for the
captured programs of `bench.zoo`; budgets are shares of the baseline's peak and small distances from
the smallest peak in the program's own order.  Nothing is compiled.  ``planning`` is the processor
time of both orders over that of one.

    python -m bench.planner_orders [--models gpt2,unet] [--scale cpu] [--out rows.jsonl]
    python -m bench.planner_orders --quick

Exits with 1 if a plan is more expensive than in the program's own order, or if there is none where
that order has one.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from bench.measure import format_table, machine, say, write_json_line
from bench.zoo import SCALES, ZOO
from dtrcompile.passes.errors import InfeasibleBudgetError
from dtrcompile.passes.planning.planners import keep_all, make_planner, minimum_plan
from dtrcompile.passes.program.program import Program
from dtrcompile.passes.program.replay import replay
from workloads.captured import captured_of

# In percent: of the baseline's peak, and of the smallest peak in the program's own order.
_OF_BASELINE, _OF_SMALLEST = (70, 50, 30), (120, 105, 101)


def planned(program: Program, budget_bytes: int, planner: str) -> tuple[float, float]:
    """(overhead, processor seconds); infinite where no plan is found."""
    start = time.process_time()
    try:
        plan = make_planner(planner).plan(program, budget_bytes)
    except InfeasibleBudgetError:
        return math.inf, time.process_time() - start
    return replay(program, plan)[1].overhead, time.process_time() - start


def smallest(program: Program, planner: str) -> tuple[int, float]:
    """(the smallest peak in bytes, processor seconds)."""
    start = time.process_time()
    plan = minimum_plan(program, make_planner(planner))
    return replay(program, plan)[0].peak_bytes, time.process_time() - start


def main(argv: Sequence[str] | None = None) -> int:
    """Run, print the table, return the exit status."""
    assert __doc__ is not None
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--models", help=f"comma-separated, of: {', '.join(ZOO)}")
    parser.add_argument("--scale", choices=SCALES, default="cpu")
    parser.add_argument("--quick", action="store_true", help="one small model")
    parser.add_argument("--out", type=Path, help="append JSON lines to this file")
    arguments = parser.parse_args(argv)
    scale = "quick" if arguments.quick else arguments.scale
    names = (arguments.models or ("mixture" if arguments.quick else ",".join(ZOO))).split(",")
    description = machine(torch.device("cpu"))
    rows: list[tuple[str, ...]] = []
    bad: list[str] = []
    for name in names:
        say(name)
        module, inputs = ZOO[name].build(scale)
        program = captured_of(module, *inputs).program
        baseline_bytes = replay(program, keep_all(program))[0].peak_bytes
        own_bytes, own_s = smallest(program, "program-order")
        best_bytes, best_s = smallest(program, "auto")
        cells = [f"{own_bytes / baseline_bytes:.4f}", f"{best_bytes / baseline_bytes:.4f}"]
        rows.append((name, "smallest", *cells, f"{best_s / own_s:.2f}"))
        row = {
            "bench": "planner_orders",
            "machine": description,
            "model": name,
            "scale": scale,
            "operators": len(program.operators),
            "baseline_bytes": baseline_bytes,
        }
        seen: list[dict[str, object]] = [
            {
                "budget": "min",
                "peak_bytes": {"program-order": own_bytes, "auto": best_bytes},
                "planning_s": {"program-order": own_s, "auto": best_s},
            }
        ]
        for whole, percents, of in (
            (baseline_bytes, _OF_BASELINE, "%"),
            (own_bytes, _OF_SMALLEST, "% of the smallest"),
        ):
            for percent in percents:
                budget_bytes = whole * percent // 100
                own, own_s = planned(program, budget_bytes, "program-order")
                best, best_s = planned(program, budget_bytes, "auto")
                if own < math.inf or best < math.inf:
                    cells = [f"{overhead:.4f}" for overhead in (own, best)]
                    ratio = f"{best_s / max(own_s, 1e-9):.2f}"
                    rows.append((name, f"{percent}{of}", *cells, ratio))
                if best > own:
                    bad.append(f"{name} at {percent}{of}: {best} instead of {own}")
                seen.append(
                    {
                        "budget": f"{percent}{of}",
                        "budget_bytes": budget_bytes,
                        "overhead": {
                            "program-order": own if own < math.inf else None,
                            "auto": best if best < math.inf else None,
                        },
                        "planning_s": {"program-order": own_s, "auto": best_s},
                    }
                )
        for cell in seen:
            write_json_line(arguments.out, {**row, **cell})
    header = ("model", "budget", "own order", "better of two", "planning")
    print(format_table(header, rows))
    for line in bad:
        print(line)
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
