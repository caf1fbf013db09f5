"""On a device: steps above the budget are said; `dtrcompile.watch` agrees with the allocator."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import dtrcompile
from dtrcompile.outside.uncompiled import told
from tests.integration.test_outside import line_of
from workloads.training import compile_dtr

pytestmark = [pytest.mark.gpu, pytest.mark.inductor]

ROWS, WIDTH, CLASSES = 4096, 1024, 8192


@pytest.fixture(autouse=True)
def fresh() -> None:
    torch._dynamo.reset()
    dtrcompile.clear_reports()
    torch.cuda.empty_cache()


class Net(nn.Module):
    def __init__(self, outputs: int = WIDTH) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            *(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(4)),
            nn.Linear(WIDTH, outputs),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


class WithLoss(Net):
    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x).square().mean()


@pytest.mark.parametrize("reserve", [0, "200MiB"])
def test_a_step_above_the_budget_is_said(reserve: object) -> None:
    model, x = WithLoss().cuda(), torch.randn(ROWS, WIDTH, device="cuda")
    others = torch.empty(100 * 2**20, dtype=torch.uint8, device="cuda")  # another model's, say
    # What the graphs hold without a budget, and 20 MiB, in which 100 more do not fit.
    probe = compile_dtr(model, "100%", compiler="inductor")
    probe(x).backward()
    model.zero_grad()
    budget = dtrcompile.reports()[-1].baseline_peak_bytes + 20 * 2**20
    torch._dynamo.reset()
    budget += 200 * 2**20 if reserve else 0
    compiled = compile_dtr(model, budget, compiler="inductor", reserve=reserve)

    def step() -> None:
        loss = compiled(x)
        loss.backward()
        model.zero_grad()

    for _ in range(4):
        step()
    assert len(told()) == (0 if reserve else 1), told()
    if not reserve:
        assert told()[0].startswith(f"{line_of(step, 'compiled(x)')}: the allocator of cuda:0")
    del others


def test_watching_a_loss_outside() -> None:
    model, x = Net(CLASSES).cuda(), torch.randn(ROWS, WIDTH, device="cuda")
    labels = torch.zeros(ROWS, dtype=torch.long, device="cuda")
    compiled = compile_dtr(model, "min", compiler="inductor")

    def step() -> None:
        scores = compiled(x)
        loss = F.cross_entropy(scores, labels)
        loss.backward()

    step()
    assert any("LogSoftmax" in message for message in told()), told()
    model.zero_grad()
    with dtrcompile.watch() as seen:
        step()
    print(seen)
    assert seen.device.type == "cuda"
    assert seen.observed_bytes == torch.cuda.max_memory_allocated()
    assert any(
        held.where == line_of(step, "cross_entropy") and held.size_bytes >= ROWS * CLASSES * 4
        for held in seen.outside
    )
    assert seen.promised_bytes is not None
    assert seen.observed_bytes - seen.outside_bytes <= seen.promised_bytes


def test_an_lstm() -> None:
    class Tagger(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.recurrent = nn.LSTM(32, 32, batch_first=True)

        def forward(self, x: Tensor) -> Tensor:
            return self.recurrent(x)[0].square().mean()

    model, x = Tagger().cuda(), torch.randn(8, 3, 32, device="cuda")
    with torch._dynamo.config.patch(allow_rnn=True):
        compile_dtr(model, "min", compiler="inductor")(x).backward()
    found = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    model(x).backward()
    for gradient, parameter in zip(found, model.parameters(), strict=True):
        torch.testing.assert_close(gradient, parameter.grad, rtol=1e-3, atol=1e-4)
