"""Nodes of an emitted graph that copy to the host and back (`device.host_copies`)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, fx

from dtrcompile.passes.device.host_copies import offload, prefetch, wait_for_copy
from dtrcompile.passes.nodes import mark


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


def add_wait(graph: fx.Graph, copy: fx.Node, source: fx.Node | None, step: int | None) -> fx.Node:
    """Add the moment at which a copy has to be complete.

    Args:
        source: what is held until then.
    """
    args = (copy,) if source is None else (copy, source)
    node = graph.create_node("call_function", wait_for_copy, args)
    node.meta["val"] = None
    mark(node, step=step)
    return node


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
