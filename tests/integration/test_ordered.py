"""Plans that run operators for the first time in another order than the program's."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import dtrcompile
from workloads.training import assert_close, compile_dtr, executor_checked, gradients_of

pytestmark = pytest.mark.usefixtures("nothing_compiled")


class Towers(nn.Module):
    """Towers of wide layers, computed one layer after the other."""

    def __init__(self, n: int = 4) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.wide = nn.ModuleList(nn.Linear(8, 256) for _ in range(n))
        self.small = nn.ModuleList(nn.Linear(256, 8) for _ in range(n))

    def forward(self, x: Tensor) -> Tensor:
        wide = [torch.tanh(layer(x)) for layer in self.wide]
        small = [layer(h) for layer, h in zip(self.small, wide, strict=True)]
        return torch.stack(small).sum(0).square().mean()


@pytest.mark.parametrize("trains", [True, False])
def test_gradients_and_bytes_in_another_order(trains: bool) -> None:
    x = torch.randn(64, 8)
    other = Towers()
    expected = other(x)
    expected.backward()
    promised = {}
    for planner in ("program-order", "auto"):
        torch._dynamo.reset()
        dtrcompile.clear_reports()
        compiled = compile_dtr(Towers(), "min", planner=planner)
        with executor_checked(), torch.set_grad_enabled(trains):
            found = compiled(x)
            if trains:
                found.backward()
        assert_close(found.detach(), expected.detach())
        if trains:
            assert_close(list(gradients_of(compiled).values()), list(gradients_of(other).values()))
        (report,) = dtrcompile.reports()
        promised[planner] = report.promised_peak_bytes, report.overhead
    assert promised["auto"] <= promised["program-order"]
    if not trains:  # one tower after the other, and nothing twice
        assert promised["program-order"][1] > 1.0
        assert promised["auto"][1] == 1.0
