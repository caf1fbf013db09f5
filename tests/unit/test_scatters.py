"""Rows that are scattered into zeros are added to the other gradient right away, where that is the
same."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, fx
from torch._decomp import get_decompositions
from torch.fx.experimental.proxy_tensor import make_fx

from dtrcompile.passes.graphs.scatters import into_gradients

WORDS, WIDTH, ROWS = 11, 3, 7
GRADIENT_BYTES = WORDS * WIDTH * 4
aten = torch.ops.aten
Function = Callable[..., object]
DECOMPOSED = get_decompositions([aten.embedding_dense_backward, aten.new_zeros])


def inputs(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    """The other gradient before its last operator, places with repetitions, and rows."""
    generator = torch.Generator().manual_seed(0)
    at = torch.tensor([0, 2, 2, 10, -1, 5, 2])
    return (
        torch.randn(WORDS, WIDTH, generator=generator).to(dtype),
        at,
        torch.randn(ROWS, WIDTH, generator=generator).to(dtype),
    )


def traced(function: Function, *given: Tensor) -> fx.GraphModule:
    return make_fx(function, decomposition_table=DECOMPOSED, tracing_mode="fake")(*given)


def of_embedding(rows: Tensor, at: Tensor, padding_index: int = -1) -> Tensor:
    return aten.embedding_dense_backward(rows, at, WORDS, padding_index, False)


def full(number: float) -> Tensor:
    return torch.full((WORDS, WIDTH), number)


def scattered_to_the_right(g: Tensor, at: Tensor, rows: Tensor) -> Tensor:
    return g.cos() + of_embedding(rows, at)


def scattered_to_the_left(g: Tensor, at: Tensor, rows: Tensor) -> Tensor:
    return of_embedding(rows, at) + g.cos()


def padded(g: Tensor, at: Tensor, rows: Tensor) -> Tensor:
    return g.cos() + of_embedding(rows, at, 2)


def unmasked(g: Tensor, at: Tensor, rows: Tensor) -> Tensor:
    return g.cos() + torch.index_put(full(0.0), (at,), rows, accumulate=True)


def used_three_times(g: Tensor, at: Tensor, rows: Tensor) -> Tensor:
    return (g.cos() + of_embedding(rows, at)) + of_embedding(rows.sin(), at.flip(0))


@pytest.mark.parametrize(
    ("function", "n_sums"),
    [
        (scattered_to_the_right, 1),
        (scattered_to_the_left, 1),
        (padded, 1),
        (unmasked, 1),
        (used_three_times, 2),
    ],
)
def test_the_same_sum_without_zeros(function: Function, n_sums: int) -> None:
    given = inputs()
    gm = traced(function, *given)
    found, count = into_gradients(gm, GRADIENT_BYTES)
    assert count == n_sums
    targets = {node.target for node in found.graph.nodes}
    assert aten.add.Tensor not in targets
    assert not any(
        node.target is aten.full.default and node.meta["val"].dim() for node in found.graph.nodes
    )
    # Negative places are outside of an embedding, and count from the end elsewhere.
    torch.testing.assert_close(found(*given), gm(*given), rtol=1e-6, atol=1e-6)
    assert aten.add.Tensor in {node.target for node in gm.graph.nodes}  # which stays as it was


def not_zeros(g: Tensor, at: Tensor, rows: Tensor) -> Tensor:
    return g.cos() + torch.index_put(full(1.0), (at,), rows, accumulate=True)


def replaced(g: Tensor, at: Tensor, rows: Tensor) -> Tensor:
    return g.cos() + torch.index_put(full(0.0), (at,), rows)


def gradient_is_returned(g: Tensor, at: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
    other = g.cos()
    return other, other + of_embedding(rows, at)


def scatter_is_returned(g: Tensor, at: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
    scatter = of_embedding(rows, at)
    return scatter, g.cos() + scatter


def gradient_is_an_input(g: Tensor, at: Tensor, rows: Tensor) -> Tensor:
    return g + of_embedding(rows, at)


def scaled(g: Tensor, at: Tensor, rows: Tensor) -> Tensor:
    return torch.add(g.cos(), of_embedding(rows, at), alpha=2)


def broadcast(g: Tensor, at: Tensor, rows: Tensor) -> Tensor:
    return g[:1].cos() + of_embedding(rows, at)


@pytest.mark.parametrize(
    "function",
    [
        not_zeros,
        replaced,
        gradient_is_returned,
        scatter_is_returned,
        gradient_is_an_input,
        scaled,
        broadcast,
    ],
)
def test_what_is_something_else_stays(function: Function) -> None:
    gm = traced(function, *inputs())
    assert into_gradients(gm, GRADIENT_BYTES) == (gm, 0)


def test_small_gradients_are_rounded_as_they_were() -> None:
    gm = traced(scattered_to_the_right, *inputs())
    assert into_gradients(gm, GRADIENT_BYTES + 1) == (gm, 0)


def test_short_types_are_summed_apart() -> None:
    """Small rows that are added to a large gradient one by one would be rounded away."""
    gm = traced(scattered_to_the_right, *inputs(torch.bfloat16))
    assert into_gradients(gm, 0) == (gm, 0)
