"""The binomial schedule as a candidate of ``auto``, where the program is a chain.

`treeverse` says where it comes from.  On a chain of equal layers whose backward reads what
Griewank's does it is the optimum, and neither a heuristic nor a local search finds it where memory
is a logarithm of the length: its recomputations only pay together.
"""

from __future__ import annotations

from itertools import accumulate

from dtrcompile.passes.planning.planners.improve import Schedule
from dtrcompile.passes.planning.planners.linearize import Linearization
from dtrcompile.passes.planning.planners.treeverse import (
    ChainStages,
    binomial_schedule,
    forward_steps,
)
from dtrcompile.passes.planning.settings import (
    MAX_CHAIN_RUNS,
)
from dtrcompile.passes.program.index import ProgramIndex


def binomial_seed(index: ProgramIndex, budget_bytes: int) -> Schedule | None:
    """The schedule with the most snapshots that fits; None where forward is not a chain."""
    line = Linearization.of(index)
    if line.forward_end < 3 or _most_crossing(line) > 1:
        return None
    stages = ChainStages.of(line, tuple(line.windows(1)))
    sizes = [index.size_bytes[s] for state in stages.state for s in state]
    smallest = min((size for size in sizes if size), default=0)
    if not smallest:
        return None
    free_bytes = budget_bytes - index.program.constant_bytes
    most = min(len(stages.positions), free_bytes // smallest + 1)
    # With equal layers the first or second fits; else the number is searched by bisection.
    low, high, snapshots = 0, most + 1, most
    best: Schedule | None = None
    while low < high - 1:
        schedule = None
        if forward_steps(len(stages.positions), snapshots) <= MAX_CHAIN_RUNS:
            schedule = binomial_schedule(stages, snapshots, MAX_CHAIN_RUNS)
            if schedule is None:
                return best
        if schedule is None or schedule.peak_bytes <= budget_bytes:
            low = snapshots
            if schedule is not None and (best is None or schedule.cost_ns < best.cost_ns):
                best = schedule
        else:
            high = snapshots
        snapshots = max((low + high) // 2, high - 2, low + 1)
    return best


def _most_crossing(line: Linearization) -> int:
    """The most storages that are made before a position of forward and read after it there."""
    change = [0] * (line.forward_end + 2)
    for s, made_at in enumerate(line.made_at):
        if 0 <= made_at < line.last_read[s] and line.index.size_bytes[s]:
            change[made_at + 1] += 1
            change[line.last_read[s] + 1] -= 1
    return max(accumulate(change))
