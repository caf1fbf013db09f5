"""HiGHS, through SciPy: solves what `checkmate_model` builds.

SciPy is an extra (``dtrcompile[milp]``) and is imported where it is used.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dtrcompile.passes.errors import DTRError, MissingExtraError
from dtrcompile.passes.planning.planners.checkmate_model import LinearProgram


class Status(enum.Enum):
    """How a solve ended."""

    OPTIMAL = "optimal"
    FEASIBLE = "feasible"
    INFEASIBLE = "infeasible"
    TIME_LIMIT = "time limit"


@dataclass(frozen=True)
class Solved:
    """What HiGHS says.

    Attributes:
        x: the variables; None where there is no solution.
        bound: no solution's objective is below it.
        nodes: of the search tree; 0 for a linear program.
    """

    status: Status
    x: NDArray[np.float64] | None
    bound: float
    nodes: int


def solve_linear(
    linear: LinearProgram, *, integer: bool, time_limit_s: float, gap: float = 0.0
) -> Solved:
    """Minimize, all variables continuous unless ``integer``.

    Args:
        gap: stop when the solution is proven to be within this share of the optimum.

    Raises:
        MissingExtraError: without SciPy.
        DTRError: where HiGHS fails.
    """
    try:
        from scipy.optimize import Bounds, LinearConstraint, milp
        from scipy.sparse import csr_matrix
    except ImportError as error:
        raise MissingExtraError("the planner", "SciPy 1.9 or later", "milp") from error
    shape = (len(linear.low), len(linear.cost))
    result = milp(
        np.array(linear.cost),
        integrality=np.array(linear.integer, dtype=np.int64) * int(integer),
        bounds=Bounds(np.array(linear.lower), np.array(linear.upper)),
        constraints=LinearConstraint(
            csr_matrix((linear.value, (linear.row, linear.column)), shape=shape),
            np.array(linear.low),
            np.array(linear.high),
        ),
        options={"time_limit": time_limit_s, "mip_rel_gap": gap},
    )
    x = None if result.x is None else np.array(result.x)
    bound = getattr(result, "mip_dual_bound", None)
    nodes = int(getattr(result, "mip_node_count", None) or 0)
    if result.status == 2:
        return Solved(Status.INFEASIBLE, None, float("inf"), nodes)
    if result.status == 0:
        # A linear program's optimum is its own bound.
        proven = float(bound) if integer and bound is not None else float(result.fun)
        return Solved(Status.OPTIMAL, x, proven, nodes)
    if result.status == 1:
        status = Status.TIME_LIMIT if x is None or not integer else Status.FEASIBLE
        known = float(bound) if integer and bound is not None else float("-inf")
        return Solved(status, x if integer else None, known, nodes)
    raise DTRError(f"HiGHS failed: {result.message}")
