"""Every large tensor is explained with the line of the model's code that ran when it was made.

The lines come from a run of the model in eager PyTorch: which line of code outside of PyTorch, in
which submodule, called the operator that made a tensor.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

import dtrcompile
from workloads.models import MODELS

_TORCH = str(Path(torch.__file__).parent)


class _Made(NamedTuple):
    """Where a tensor is made: the user's innermost line and the innermost submodule."""

    file: str
    line: int
    module: str

    def contains(self, other: _Made) -> bool:
        """Whether the other module is this one or in it."""
        return f"{other.module}.".startswith(f"{self.module}." if self.module else "")


class _Lines(TorchDispatchMode):
    """Collects where tensors are made, by their shapes."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.by_shape: dict[tuple[int, ...], set[_Made]] = {}
        self.path = [""]
        self.names = {id(module): name for name, module in model.named_modules()}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **kwargs or {})
        frame = sys._getframe(1)
        while frame.f_code.co_filename.startswith((_TORCH, __file__)):
            assert frame.f_back is not None
            frame = frame.f_back
        made = _Made(frame.f_code.co_filename, frame.f_lineno, self.path[-1])
        for tensor in pytree.tree_leaves(result):
            if isinstance(tensor, torch.Tensor):
                self.by_shape.setdefault(tuple(tensor.shape), set()).add(made)
        return result

    @contextmanager
    def following(self, model: nn.Module) -> Iterator[None]:
        """Keeps track of the submodule that runs."""
        handles = []
        for module in model.modules():
            enter, leave = self._enter, self._leave
            handles += [module.register_forward_pre_hook(enter)]
            handles += [module.register_forward_hook(leave)]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _enter(self, module: nn.Module, _args: object) -> None:
        self.path.append(self.names[id(module)])

    def _leave(self, _module: nn.Module, _args: object, _result: object) -> None:
        self.path.pop()


@pytest.mark.parametrize("name", ["gpt2_hf", "resnet", "unet", "lstm64"])
def test_every_large_tensor_is_explained_with_the_line_that_makes_it(name: str) -> None:
    model, inputs = MODELS[name].build(quick=True)
    lines = _Lines(model)
    with lines.following(model), lines:
        model(*inputs)
    explained = dtrcompile.plan(model, *inputs, budget="80%", compiler="eager").explain().data
    large = [
        t
        for t in explained.tensors
        if t.size_bytes >= explained.planned_peak_bytes / 100 and t.operator is not None
    ]
    everywhere = set().union(*lines.by_shape.values())
    forward, of_that_shape = 0, 0
    for tensor in large:
        assert tensor.operator is not None
        operator = explained.operators[tensor.operator]
        frame = operator.frames[-1]
        made = _Made(frame.file, frame.line, tensor.module)
        if operator.phase == "backward" and tensor.name.startswith("add"):
            # Of gradients: of the module that all readers of the tensor are in.
            within = {m._replace(module=made.module) for m in everywhere if made.contains(m)}
            assert made in within, tensor
        else:
            assert made in everywhere, tensor
        if operator.phase == "forward":
            forward += 1
            of_that_shape += made in lines.by_shape.get(tensor.shape, ())
    # Operators that are decomposed make what eager PyTorch keeps to itself, such as a loss does.
    assert forward > 5 and of_that_shape >= 0.9 * forward
    assert len(large) > forward + 5
