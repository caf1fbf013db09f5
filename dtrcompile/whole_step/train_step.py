"""``dtrcompile.train_step``: forward, backward and the optimizer's update, as one graph.

In the usual loop all gradients exist at the same time, because backward ends before
``optimizer.step()`` begins.  In one graph each parameter is updated as soon as its gradient is
known and nothing reads the old value any more, and the gradient is then freed.  The least that a
step can hold is then what the model, the optimizer's state and a layer or two need.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn, optim
from torch.utils import _pytree as pytree

from dtrcompile.backend import dtr
from dtrcompile.options import Options
from dtrcompile.passes.errors import OptionError, UnsupportedOptimizerError
from dtrcompile.passes.torch_private import dynamo_config, mark_static_address
from dtrcompile.whole_step.update import ParameterUpdate, prepare, settings_of

Loss = Callable[[Any, Any], torch.Tensor]


def train_step(
    model: nn.Module,
    optimizer: optim.Optimizer,
    loss_fn: Loss | None = None,
    *,
    budget: str | int | None = None,
    max_norm: float | None = None,
    accumulate: int = 1,
    **options: Any,
) -> TrainStep:
    """A training step that updates the parameters in the same graph, within a budget of bytes.

        step = dtrcompile.train_step(model, optimizer, nn.functional.cross_entropy, budget="8GiB")
        for inputs, targets in loader:
            loss = step(inputs, targets)

    does ``loss = loss_fn(model(inputs), targets)``, ``loss.backward()``, ``optimizer.step()`` and
    ``optimizer.zero_grad()``.  The ``.grad`` of the parameters is neither read nor written.  The
    optimizer is the user's own: its state, and its learning rate, can be saved, loaded and changed
    at any time, and the usual loop can be taken up again after any step.

    Args:
        model: what is trained; its parameters that the optimizer does not have stay as they are.
        optimizer: one of those in `torch.optim`, except LBFGS and SparseAdam.
        loss_fn: takes what the model returns and the targets, which are then the last argument of
            each step.  None means that the model returns the loss, or something that has it as
            ``.loss``.
        budget: see `dtrcompile.options.Options`; it covers parameters, the optimizer's state,
            gradients and all that is computed.
        max_norm: all gradients together are scaled down to this norm, as
            `torch.nn.utils.clip_grad_norm_` does.  Every gradient is then held until the last is
            known.
        accumulate: number of micro-batches, of equal size, that a batch is computed in, one after
            the other.  The loss is the mean of their losses.
        options: further options of the backend.

    Raises:
        OptionError: if an argument cannot be used.
        UnsupportedOptimizerError: if the optimizer's update cannot be part of a graph.
    """
    return TrainStep(
        model,
        optimizer,
        loss_fn,
        max_norm=max_norm,
        accumulate=accumulate,
        options={**options, **({} if budget is None else {"budget": budget})},
    )


class TrainStep:
    """A training step; see `train_step`, which makes it."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: optim.Optimizer,
        loss_fn: Loss | None,
        *,
        max_norm: float | None,
        accumulate: int,
        options: Mapping[str, Any],
    ) -> None:
        if isinstance(accumulate, bool) or not isinstance(accumulate, int) or accumulate < 1:
            raise OptionError(f"accumulate is {accumulate!r}; give a whole number, 1 or more")
        if max_norm is not None and not max_norm > 0:
            raise OptionError(f"max_norm is {max_norm!r}; give a number above 0, or None")
        self.model, self.optimizer = model, optimizer
        self._loss_fn = loss_fn
        self._max_norm, self._accumulate = max_norm, accumulate
        self._logs = _logs()
        self._updates = _updates(model, optimizer)
        self._settings: list[dict[str, Any]] = []
        self._states: list[Mapping[str, torch.Tensor]] = []
        self._device = self._updates[0].parameter.device.type
        options = {**options, "whole_step": True}
        Options.parse(options)  # an option that is not one is said here, not at the first step
        self._compiled = torch.compile(self._run, backend=dtr, fullgraph=True, options=options)

    def __call__(self, *inputs: Any, **keywords: Any) -> torch.Tensor:
        """Run one step.

        Returns:
            The loss before the update, without autograd's graph behind it.

        Raises:
            InfeasibleBudgetError: if the step does not fit, before anything is computed.
            OptionError: if a batch cannot be cut into micro-batches.
        """
        prepare(self.optimizer)
        groups = self.optimizer.param_groups
        self._settings = [settings_of(group) for group in groups]
        self._states = [dict(self.optimizer.state.get(u.parameter, {})) for u in self._updates]
        for state in self._states:
            for value in state.values():
                mark_static_address(value, guard=False)
        lrs = [torch.as_tensor(group["lr"], dtype=torch.float64) for group in groups]
        batches = _cut(inputs, keywords, self._accumulate)
        autocast = None
        if torch.is_autocast_enabled(self._device):
            autocast = torch.get_autocast_dtype(self._device)
        # Backward and the update are not what autocast is for.
        with (
            torch.no_grad(),
            torch.autocast(self._device, enabled=False),
            dynamo_config.patch(
                trace_autograd_ops=True,
                ignore_logging_functions=self._logs | dynamo_config.ignore_logging_functions,
            ),
        ):
            loss: torch.Tensor = self._compiled(batches, lrs, autocast)
        # What a scheduler looks at to warn of a wrong order.
        self.optimizer._opt_called = True  # type: ignore[attr-defined]
        return loss

    # --- traced -----------------------------------------------------------------------------------

    def _run(
        self,
        batches: Sequence[tuple[Sequence[Any], Mapping[str, Any]]],
        lrs: Sequence[torch.Tensor],
        autocast: torch.dtype | None,
    ) -> torch.Tensor:
        parameters = [u.parameter for u in self._updates]
        gradients: list[torch.Tensor] = []
        losses = []
        for inputs, keywords in batches:
            with torch.enable_grad():
                loss = self._loss(inputs, keywords, autocast)
                found = torch.autograd.grad(loss, parameters)
            losses.append(loss.detach())
            gradients = [*found] if not gradients else _added(gradients, found)
        n = len(batches)
        if n > 1:
            gradients = [gradient / n for gradient in gradients]
        if self._max_norm is not None:
            gradients = _clipped(gradients, self._max_norm)
        for update, gradient, state in zip(self._updates, gradients, self._states, strict=True):
            group = update.group
            update.run(update.parameter, gradient, self._settings[group], state, lrs[group])
        return losses[0] if n == 1 else sum(losses) / n  # type: ignore[return-value]

    def _loss(
        self, inputs: Sequence[Any], keywords: Mapping[str, Any], autocast: torch.dtype | None
    ) -> torch.Tensor:
        with torch.autocast(self._device, dtype=autocast, enabled=autocast is not None):
            if self._loss_fn is None:
                found = self.model(*inputs, **keywords)
                return _loss_of(found)
            *given, targets = inputs
            return self._loss_fn(self.model(*given, **keywords), targets)


