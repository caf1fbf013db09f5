"""What the backward of a loss that runs outside of the graphs holds, against the allocator."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from dtrcompile.outside.uncompiled import _INTERMEDIATE_RESULTS, _running_bytes
from workloads.training import live_peak_bytes

SIDE = 256
# Scalars, and one value a row.
SMALL_BYTES = 16 * SIDE

Operator = Callable[[Tensor, Tensor], Tensor]

FORMULAS: dict[str, Operator] = {
    "AbsBackward0": lambda x, _: x.abs(),
    "AmaxBackward0": lambda x, _: x.amax(1),
    "AminBackward0": lambda x, _: x.amin(1),
    "Atan2Backward0": lambda x, t: torch.atan2(x, t),
    "ClampBackward1": lambda x, _: x.clamp(0.2, 0.5),
    "CosBackward0": lambda x, _: x.cos(),
    "CumsumBackward0": lambda x, _: x.cumsum(1),
    "DivBackward0": lambda x, t: t / x,
    "ErfBackward0": lambda x, _: x.erf(),
    "LinalgVectorNormBackward0": lambda x, _: x.norm(dim=1),
    "Log1PBackward0": lambda x, _: x.log1p(),
    "LogaddexpBackward0": lambda x, t: torch.logaddexp(x, t),
    "LogsumexpBackward0": lambda x, _: x.logsumexp(1),
    "MaximumBackward0": lambda x, t: torch.maximum(x, t),
    "MinimumBackward0": lambda x, t: torch.minimum(x, t),
    "PowBackward0": lambda x, _: x.square(),
    "PowBackward1": lambda x, t: x**t,
    "ProdBackward1": lambda x, _: x.prod(1),
    "ReciprocalBackward0": lambda x, _: x.reciprocal(),
    "RsqrtBackward0": lambda x, _: x.rsqrt(),
    "SinBackward0": lambda x, _: x.sin(),
    "SoftMarginLossBackward0": lambda x, t: F.soft_margin_loss(x, t),
    "SqrtBackward0": lambda x, _: x.sqrt(),
    "StdBackward0": lambda x, _: x.std(1),
    "VarBackward0": lambda x, _: x.var(1),
}
KERNELS: dict[str, Operator] = {
    "BinaryCrossEntropyBackward0": lambda x, t: F.binary_cross_entropy(x, t),
    "BinaryCrossEntropyWithLogitsBackward0": F.binary_cross_entropy_with_logits,
    "ExpBackward0": lambda x, _: x.exp(),
    "GeluBackward0": lambda x, _: F.gelu(x),
    "HuberLossBackward0": lambda x, t: F.huber_loss(x, t),
    "LogBackward0": lambda x, _: x.log(),
    "LogSoftmaxBackward0": lambda x, _: F.log_softmax(x, 1),
    "MeanBackward0": lambda x, _: x.mean(),
    "MseLossBackward0": lambda x, t: F.mse_loss(x, t),
    "MulBackward0": lambda x, _: x * x,
    "SmoothL1LossBackward0": lambda x, t: F.smooth_l1_loss(x, t),
    "TanhBackward0": lambda x, _: x.tanh(),
}


def test_every_formula_is_measured() -> None:
    assert FORMULAS.keys() == _INTERMEDIATE_RESULTS.keys()


@pytest.mark.parametrize("name", [*FORMULAS, *KERNELS])
def test_a_backward_holds_what_is_counted(name: str) -> None:
    leaf = torch.rand(SIDE, SIDE).mul_(0.8).add_(0.1).requires_grad_()
    target = torch.rand(SIDE, SIDE).mul_(0.8).add_(0.1)
    x = leaf.view(SIDE, SIDE)  # gradients of parameters are counted elsewhere
    y = {**FORMULAS, **KERNELS}[name](x, target)
    node = y.grad_fn
    assert node is not None and node.name() == name
    gradient = torch.ones_like(y)
    held_bytes = gradient.nbytes + live_peak_bytes(lambda: y.backward(gradient))
    counted_bytes = _running_bytes(node)
    assert held_bytes <= counted_bytes + SMALL_BYTES
    # Not by far too much: DivBackward0 may have one gradient to make, or two.
    assert counted_bytes - held_bytes <= math.ceil(0.8 * x.nbytes)
