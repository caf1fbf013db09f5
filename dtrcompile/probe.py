"""What `torch.compile` would plan for a model and its inputs, without compiling it.

The model is traced as in its first call, and the planning's result is carried out of PyTorch's
compilation by an exception that is no error, before any code is kept: no cache of PyTorch's and no
report changes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from dtrcompile.backend import compile_graph
from dtrcompile.compilation.probing import ProbedPlan, probing
from dtrcompile.options import Options
from dtrcompile.passes.errors import CaptureError, wrapped_error
from dtrcompile.passes.fitting.fit import Outcome


def planned_outcome(
    model: Callable[..., Any],
    inputs: Sequence[Any],
    options: Options,
    *,
    dynamic_dimensions: Mapping[int, int] | None = None,
) -> Outcome:
    """Trace and plan the first graph of a call, which must be the only one.

    Args:
        dynamic_dimensions: input -> its dimension whose size is to be a symbol; the others, and
            without them all, are fixed.

    Raises:
        InfeasibleBudgetError: if no plan fits.
        CaptureError: if the model does not compile as one graph.
    """
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
        with probing(), torch.enable_grad():
            compiled(*marked)
    except ProbedPlan as planned:
        return planned.outcome
    except Exception as error:
        ours = wrapped_error(error)
        if ours is not None:
            raise ours from error
        raise CaptureError(
            f"the model does not compile as one graph with these inputs, so its step cannot be"
            f" planned beforehand: {error}"
        ) from error
    raise CaptureError("the model computes nothing that needs a gradient, so nothing was planned")
