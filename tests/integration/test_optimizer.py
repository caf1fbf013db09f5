"""The budget of a whole step, ``optimizer.step()`` included, and gradients that are kept."""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import StepLR
from torch.optim.swa_utils import AveragedModel

import dtrcompile
from dtrcompile.passes.errors import InfeasibleBudgetError, UnknownOptimizerError
from dtrcompile.passes.fitting import fit
from tests.integration.test_optimizer_step import OPTIMIZERS, MasterWeights, Opaque, state_bytes
from workloads.training import compile_dtr, live_peak_bytes, static_bytes, unwrap

KIB = 1024


def make_model(layers: int = 4, width: int = 64) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        *(nn.Sequential(nn.Linear(width, width), nn.GELU()) for _ in range(layers))
    )


class Loop:
    """An ordinary training loop, whose loss stays with the caller as it does there."""

    def __init__(
        self, optimizer_of: Callable[..., torch.optim.Optimizer], batch: int, **options: Any
    ) -> None:
        self.model = make_model()
        self.batch = torch.randn(batch, 64)
        self.optimizer = optimizer_of(list(self.model.parameters()))
        budget = options.pop("budget", "min")
        given = {"optimizer": self.optimizer} if "reserve" not in options else {}
        model = self.model
        self.loss_of = compile_dtr(lambda x: model(x).square().mean(), budget, **given, **options)
        self.loss: Tensor | None = None

    def compile(self) -> dtrcompile.CompileReport:
        """The first call allocates for the compilation; nothing is learned from it."""
        self.loss_of(self.batch).backward()
        self.optimizer.zero_grad()
        return dtrcompile.reports()[-1]

    def step(self) -> None:
        self.optimizer.zero_grad()
        self.loss = self.loss_of(self.batch)
        self.loss.backward()
        self.optimizer.step()

    def peak_bytes(self) -> int:
        """Of one step, with what was there before."""
        self.optimizer.zero_grad()
        self.loss = None
        before = static_bytes(self.model, self.batch) + state_bytes(self.optimizer)
        return before + live_peak_bytes(self.step)


# A batch so small that the peak stands in the optimizer's step.
@pytest.mark.parametrize("name", ["AdamW, foreach", "custom"])
@pytest.mark.parametrize("how", [{}, {"reserve": "optimizer"}], ids=["given", "found"])
def test_a_step_of_the_optimizer_holds_what_the_report_says(name: str, how: Any) -> None:
    loop = Loop(OPTIMIZERS[name], batch=2, **how)
    report = loop.compile()
    first, *later = (loop.peak_bytes() for _ in range(3))
    assert first == report.first_optimizer_step_bytes > report.promised_peak_bytes
    assert later == [report.step_bytes] * 2 == [report.optimizer_step_bytes] * 2


@pytest.mark.inductor
@pytest.mark.parametrize("batch", [2, 1024], ids=["in the optimizer", "in backward"])
def test_a_whole_step_holds_what_the_report_says(batch: int) -> None:
    loop = Loop(OPTIMIZERS["AdamW"], batch, compiler="inductor")
    report = loop.compile()
    first, *later = (loop.peak_bytes() for _ in range(3))
    assert first == max(report.first_optimizer_step_bytes, report.promised_peak_bytes)
    assert later == [report.step_bytes] * 2
    in_optimizer = report.step_bytes == report.optimizer_step_bytes
    assert in_optimizer == (batch == 2)


def test_the_state_that_is_still_to_come_is_off_the_budget() -> None:
    # 4 x (64 x 64 + 64) floats, twice for AdamW; "step" is a float a parameter.
    state = {"AdamW's step": 8 * 4, "AdamW's exp_avg": 66560, "AdamW's exp_avg_sq": 66560}
    alone = Loop(OPTIMIZERS["SGD"], batch=1024).compile()
    budget = alone.baseline_peak_bytes
    assert not Loop(OPTIMIZERS["SGD"], batch=1024, budget=budget).compile().recomputed
    report = Loop(OPTIMIZERS["AdamW"], batch=1024, budget=budget).compile()
    assert dict(report.beside) == state
    assert report.recomputed
    assert report.promised_peak_bytes <= budget - sum(state.values())
    assert "AdamW's exp_avg_sq" in str(report)


def test_a_share_is_one_of_the_whole_step() -> None:
    report = Loop(OPTIMIZERS["AdamW"], batch=1024, budget="90%").compile()
    whole = report.baseline_peak_bytes + sum(report.beside.values())
    assert report.budget_bytes == whole * 9 // 10
    assert report.step_bytes <= report.budget_bytes


