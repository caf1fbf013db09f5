"""Regions (`torch.compiler.nested_compile_region`), put into the graph that calls them.

Dynamo traces a region once, however often it is called, and its calls are one operator each: all of
it would be kept, or none.  A plan chooses among the operators inside.
"""

from __future__ import annotations

import operator

import torch
from torch import fx

from dtrcompile.passes.nodes import attribute


def inline_regions(gm: fx.GraphModule) -> None:
    """Replace calls of regions in Dynamo's graph, and in graphs inside it, by what they run."""
    for module in reversed(list(gm.modules())):  # regions inside regions come first
        if isinstance(module, fx.GraphModule):
            _inline_calls(module)


def _inline_calls(gm: fx.GraphModule) -> None:
    calls = gm.graph.find_nodes(
        op="call_function", target=torch.ops.higher_order.invoke_subgraph, sort=True
    )
    for call in calls:
        callee = call.args[0]
        region = attribute(callee)
        inputs = region.graph.find_nodes(op="placeholder")
        made: dict[fx.Node, fx.Node] = dict(zip(inputs, call.args[2:], strict=True))
        with gm.graph.inserting_before(call):
            outputs = gm.graph.graph_copy(region.graph, made)  # type: ignore[arg-type]
        for inner in region.graph.find_nodes(op="get_attr"):
            made[inner].target = _adopt(gm, str(inner.target), attribute(inner))
        for item in list(call.users):
            assert item.target is operator.getitem, item
            item.replace_all_uses_with(outputs[item.args[1]])  # type: ignore[index]
            gm.graph.erase_node(item)
        gm.graph.erase_node(call)
        if not callee.users:
            gm.graph.erase_node(callee)
    if calls:
        gm.delete_all_unused_submodules()
        gm.recompile()


def _adopt(gm: fx.GraphModule, name: str, value: object) -> str:
    """Make a region's attribute one of the graph that calls it; gives its name there."""
    name = name.replace(".", "_")
    while getattr(gm, name, value) is not value:
        name += "_"
    setattr(gm, name, value)
    return name
