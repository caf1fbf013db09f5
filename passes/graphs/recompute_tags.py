"""What the user asked for beside the budget: scopes whose inside is not kept.

`dtrcompile.recompute` annotates the nodes that run inside it.  Before the default split, these get
the tags that `torch.utils.checkpoint` gives its nodes, so PyTorch's own partitioner does the rest:
nothing inside is saved, and values that one scope hands to another are.
"""

from __future__ import annotations

from torch import fx

from dtrcompile.passes.nodes import why_not_recomputable
from dtrcompile.passes.torch_private import CheckpointPolicy

SCOPE = "dtrcompile_recompute"
"""Key of the annotation; the value is a number, one a scope."""


def tag_scopes(joint: fx.GraphModule) -> int:
    """Tag the nodes of the joint graph that are inside of a scope; returns how many.

    Nodes that may not run twice (random numbers, effects) keep their values.  Backward nodes carry
    the annotation of the forward node that they belong to; tags on them have no effect, but none
    are set.
    """
    tagged = 0
    for node in joint.graph.nodes:
        scope = node.meta.get("custom", {}).get(SCOPE)
        if scope is None or node.op != "call_function" or node.meta.get("autograd_backward"):
            continue
        if "recompute" in node.meta or why_not_recomputable(node) is not None:
            continue
        node.meta["recompute"] = CheckpointPolicy.MUST_RECOMPUTE
        node.meta["ac_graph_id"] = scope
        tagged += 1
    return tagged
