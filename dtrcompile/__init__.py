"""A ``torch.compile`` backend that trains within a byte budget.

    model = torch.compile(model, backend="dtr", options={"budget": "8GiB"})

needs no import of this package.  What it exports is for looking at what was done (`reports`), for
scripts that cannot pass options (`set_defaults`), for changing a budget (`set_budget`), for what
not to keep (`recompute`), and for catching errors.  Importing it does not import torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from dtrcompile.explain.explanation import Explanation
from dtrcompile.options import Budget, Options, reset_defaults, set_defaults
from dtrcompile.passes.declared import declare_operator
from dtrcompile.passes.errors import (
    CaptureError,
    ChangedTorchError,
    DTRError,
    InfeasibleBudgetError,
    MissingExtraError,
    OptionError,
    PlanError,
    ProgramError,
    ProgramTooLargeError,
    TimeLimitError,
    UnsupportedOptimizerError,
    UnsupportedPlanError,
    UnsupportedTorchError,
    VerificationError,
)
from dtrcompile.recompute import recompute
from dtrcompile.report import CompileReport, clear_reports, reports

if TYPE_CHECKING:
    from dtrcompile.forecast import Forecast, StockPoint, Sweep, plan, sweep
    from dtrcompile.largest_size import Largest, SizePoint, largest
    from dtrcompile.outside.watching import Watch, watch
    from dtrcompile.steps.budgeted import set_budget
    from dtrcompile.whole_step.train_step import TrainStep, train_step

__version__ = "0.1.0"

# What imports torch, by the module that has it.
_WITH_TORCH = {
    "Forecast": "forecast",
    "StockPoint": "forecast",
    "Sweep": "forecast",
    "plan": "forecast",
    "sweep": "forecast",
    "Largest": "largest_size",
    "SizePoint": "largest_size",
    "TrainStep": "whole_step.train_step",
    "Watch": "outside.watching",
    "largest": "largest_size",
    "set_budget": "steps.budgeted",
    "train_step": "whole_step.train_step",
    "watch": "outside.watching",
}


def __getattr__(name: str) -> Any:
    if name in _WITH_TORCH:
        return getattr(import_module(f"dtrcompile.{_WITH_TORCH[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


__all__ = [
    "Budget",
    "CaptureError",
    "ChangedTorchError",
    "CompileReport",
    "DTRError",
    "Explanation",
    "Forecast",
    "InfeasibleBudgetError",
    "Largest",
    "MissingExtraError",
    "OptionError",
    "Options",
    "PlanError",
    "ProgramError",
    "ProgramTooLargeError",
    "SizePoint",
    "StockPoint",
    "Sweep",
    "TimeLimitError",
    "TrainStep",
    "UnsupportedOptimizerError",
    "UnsupportedPlanError",
    "UnsupportedTorchError",
    "VerificationError",
    "Watch",
    "clear_reports",
    "declare_operator",
    "largest",
    "plan",
    "recompute",
    "reports",
    "reset_defaults",
    "set_budget",
    "set_defaults",
    "sweep",
    "train_step",
    "watch",
]
