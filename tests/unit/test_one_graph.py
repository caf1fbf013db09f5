"""A step that was traced as one graph, split by PyTorch's partitioner and joined again."""

from __future__ import annotations

import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx

from dtrcompile.passes.graphs.one_graph import split_and_joined
from dtrcompile.passes.graphs.writes import final_writes
from dtrcompile.passes.torch_private import min_cut_rematerialization_partition, select_decomp_table

ROWS, WIDTH = 16, 8


def step(x: Tensor, w: Tensor, v: Tensor) -> tuple[Tensor]:
    """A layer with an activation of many operators, its gradients, and the update."""

    def loss(w: Tensor, v: Tensor) -> Tensor:
        h = x @ w
        return ((torch.tanh(h) * torch.sigmoid(h)) @ v).square().mean()

    (for_w, for_v), found = torch.func.grad_and_value(loss, argnums=(0, 1))(w, v)
    w.copy_(w - 0.1 * for_w)
    v.copy_(v - 0.1 * for_v)
    return (found,)


def values() -> list[Tensor]:
    torch.manual_seed(0)
    shapes = [(ROWS, WIDTH), (WIDTH, WIDTH), (WIDTH, WIDTH)]
    return [torch.randn(shape, dtype=torch.float64) for shape in shapes]


def traced() -> fx.GraphModule:
    pure = torch.func.functionalize(step, remove="mutations")
    return make_fx(pure, decomposition_table=select_decomp_table(), tracing_mode="fake")(*values())


def partition(gm: fx.GraphModule, n_outputs: int) -> tuple[fx.GraphModule, fx.GraphModule]:
    found: tuple[fx.GraphModule, fx.GraphModule] = min_cut_rematerialization_partition(
        gm, None, num_fwd_outputs=n_outputs
    )
    return found


def calls(gm: fx.GraphModule) -> list[fx.Node]:
    return [n for n in gm.graph.nodes if n.op == "call_function"]


def test_the_same_is_computed_with_less_kept() -> None:
    gm = traced()
    joined = split_and_joined(gm, partition)
    assert len(final_writes(calls(joined))) == 2
    expected, found = values(), values()
    a = fx.Interpreter(gm).run(*expected)
    b = fx.Interpreter(joined).run(*found)
    torch.testing.assert_close(b, a)
    for x, y in zip(expected, found, strict=True):
        torch.testing.assert_close(y, x)
    # The activation is computed again from the product; all of its operators were kept before.
    tanh = torch.ops.aten.tanh.default
    assert sum(n.target is tanh for n in calls(gm)) == 1
    assert sum(n.target is tanh for n in calls(joined)) == 2


def test_a_graph_that_writes_nothing_stays_as_it_is() -> None:
    gm = make_fx(lambda x: x + 1, tracing_mode="fake")(torch.ones(2))
    assert split_and_joined(gm, partition) is gm
