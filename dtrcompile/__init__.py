"""A ``torch.compile`` backend that trains within a byte budget.

    model = torch.compile(model, backend="dtr", options={"budget": "8GiB"})

needs no import of this package; what it exports is for looking at what was done (`reports`), for
scripts that cannot pass options (`set_defaults`), for what not to keep (`recompute`), and for
catching errors.  Importing it does not import torch.
"""

from dtrcompile.options import Budget, Options, reset_defaults, set_defaults
from dtrcompile.passes.errors import (
    CaptureError,
    DTRError,
    InfeasibleBudgetError,
    MissingExtraError,
    OptionError,
    PlanError,
    ProgramError,
    ProgramTooLargeError,
    TimeLimitError,
    UnsupportedPlanError,
    VerificationError,
)
from dtrcompile.recompute import recompute
from dtrcompile.report import CompileReport, clear_reports, reports

__version__ = "0.1.0"

__all__ = [
    "Budget",
    "CaptureError",
    "CompileReport",
    "DTRError",
    "InfeasibleBudgetError",
    "MissingExtraError",
    "OptionError",
    "Options",
    "PlanError",
    "ProgramError",
    "ProgramTooLargeError",
    "TimeLimitError",
    "UnsupportedPlanError",
    "VerificationError",
    "clear_reports",
    "recompute",
    "reports",
    "reset_defaults",
    "set_defaults",
]
