"""Fake CUDA tensors that autograd differentiates where there is no CUDA.

Autograd's engine asks the device of each tensor that it meets for a stream, which neither a build
of PyTorch without CUDA nor a machine without a device can give.  It asks in C++.  Inside of
`traced`, a fake CUDA tensor says to C++ that it is on the CPU, and still has the dispatch keys of
CUDA.  Decompositions, fake kernels and all other Python code see a CUDA tensor; the engine sees
none.

What is left are functions in C++ that ask a tensor for its device:

* Those that make tensors like it or beside it (the zeros that stand for a gradient that nobody has)
  would make them on the CPU.  So every tensor is made on the GPU, including those that the model
  itself makes on the CPU, or moves there.
* ``scaled_dot_product_attention`` chooses among kernels: see `attention`.
* Autocast casts only what is on the GPU: see `autocast`.
* Convolutions choose a library, and with it the layout of what they return: see `stand_in`.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Sequence
from contextvars import ContextVar
from typing import Any
from unittest import mock

import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from dtrcompile.passes.target.attention import attend
from dtrcompile.passes.target.autocast import autocasting
from dtrcompile.passes.target.devices import Target
from dtrcompile.passes.target.python_kernels import python_kernel
from dtrcompile.passes.torch_private import (
    DispatchKey,
    FakeTensor,
    FakeTensorMode,
    FunctionalTensor,
    UniformValueConstantFolder,
    compile_fx_module,
    joint_graph,
    metadata_handlers,
    proxy_tensor,
)

DEVICE = torch.device("cuda", 0)
_CPU = torch.device("cpu")
_DEVICE_OF = torch.ops.prim.device.default
_COMPOSED = DispatchKey.CompositeImplicitAutograd
_ATTENTION = torch.ops.aten.scaled_dot_product_attention.default
_IS_TRACED: ContextVar[bool] = ContextVar("dtrcompile_traced", default=False)


@contextlib.contextmanager
def traced(target: Target) -> Iterator[None]:
    """Inside of the ``with`` block, models whose tensors are fake CUDA tensors can be traced with
    their gradients."""
    with contextlib.ExitStack() as stack:
        for owner, name, replacement in (
            (FakeTensor, "__torch_dispatch__", classmethod(_dispatch_of_tensor)),
            (FakeTensorMode, "dispatch", _dispatch_of_mode),
            # `torch.tensor` moves its values to the GPU only when they are fake.
            (FakeTensorMode, "avoid_device_init", True),
            (proxy_tensor, "unset_fake_temporarily", _unset_fake_on_cpu),
            (FunctionalTensor, "device", property(_device_of_functional)),
            (compile_fx_module, "joint_graph_passes", _joint_graph_passes),
            # Inductor traces its patterns on the device; those of the CPU are the same.
            (joint_graph, "lazy_init", lambda _device=None: _LAZY_INIT(_CPU)),
            (UniformValueConstantFolder, "_deduce_value", _deduce_on_cpu),
            (UniformValueConstantFolder, "_add_peephole_patterns", _add_patterns_on_cpu),
        ):
            stack.enter_context(mock.patch.object(owner, name, replacement, create=True))
        stack.enter_context(mock.patch.dict(metadata_handlers, {_DEVICE_OF: _device_in_mode}))
        attention = functools.partial(attend, target)
        stack.enter_context(python_kernel(_ATTENTION, _COMPOSED, attention))
        stack.enter_context(autocasting())
        stack.enter_context(_set(True))
        yield


@contextlib.contextmanager
def not_traced() -> Iterator[None]:
    """Inside of `traced`, for what is planned there: what is to be on the CPU is on the CPU."""
    with _set(False):
        yield


@contextlib.contextmanager
def _set(is_traced: bool) -> Iterator[None]:
    token = _IS_TRACED.set(is_traced)
    try:
        yield
    finally:
        _IS_TRACED.reset(token)


_TENSOR_DISPATCH = FakeTensor.__torch_dispatch__.__func__  # type: ignore[attr-defined]
_MODE_DISPATCH = FakeTensorMode.dispatch
_LAZY_INIT = joint_graph.lazy_init
_DEVICE_HANDLER = metadata_handlers[_DEVICE_OF]


def _dispatch_of_tensor(
    cls: type, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
) -> Any:
    if func is _DEVICE_OF and not args[0].fake_mode.in_kernel_invocation:
        return _CPU
    return _TENSOR_DISPATCH(cls, func, types, args, kwargs)


def _device_in_mode(args: Sequence[Any]) -> Any:
    if not args[0].fake_mode.in_kernel_invocation:
        return _CPU
    return _DEVICE_HANDLER(args)


def _dispatch_of_mode(
    self: Any, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
) -> Any:
    if _IS_TRACED.get():
        args, kwargs = _on_gpu(args), _on_gpu(kwargs or {})
    return _MODE_DISPATCH(self, func, types, args, kwargs)


def _on_gpu(arguments: Any) -> Any:
    """Arguments of an operator that name no other device than the GPU."""
    return pytree.tree_map_only(
        torch.device, lambda device: DEVICE if device.type == "cpu" else device, arguments
    )


def _device_of_functional(self: Any) -> torch.device:
    return torch._from_functional_tensor(self.elem).device


_DEDUCE = UniformValueConstantFolder._deduce_value
_ADD_PATTERNS = UniformValueConstantFolder._add_peephole_patterns


def _deduce_on_cpu(self: Any, node: torch.fx.Node) -> Any:
    """Inductor's folding of constants, which computes with tensors of one element."""
    with _OnCPU():
        return _DEDUCE(self, node)


def _add_patterns_on_cpu(self: Any) -> None:
    with _OnCPU():
        _ADD_PATTERNS(self)


class _OnCPU(TorchDispatchMode):
    """Real tensors are made on the CPU, whatever the device that is asked for."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        asked = (args, kwargs or {})
        if not any(isinstance(leaf, FakeTensor) for leaf in pytree.tree_leaves(asked)):
            asked = pytree.tree_map_only(torch.device, lambda _device: _CPU, asked)
        return func(*asked[0], **asked[1])


_UNSET_FAKE = proxy_tensor.unset_fake_temporarily


@contextlib.contextmanager
def _unset_fake_on_cpu() -> Iterator[Any]:
    """For what is computed while it is traced, with the values of small constants."""
    with _UNSET_FAKE() as mode, _OnCPU():
        yield mode


_JOINT_GRAPH_PASSES = compile_fx_module.joint_graph_passes


def _joint_graph_passes(gm: torch.fx.GraphModule, *args: Any, **kwargs: Any) -> Any:
    """Inductor's, on a graph that names the devices on which its values were computed."""
    for node in gm.graph.nodes:
        value = node.meta.get("val")
        if isinstance(value, torch.Tensor) and value.device == DEVICE:
            node.args, node.kwargs = _on_gpu(node.args), _on_gpu(node.kwargs)
    for node in gm.graph.find_nodes(op="call_function", target=torch.ops.prims.device_put.default):
        source = node.args[0]
        if source.meta["val"].device == node.meta["val"].device:
            node.replace_all_uses_with(source)
            gm.graph.erase_node(node)
    return _JOINT_GRAPH_PASSES(gm, *args, **kwargs)
