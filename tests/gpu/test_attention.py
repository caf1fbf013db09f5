"""On a device: fused attention is computed again, by the same kernel, with the same result."""

from __future__ import annotations

import re
from collections.abc import Callable
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch._inductor.graph import GraphLowering
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import flex_attention

from tests.gpu.comparing import (
    DEVICE,
    assert_as_exact_as,
    compiled,
    exact_gradients,
    gradients,
    peak_bytes,
    report,
)

pytestmark = [pytest.mark.gpu, pytest.mark.inductor]

BLOCKS, BATCH, LENGTH, HEADS, WIDTH = 4, 8, 512, 4, 256
# A call of a fused kernel in Inductor's code, not of its gradient.
FORWARD = re.compile(r"\._scaled_dot_product_\w*attention(?:_for_cpu)?\.default\(")
Attention = Callable[[Tensor, Tensor, Tensor], Tensor]


class Attending(nn.Module):
    """Blocks of attention, of which the inner ones are worth computing again."""

    def __init__(self, attend: Attention) -> None:
        super().__init__()
        self.attend = attend
        self.inward = nn.ModuleList(nn.Linear(WIDTH, 3 * WIDTH, bias=False) for _ in range(BLOCKS))
        self.outward = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(BLOCKS))

    def forward(self, x: Tensor) -> Tensor:
        for inward, outward in zip(self.inward, self.outward, strict=True):
            query, key, value = (
                part.unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in inward(x).chunk(3, -1)
            )
            y = self.attend(query, key, value).transpose(1, 2).flatten(2)
            x = x + F.gelu(outward(y))
        return x.square().mean()


def causal(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(query, key, value, is_causal=True)


def made(attend: Attention, dtype: torch.dtype) -> tuple[Attending, Tensor]:
    torch.manual_seed(5)
    model = Attending(attend).to(DEVICE, dtype)
    return model, torch.randn(BATCH, LENGTH, WIDTH, device=DEVICE, dtype=dtype)


def check(model: Attending, x: Tensor) -> None:
    """At the smallest budget: gradients, what is computed again, and what is held."""
    plain = gradients(model, torch.compile(model), x)
    call = compiled(model, "min")
    sources: list[str] = []
    with mock.patch.object(GraphLowering, "save_output_code", sources.append):
        ours = gradients(model, call, x)
    with sdpa_kernel(SDPBackend.MATH):
        exact = exact_gradients(model, x)
    assert_as_exact_as(ours, plain, exact)
    assert len(FORWARD.findall("".join(sources))) > BLOCKS
    assert peak_bytes(model, call, x) <= report().promised_peak_bytes


@pytest.mark.parametrize(
    ("backend", "dtype"),
    [
        (SDPBackend.FLASH_ATTENTION, torch.bfloat16),
        (SDPBackend.EFFICIENT_ATTENTION, torch.bfloat16),
        (SDPBackend.EFFICIENT_ATTENTION, torch.float32),
        (SDPBackend.CUDNN_ATTENTION, torch.bfloat16),
        (SDPBackend.MATH, torch.float32),
    ],
    ids=["flash", "efficient", "efficient in float32", "cuDNN", "math"],
)
def test_attention_of_a_backend(backend: SDPBackend, dtype: torch.dtype) -> None:
    model, x = made(causal, dtype)
    with sdpa_kernel(backend):
        try:
            model(x)
        except RuntimeError as error:
            if "No available kernel" not in str(error):
                raise
            pytest.skip("this device has no such kernel")
        if backend is SDPBackend.MATH:
            check_math(model, x)
        else:
            check(model, x)


def check_math(model: Attending, x: Tensor) -> None:
    """There is no fused kernel: the scores are what is computed again."""
    plain = gradients(model, torch.compile(model), x)
    call = compiled(model, "min")
    assert_as_exact_as(gradients(model, call, x), plain, exact_gradients(model, x))
    assert report().recomputed_runs > 0
    assert peak_bytes(model, call, x) <= report().promised_peak_bytes


@pytest.mark.parametrize(
    ("backend", "dtype"),
    [
        (SDPBackend.FLASH_ATTENTION, torch.bfloat16),
        # Its random state is on the CPU.
        (SDPBackend.EFFICIENT_ATTENTION, torch.float32),
    ],
    ids=["flash", "efficient"],
)
def test_attention_that_is_dropped_out(backend: SDPBackend, dtype: torch.dtype) -> None:
    """From one seed, the masks are those of plain torch.compile, in forward and backward."""

    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(query, key, value, dropout_p=0.2, is_causal=True)

    model, x = made(attend, dtype)
    with sdpa_kernel(backend):
        plain = gradients(model, torch.compile(model), x)
        ours = gradients(model, compiled(model, "min"), x)
    for name, gradient in ours.items():
        torch.testing.assert_close(gradient, plain[name], rtol=0.1, atol=1e-3)


def test_flex_attention() -> None:
    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        def sloped(score: Tensor, _b: Tensor, _h: Tensor, i: Tensor, j: Tensor) -> Tensor:
            return score - 0.1 * (i - j).abs()

        return flex_attention(query, key, value, score_mod=sloped)

    model, x = made(attend, torch.bfloat16)
    plain = gradients(model, torch.compile(model), x)
    call = compiled(model, "min")
    ours = gradients(model, call, x)
    for name, gradient in ours.items():
        torch.testing.assert_close(gradient, plain[name], rtol=0.1, atol=1e-3)
    assert report().recomputed_runs > 0
    assert peak_bytes(model, call, x) <= report().promised_peak_bytes
