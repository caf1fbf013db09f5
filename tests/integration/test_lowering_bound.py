"""Option `lowering_s`: a search lowers no more plans than it is given time for."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import dtrcompile
from dtrcompile import InfeasibleBudgetError
from dtrcompile.options import Options
from dtrcompile.passes.fitting import fit
from dtrcompile.passes.fitting.fit import Candidate, Outcome, _Fit
from dtrcompile.passes.fitting.settings import NODES_LOWERED_PER_S
from dtrcompile.passes.program.plan import Plan
from dtrcompile.probe import planned_outcome
from workloads.training import compile_dtr


class Attention(nn.Module):
    """Something to compute again."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.norm = nn.LayerNorm(width)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(2):
            q, k, v = self.first(self.norm(x)).chunk(3, -1)
            x = x + self.last(((q @ k.mT) / 6).softmax(-1) @ v).tanh()
        return x.square().mean()


@pytest.fixture
def lowered(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The sizes of the plans that were measured, in operators."""
    found: list[int] = []
    try_plan = _Fit.try_plan

    def counted(self: _Fit, plan: Plan) -> Candidate:
        n_before = len(self.candidates)
        candidate = try_plan(self, plan)
        if len(self.candidates) > n_before:
            found.append(candidate.n_operators)
        return candidate

    monkeypatch.setattr(_Fit, "try_plan", counted)
    return found


def outcome_of(**options: object) -> Outcome:
    torch.manual_seed(0)
    return planned_outcome(Attention(), [torch.randn(4, 64, 32)], Options.parse(options))


@pytest.mark.slow
def test_the_bound_ends_the_search_for_the_smallest_plan(
    lowered: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fit, "AGREEMENT_PERCENT", 0)  # no schedule is good enough
    unbounded = outcome_of(budget="min")
    needed = list(lowered)
    assert len(needed) > 2
    assert not unbounded.is_cut_short
    lowered.clear()
    # A little more than the first plan takes.
    bounded = outcome_of(budget="min", lowering_s=(needed[0] + 1) / NODES_LOWERED_PER_S)
    assert lowered == needed[:2]
    assert bounded.is_cut_short
    assert bounded.measured.peak_bytes >= unbounded.measured.peak_bytes
    lowered.clear()
    ample = outcome_of(budget="min", lowering_s=60)
    assert ample.plan == unbounded.plan
    assert not ample.is_cut_short


def test_the_smallest_plan_is_lowered_in_any_case(lowered: list[int]) -> None:
    outcome = outcome_of(budget="min", lowering_s=0)
    assert len(lowered) == 1
    assert outcome.chosen is not None
    assert outcome.is_cut_short


@pytest.mark.slow
def test_the_minimum_that_is_named_can_be_met() -> None:
    with pytest.raises(InfeasibleBudgetError, match="'lowering_s'") as refused:
        outcome_of(budget="2%", lowering_s=0)
    minimum = refused.value.minimum_bytes
    assert minimum is not None
    assert outcome_of(budget=minimum, lowering_s=0).measured.peak_bytes <= minimum


def test_the_report_says_so() -> None:
    torch._dynamo.reset()
    dtrcompile.clear_reports()
    torch.manual_seed(0)
    model, x = Attention(), torch.randn(4, 64, 32)
    compile_dtr(model, "min", compiler="inductor", lowering_s=0)(x).backward()
    (report,) = dtrcompile.reports()
    assert any("'lowering_s'" in note for note in report.notes)
    assert report.verification.startswith("verified")
