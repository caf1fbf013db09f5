"""Where and how a step is to run, if not as it would here: on another device, in another dtype."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from dtrcompile.passes.device.optimizer_step import state_tensors
from dtrcompile.passes.device.padding import foreseen as foreseen_padding
from dtrcompile.passes.errors import CaptureError, OptionError
from dtrcompile.passes.target.devices import Target, planning_for, target_of
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
        """Refuse a dtype that the GPU does not compute in.

        Args:
            dtypes: of the tensors that are replaced.

        Raises:
            OptionError: if one of them is such a dtype.
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
                stack.enter_context(foreseen_padding())
            if self.autocast is not None:
                stack.enter_context(torch.autocast(self.device.type, self.autocast))
            yield


HERE = Elsewhere()


def elsewhere_of(
    device: str | None, dtype: torch.dtype | None, autocast: torch.dtype | None
) -> Elsewhere:
    """As a user says it.

    Raises:
        OptionError: for a device that is not in the table.
    """
    return Elsewhere(None if device is None else target_of(device), dtype, autocast)


def moved(
    model: Callable[..., Any], inputs: Sequence[Any], optimizers: list[Any], elsewhere: Elsewhere
) -> tuple[Callable[..., Any], Sequence[Any], list[Any]]:
    """A copy of a module without data, inputs and optimizers of that kind: as they would be
    elsewhere.

    A module that was built under ``torch.device("meta")`` would be on the CPU, if nothing else is
    said.  Where nothing has to be moved, all is returned as it is.

    Raises:
        CaptureError: if a function is to be moved.
        OptionError: if the GPU cannot compute in a dtype that is used.
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
    copied = copy.deepcopy((model, optimizers), memo)
    return copied[0], pytree.tree_map(fake, list(inputs)), copied[1]
