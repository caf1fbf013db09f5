"""Which autograd node a call of a compiled graph has."""

from __future__ import annotations

import torch
from torch import Tensor

from dtrcompile.steps.autograd_nodes import backward_node


def compiled(function: object) -> object:
    torch._dynamo.reset()
    return torch.compile(function, backend="aot_eager")


def leaf() -> Tensor:
    return torch.randn(4, 3, requires_grad=True)


def made_by_a_call() -> tuple[Tensor, object]:
    """What a compiled graph returned, and the node of that call."""
    x = leaf()
    result = compiled(lambda x: x.sin() * 2)(x)  # type: ignore[operator]
    node = backward_node([result])
    assert node is not None
    return result, node


def test_a_call_has_the_node_of_its_outputs() -> None:
    result, node = made_by_a_call()
    assert node is result.grad_fn


def test_a_view_among_the_outputs_leads_to_the_node() -> None:
    x = leaf()

    def viewed(x: Tensor) -> tuple[Tensor, Tensor]:
        y = x.sin()
        return y.view(-1), y

    first, second = compiled(viewed)(x)  # type: ignore[operator]
    node = backward_node([first, second])
    assert hasattr(type(node), "saved_tensors")


def test_a_call_that_writes_into_its_input_has_a_node_of_its_own() -> None:
    y, node = made_by_a_call()

    def updated(y: Tensor) -> Tensor:
        y.add_(y.detach().cos() + 0.25)
        return y

    result = compiled(updated)(y)  # type: ignore[operator]
    own = backward_node([result])
    assert hasattr(type(own), "saved_tensors")
    assert own is not node


def test_a_call_that_returns_its_input_has_not_the_inputs_node() -> None:
    y, _ = made_by_a_call()
    assert backward_node([y]) is None
    result = compiled(lambda y: y.view(-1))(y)  # type: ignore[operator]
    assert backward_node([result]) is None


def test_without_gradients_there_is_none() -> None:
    y, _ = made_by_a_call()
    with torch.no_grad():
        assert backward_node([y]) is None