def test_a_step_of_the_optimizer_that_does_not_fit_is_refused_beforehand(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """At once, where the graphs need less without any plan."""

    def search(*_: Any) -> None:
        raise AssertionError("a plan was searched for")

    loop = Loop(OPTIMIZERS["AdamW, foreach"], batch=2)
    needed = loop.compile().step_bytes
    for budget in (needed - 1, needed // 2):
        with monkeypatch.context() as patched, pytest.raises(Exception, match="foreach") as caught:
            patched.setattr(fit._Fit, "chosen_for", search)
            Loop(OPTIMIZERS["AdamW, foreach"], batch=2, budget=budget).compile()
        refusal = unwrap(caught.value)
        assert isinstance(refusal, InfeasibleBudgetError)
        assert (refusal.minimum_bytes, refusal.operator) == (needed, "AdamW.step")
        assert refusal.budget_bytes == budget
    exact = Loop(OPTIMIZERS["AdamW, foreach"], batch=2, budget=needed)
    exact.compile()
    assert exact.peak_bytes() <= needed


def test_an_optimizer_that_cannot_be_counted_is_refused() -> None:
    with pytest.raises(Exception, match="'reserve': '2GiB'") as caught:
        Loop(lambda p: Opaque(p, lr=0.1), batch=2).compile()
    assert isinstance(unwrap(caught.value), UnknownOptimizerError)


def test_master_weights_and_averages_are_named() -> None:
    gc.collect()  # optimizers of models with equal options count together, as long as they live
    model = make_model().bfloat16()
    masters = [nn.Parameter(p.detach().float()) for p in model.parameters()]
    average = AveragedModel(model)
    loss_of = compile_dtr(
        lambda x: model(x).float().square().mean(),
        optimizer=[torch.optim.SGD(masters, lr=0.1), average],
    )
    loss_of(torch.randn(8, 64).bfloat16()).backward()
    elements = sum(p.numel() for p in model.parameters())
    beside = dtrcompile.reports()[-1].beside
    # The average counts its updates in an int64.
    assert dict(beside) == {"master weights": 4 * elements, "AveragedModel": 2 * elements + 8}


def test_an_optimizer_that_is_made_late_is_found_when_it_steps() -> None:
    model, x = make_model(), torch.randn(512, 64)
    loss_of = compile_dtr(lambda x: model(x).square().mean(), "1MiB", reserve="optimizer")
    loss_of(x).backward()
    (report,) = dtrcompile.reports()
    assert not report.beside and any("no optimizer" in note for note in report.notes)
    optimizer = MasterWeights(model.parameters())
    optimizer.step()
    optimizer.zero_grad()
    loss_of(x).backward()
    report = dtrcompile.reports()[-1]
    assert report.recomputed
    assert sum(report.beside.values()) == state_bytes(optimizer)
    assert report.step_bytes <= 1024 * KIB


def test_an_optimizer_that_is_made_late_and_does_not_fit_is_refused_before_it_steps() -> None:
    model, x = make_model(), torch.randn(2, 64)
    loss_of = compile_dtr(lambda x: model(x).square().mean(), "200KiB", reserve="optimizer")
    loss_of(x).backward()
    optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
    with pytest.raises(InfeasibleBudgetError, match=r"AdamW\.step"):
        optimizer.step()
    assert not optimizer.state


def test_schedulers_and_wrappers_are_looked_through() -> None:
    class Wrapper(torch.optim.Optimizer):
        """As Accelerate's."""

        def __init__(self, optimizer: torch.optim.Optimizer) -> None:
            self.optimizer = optimizer

        @property
        def param_groups(self) -> Any:  # type: ignore[override]
            return self.optimizer.param_groups

    def make(parameters: Any) -> torch.optim.Optimizer:
        optimizer = torch.optim.AdamW(parameters)
        StepLR(optimizer, 1)
        return optimizer

    direct = Loop(make, batch=2)
    model, x = direct.model, direct.batch
    wrapped = Wrapper(direct.optimizer)
    loss_of = compile_dtr(lambda x: model(x).square().mean(), optimizer=wrapped)
    loss_of(x).backward()
    model.zero_grad()
    assert dtrcompile.reports()[-1].beside == direct.compile().beside


# --- kept gradients -------------------------------------------------------------------------------


def test_gradients_that_are_kept_come_off_the_budget(caplog: pytest.LogCaptureFixture) -> None:
    loop = Loop(OPTIMIZERS["SGD"], batch=1024)
    budget = loop.compile().baseline_peak_bytes
    loop = Loop(OPTIMIZERS["SGD"], batch=1024, budget=budget)
    assert not loop.compile().recomputed
    gradients = sum(p.numel() * 4 for p in loop.model.parameters())
    with caplog.at_level(logging.WARNING, "dtrcompile"):
        for _ in range(4):
            loop.loss_of(loop.batch).backward()
    (message,) = (r.getMessage() for r in caplog.records if "still in .grad" in r.getMessage())
    assert "come off the budget" in message and "zero_grad" in message
    report = dtrcompile.reports()[-1]
    assert report.beside["gradients kept from an earlier backward"] == gradients
    assert report.recomputed
    assert report.promised_peak_bytes + gradients <= budget
    # Added up as without a budget.
    expected = {name: 4 * p.grad for name, p in plain_gradients(loop).items()}
    for name, p in loop.model.named_parameters():
        torch.testing.assert_close(p.grad, expected[name])


def plain_gradients(loop: Loop) -> dict[str, Any]:
    model = make_model()
    model(loop.batch).square().mean().backward()
    return dict(model.named_parameters())


def test_a_budget_with_room_for_kept_gradients_is_compiled_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    loop = Loop(OPTIMIZERS["SGD"], batch=64, budget="8MiB")
    loop.compile()
    with caplog.at_level(logging.WARNING, "dtrcompile"):
        for _ in range(3):
            loop.loss_of(loop.batch).backward()
    assert [r.getMessage() for r in caplog.records if "still in .grad" in r.getMessage()]
    (report,) = dtrcompile.reports()
    assert not report.recomputed
    assert "gradients kept from an earlier backward" in report.beside


def test_a_report_counts_kept_gradients_in_the_calls_that_have_them() -> None:
    """Whatever the code was compiled for: gradients come and go with accumulation."""
    loop = Loop(OPTIMIZERS["SGD"], batch=64, budget="8MiB")
    gradients = sum(p.numel() * 4 for p in loop.model.parameters())
    promised = []
    for _ in range(3):
        loop.model.zero_grad()
        for _ in range(3):
            with dtrcompile.watch() as seen:
                loop.loss_of(loop.batch).backward()
            promised.append(seen.promised_bytes)
    assert promised == 3 * [promised[0], promised[0] + gradients, promised[0] + gradients]


def test_kept_gradients_without_room_are_refused_before_the_step_until_they_are_gone() -> None:
    smallest = Loop(OPTIMIZERS["SGD"], batch=256).compile().promised_peak_bytes
    loop = Loop(OPTIMIZERS["SGD"], batch=256, budget=smallest)
    loop.compile()
    loop.loss_of(loop.batch).backward()
    for _ in range(2):
        with pytest.raises(InfeasibleBudgetError, match="zero_grad"):
            loop.loss_of(loop.batch)
    loop.optimizer.zero_grad()
    loop.loss_of(loop.batch).backward()


def test_gradients_that_are_dropped_before_backward_are_in_the_way_of_forward_alone() -> None:
    """As in many loops, and in Lightning: ``zero_grad`` stands before backward, after forward."""
    smallest = Loop(OPTIMIZERS["SGD"], batch=1024).compile().promised_peak_bytes
    # Gradients take 65 KiB, and there is room for half of them.
    loop = Loop(OPTIMIZERS["SGD"], batch=1024, budget=smallest + 32 * KIB)
    loop.compile()
    for _ in range(3):
        loss = loop.loss_of(loop.batch)
        loop.optimizer.zero_grad()
        loss.backward()
        loop.optimizer.step()
    (report,) = dtrcompile.reports()[1:]
    assert not report.beside
    # What was dropped so far, and now is not, is said before backward makes new ones.
    loss = loop.loss_of(loop.batch)
    with pytest.raises(InfeasibleBudgetError, match="zero_grad"):
        loss.backward()


@pytest.mark.inductor
def test_micro_batches_stay_within_the_budget() -> None:
    loop = Loop(OPTIMIZERS["SGD"], batch=1024, compiler="inductor", budget="100%")
    budget = loop.compile().baseline_peak_bytes
    torch._dynamo.reset()
    loop = Loop(OPTIMIZERS["SGD"], batch=1024, compiler="inductor", budget=budget)
    loop.compile()
    held = static_bytes(loop.model, loop.batch)
    gradients = sum(p.numel() * p.element_size() for p in loop.model.parameters())

    def micro_batch() -> None:
        loop.loss_of(loop.batch).backward()

    micro_batch()
    micro_batch()  # compiles again
    loop.optimizer.zero_grad()
    peaks = [held + kept + live_peak_bytes(micro_batch) for kept in (0, gradients, gradients)]
    assert dtrcompile.reports()[-1].recomputed
    assert max(peaks) <= budget
