"""What a loss that runs outside of the graphs holds, against the allocator."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from dtrcompile.outside.loss import (
    _BACKWARD_INTERMEDIATES,
    _FORWARD_INTERMEDIATES,
    _UNTRIMMED,
    OutsideLoss,
    outside_loss,
)
from workloads.training import live_peak_bytes

SIDE = 256
# Scalars, and a few values a row.
SMALL_BYTES = 64 * SIDE

Operator = Callable[[Tensor, Tensor], Tensor]
Loss = Callable[[Tensor, Tensor, Tensor], Tensor]


class CompiledFunction(torch.autograd.Function):
    """Stands in for a compiled graph: autograd's node has this name."""

    seen: OutsideLoss | None = None

    @staticmethod
    def forward(_: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> None:
        CompiledFunction.seen = outside_loss(ctx)


def held_and_counted(loss: Callable[[Tensor], Tensor], *, is_held: bool) -> tuple[int, int]:
    """Bytes between what stands in for a graph and the loss, its output left out: what the
    allocator says, and what is counted."""
    leaf = torch.rand(SIDE, SIDE).mul_(0.8).add_(0.1).requires_grad_()

    def step() -> None:
        y = CompiledFunction.apply(leaf)
        value = loss(y)
        if not is_held:
            del y
        value.backward()

    held_bytes = live_peak_bytes(step) - leaf.nbytes
    seen, CompiledFunction.seen = CompiledFunction.seen, None
    assert seen is not None
    return held_bytes, seen.without(0 if is_held else leaf.nbytes).peak_bytes


OPERATORS: dict[str, Operator] = {
    "AbsBackward0": lambda x, _: x.abs(),
    "AmaxBackward0": lambda x, _: x.amax(1),
    "AminBackward0": lambda x, _: x.amin(1),
    "Atan2Backward0": lambda x, t: torch.atan2(x, t),
    "BinaryCrossEntropyBackward0": lambda x, t: F.binary_cross_entropy(x, t),
    "BinaryCrossEntropyWithLogitsBackward0": F.binary_cross_entropy_with_logits,
    "ClampBackward1": lambda x, _: x.clamp(0.2, 0.5),
    "CosBackward0": lambda x, _: x.cos(),
    "CumsumBackward0": lambda x, _: x.cumsum(1),
    "DivBackward0": lambda x, t: t / x,
    "ErfBackward0": lambda x, _: x.erf(),
    "ExpBackward0": lambda x, _: x.exp(),
    "GeluBackward0": lambda x, _: F.gelu(x),
    "HuberLossBackward0": lambda x, t: F.huber_loss(x, t),
    "LinalgVectorNormBackward0": lambda x, _: x.norm(dim=1),
    "Log1PBackward0": lambda x, _: x.log1p(),
    "LogBackward0": lambda x, _: x.log(),
    "LogSoftmaxBackward0": lambda x, _: F.log_softmax(x, 1),
    "LogaddexpBackward0": lambda x, t: torch.logaddexp(x, t),
    "LogsumexpBackward0": lambda x, _: x.logsumexp(1),
    "MaximumBackward0": lambda x, t: torch.maximum(x, t),
    "MeanBackward0": lambda x, _: x.mean(),
    "MinimumBackward0": lambda x, t: torch.minimum(x, t),
    "MseLossBackward0": lambda x, t: F.mse_loss(x, t),
    "MulBackward0": lambda x, _: x * x,
    "PowBackward0": lambda x, _: x.square(),
    "PowBackward1": lambda x, t: x**t,
    "ProdBackward1": lambda x, _: x.prod(1),
    "ReciprocalBackward0": lambda x, _: x.reciprocal(),
    "RsqrtBackward0": lambda x, _: x.rsqrt(),
    "SinBackward0": lambda x, _: x.sin(),
    "SmoothL1LossBackward0": lambda x, t: F.smooth_l1_loss(x, t),
    "SoftMarginLossBackward0": lambda x, t: F.soft_margin_loss(x, t),
    "SqrtBackward0": lambda x, _: x.sqrt(),
    "StdBackward0": lambda x, _: x.std(1),
    "SumBackward1": lambda x, _: x.sum(1),
    "TanhBackward0": lambda x, _: x.tanh(),
    "VarBackward0": lambda x, _: x.var(1),
}


def test_every_formula_is_measured() -> None:
    assert OPERATORS.keys() >= {*_BACKWARD_INTERMEDIATES, *_FORWARD_INTERMEDIATES, *_UNTRIMMED}


@pytest.mark.parametrize("is_held", [False, True])
@pytest.mark.parametrize("name", OPERATORS)
def test_an_operator_holds_what_is_counted(name: str, is_held: bool) -> None:
    target = torch.rand(SIDE, SIDE).mul_(0.8).add_(0.1)
    names: list[str] = []

    def loss(y: Tensor) -> Tensor:
        result = OPERATORS[name](y, target)
        assert result.grad_fn is not None
        names.append(result.grad_fn.name())
        return result if result.numel() == 1 else result.sin().mean()

    held_bytes, counted_bytes = held_and_counted(loss, is_held=is_held)
    assert names == [name]
    assert held_bytes <= counted_bytes + SMALL_BYTES
    # Not by far too much: DivBackward0 may have one gradient to make, or two.
    assert counted_bytes - held_bytes <= 1.3 * target.nbytes


LOSSES: dict[str, Loss] = {
    "scores in a view": lambda y, _, c: F.cross_entropy(
        y.view(4, -1, SIDE)[:, :-1].reshape(-1, SIDE), c[:-4]
    ),
    "scores in bfloat16": lambda y, _, c: F.cross_entropy(y.bfloat16().float(), c),
    "scores transposed": lambda y, _, c: F.cross_entropy(
        y.view(4, -1, SIDE).transpose(1, 2), c.view(4, -1)
    ),
    "smoothed labels": lambda y, _, c: F.cross_entropy(y, c, label_smoothing=0.1),
    "z-loss": lambda y, _, c: F.cross_entropy(y, c) + 1e-4 * y.logsumexp(-1).square().mean(),
    "soft labels": lambda y, t, _: -(torch.log_softmax(y, -1) * t).sum(-1).mean(),
    "entropy": lambda y, _, __: -(torch.softmax(y, -1) * torch.log_softmax(y, -1)).sum(-1).mean(),
    "probabilities": lambda y, t, _: F.binary_cross_entropy(torch.sigmoid(y), t),
    "focal": lambda y, t, _: (
        ((1 - torch.sigmoid(y)) ** 2)
        * F.binary_cross_entropy_with_logits(y, t, reduction="none")
    ).mean(),
    "dice": lambda y, t, _: (
        1 - 2 * (torch.sigmoid(y) * t).sum() / (torch.sigmoid(y).sum() + t.sum())
    ),
    "differences": lambda y, t, _: ((y - t) ** 2).mean(),
    "hinge": lambda y, t, _: torch.relu(1 - y * t).mean(),
    "two of one output": lambda y, _, __: y.square().sum() + y.abs().sum(),
    "mean and deviation": lambda y, _, __: y.mean() + y.std(),
    "a layer after the model": lambda y, _, __: F.layer_norm(y, (SIDE,)).square().mean(),
    "a matrix after the model": lambda y, t, _: F.linear(y, t).square().mean(),
    "a product": lambda y, _, __: torch.tanh(torch.relu(y) * y).mean(),
    "a part of the output": lambda y, _, c: F.cross_entropy(y.view(16, -1, SIDE)[:, -1], c[:16]),
    "sequences": lambda y, _, c: F.ctc_loss(
        F.log_softmax(y.view(64, 4, SIDE), -1),
        c[:80].view(4, 20).clamp(1),
        torch.full((4,), 64),
        torch.full((4,), 20),
    ),
}  # fmt: skip


@pytest.mark.parametrize("is_held", [False, True])
@pytest.mark.parametrize("name", LOSSES)
def test_a_loss_holds_what_is_counted(name: str, is_held: bool) -> None:
    target, labels = torch.rand(SIDE, SIDE), torch.randint(0, SIDE, (SIDE,))
    held_bytes, counted_bytes = held_and_counted(
        lambda y: LOSSES[name](y, target, labels), is_held=is_held
    )
    assert held_bytes <= counted_bytes + SMALL_BYTES
    assert counted_bytes - held_bytes <= 1.05 * target.nbytes


def test_a_graph_that_is_kept_keeps_what_was_saved() -> None:
    leaf, powers = (torch.rand(SIDE, SIDE).add_(0.1) for _ in range(2))
    leaf.requires_grad_()

    def step(*, retain_graph: bool) -> None:
        # The formula of the power holds most, when the others' results are gone.
        power = CompiledFunction.apply(leaf) ** powers
        loss = torch.tanh(torch.tanh(torch.tanh(power))).mean()
        del power
        loss.backward(retain_graph=retain_graph)

    counted: list[int] = []
    for retain_graph in (False, True):
        held_bytes = live_peak_bytes(partial(step, retain_graph=retain_graph)) - leaf.nbytes
        assert CompiledFunction.seen is not None
        counted.append(CompiledFunction.seen.without(leaf.nbytes).peak_bytes)
        assert held_bytes <= counted[-1] + SMALL_BYTES
        assert counted[-1] - held_bytes <= 2 * leaf.nbytes
    assert counted[1] == counted[0] + 3 * leaf.nbytes
