"""Planner ``program-order``: planner ``auto`` with first runs in the program's order only.

It takes about half of the time, and its plans may be more expensive than ``auto``'s.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from dtrcompile.passes.planning.planners.auto import AutoPlanner


@dataclass(frozen=True)
class ProgramOrderPlanner(AutoPlanner):
    """See the module docstring; the options are those of planner ``auto``."""

    name: ClassVar[str] = "program-order"

    order: str = "program"
