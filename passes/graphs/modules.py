"""What a graph module is given and returns, and copies of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import fx
from torch.utils import _pytree as pytree

from dtrcompile.passes.torch_private import ForwardTokenAOTInput, make_graph_module


def inputs_of_gradients(forward: fx.GraphModule) -> list[fx.Node]:
    """Forward's inputs, in the order in which backward returns a gradient for each."""
    without = tokens(forward)
    return [n for n in placeholders(forward) if n not in without]


def tokens(forward: fx.GraphModule) -> list[fx.Node]:
    """Forward's inputs that order effects, such as the error that a singular matrix raises.

    They come first, and as many outputs too; they have no gradients.
    """
    return [
        n for n in placeholders(forward) if isinstance(n.meta.get("desc"), ForwardTokenAOTInput)
    ]


def placeholders(gm: fx.GraphModule) -> list[fx.Node]:
    """A graph's inputs in order."""
    return [n for n in gm.graph.nodes if n.op == "placeholder"]


def calls_of(gm: fx.GraphModule) -> list[fx.Node]:
    """A graph's calls in order."""
    return [n for n in gm.graph.nodes if n.op == "call_function"]


def output_arguments(gm: fx.GraphModule) -> list[object]:
    """What a graph returns, flat: nodes, None and numbers."""
    (node,) = gm.graph.find_nodes(op="output")
    return list(pytree.tree_leaves(node.args[0], is_leaf=lambda x: x is None))


def copied_module(gm: fx.GraphModule) -> fx.GraphModule:
    """A copy whose graph may be changed; tensors that the module holds are shared."""
    graph = fx.Graph()
    env: dict[fx.Node, fx.Node] = {}
    result = graph.graph_copy(gm.graph, env)
    (old,) = gm.graph.find_nodes(op="output")
    out = graph.output(result)
    out.meta = dict(old.meta)
    return module_like(gm, graph, env)


def module_like(
    gm: fx.GraphModule, graph: fx.Graph, copies: Mapping[fx.Node, fx.Node]
) -> fx.GraphModule:
    """A module of another graph with the same inputs, which knows what AOTAutograd looks for.

    Args:
        copies: input of ``gm`` -> input of ``graph``; other nodes do not matter.
    """
    for node in gm.graph.find_nodes(op="placeholder"):
        if hasattr(node, "_dynamo_source"):
            copies[node]._dynamo_source = node._dynamo_source
    # As Inductor does: Python code, which takes time to write, only if somebody asks for it.
    module = make_graph_module(gm, graph)
    module.meta = dict(gm.meta)
    # Symbolic sizes, and that the graph came from Dynamo.
    for name in ("shape_env", "_param_name_to_source"):
        if hasattr(gm, name):
            setattr(module, name, getattr(gm, name))
    return module


def call_like(
    graph: fx.Graph, like: fx.Node, target: Any, args: Sequence[Any], **kwargs: Any
) -> fx.Node:
    """A call that stands for another node of the graph, with what is noted of that one."""
    made = graph.call_function(target, tuple(args), kwargs)
    values = fx.map_arg(tuple(args), lambda node: node.meta["val"])
    made.meta = {**like.meta, "val": target(*values, **kwargs)}
    made.meta.pop("tensor_meta", None)
    return made
