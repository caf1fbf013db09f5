"""What tests on a device share: a model whose activations are worth evicting, and its steps."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import dtrcompile
from dtrcompile.demo.memory import static_bytes
from workloads.training import compile_dtr, gradients_of, relative_error

DEVICE = torch.device("cuda")
ROWS, WIDTH, LAYERS = 4096, 512, 6
# Plain torch.compile's error, times this; below the floor nobody can tell them apart in float32.
ERROR_RATIO, ERROR_FLOOR = 1.5, 1e-6
SEED = 3

Gradients = dict[str, Tensor | None]


class Net(nn.Module):
    """A perceptron with norms; the loss is inside."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            *(
                nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH), nn.GELU())
                for _ in range(LAYERS)
            )
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x).square().mean()


def net_and_batch(seed: int = SEED, rows: int = ROWS) -> tuple[Net, Tensor]:
    """On the device, the same each time."""
    torch.manual_seed(seed)
    return Net().to(DEVICE), torch.randn(rows, WIDTH, device=DEVICE)


def compiled(module: nn.Module, budget: object = "min", **options: Any) -> Callable[..., Any]:
    """By dtr, to Inductor's kernels."""
    return compile_dtr(module, budget, compiler="inductor", **options)


def gradients(module: nn.Module, call: Callable[..., Tensor], *inputs: Tensor) -> Gradients:
    """Copies of those of one step from a fixed seed."""
    module.zero_grad(set_to_none=True)
    torch.manual_seed(SEED + 1)
    call(*inputs).backward()
    return {n: None if g is None else g.clone() for n, g in gradients_of(module).items()}


def exact_gradients(module: nn.Module, *inputs: Tensor) -> Gradients:
    """Those of eager PyTorch in float64."""
    exact = copy.deepcopy(module).double()
    given = (t.double() if t.is_floating_point() else t for t in inputs)
    return gradients(exact, exact, *given)


def assert_as_exact_as(ours: Gradients, plain: Gradients, exact: Gradients) -> None:
    """Ours are off by at most what those of plain torch.compile may be off."""
    error, allowed = relative_error(ours, exact), ERROR_RATIO * relative_error(plain, exact)
    assert error <= max(allowed, ERROR_FLOOR), f"off by {error:.2e}, plain by {allowed:.2e} / 1.5"


def peak_bytes(module: nn.Module, call: Callable[..., Tensor], *inputs: Tensor) -> int:
    """The most that a step holds, without what is beside it on the device.

    It is read after each step: a step of dtr may begin the allocator's peak anew.
    """
    module.zero_grad(set_to_none=True)
    beside_bytes = torch.cuda.memory_allocated() - static_bytes(module, *inputs)
    torch.cuda.reset_peak_memory_stats()
    most_bytes = 0
    for _ in range(3):
        call(*inputs).backward()
        most_bytes = max(most_bytes, torch.cuda.max_memory_allocated())
        module.zero_grad(set_to_none=True)
    return most_bytes - beside_bytes


def report() -> dtrcompile.CompileReport:
    """Of the graph that was compiled last."""
    return dtrcompile.reports()[-1]
