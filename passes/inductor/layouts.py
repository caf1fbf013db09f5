"""Which layout Inductor's convolutions get in the graphs of a plan.

Inductor prefers channels-last in graphs with convolutions.  The default split's backward has none;
a plan's has those that it recomputes, and what the preference does to the values around them is
bytes that nobody planned.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any
from unittest import mock

import torch
from torch import fx

from dtrcompile.passes.device.workspaces import workspace_bytes
from dtrcompile.passes.nodes import mark, mark_of, value
from dtrcompile.passes.torch_private import GraphLowering

aten = torch.ops.aten

_CONVOLUTIONS = (aten.convolution.default, aten.convolution_backward.default)
_REARRANGING = (
    aten.permute.default,
    aten.transpose.int,
    aten.t.default,
    aten.view.default,
    aten._unsafe_view.default,
    aten.reshape.default,
)
_PREFER_CHANNELS_LAST = GraphLowering.find_nodes_prefer_channels_last
_DECIDE = GraphLowering.decide_layout_opt
# Which arguments of convolution_backward: the gradient, the images, and how many groups.
_IMAGES = (0, 1)
_GROUPS = 9


def prefers_channels_last(gm: fx.GraphModule, *, is_inference: bool) -> bool:
    """Whether Inductor had better make images channels-last in a graph.

    It looks at convolutions alone; on a CPU, gradients that may use workspace gain as much.
    """
    return _DECIDE(gm, is_inference=is_inference) or any(
        _fits_channels_last(node)
        for node in gm.graph.nodes
        if mark_of(node).speed_workspace_bytes and _device(node).type == "cpu"
    )


def images_channels_last(graph: Any) -> Any:
    """Which nodes Inductor had better make channels-last.

    Not inputs that are saved: it would save a channels-last copy of each convolution's weight for
    backward, beside the weight itself.  The copy that a convolution needs is made where it runs.

    And not what only a permutation or a view separates from a convolution: its dimensions mean
    something else.  In ConvNeXt the channels are last already where the linear layers run; what is
    made "channels-last" there is copied by each product.
    """
    nodes = graph.module.graph.nodes
    images = set()
    for node in reversed(nodes):
        is_near = node.target in _CONVOLUTIONS or any(user in images for user in node.users)
        if is_near and node.target not in _REARRANGING:
            images.add(node)
    for node in nodes:
        if node in images:
            images.update(user for user in node.users if user.target not in _REARRANGING)
    (out,) = graph.module.graph.find_nodes(op="output")
    saved_inputs = {n for n in out.all_input_nodes if n.op == "placeholder"}
    return _PREFER_CHANNELS_LAST(graph) & images - saved_inputs


def gains_from_workspace(graphs: Iterable[fx.GraphModule]) -> bool:
    """Whether a kernel of the graphs could be faster if it held more."""
    return any(_is_grouped_gradient(node) for gm in graphs for node in gm.graph.nodes)


def allow_workspace(graphs: Iterable[fx.GraphModule], speed_workspace_bytes: int) -> None:
    """Let each kernel that can use it hold so much inside."""
    for gm in graphs:
        for node in gm.graph.nodes:
            if speed_workspace_bytes and _is_grouped_gradient(node):
                mark(node, speed_workspace_bytes=speed_workspace_bytes)


@contextlib.contextmanager
def lowered_in(graph: Any, node: fx.Node) -> Iterator[None]:
    """A context that lowers a node in the layout that is best for it.

    The gradient of a grouped convolution is computed much faster channels-last, but on a CPU oneDNN
    then pads each group of the weight to a block of, say, 16 by 16 channels: 256 times a depthwise
    weight.  That is worth it only where the budget allows it.
    """
    with contextlib.ExitStack() as stack:
        if _is_grouped_gradient(node) and not _fits_channels_last(node):
            # Inductor then asks for the strides that were traced, which in torch 2.11 are
            # channels-last for depthwise convolutions, whatever their images are.
            stack.enter_context(mock.patch.object(graph, "layout_opt", False))
            for image in (node.args[i] for i in _IMAGES):
                assert isinstance(image, fx.Node)
                traced: Any = value(image)
                stack.enter_context(mock.patch.dict(image.meta, val=traced.contiguous()))
        yield


def _is_grouped_gradient(node: fx.Node) -> bool:
    return node.target is aten.convolution_backward.default and node.args[_GROUPS] != 1


def _device(node: fx.Node) -> torch.device:
    gradient: Any = value(node.args[0])
    return torch.device(gradient.device)


def _fits_channels_last(node: fx.Node) -> bool:
    args, kwargs = fx.map_arg((node.args, node.kwargs), value)
    images = [args[i] for i in _IMAGES]
    if any(t.dim() != 4 or not all(isinstance(s, int) for s in t.shape) for t in images):
        return False
    contiguous_bytes, channels_last_bytes = (
        workspace_bytes(
            node.target,
            [a.contiguous(memory_format=layout) if i in _IMAGES else a for i, a in enumerate(args)],
            kwargs,
            value(node),
        )
        for layout in (torch.contiguous_format, torch.channels_last)
    )
    return channels_last_bytes <= max(contiguous_bytes, mark_of(node).speed_workspace_bytes)
