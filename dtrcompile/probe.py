"""What `torch.compile` would plan for a model and its inputs, without compiling it.

The model is traced as in its first call, and the planning's result is carried out of PyTorch's
compilation by an exception that is no error, before any code is kept: no cache of PyTorch's and no
report changes.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from dtrcompile.backend import compile_graph
from dtrcompile.compilation.probing import ProbedPlan, probing
from dtrcompile.options import Budget, ObjectsBeside, Options
from dtrcompile.passes.device.allocators import allocator_of, library_workspace_bytes
from dtrcompile.passes.device.optimizer_step import (
    Request,
    innermost,
    state_tensors,
    step_requests,
)
from dtrcompile.passes.errors import CaptureError, InfeasibleBudgetError, OptionError, wrapped_error
from dtrcompile.passes.fitting.fit import Outcome
from dtrcompile.passes.fitting.inductor_model import ScheduleSizeModel
from dtrcompile.passes.fitting.reserved import reserved_bytes
from dtrcompile.passes.inductor.step import device_of, trace
from dtrcompile.passes.target.devices import Target, planning_for
from dtrcompile.passes.target.stand_in import standing_in
from dtrcompile.passes.target.tracing import DEVICE, traced
from dtrcompile.passes.torch_private import FakeTensorMode


@dataclass(frozen=True, slots=True)
class Elsewhere:
    """Where and how a step is to run, if not as it would here.

    Attributes:
        target: the GPU; None: where the model's tensors are.
        dtype: of its floating-point parameters, buffers and inputs; None: their own.
        autocast: the dtype of automatic mixed precision; None: off.
    """

    target: Target | None = None
    dtype: torch.dtype | None = None
    autocast: torch.dtype | None = None

    @property
    def moves(self) -> bool:
        """Whether tensors are replaced."""
        return self.target is not None or self.dtype is not None

    @property
    def device(self) -> torch.device:
        """Of tensors that are replaced."""
        return torch.device("cpu") if self.target is None else DEVICE

    def check(self, dtypes: Iterable[torch.dtype]) -> None:
        """
        Args:
            dtypes: of the tensors that are replaced.

        Raises:
            OptionError: if the GPU cannot compute in one of them.
        """
        used = {*dtypes, self.dtype, self.autocast}
        if self.target is not None and torch.bfloat16 in used and not self.target.has_bfloat16:
            raise OptionError(
                f"{self.target.name} does not compute in bfloat16, so Inductor does not compile for"
                " it. Plan with float16 or float32."
            )

    @contextlib.contextmanager
    def entered(self) -> Iterator[None]:
        """Inside of the ``with`` block, models are traced and planned so."""
        with contextlib.ExitStack() as stack:
            if self.target is not None:
                stack.enter_context(planning_for(self.target))
                stack.enter_context(standing_in(self.target))
                stack.enter_context(traced(self.target))
            if self.autocast is not None:
                stack.enter_context(torch.autocast(self.device.type, self.autocast))
            yield


HERE = Elsewhere()


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
) -> ProbedPlan:
    """Trace the first graph of a call, which must be the only one, and plan it for each budget.

    Args:
        budgets: none: that of the options.
        dynamic_dimensions: input -> its dimension whose size is to be a symbol; the others, and
            without them all, are fixed.
        elsewhere: where and how the step is to run.

    Raises:
        CaptureError: if the model does not compile as one graph.
    """
    with elsewhere.entered():
        return _planned(model, inputs, options, budgets, dynamic_dimensions or {}, elsewhere)


def _planned(
    model: Callable[..., Any],
    inputs: Sequence[Any],
    options: Options,
    budgets: Sequence[Budget],
    dynamic_dimensions: Mapping[int, int],
    elsewhere: Elsewhere,
) -> ProbedPlan:
    optimizers = options.optimizer.alive()
    model, inputs, optimizers = _moved(model, inputs, optimizers, elsewhere)
    options = replace(options, optimizer=ObjectsBeside(optimizers))
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
        with probing(budgets), torch.enable_grad():
            compiled(*marked)
    except ProbedPlan as planned:
        planned.reserved_bytes = _reserved_bytes(planned, optimizers)
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


def _reserved_bytes(planned: ProbedPlan, optimizers: Sequence[Any]) -> list[int | None]:
    """For each outcome: what PyTorch's caching allocator takes from the device over some steps.

    None for a refusal, and on a device whose allocator keeps nothing.
    """
    asked: list[tuple[Sequence[Request], Sequence[Request]]] | None = None
    found: list[int | None] = []
    for outcome in planned.outcomes:
        model = None if isinstance(outcome, InfeasibleBudgetError) else outcome.measured.by_sizes
        if not isinstance(model, ScheduleSizeModel):
            found.append(None)
            continue
        device = device_of(model.lowered.captured)
        if device.type != "cuda":
            found.append(None)
            continue
        if asked is None:
            asked = [
                step_requests(innermost(o), device)
                for o in optimizers
                if isinstance(o, torch.optim.Optimizer)
            ]
        found.append(
            reserved_bytes(
                trace(model.lowered),
                asked,
                expandable_segments=allocator_of(device).splits_all,
                library_bytes=library_workspace_bytes(device),
            )
        )
    return found


def _moved(
    model: Callable[..., Any], inputs: Sequence[Any], optimizers: list[Any], elsewhere: Elsewhere
) -> tuple[Callable[..., Any], Sequence[Any], list[Any]]:
    """A copy of a module without data, inputs and optimizers of that kind: as they would be
    elsewhere.

    A module that was built under ``torch.device("meta")`` would be on the CPU, if nothing else is
    said.  Where nothing has to be moved, all is returned as it is.
    """
    if not isinstance(model, nn.Module):
        if elsewhere.target is not None or elsewhere.dtype is not None:
            raise CaptureError(
                "a function cannot be planned for another device or dtype, because its parameters"
                " are not known: pass an nn.Module."
            )
        return model, inputs, optimizers
    tensors = [*model.parameters(), *model.buffers()]
    if not elsewhere.moves and not any(t.is_meta for t in tensors):
        return model, inputs, optimizers
    elsewhere.check(
        t.dtype for t in [*tensors, *pytree.tree_leaves(inputs)] if isinstance(t, Tensor)
    )
    mode = FakeTensorMode(allow_non_fake_inputs=True)

    def fake(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        dtype = leaf.dtype
        if elsewhere.dtype is not None and dtype.is_floating_point:
            dtype = elsewhere.dtype
        with mode:
            found = torch.empty_strided(
                leaf.size(), leaf.stride(), dtype=dtype, device=elsewhere.device
            )
        found.requires_grad_(leaf.requires_grad)
        return nn.Parameter(found, leaf.requires_grad) if isinstance(leaf, nn.Parameter) else found

    # What is copied takes these for its tensors.
    memo: dict[int, Any] = {id(t): fake(t) for t in tensors}
    for optimizer in optimizers:
        if isinstance(optimizer, torch.optim.Optimizer):
            # Numbers keep their values, such as the count of its steps.
            state = [t for _, t in state_tensors(optimizer) if t.numel() > 1]
            memo.update({id(t): fake(t) for t in state})
    copied, moved = copy.deepcopy((model, optimizers), memo)
    return copied, pytree.tree_map(fake, list(inputs)), moved


def _told(error: Exception) -> str:
    """The first line of an error of Dynamo's, and what it hints at, in one line."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    hints = [line for line in lines[1:] if line.startswith("Hint:")]
    return " ".join([*lines[:1], *hints]) or type(error).__name__
