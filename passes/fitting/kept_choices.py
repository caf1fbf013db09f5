"""What an earlier process chose for the same graphs, kept on disk.

A search is deterministic, so its result may be read instead of made again.  An entry holds the
plan and what was decided with it; graphs are emitted from the plan, verified and measured as ever,
and an entry whose graphs do not hold what they held when it was written is ignored.  The wrappers
that are measured come from disk as well (`inductor.lowering`), so nothing is planned or lowered.  A
search that found no plan is kept too: to refuse takes longer than to plan.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from dtrcompile.passes.errors import InfeasibleBudgetError, PlanError
from dtrcompile.passes.fitting.sharing import OtherGraphs
from dtrcompile.passes.program.plan import Plan


@dataclass(frozen=True)
class Choice:
    """What a search came to.

    Attributes:
        plan: None where the default split was chosen.
        others: the other graphs of the step, as the plan sees them.
        speed_workspace_bytes: what one kernel may hold inside for its speed.
        peak_bytes: what counts against the budget.
        is_cut_short: the search ended because it had lowered as much as it may.
    """

    plan: Plan | None
    others: OtherGraphs
    speed_workspace_bytes: int
    peak_bytes: int
    is_cut_short: bool = False

    def entry(self) -> dict[str, Any]:
        """As JSON can hold it."""
        return {
            "plan": None if self.plan is None else self.plan.to_text(),
            "others": asdict(self.others),
            "speed_workspace_bytes": self.speed_workspace_bytes,
            "peak_bytes": self.peak_bytes,
            "is_cut_short": self.is_cut_short,
        }

    @staticmethod
    def of_entry(entry: Mapping[str, Any] | None) -> Choice | None:
        """What `entry` gave; None where there is none, or where it is something else."""
        if entry is None:
            return None
        try:
            text = entry["plan"]
            return Choice(
                None if text is None else Plan.from_text(text),
                OtherGraphs(**entry["others"]),
                entry["speed_workspace_bytes"],
                entry["peak_bytes"],
                entry["is_cut_short"],
            )
        except (KeyError, TypeError, AttributeError, PlanError):
            return None


def refusal_entry(refusal: InfeasibleBudgetError) -> dict[str, Any]:
    """That a search found no plan, as JSON can hold it."""
    return {
        "refused_bytes": refusal.budget_bytes,
        "minimum_bytes": refusal.minimum_bytes,
        "operator": refusal.operator,
        "largest": [list(storage) for storage in refusal.largest],
        "advice": refusal.advice,
    }


def refusal_of_entry(entry: Mapping[str, Any] | None) -> InfeasibleBudgetError | None:
    """What `refusal_entry` gave; None where it is something else."""
    if entry is None:
        return None
    try:
        return InfeasibleBudgetError(
            entry["refused_bytes"],
            minimum_bytes=entry["minimum_bytes"],
            operator=entry["operator"],
            largest=[(name, size_bytes) for name, size_bytes in entry["largest"]],
            advice=entry["advice"],
        )
    except (KeyError, TypeError, ValueError):
        return None
