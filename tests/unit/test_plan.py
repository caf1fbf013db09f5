"""The plan's text form."""

from __future__ import annotations

import pytest

from dtrcompile.passes.errors import PlanError
from dtrcompile.passes.planning.planners import keep_all
from dtrcompile.passes.program.plan import Boundary, Compute, Free, Offload, Plan, Prefetch
from workloads.synthetic import training_chain

PLAN = Plan((Compute(0), Free(3), Boundary(), Compute(1)), "0123456789abcdef", "dtr(h_dtr_eq)")
TEXT = """\
dtrcompile-plan 1
program 0123456789abcdef
planner dtr(h_dtr_eq)
compute 0
free 3
boundary
compute 1
"""


def test_text_is_as_documented_and_reads_back() -> None:
    assert PLAN.to_text() == TEXT
    assert Plan.from_text(TEXT) == PLAN


def test_copies_read_back() -> None:
    plan = Plan((Compute(0), Offload(3), Free(3), Prefetch(3)), PLAN.program, "offload(auto)")
    assert plan.to_text().splitlines()[3:] == ["compute 0", "offload 3", "free 3", "prefetch 3"]
    assert Plan.from_text(plan.to_text()) == plan


def test_keep_all_reads_back() -> None:
    plan = keep_all(training_chain(5))
    assert Plan.from_text(plan.to_text()) == plan


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "line 1"),
        ("dtrcompile-plan 2\n", "not a plan of this version"),
        (TEXT + "compute x\n", "line 8"),
        (TEXT + "evict 1\n", "line 8"),
        (TEXT + "offload\n", "line 8"),
        (TEXT.replace("planner dtr(h_dtr_eq)\n", ""), "no 'planner' line"),
        (TEXT.replace("program 0123456789abcdef\n", ""), "no 'program' line"),
    ],
)
def test_what_cannot_be_read(text: str, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        Plan.from_text(text)


def test_blank_lines_are_ignored() -> None:
    assert Plan.from_text(TEXT.replace("boundary", "\nboundary\n")) == PLAN
