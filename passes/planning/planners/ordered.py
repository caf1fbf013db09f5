"""Planner ``ordered``: planner ``auto`` in two orders of first runs, whose cheaper plan is taken.

The program's own order comes first: a plan is never more expensive than ``auto``'s.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from dtrcompile.passes.planning.planners.auto import AutoPlanner


@dataclass(frozen=True)
class OrderedPlanner(AutoPlanner):
    """See the module docstring; the options are those of planner ``auto``."""

    name: ClassVar[str] = "ordered"

    order: str = "best"