def _logs() -> set[Any]:
    """The methods of loggers, those that libraries add included.

    What a model logs while it is traced would end the graph; many models of transformers do that.
    """
    methods = vars(logging.Logger).items()
    return {method for name, method in methods if callable(method) and not name.startswith("_")}


def _loss_of(found: Any) -> torch.Tensor:
    """The loss among what a model returns."""
    if isinstance(found, torch.Tensor):
        return found
    loss: torch.Tensor = found["loss"] if isinstance(found, Mapping) else found.loss
    return loss


def _updates(model: nn.Module, optimizer: optim.Optimizer) -> list[ParameterUpdate]:
    """How each parameter is updated, in the optimizer's order."""
    prepare(optimizer)
    of_model = set(model.parameters())
    found: list[ParameterUpdate] = []
    for index, group in enumerate(optimizer.param_groups):
        for parameter in group["params"]:
            if not parameter.requires_grad:
                continue
            if parameter not in of_model:
                raise UnsupportedOptimizerError(
                    type(optimizer).__name__,
                    f"it has a parameter of shape {tuple(parameter.shape)} that is none of the"
                    " model's",
                )
            found.append(ParameterUpdate(optimizer, index, parameter))
    if not found:
        raise UnsupportedOptimizerError(
            type(optimizer).__name__, "none of its parameters wants a gradient"
        )
    return found


def _added(sums: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    return [total + gradient for total, gradient in zip(sums, gradients, strict=True)]


def _clipped(gradients: Sequence[torch.Tensor], max_norm: float) -> list[torch.Tensor]:
    """As `torch.nn.utils.clip_grad_norm_`."""
    norms = [torch.linalg.vector_norm(gradient) for gradient in gradients]
    norm = torch.linalg.vector_norm(torch.stack(norms))
    factor = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
    return [gradient * factor.to(gradient.dtype) for gradient in gradients]


def _cut(
    inputs: Sequence[Any], keywords: Mapping[str, Any], n: int
) -> list[tuple[list[Any], dict[str, Any]]]:
    """A step's arguments as micro-batches: tensors are cut along their first dimension.

    Raises:
        OptionError: if they cannot be.
    """
    if n == 1:
        return [(list(inputs), dict(keywords))]
    leaves, structure = pytree.tree_flatten((list(inputs), dict(keywords)))
    lengths = sorted({v.shape[0] for v in leaves if isinstance(v, torch.Tensor) and v.dim()})
    if len(lengths) != 1 or lengths[0] % n:
        raise OptionError(
            f"accumulate={n} cuts a batch into {n} micro-batches of equal size, but the tensors of"
            f" this one have {' and '.join(map(str, lengths)) or 'no'} samples. If the last batch"
            " of a loader is smaller, drop it (drop_last=True); and pass only tensors that have one"
            " entry a sample."
        )
    rows = lengths[0] // n
    return [
        pytree.tree_unflatten(
            [
                v[i * rows : (i + 1) * rows] if isinstance(v, torch.Tensor) and v.dim() else v
                for v in leaves
            ],
            structure,
        )
        for i in range(n)
    ]
