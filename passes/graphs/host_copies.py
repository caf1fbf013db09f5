"""Copies to the host and back, as operators of an emitted graph.

``dtrcompile::offload`` copies a tensor to memory that counts against no budget, and
``dtrcompile::prefetch`` copies it back.  Off the CPU that memory is the host's; on the CPU, where
plans with copies are tested, it is memory that PyTorch's allocator does not hand out.

Both are complete when they return: a copy that runs beside compute needs a stream of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx

from dtrcompile.passes.nodes import mark

_LIBRARY = torch.library.Library("dtrcompile", "DEF")
_LIBRARY.define("offload(Tensor tensor) -> Tensor")
_LIBRARY.define("prefetch(Tensor on_host, Device device) -> Tensor")

offload = torch.ops.dtrcompile.offload.default
prefetch = torch.ops.dtrcompile.prefetch.default


@torch.library.impl(_LIBRARY, "offload", "CompositeExplicitAutograd")
def _offload(tensor: Tensor) -> Tensor:
    return _uncounted_like(tensor).copy_(tensor)


@torch.library.impl(_LIBRARY, "prefetch", "CompositeExplicitAutograd")
def _prefetch(on_host: Tensor, device: torch.device) -> Tensor:
    return _like(on_host, device).copy_(on_host)


@torch.library.register_fake("dtrcompile::offload", lib=_LIBRARY)
def _fake_offload(tensor: Tensor) -> Tensor:
    return _like(tensor, torch.device("cpu"))


@torch.library.register_fake("dtrcompile::prefetch", lib=_LIBRARY)
def _fake_prefetch(on_host: Tensor, device: torch.device) -> Tensor:
    return _like(on_host, device)


def _like(tensor: Tensor, device: torch.device) -> Tensor:
    """Of the same layout, whether it is dense or not."""
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)


def _uncounted_like(tensor: Tensor) -> Tensor:
    """The same on the host, in memory that no allocator of PyTorch counts."""
    n_bytes = tensor.element_size() * (
        1 + sum((n - 1) * stride for n, stride in zip(tensor.shape, tensor.stride(), strict=True))
    )
    memory = torch.frombuffer(bytearray(n_bytes), dtype=torch.uint8).untyped_storage()
    made = torch.empty(0, dtype=tensor.dtype)
    return made.set_(memory, 0, tensor.shape, tensor.stride())  # type: ignore[arg-type]


def add_offload(graph: fx.Graph, owner: fx.Node, step: int | None) -> fx.Node:
    """Add a copy of a storage to the host."""
    return _added(graph, offload, owner, (), f"{owner.name}_on_host", step)


def add_prefetch(graph: fx.Graph, on_host: fx.Node, owner: fx.Node, step: int | None) -> fx.Node:
    """Add a copy from the host.

    Args:
        owner: of the default split, whose value comes back.
    """
    device = owner.meta["val"].device
    return _added(graph, prefetch, on_host, (device,), f"{owner.name}_back", step)


def _added(
    graph: fx.Graph,
    target: Callable[..., Tensor],
    source: fx.Node,
    further: tuple[Any, ...],
    name: str,
    step: int | None,
) -> fx.Node:
    node = graph.create_node("call_function", target, (source, *further), name=name)
    with source.meta["val"].fake_mode:
        node.meta["val"] = target(source.meta["val"], *further)
    if "stack_trace" in source.meta:
        node.meta["stack_trace"] = source.meta["stack_trace"]
    mark(node, step=step)
    return node
