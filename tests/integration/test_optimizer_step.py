"""What an optimizer's steps hold, counted on fake tensors, beside what the allocator shows."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import StepLR

from dtrcompile.passes.device.allocators import EXACT
from dtrcompile.passes.device.optimizer_step import StepBytes, state_tensors, step_bytes
from dtrcompile.passes.errors import UnknownOptimizerError
from workloads.training import live_peak_bytes

CPU = torch.device("cpu")
MakeOptimizer = Callable[[Iterable[Tensor]], torch.optim.Optimizer]


class MasterWeights(torch.optim.Optimizer):
    """A custom one: weights in double precision, an average of them, and a temporary or two."""

    def __init__(self, parameters: Iterable[Tensor], lr: float = 1e-3) -> None:
        super().__init__(parameters, {"lr": lr})
        self.steps = 0

    @torch.no_grad()
    def step(self, closure: object = None) -> None:
        assert closure is None
        self.steps += 1
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state["master"], state["ema"] = p.double(), p.clone()
                update = 2 * p.grad + p.grad.square().mean()
                state["master"].add_(update, alpha=-group["lr"])
                p.copy_(state["master"])
                state["ema"].lerp_(p, 0.1)


OPTIMIZERS: dict[str, MakeOptimizer] = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1),
    "SGD, momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.1),
    "SGD, momentum, foreach": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, foreach=True),
    "Adam": torch.optim.Adam,
    "Adam, foreach": lambda p: torch.optim.Adam(p, foreach=True, weight_decay=0.1),
    "Adam, fused": lambda p: torch.optim.Adam(p, fused=True),
    "AdamW": torch.optim.AdamW,
    "AdamW, foreach": lambda p: torch.optim.AdamW(p, foreach=True, amsgrad=True),
    "AdamW, fused": lambda p: torch.optim.AdamW(p, fused=True),
    "AdamW, a tensor as learning rate": lambda p: torch.optim.AdamW(p, lr=torch.tensor(1e-3)),
    "Adafactor": torch.optim.Adafactor,
    "Adafactor, foreach": lambda p: torch.optim.Adafactor(p, foreach=True),
    "RAdam": torch.optim.RAdam,  # temporaries from its sixth step on
    "NAdam, foreach": lambda p: torch.optim.NAdam(p, foreach=True),
    "Rprop": torch.optim.Rprop,
    "custom": MasterWeights,
}


def make_model() -> nn.Module:
    return nn.Sequential(
        nn.Linear(64, 96), nn.LayerNorm(96), nn.Linear(96, 64, bias=False), nn.Linear(1, 1)
    )


def with_gradients(make: MakeOptimizer) -> torch.optim.Optimizer:
    optimizer = make(list(make_model().parameters()))
    for group in optimizer.param_groups:
        for p in group["params"]:
            p.grad = torch.randn_like(p)
    return optimizer


def state_bytes(optimizer: torch.optim.Optimizer) -> int:
    return sum(t.untyped_storage().nbytes() for _, t in state_tensors(optimizer))


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_counted_bytes_are_the_allocators(name: str) -> None:
    optimizer = with_gradients(OPTIMIZERS[name])
    counted = step_bytes(optimizer, CPU, EXACT)
    first, *later = (live_peak_bytes(lambda: optimizer.step()) for _ in range(7))
    assert counted.first_peak_bytes == first
    assert counted.later_peak_bytes == max(later)
    assert (counted.present_bytes, counted.state_bytes) == (0, state_bytes(optimizer))
    # Once the state is there, as after a checkpoint was loaded.
    resumed = step_bytes(optimizer, CPU, EXACT)
    assert resumed == StepBytes(
        counted.state,
        counted.state_bytes,
        max(later),
        max(later),
        counted.is_guess,
    )


def test_counting_leaves_the_optimizer_and_its_hooks_alone() -> None:
    optimizer = with_gradients(MasterWeights)
    stepped = []
    optimizer.register_step_pre_hook(lambda *_: stepped.append("pre"))
    scheduler = StepLR(optimizer, 1)  # wraps the step of this very object
    optimizer.step()
    before = [t.clone() for _, t in state_tensors(optimizer)]
    parameters = [p.clone() for p in optimizer.param_groups[0]["params"]]
    step_bytes(optimizer, CPU, EXACT)
    assert (optimizer.steps, stepped) == (1, ["pre"])
    for old, (_, new) in zip(before, state_tensors(optimizer), strict=True):
        torch.testing.assert_close(new, old, rtol=0, atol=0)
    for old, new in zip(parameters, optimizer.param_groups[0]["params"], strict=True):
        torch.testing.assert_close(new, old, rtol=0, atol=0)
    assert scheduler.get_last_lr() == [1e-3]


def test_state_is_named() -> None:
    counted = step_bytes(with_gradients(MasterWeights), CPU, EXACT)
    elements = sum(p.numel() for p in make_model().parameters())
    assert dict(counted.state) == {"master": 8 * elements, "ema": 4 * elements}


class Branching(torch.optim.SGD):
    """Needs room only if a gradient is large."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for p in self.param_groups[0]["params"]:
            if p.grad.abs().max() > 100:
                p.grad.mul_(p.grad.sign())
        return super().step(closure)


def test_a_condition_on_a_value_counts_both_ways() -> None:
    optimizer = with_gradients(lambda p: Branching(p, lr=0.1))
    counted = step_bytes(optimizer, CPU, EXACT)
    for p in optimizer.param_groups[0]["params"]:
        p.grad.fill_(200.0)
    assert counted.is_guess
    assert live_peak_bytes(lambda: optimizer.step()) == counted.later_peak_bytes > 0


class Opaque(torch.optim.SGD):
    """Reads its parameters' memory behind PyTorch's back, as a foreign kernel does."""

    def step(self, closure: Any = None) -> Any:
        for p in self.param_groups[0]["params"]:
            p.grad.data_ptr()
        return super().step(closure)


@pytest.mark.parametrize("make", [lambda p: Opaque(p, lr=0.1), torch.optim.LBFGS])
def test_what_cannot_be_counted_is_an_error_with_a_remedy(make: MakeOptimizer) -> None:
    with pytest.raises(UnknownOptimizerError, match="'reserve': '2GiB'"):
        step_bytes(with_gradients(make), CPU, EXACT)
