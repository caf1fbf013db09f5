"""Products of padded operands are taken back, and only those."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional as F

from dtrcompile.passes.graphs.padding import without_padding
from tests.unit.padded_products import pad_products

M, K, N = 6, 5, 7
Function = Callable[..., Tensor]


def traced(function: Function, *inputs: Tensor) -> fx.GraphModule:
    return make_fx(function, tracing_mode="fake")(*inputs)


def count(gm: fx.GraphModule, target: object) -> int:
    return len(gm.graph.find_nodes(op="call_function", target=target))


def padded(x: Tensor, rows: int = 0, columns: int = 0) -> Tensor:
    return F.pad(x, (0, columns, 0, rows))


def mm(a: Tensor, b: Tensor) -> Tensor:
    return (padded(a, 2, 3) @ padded(b, 3, 1))[:-2, :-1]


def mm_inner(a: Tensor, b: Tensor) -> Tensor:
    return padded(a, 0, 3) @ padded(b, 3, 0)


def mm_rows(a: Tensor, b: Tensor) -> Tensor:
    return (padded(a, 2) @ b)[:-2]


def mm_columns(a: Tensor, b: Tensor) -> Tensor:
    return (a @ padded(b, 0, 1))[:, :-1].relu()


def addmm(a: Tensor, b: Tensor) -> Tensor:
    bias = torch.arange(1.0, N + 1)
    longer = torch.cat([bias, torch.zeros(1)])
    return torch.addmm(longer, padded(a, 0, 3), padded(b, 3, 1), beta=2.0, alpha=0.5)[:, :-1]


def addmm_of_a_matrix(a: Tensor, b: Tensor) -> Tensor:
    return torch.addmm(padded(torch.ones(M, N), 2, 1), padded(a, 2), padded(b, 0, 1))[:-2, :-1]


def addmm_of_one_column(a: Tensor, b: Tensor) -> Tensor:
    return torch.addmm(torch.ones(M, 1), a, padded(b, 0, 1))[:, :-1]


def read_twice(a: Tensor, b: Tensor) -> Tensor:
    product = padded(a, 2, 3) @ padded(b, 3, 1)
    return product[:-2, :-1] + product[:, :-1][:-2]


@pytest.mark.parametrize(
    "function",
    [
        mm,
        mm_inner,
        mm_rows,
        mm_columns,
        addmm,
        addmm_of_a_matrix,
        addmm_of_one_column,
        read_twice,
    ],
)
def test_padding_is_left_out(function: Function) -> None:
    inputs = torch.randn(M, K), torch.randn(K, N)
    given = traced(function, *inputs)
    before = str(given.graph)
    found, n_products = without_padding(given)
    assert n_products == 1
    (product,) = [n for n in found.graph.nodes if "mm" in str(n.target)]
    assert product.meta["val"].shape == (M, N)
    of_factors = product.args[-2:]
    assert [n.op for n in of_factors] == ["placeholder", "placeholder"]
    torch.testing.assert_close(found(*inputs), function(*inputs))
    assert str(given.graph) == before


def test_padding_of_batches() -> None:
    def bmm(a: Tensor, b: Tensor) -> Tensor:
        return torch.bmm(F.pad(a, (0, 3, 0, 2)), F.pad(b, (0, 1, 0, 3, 0, 0)))[:, :-2][..., :-1]

    inputs = torch.randn(3, M, K), torch.randn(3, K, N)
    found, n_products = without_padding(traced(bmm, *inputs))
    assert (n_products, count(found, torch.ops.aten.constant_pad_nd.default)) == (1, 0)
    torch.testing.assert_close(found(*inputs), bmm(*inputs))


def test_one_padded_copy_of_two_products() -> None:
    def both(a: Tensor, b: Tensor) -> Tensor:
        wide = padded(b, 0, 1)
        return (a @ wide)[:, :-1] + (2 * a @ wide)[:, :-1]

    inputs = torch.randn(M, K), torch.randn(K, N)
    found, n_products = without_padding(traced(both, *inputs))
    assert (n_products, count(found, torch.ops.aten.constant_pad_nd.default)) == (2, 0)
    torch.testing.assert_close(found(*inputs), both(*inputs))


@pytest.mark.parametrize("alignment", [2, 16])
def test_a_joint_graph_is_taken_back(alignment: int) -> None:
    def step(x: Tensor, w: Tensor) -> Tensor:
        return F.cross_entropy(torch.tanh(x @ w), torch.arange(M) % N)

    inputs = torch.randn(M, K), torch.randn(K, N)
    gm, plain = (traced(torch.func.grad(step, argnums=(0, 1)), *inputs) for _ in range(2))
    n_padded = pad_products(gm, alignment)
    assert n_padded == count(gm, torch.ops.aten.mm.default) == 3
    found, n_products = without_padding(gm)
    assert n_products == n_padded
    for ours, theirs in zip(found(*inputs), plain(*inputs), strict=True):
        assert torch.equal(ours, theirs) and ours.stride() == theirs.stride()
    targets, expected = ([n.target for n in g.graph.nodes] for g in (found, plain))
    assert targets == expected


def whole_result(a: Tensor, b: Tensor) -> Tensor:
    return a @ padded(b, 0, 1)


def cut_too_short(a: Tensor, b: Tensor) -> Tensor:
    return (a @ padded(b, 0, 1))[:, :-2]


def cut_from_the_wrong_end(a: Tensor, b: Tensor) -> Tensor:
    return (a @ padded(b, 0, 1))[:, 1:]


def of_ones(a: Tensor, b: Tensor) -> Tensor:
    return F.pad(a, (0, 2), value=1.0) @ F.pad(b, (0, 0, 0, 2), value=1.0)


def in_front(a: Tensor, b: Tensor) -> Tensor:
    return (a @ F.pad(b, (1, 1)))[:, :-1]


def one_factor_only(a: Tensor, b: Tensor) -> Tensor:
    return padded(a, 0, 3) @ torch.cat([b, torch.ones(3, N)])


def read_whole_too(a: Tensor, b: Tensor) -> Tensor:
    product = a @ padded(b, 0, 1)
    return product[:, :-1] + product.sum()


@pytest.mark.parametrize(
    "function",
    [
        whole_result,
        cut_too_short,
        cut_from_the_wrong_end,
        of_ones,
        in_front,
        one_factor_only,
        read_whole_too,
    ],
)
def test_other_padding_stays(function: Function) -> None:
    given = traced(function, torch.randn(M, K), torch.randn(K, N))
    found, n_products = without_padding(given)
    assert found is given
    assert n_products == 0
