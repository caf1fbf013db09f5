"""`dtrcompile.recompute`: what runs inside keeps its inputs only."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import dtrcompile
from workloads.training import assert_bitwise, compile_dtr, gradients_of

WIDTH, BATCH, BLOCKS = 32, 64, 3
BLOCK_INPUT_BYTES = WIDTH * BATCH * 4


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + F.dropout(self.down(F.gelu(self.up(x))), 0.2, self.training)


@dtrcompile.recompute
def decorated(block: Block, x: Tensor) -> Tensor:
    y: Tensor = block(x)
    return y


class Model(nn.Module):
    def __init__(self, how: str) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))
        self.how = how

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            if self.how == "context manager":
                with dtrcompile.recompute():
                    x = block(x)
            elif self.how == "decorator":
                x = decorated(block, x)
            else:
                x = block(x)
        return x.square().mean()


def trained(how: str, budget: object) -> tuple[dict[str, Tensor], dtrcompile.CompileReport]:
    torch.manual_seed(1)
    module, x = Model(how), torch.randn(BATCH, WIDTH)
    compiled = compile_dtr(module, budget, fullgraph=True)
    torch.manual_seed(2)
    compiled(x).backward()
    (report,) = dtrcompile.reports()
    dtrcompile.clear_reports()
    return gradients_of(module), report


@pytest.mark.parametrize("how", ["context manager", "decorator"])
@pytest.mark.parametrize("budget", [1.0, "min"])
def test_only_the_inputs_of_each_scope_are_saved(how: str, budget: object) -> None:
    expected, without = trained("nothing", 1.0)
    gradients, report = trained(how, budget)
    # Dropout included: random numbers are not drawn again.
    assert_bitwise(gradients, expected)
    # What one scope hands to the next, the last one's result, and the seed.
    assert report.saved_bytes <= BLOCKS * BLOCK_INPUT_BYTES + 64
    assert without.saved_bytes > 2 * report.saved_bytes


def test_outside_of_the_backend_it_does_nothing() -> None:
    torch.manual_seed(1)
    module, x = Model("context manager").eval(), torch.randn(BATCH, WIDTH)
    module(x).backward()
    found = gradients_of(module)
    module.how = "nothing"
    module.zero_grad()
    module(x).backward()
    assert_bitwise(found, gradients_of(module))
