"""What `torch.compile` would plan for a model and its inputs, without compiling it.

The model is traced as in its first call, and the planning's result is carried out of PyTorch's
compilation by an exception that is no error, before any code is kept: no cache of PyTorch's and no
report changes.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from dtrcompile.backend import compile_graph
from dtrcompile.compilation.probing import Asked, ProbedPlan, probing
from dtrcompile.compilation.segments import reserved_by
from dtrcompile.elsewhere import HERE, Elsewhere, moved
from dtrcompile.options import Budget, ObjectsBeside, Options
from dtrcompile.passes.device.optimizer_step import (
    Request,
    innermost,
    step_requests,
)
from dtrcompile.passes.errors import (
    CaptureError,
    InfeasibleBudgetError,
    OptionError,
    wrapped_error,
)
from dtrcompile.passes.fitting.fit import Outcome
from dtrcompile.passes.inductor.step import device_of
from dtrcompile.passes.target.tracing import not_traced


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
    elsewhere: Elsewhere = HERE,
    n_reserved: int = 0,
    stock: Sequence[float] = (),
) -> ProbedPlan:
    """Trace the first graph of a call, which must be the only one, and plan it for each budget.

    Args:
        budgets: none: that of the options.
        dynamic_dimensions: input -> its dimension whose size is to be a symbol; the others, and
            without them all, are fixed.
        elsewhere: where and how the step is to run.
        n_reserved: for how many budgets, from the first on, the allocator is followed.
        stock: settings of ``activation_memory_budget`` at which PyTorch splits the step too.

    Raises:
        CaptureError: if the model does not compile as one graph.
    """
    with elsewhere.entered():
        model, inputs, optimizers = moved(model, inputs, options.optimizer.alive(), elsewhere)
        options = replace(options, optimizer=ObjectsBeside(optimizers))
        asked = Asked(budgets, stock)
        planned = _planned(model, inputs, options, asked, dynamic_dimensions or {})
        with not_traced():
            planned.reserved_bytes = _reserved_bytes(planned.outcomes[:n_reserved], optimizers)
        return planned


def _planned(
    model: Callable[..., Any],
    inputs: Sequence[Any],
    options: Options,
    asked: Asked,
    dynamic_dimensions: Mapping[int, int],
) -> ProbedPlan:
    _check_call(model, inputs)
    marked: list[Any] = list(inputs)
    for index, dimension in dynamic_dimensions.items():
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
        with probing(asked), torch.enable_grad():
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


def _check_call(model: Callable[..., Any], inputs: Sequence[Any]) -> None:
    """Whether the model takes these inputs at all.

    Raises:
        OptionError: if not.
    """
    called = model.forward if isinstance(model, torch.nn.Module) else model
    try:
        signature = inspect.signature(called)
    except (TypeError, ValueError):  # a builtin, say
        return
    try:
        signature.bind(*inputs)
    except TypeError as error:
        raise OptionError(
            f"the model cannot be called with these inputs, {len(inputs)} in all: {error}. They are"
            " its positional arguments, one by one; for others, give a module that calls the"
            " model with them."
        ) from error


def _reserved_bytes(
    outcomes: Sequence[Outcome | InfeasibleBudgetError], optimizers: Sequence[Any]
) -> list[int | None]:
    """For each outcome: what PyTorch's caching allocator takes from the device over some steps.

    None for a refusal, and on a device whose allocator keeps nothing.
    """
    asked: list[tuple[Sequence[Request], Sequence[Request]]] | None = None
    found: list[int | None] = []
    for outcome in outcomes:
        if isinstance(outcome, InfeasibleBudgetError):
            found.append(None)
            continue
        device = device_of(outcome.captured)
        if asked is None and device.type == "cuda":
            asked = [
                step_requests(innermost(o), device)
                for o in optimizers
                if isinstance(o, torch.optim.Optimizer)
            ]
        found.append(reserved_by(outcome, asked or ()))
    return found


def _told(error: Exception) -> str:
    """The first line of an error of Dynamo's, and what it hints at, in one line."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    hints = [line for line in lines[1:] if line.startswith("Hint:")]
    raised = [part for line in lines if (part := line.partition(_RAISED)[2])]
    if raised:  # by the model itself
        return "it raises " + _VARIABLE.sub(r"\1", raised[0])
    # Of an error in what compiles the graph, the first line says no more than that.
    n_first = 2 if lines and lines[0].endswith("raised:") else 1
    return " ".join([*lines[:n_first], *hints]) or type(error).__name__


# How Dynamo names an exception that nobody handles in what it traces.
_RAISED = "Developer debug context: raised exception "
# What it was given, up to PyTorch 2.11.
_VARIABLE = re.compile(r"\[ConstantVariable\(\w+: (.*?)\)\]")
