"""What `torch.compile` would plan for a model and its inputs, without compiling it.

The model is traced as in its first call, and the planning's result is carried out of PyTorch's
compilation by an exception that is no error, before any code is kept: no cache of PyTorch's and no
report changes.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from dtrcompile.backend import compile_graph
from dtrcompile.compilation.probing import ProbedPlan, probing
from dtrcompile.options import Budget, Options
from dtrcompile.passes.errors import CaptureError, wrapped_error
from dtrcompile.passes.fitting.fit import Outcome
from dtrcompile.passes.torch_private import FakeTensorMode


def planned_outcome(
    model: Callable[..., Any],
    inputs: Sequence[Any],
    options: Options,
    *,
    dynamic_dimensions: Mapping[int, int] | None = None,
) -> Outcome:
    """As `planned_for`, for the budget of the options.

    Raises:
        InfeasibleBudgetError: if no plan fits.
        CaptureError: if the model does not compile as one graph.
    """
    return planned_for(model, inputs, options, dynamic_dimensions=dynamic_dimensions).outcome


def planned_for(
    model: Callable[..., Any],
    inputs: Sequence[Any],
    options: Options,
    *,
    budgets: Sequence[Budget] = (),
    dynamic_dimensions: Mapping[int, int] | None = None,
) -> ProbedPlan:
    """Trace the first graph of a call, which must be the only one, and plan it for each budget.

    Args:
        budgets: none: that of the options.
        dynamic_dimensions: input -> its dimension whose size is to be a symbol; the others, and
            without them all, are fixed.

    Raises:
        CaptureError: if the model does not compile as one graph.
    """
    model, inputs = _without_data(model, inputs)
    marked: list[Any] = list(inputs)
    for index, dimension in (dynamic_dimensions or {}).items():
        value = marked[index]
        assert isinstance(value, Tensor)
        marked[index] = value.detach().requires_grad_(value.requires_grad)
        torch._dynamo.mark_dynamic(marked[index], dimension)

    def backend(gm: torch.fx.GraphModule, example_inputs: Sequence[Any]) -> Any:
        return compile_graph(gm, example_inputs, options)

    compiled = torch.compile(
        model,
        backend=backend,
        fullgraph=True,
        dynamic=None if dynamic_dimensions else False,
    )
    try:
        with probing(budgets), torch.enable_grad():
            compiled(*marked)
    except ProbedPlan as planned:
        return planned
    except Exception as error:
        ours = wrapped_error(error)
        if ours is not None:
            raise ours from error
        raise CaptureError(
            "the model does not compile as one graph with these inputs, so its step cannot be"
            f" planned beforehand: {_told(error)} (TORCH_LOGS=graph_breaks says where)"
        ) from error
    raise CaptureError("the model computes nothing that needs a gradient, so nothing was planned")


def _without_data(
    model: Callable[..., Any], inputs: Sequence[Any]
) -> tuple[Callable[..., Any], Sequence[Any]]:
    """Of a module that was built under ``torch.device("meta")``: a copy of it as if it was on the
    CPU, without data, and such inputs.  Of any other: what is given."""
    if not isinstance(model, nn.Module):
        return model, inputs
    tensors = [*model.parameters(), *model.buffers()]
    if not any(t.is_meta for t in tensors):
        return model, inputs
    mode = FakeTensorMode(allow_non_fake_inputs=True)

    def fake(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        found = torch.empty_strided(leaf.size(), leaf.stride(), dtype=leaf.dtype)
        return found.requires_grad_(leaf.requires_grad)

    copied = copy.deepcopy(model)
    with mode:
        return copied.to_empty(device="cpu"), pytree.tree_map(fake, list(inputs))


def _told(error: Exception) -> str:
    """The first line of an error of Dynamo's, and what it hints at, in one line."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    hints = [line for line in lines[1:] if line.startswith("Hint:")]
    return " ".join([*lines[:1], *hints]) or type(error).__name__
