"""Planner ``chen-sqrt``: a checkpoint every √n values.

Chen et al., "Training Deep Nets with Sublinear Memory Cost" (arXiv:1604.06174), section 4: with
segments of √n layers, n layers are trained in O(√n) memory for one more forward pass.  On other
graphs, the two ways that Checkmate (Jain et al., MLSys 2020, section 6) names; see `segments`.

The paper has one checkpoint set a graph and knows no budget: it fits or it does not.  Here, each
way of `segments.WAYS` has one, and the cheapest that fits is taken.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar

from dtrcompile.passes.planning.planners.linearize import Linearization
from dtrcompile.passes.planning.planners.segments import SegmentPlanner


@dataclass(frozen=True)
class ChenSqrtPlanner(SegmentPlanner):
    """See the module docstring; options as in `segments.SegmentPlanner`."""

    name: ClassVar[str] = "chen-sqrt"

    def choices(
        self,
        line: Linearization,  # noqa: ARG002  counts, not sizes
        candidates: list[int],
    ) -> Iterable[tuple[int, ...]]:
        every = max(1, round(math.sqrt(len(candidates))))
        yield tuple(candidates[every - 1 :: every])
