"""What a budget costs at least, as the fullest stage alone tells it.

In the stage in which the baseline holds most, storages must be out of memory whose bytes cover the
excess over the budget, and each operator that made one of them must run again after it.  The
cheapest such cover, a knapsack problem with few items, costs no more than any plan that runs the
operators for the first time in the program's order: one constraint of the covering relaxation in
``workloads/bounds.py``, but solved in integers.  Where budgets are not very tight a plan often
costs exactly that much, and is then known to be optimal without any search.
"""

from __future__ import annotations

import numpy as np

from dtrcompile.passes.planning.planners.intervals import Intervals
from dtrcompile.passes.planning.settings import (
    MAX_COVERS,
)
from dtrcompile.passes.program.index import ProgramIndex


def least_cost_ns(index: ProgramIndex, budget_bytes: int) -> int:
    """A cost that no plan for ``budget_bytes`` in the program's order can be below."""
    state = Intervals(index, budget_bytes)
    # What a stage holds after its operator, an input that was not written over, is another stage's.
    held_bytes = state.held_bytes - np.array(state.still_bytes) + np.array(state.plain_bytes)
    stage = int(held_bytes.argmax())
    excess = int(held_bytes[stage]) - budget_bytes
    if excess <= 0:
        return index.program.cost_ns
    return index.program.cost_ns + least_cover(_runs_that_free(index, state, stage), excess)


def least_cover(items: list[tuple[int, int]], need: int) -> int:
    """The least cost of items, (cost, size) each, whose sizes sum to ``need``; or a bound below it.

    Sizes are at least 1, ``need`` too.  Exact by dynamic programming over the covers that no other
    beats, as long as they are few; else what Dantzig's rule gives when the last item may be split.
    Where all items together are not enough, the cost of all of them.
    """
    items = [(cost, min(size, need)) for cost, size in items]
    items.sort(key=lambda item: (item[0] / item[1], item))
    covers = [(0, 0)]
    for cost, size in items:
        covers = _undominated(
            covers + [(c + cost, min(s + size, need)) for c, s in covers if s < need]
        )
        if len(covers) > MAX_COVERS:
            return _least_split_cover(items, need)
    return covers[-1][0]


def _undominated(covers: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """By rising cost, those that cover more than every cheaper one."""
    kept: list[tuple[int, int]] = []
    for cost, size in sorted(covers, key=lambda cover: (cover[0], -cover[1])):
        if not kept or size > kept[-1][1]:
            kept.append((cost, size))
    return kept


def _least_split_cover(items: list[tuple[int, int]], need: int) -> int:
    """`least_cover` where an item may be taken in part; ``items`` by rising cost for their size."""
    total = 0
    for cost, size in items:
        if size >= need:
            return total + -(-cost * need // size)
        total += cost
        need -= size
    return total


def _runs_that_free(index: ProgramIndex, state: Intervals, stage: int) -> list[tuple[int, int]]:
    """(cost in ns, bytes) of each operator that could run again for what passes ``stage``."""
    slots = np.flatnonzero(
        (state.segment_start >= 0) & (state.segment_start < stage) & (state.segment_stop > stage)
    )
    freed: dict[int, int] = {}
    for slot in slots.tolist():
        o = index.producer[int(state.segment_item[slot])]
        freed[o] = freed.get(o, 0) + int(state.segment_bytes[slot])
    # The search keeps a storage of which an operator that runs once makes a view; a plan may let it
    # go before that operator.
    for s, r in enumerate(index.program.root_tensor):
        o = index.producer[r]
        may_go = index.makes_once[s] and index.size_bytes[s] and index.uses[s]
        if not may_go or o < 0 or index.runs_once[o]:
            continue
        last = index.uses[s][-1]
        last_stage = state.end if last == index.n_operators else state.stage_of[last]
        if state.stage_of[o] < stage < last_stage:
            freed[o] = freed.get(o, 0) + index.size_bytes[s]
    return [(index.operator_cost_ns[o], size_bytes) for o, size_bytes in sorted(freed.items())]
