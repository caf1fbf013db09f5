"""An optimizer's update of one parameter, as code that Dynamo traces.

`torch.optim.Optimizer.step` updates all parameters from their ``.grad``.  In a graph of the whole
step each parameter is updated from a gradient that exists only there, and alone, so that the
gradient can be freed at once.  What is traced is the optimizer's own ``step``, called on a stand-in
that has one parameter.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import optim

from dtrcompile.passes.errors import UnsupportedOptimizerError

# Of a parameter group: what is given anew at each step, and what one parameter alone has no use
# for: kernels that update many at once.
_GIVEN = frozenset({"params", "lr", "initial_lr"})
_ALONE = {"foreach": False, "fused": False}
# What reads the gradients again to choose its step, or takes no dense ones.
_READ_NUMBERS = (optim.RAdam, optim.ASGD)
_NOT_IN_A_GRAPH = ("LBFGS", "SparseAdam")


class ParameterUpdate:
    """How an optimizer updates one of its parameters.

    Args:
        optimizer: whose ``step`` it is.
        group: index of the parameter's group.
        parameter: which one.
    """

    def __init__(
        self, optimizer: optim.Optimizer, group: int, parameter: torch.nn.Parameter
    ) -> None:
        self.group = group
        self.parameter = parameter
        self._step = _step_of(type(optimizer))
        # These two read numbers from tensors, unless they are to run in a CUDA graph.
        self._form = {"capturable": True} if isinstance(optimizer, _READ_NUMBERS) else {}
        self._init_group = inspect.unwrap(type(optimizer)._init_group)  # type: ignore[attr-defined]

    def run(
        self,
        value: torch.Tensor,
        gradient: torch.Tensor,
        settings: Mapping[str, Any],
        state: Mapping[str, torch.Tensor],
        lr: torch.Tensor,
    ) -> None:
        """Update ``value`` and ``state`` in place; to be traced.

        Args:
            value: the parameter.
            gradient: of its shape.
            settings: the group's, without what is given here.
            state: the optimizer's for this parameter.
            lr: the learning rate, a tensor without dimensions in double precision, so that another
                value is no other graph.
        """
        alone = value.detach()
        alone.grad = gradient
        group = {**settings, **_ALONE, **self._form, "params": [alone], "lr": lr}
        # The usual loop computes with such numbers (of steps, above all) in double precision.
        precise = {name: v.double() if _is_number(v) else v for name, v in state.items()}
        self._step(_OneParameter(self._init_group, group, {alone: precise}))
        for name, v in state.items():
            if _is_number(v):
                v.copy_(precise[name])


def _is_number(value: torch.Tensor) -> bool:
    return value.dim() == 0 and value.is_floating_point()


class _OneParameter:
    """What an optimizer's ``step`` takes for the optimizer."""

    def __init__(
        self, init_group: Callable[..., Any], group: dict[str, Any], state: dict[torch.Tensor, Any]
    ) -> None:
        self._unbound_init_group = init_group
        self.param_groups = [group]
        self.state = state

    def _init_group(self, *arguments: Any) -> Any:
        return self._unbound_init_group(self, *arguments)

    # Of these two, each release of torch calls one.
    def _cuda_graph_capture_health_check(self) -> None:
        pass

    def _accelerator_graph_capture_health_check(self) -> None:
        pass


def _step_of(kind: type[optim.Optimizer]) -> Callable[[Any], Any]:
    """The ``step`` of an optimizer's class, without what PyTorch wraps around it."""
    if issubclass(kind, optim.Adafactor):
        return _adafactor_step
    return inspect.unwrap(kind.step)


def settings_of(group: Mapping[str, Any]) -> dict[str, Any]:
    """What a parameter group says, without the parameters and the learning rate."""
    return {name: value for name, value in group.items() if name not in _GIVEN}


def prepare(optimizer: optim.Optimizer) -> None:
    """Make the state that the optimizer's first step would make.

    Raises:
        UnsupportedOptimizerError: if the optimizer cannot be part of a graph.
    """
    name = type(optimizer).__name__
    if name in _NOT_IN_A_GRAPH or not hasattr(optimizer, "_init_group"):
        raise UnsupportedOptimizerError(name, "its step is not one of torch.optim's usual form")
    hooks = (*optimizer._optimizer_step_pre_hooks, *optimizer._optimizer_step_post_hooks)
    if hooks:
        raise UnsupportedOptimizerError(name, "hooks are registered on its step")
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.requires_grad and not optimizer.state.get(parameter):
                _make_state(optimizer, group, parameter)


def _make_state(
    optimizer: optim.Optimizer, group: dict[str, Any], parameter: torch.nn.Parameter
) -> None:
    n_lists = len(inspect.signature(optimizer._init_group).parameters) - 1  # type: ignore[attr-defined]
    kept = parameter.grad
    # State is made for what has a gradient.  This one takes no memory.
    parameter.grad = torch.zeros((), dtype=parameter.dtype, device=parameter.device).expand(
        parameter.shape
    )
    try:
        optimizer._init_group(  # type: ignore[attr-defined]
            {**group, "params": [parameter]}, *([] for _ in range(n_lists))
        )
    finally:
        parameter.grad = kept
    if isinstance(optimizer, optim.SGD) and group["momentum"]:
        if group["dampening"]:
            raise UnsupportedOptimizerError(
                "SGD", "with dampening, its first step is another than the following ones"
            )
        # The first step takes the gradient itself, which is what it adds to a buffer of zeros.
        optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)


def _adafactor_step(optimizer: Any) -> None:
    """`torch.optim.Adafactor.step` for one parameter, with tensors where that reads numbers.

    Shazeer and Stern, "Adafactor: Adaptive Learning Rates with Sublinear Memory Cost" (ICML 2018),
    algorithms 4 and 5; settings and their names are torch's.
    """
    (group,) = optimizer.param_groups
    (value,) = group["params"]
    state = optimizer.state[value]
    gradient = -value.grad if group["maximize"] else value.grad
    beta2_decay, eps2, d = group["beta2_decay"], group["eps"][1], group["d"]
    eps1 = group["eps"][0]
    if eps1 is None:
        eps1 = torch.finfo(value.dtype).eps
    step = state["step"]
    step += 1
    decay = (step**beta2_decay).to(value.device, value.dtype)
    rho = torch.minimum(group["lr"], step**-0.5).to(value.device, value.dtype)
    root_mean_square = value.norm(2) / value.numel() ** 0.5
    alpha = root_mean_square.clamp(min=eps2) * rho
    if group["weight_decay"] != 0:
        value.mul_(1 - group["lr"].to(value.device, value.dtype) * group["weight_decay"])
    if gradient.dim() > 1:
        row, column = state["row_var"], state["col_var"]
        row.lerp_(gradient.norm(dim=-1, keepdim=True).square() / gradient.size(-1), decay)
        column.lerp_(gradient.norm(dim=-2, keepdim=True).square() / gradient.size(-2), decay)
        variance = row @ column / row.mean(dim=-2, keepdim=True).clamp(min=eps1)
    else:
        variance = state["variance"]
        variance.lerp_(gradient * gradient, decay)
    update = variance.clamp(min=eps1 * eps1).rsqrt() * gradient
    denominator = (update.norm(2) / (update.numel() ** 0.5 * d)).clamp(min=1.0)
    value.sub_(update * (alpha / denominator))
