"""A whole training step in one graph, with what PyTorch's default split would compute again.

For a forward and a backward graph, PyTorch's partitioner finds by a minimal cut which of forward's
values backward reads and which cheap ones it computes again in its own loops.  A training step that
was traced as one graph, the optimizer's update included, has never been split.  Here it is, and
joined again.
"""

from __future__ import annotations

import operator
from collections.abc import Callable

import torch
from torch import fx

from dtrcompile.passes.graphs.modules import (
    calls_of,
    copied_module,
    module_like,
    output_arguments,
    placeholders,
)
from dtrcompile.passes.graphs.split import Split
from dtrcompile.passes.graphs.writes import only_final_writes
from dtrcompile.passes.nodes import value

Partition = Callable[[fx.GraphModule, int], tuple[fx.GraphModule, fx.GraphModule]]

# The partitioner's mark of what belongs to backward although no tangent leads there.
_TAG, _BACKWARD = "partitioner_tag", "must_be_in_backward"


def split_and_joined(gm: fx.GraphModule, partition: Partition) -> fx.GraphModule:
    """The same step, where backward and update compute cheap values of forward again.

    Args:
        gm: what it returns is forward's, and what it writes into its inputs at its end is computed
            by backward and update.
        partition: PyTorch's default split of a graph, whose first so many outputs are forward's.

    Returns:
        Another module; ``gm`` itself where it writes nothing, or has other effects.
    """
    writes = only_final_writes(calls_of(gm))
    if not writes:
        return gm
    n_returned = len(output_arguments(gm))
    forward, backward = partition(_without_effects(gm, writes), n_returned)
    split = Split.of(forward, backward, n_returned)
    return _joined(gm, list(writes.values()), split)


def _without_effects(gm: fx.GraphModule, writes: dict[fx.Node, fx.Node]) -> fx.GraphModule:
    """A copy that returns what is written, after all that it returns."""
    pure = copied_module(gm)
    nodes = {n.name: n for n in pure.graph.nodes}
    (output,) = pure.graph.find_nodes(op="output")
    made = [nodes[write.name].args[1] for write in writes]
    output.args = ((*output.args[0], *made),)
    output.meta.pop("desc", None)
    for write in writes:
        pure.graph.erase_node(nodes[write.name])
    of_forward: set[fx.Node] = set()
    stack = [n for n in output.args[0][: len(output_arguments(gm))] if isinstance(n, fx.Node)]
    while stack:
        n = stack.pop()
        if n not in of_forward:
            of_forward.add(n)
            stack.extend(n.all_input_nodes)
    for call in calls_of(pure):
        if call.target is operator.getitem and call.args[0] in of_forward:
            of_forward.add(call)  # an element can be saved, all of them together cannot
        if call not in of_forward:
            call.meta[_TAG] = _BACKWARD
    pure.recompile()
    return pure


def _joined(gm: fx.GraphModule, targets: list[fx.Node], split: Split) -> fx.GraphModule:
    """Forward and backward one after the other, and what backward returns written at the end."""
    assert split.backward is not None
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    by_name: dict[str, fx.Node] = {}
    for node in placeholders(split.forward):
        copies[node] = by_name[node.name] = _copied(graph, node, copies)
    for original in placeholders(gm):
        copies[original] = by_name[original.name]
    for part in (split.forward, split.backward):
        for node in part.graph.nodes:
            if node.op in ("call_function", "get_attr"):
                copies[node] = _copied(graph, node, copies)
            elif node in split.same_value:
                copies[node] = copies[split.same_value[node]]
    for target, made in zip(targets, output_arguments(split.backward), strict=True):
        new = copies[made] if isinstance(made, fx.Node) else made
        write = graph.call_function(torch.ops.aten.copy_.default, (copies[target], new))
        write.meta["val"] = value(target)
    (old,) = gm.graph.find_nodes(op="output")
    returned = output_arguments(split.forward)[: split.num_fwd_outputs]
    out = graph.output(tuple(copies[n] if isinstance(n, fx.Node) else n for n in returned))
    out.meta = dict(old.meta)
    graph.lint()
    return module_like(gm, graph, copies)


def _copied(graph: fx.Graph, node: fx.Node, copies: dict[fx.Node, fx.Node]) -> fx.Node:
    copy = graph.node_copy(node, copies.__getitem__)
    copy.meta = {k: v for k, v in node.meta.items() if k != _TAG}
    return copy
