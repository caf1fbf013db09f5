"""Errors of Inductor's that our graphs do not have."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from dtrcompile.passes.inductor.bug_fixes import write_out_alpha
from workloads.training import compile_dtr

pytestmark = pytest.mark.usefixtures("nothing_compiled")


def scaled(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    return torch.add(a @ b, c, alpha=0.1).sum() + torch.add(c, a @ b, alpha=0.2).square().sum()


@pytest.mark.parametrize("trains", [True, False])
def test_a_product_and_a_scaled_addition(trains: bool) -> None:
    torch.manual_seed(0)
    inputs = [torch.randn(8, 8, requires_grad=trains) for _ in range(3)]
    compiled = compile_dtr(scaled, 1 << 30, compiler="inductor")
    found, expected = compiled(*inputs), scaled(*inputs)
    torch.testing.assert_close(found, expected)
    if trains:
        for a, b in zip(
            torch.autograd.grad(found, inputs), torch.autograd.grad(expected, inputs), strict=True
        ):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


def test_only_such_additions_are_written_out() -> None:
    graph = torch.fx.Graph()
    x, y = graph.placeholder("x"), graph.placeholder("y")
    x.meta["val"] = y.meta["val"] = torch.ones(2, 2)
    product = graph.call_function(torch.ops.aten.mm.default, (x, y))
    add = torch.ops.aten.add.Tensor
    plain = graph.call_function(add, (product, x))
    other = graph.call_function(add, (x, y), {"alpha": 3})
    number = graph.call_function(add, (product, 2.0), {"alpha": 3})
    graph.output((plain, other, number, graph.call_function(add, (product, y), {"alpha": 3})))
    for node in (product, plain, other, number):
        node.meta["val"] = torch.ones(2, 2)
    gm = torch.fx.GraphModule({}, graph)
    expected = gm(torch.ones(2, 2), torch.ones(2, 2))
    write_out_alpha(gm)
    for a, b in zip(gm(torch.ones(2, 2), torch.ones(2, 2)), expected, strict=True):
        assert torch.equal(a, b)
    kept = [n for n in gm.graph.nodes if n.kwargs.get("alpha") == 3]
    assert kept == [other]
    assert sum(n.target is torch.ops.aten.mul.Tensor for n in gm.graph.nodes) == 1
