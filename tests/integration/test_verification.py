"""Every report says whether the compiled code was looked at, and promises what that code holds."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

import dtrcompile
from dtrcompile.compilation import inductor, session
from dtrcompile.passes.errors import VerificationError
from dtrcompile.passes.inductor import LoweredStep, ScheduleTrace, trace
from tests.integration.scenarios import layers
from workloads.training import compile_dtr, raises_dtr

WIDTH, BATCH = 16, 256


def model_and_batch() -> tuple[nn.Module, torch.Tensor]:
    torch.manual_seed(0)
    return layers(4, WIDTH), torch.randn(BATCH, WIDTH)


def verifications() -> list[str]:
    return [report.verification for report in dtrcompile.reports()]


def test_the_executor_counts_as_it_runs() -> None:
    model, x = model_and_batch()
    compile_dtr(model, "min")(x).sum().backward()
    assert verifications() == [session.COUNTED]


@pytest.mark.inductor
@pytest.mark.parametrize("budget", ["min", 1.0, 10**9])
def test_a_step_is_verified_when_all_of_it_is_compiled(budget: object) -> None:
    model, x = model_and_batch()
    loss = compile_dtr(model, budget, compiler="inductor")(x).sum()
    assert verifications() == [session.NOT_YET]
    loss.backward()
    assert verifications() == [session.VERIFIED]
    assert session.VERIFIED in str(dtrcompile.reports()[0])


@pytest.mark.inductor
def test_an_evaluation_is_verified() -> None:
    model, x = model_and_batch()
    with torch.no_grad():
        compile_dtr(model, 10**9, compiler="inductor")(x)
    assert verifications() == [session.VERIFIED]


@pytest.mark.inductor
def test_the_option_leaves_it_out() -> None:
    model, x = model_and_batch()
    compile_dtr(model, "min", compiler="inductor", verify=False)(x).sum().backward()
    (verification,) = verifications()
    assert verification == session.UNVERIFIED + "the option 'verify' is off"


def with_more(lowered: LoweredStep, more_bytes: int) -> ScheduleTrace:
    """As if the compiled code held more from its first moment on."""
    traced = trace(lowered)
    first, *events = traced.events
    return replace(
        traced, events=(replace(first, size_bytes=first.size_bytes + more_bytes), *events)
    )


@pytest.mark.inductor
def test_the_promise_is_that_of_the_compiled_code(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = model_and_batch()

    def loss_of(x: torch.Tensor) -> torch.Tensor:
        return model(x).sum()  # type: ignore[no-any-return]

    compile_dtr(loss_of, "min", compiler="inductor")(x).backward()
    (planned,) = dtrcompile.reports()
    torch._dynamo.reset()
    dtrcompile.clear_reports()
    model.zero_grad(set_to_none=True)

    budget = planned.promised_peak_bytes + 4096
    monkeypatch.setattr(inductor, "trace", lambda lowered: with_more(lowered, 1024))
    compile_dtr(loss_of, budget, compiler="inductor")(x).backward()
    (report,) = dtrcompile.reports()
    assert report.verification == session.VERIFIED
    assert planned.promised_peak_bytes < report.promised_peak_bytes <= budget
    assert sum(report.promised_split.values()) == report.promised_peak_bytes


@pytest.mark.inductor
def test_compiled_code_above_the_budget_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = model_and_batch()
    monkeypatch.setattr(inductor, "trace", lambda lowered: with_more(lowered, 1 << 20))
    with raises_dtr(VerificationError, "more than the", "promised"):
        compile_dtr(model, "50%", compiler="inductor")(x).sum().backward()
