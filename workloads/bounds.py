"""What a budget costs at least: a lower bound for any program, the optimum for unit chains.

The bound is a covering relaxation.

In the stage in which operator t runs for the first time, the storages that the baseline holds over
the budget must be out of memory.  Each of them is touched before and after, so it lies in a *gap*
between two touches; being out of memory in a gap costs at least one more run of the operator that
makes it.  The cheapest fractional choice of gaps that covers the excess of every stage, a linear
program, costs no more than any plan which runs the operators for the first time in the program's
order.  Gaps of the outputs of one operator that overlap count once: one run can serve them all.

What the bound leaves out, so that no plan may reach it: whether what is computed again finds its
inputs in memory, the bytes that this takes, and that a storage is in memory or not.
"""

from __future__ import annotations

import math

import numpy as np

from dtrcompile.passes.planning.planners.intervals import Intervals
from dtrcompile.passes.planning.planners.treeverse import forward_steps
from dtrcompile.passes.program.index import ProgramIndex
from dtrcompile.passes.program.program import Program


def lower_bound_overhead(program: Program, budget_bytes: int) -> float:
    """Overhead that no plan in the program's order can be below; NaN where none fits.

    Also NaN without scipy.
    """
    try:
        from scipy.optimize import linprog
        from scipy.sparse import csr_matrix
    except ImportError:
        return math.nan
    index = ProgramIndex.of(program)
    state = Intervals(index, budget_bytes)
    excess = np.maximum(state.held_bytes - budget_bytes, 0)
    over = np.flatnonzero(excess)
    if not len(over):
        return 1.0
    gaps = _gaps(index, state)
    row_of = np.searchsorted(over, np.arange(state.n_stages + 1))
    rows: list[int] = []
    columns: list[int] = []
    values: list[float] = []
    for column, (_, members) in enumerate(gaps):
        for start, stop, size_bytes in members:
            covered = range(row_of[start + 1], row_of[stop])
            rows += covered
            columns += [column] * len(covered)
            values += [-float(size_bytes)] * len(covered)
    matrix = csr_matrix((values, (rows, columns)), shape=(len(over), len(gaps)))
    costs = np.array([cost_ns for cost_ns, _ in gaps], dtype=np.float64)
    result = linprog(
        costs, A_ub=matrix, b_ub=-excess[over].astype(np.float64), bounds=(0, 1), method="highs"
    )
    return 1.0 + float(result.fun) / program.cost_ns if result.status == 0 else math.nan


def _gaps(index: ProgramIndex, state: Intervals) -> list[tuple[int, list[tuple[int, int, int]]]]:
    """(cost in ns, gaps as (touch before, touch after, bytes)) that one run could serve."""
    by_operator: dict[int, list[tuple[int, int, int]]] = {}
    for (tensor, stop), slot in state.slot.items():
        start = int(state.segment_start[slot])
        if stop - start > 1:
            gap = (start, stop, int(state.segment_bytes[slot]))
            by_operator.setdefault(index.producer[tensor], []).append(gap)
    together = []
    for o, gaps in sorted(by_operator.items()):
        end = -1
        for gap in sorted(gaps):
            if gap[0] >= end:
                together.append((index.operator_cost_ns[o], [gap]))
            else:
                together[-1][1].append(gap)
            end = max(end, gap[1])
    return together


def unit_chain_cost(layers: int, memory_bytes: int) -> int:
    """The optimum of `synthetic.unit_chain`, whose operators cost 1 each.

    With M bytes, a gradient and the one made from it take two, the state and the snapshots share
    M - 2, and the start has no bytes but is a snapshot too.  So a chain of N layers has N + 1
    states, of which the reversal takes t(N + 1, M - 2) forward steps (Griewank and Walther, 2000:
    `treeverse.forward_steps`); the loss and N gradients are computed once each.  The optimum is
    their sum, 2 N + 1 where nothing is computed twice (M = N + 2); the MILP of Checkmate agrees
    (``tests/differential/test_public_graphs.py``).
    """
    return forward_steps(layers + 1, memory_bytes - 2) + 1 + layers
