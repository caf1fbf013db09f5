"""How near the optimum are ``treeverse`` and ``auto`` on chains?  Every memory from 3 to N.

On `synthetic.unit_chain` the optimum is known (`bounds.unit_chain_cost`).

Ratios are planned cost over the optimum, of all operators and of what runs more than once alone.

    python -m bench.planner_chains [--layers 512] [--every 1] [--planners auto,chen-greedy]
        [--quick] [--out results.jsonl]
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from dtrcompile.passes.errors import InfeasibleBudgetError
from dtrcompile.passes.planning.planners import make_planner
from dtrcompile.passes.planning.planners.base import Planner
from dtrcompile.passes.planning.planners.treeverse import TreeversePlanner
from dtrcompile.passes.program.program import Program
from dtrcompile.passes.program.replay import replay
from workloads.bounds import unit_chain_cost
from workloads.synthetic import unit_chain

_LAYERS = (16, 32, 64, 128, 256, 512)
_ALL_MEMORIES_UP_TO = 64
_SAMPLE = 24


@dataclass(frozen=True, slots=True)
class Point:
    """One plan; ``cost`` is None where none was found."""

    planner: str
    layers: int
    memory_bytes: int
    cost: int | None
    optimum: int
    planning_s: float

    @property
    def ratio(self) -> float:
        """Of all compute."""
        return math.nan if self.cost is None else self.cost / self.optimum

    @property
    def extra(self) -> tuple[int, int]:
        """What runs beyond once: planned, and at the optimum."""
        once = 2 * self.layers + 1
        return (0 if self.cost is None else self.cost - once), self.optimum - once


def memories(layers: int, every: int | None) -> list[int]:
    """From 3 to N + 2: each ``every``-th, or all of short chains and a sample of long ones."""
    most = layers + 2
    if every is not None:
        return sorted({*range(3, most + 1, every), most})
    if layers <= _ALL_MEMORIES_UP_TO:
        return list(range(3, most + 1))
    ratio = (most / 3) ** (1 / (_SAMPLE - 1))
    return sorted({min(most, round(3 * ratio**k)) for k in range(_SAMPLE)})


def measure(planner: Planner, program: Program, layers: int, memory_bytes: int) -> Point:
    """Plan and let the referee say what it costs."""
    start = time.perf_counter()
    try:
        plan = planner.plan(program, memory_bytes)
    except InfeasibleBudgetError:
        cost = None
    else:
        cost = replay(program, plan)[1].cost_ns
    planning_s = time.perf_counter() - start
    optimum = unit_chain_cost(layers, memory_bytes)
    return Point(planner.name, layers, memory_bytes, cost, optimum, planning_s)


def summary(points: Sequence[Point]) -> str:
    """One line for one planner on one chain."""
    found = [p for p in points if p.cost is not None]
    first = f"{points[0].layers:6} {points[0].planner:>12} {len(points):9} "
    if not found:
        return first + "no plan at any memory"
    worst = max(found, key=lambda p: p.ratio)
    over = [p.extra[0] / p.extra[1] for p in found if p.extra[1]]
    return first + (
        f"{sum(p.cost == p.optimum for p in found):8}"
        f" {sum(p.ratio <= 1.02 for p in found):9}"
        f" {len(points) - len(found):8}"
        f" {min(p.memory_bytes for p in found):8}"
        f" {sum(p.ratio for p in found) / len(found):8.4f}"
        f" {worst.ratio:8.4f} at {worst.memory_bytes:4}"
        f" {max(over, default=1.0):10.3f}"
        f" {max(p.planning_s for p in points):8.2f}"
    )


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--layers", type=int, action="append", help="repeatable; default: several")
    parser.add_argument("--every", type=int, help="step of the memories; default: see --help")
    parser.add_argument("--planners", default="treeverse,auto", help="comma-separated names")
    parser.add_argument("--detail", action="store_true", help="a line for each memory, too")
    parser.add_argument("--quick", action="store_true", help="two short chains, few memories")
    parser.add_argument("--out", type=Path, help="append JSON lines to this file")
    args = parser.parse_args()
    chains = args.layers or ((16, 48) if args.quick else _LAYERS)
    print(
        f"{'layers':>6} {'planner':>12} {'memories':>9} {'optimal':>8} {'within 2%':>9}"
        f" {'no plan':>8} {'least':>8} {'mean':>8} {'worst':>8} {'':7} {'extra, worst':>12}"
        f" {'s, most':>7}"
    )
    unequal = 0
    for layers in chains:
        program = unit_chain(layers)
        for name in args.planners.split(","):
            # The other ways to cut are for programs that are no chains; the first is exact here.
            planner: Planner = (
                TreeversePlanner(way="linearized", window=1)
                if name == TreeversePlanner.name
                else make_planner(name)
            )
            step = max(1, layers // 8) if args.quick and args.every is None else args.every
            points = [measure(planner, program, layers, m) for m in memories(layers, step)]
            print(summary(points), flush=True)
            if args.detail:
                for p in points:
                    print(
                        f"{'':20}{p.memory_bytes:6} {p.cost or '-':>8} {p.optimum:8} {p.ratio:.4f}"
                    )
            if name == TreeversePlanner.name:
                unequal += sum(p.cost != p.optimum for p in points)
            if args.out is not None:
                with args.out.open("a") as lines:
                    lines.writelines(json.dumps(asdict(p)) + "\n" for p in points)
    print(f"treeverse differs from the formula at {unequal} memories")
    return 1 if unequal else 0


if __name__ == "__main__":
    sys.exit(main())
