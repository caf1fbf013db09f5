"""PyTorch's default split of a joint graph, with a backward that reads no value that is gone.

AOTAutograd lets a forward graph write into its inputs (running statistics, a codebook, a queue of
keys) at its end.  PyTorch's partitioner does not see that: where backward needs what was computed
from the old value, it may save the input itself, or compute from it again, and then reads the new
value.  The gradients are wrong without an error (PyTorch's pull request 197039).  Such a graph is
split again, with the old value as a value of its own that may be saved.  All other graphs are split
as PyTorch does.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import fx

from dtrcompile.passes.errors import CaptureError
from dtrcompile.passes.graphs.modules import (
    call_like,
    copied_module,
    output_arguments,
    placeholders,
)
from dtrcompile.passes.graphs.split import Split
from dtrcompile.passes.nodes import is_mutating, mutated_arguments, owner, view_base
from dtrcompile.passes.torch_private import (
    CheckpointPolicy,
    functorch_config,
    min_cut_rematerialization_partition,
)


def default_split(
    joint: fx.GraphModule, joint_inputs: Sequence[object], **kwargs: Any
) -> tuple[fx.GraphModule, fx.GraphModule]:
    """Forward and backward of a joint graph.

    Args:
        joint: PyTorch's partitioner may change it.
        kwargs: as AOTAutograd gives them to a partitioner, ``num_fwd_outputs`` among them.

    Raises:
        CaptureError: if backward would read an input after forward has written into it.
    """
    forward, backward = min_cut_rematerialization_partition(joint, joint_inputs, **kwargs)
    n_outputs = kwargs["num_fwd_outputs"]
    stale = stale_inputs(forward, backward, n_outputs)
    if not stale:
        return forward, backward
    held = copied_module(joint)
    names = _hold_old_values(held, [n.name for n in stale])
    # A budget of PyTorch's own would have the partitioner compute again what may not be.
    with functorch_config.patch(activation_memory_budget=1.0):
        forward, backward = min_cut_rematerialization_partition(held, joint_inputs, **kwargs)
    _drop_unsaved(forward, names)
    still = stale_inputs(forward, backward, n_outputs)
    if still:
        raise CaptureError(
            f"backward would read {', '.join(repr(n.name) for n in still)} after forward has"
            " written into it; please report this graph"
        )
    return forward, backward


def stale_inputs(
    forward: fx.GraphModule, backward: fx.GraphModule, n_outputs: int
) -> list[fx.Node]:
    """Inputs that forward writes into, and that backward reads as they were before.

    Args:
        n_outputs: how many of forward's outputs are the user's.
    """
    split = Split.of(forward, backward, n_outputs)
    written = set(split.written_inputs(split.calls[: split.first_backward_call]))
    read = dict.fromkeys(map(split.owner, split.same_value.values()))
    return [n for n in read if n in written and n.op == "placeholder"]


def _hold_old_values(joint: fx.GraphModule, names: Iterable[str]) -> list[str]:
    """Have all that reads these inputs read copies, which may be saved and are not made again.

    Returns:
        The copies' names.
    """
    inputs = {n.name: n for n in placeholders(joint)}
    last = list(inputs.values())[-1]
    copies = []
    for name in names:
        node = inputs[name]
        readers = [n for n in node.users if not (is_mutating(n) and node in mutated_arguments(n))]
        with joint.graph.inserting_after(last):
            copy = call_like(joint.graph, node, torch.ops.aten.clone.default, (node,))
        copy.meta.pop("desc", None)
        copy.meta["recompute"] = CheckpointPolicy.MUST_SAVE
        for reader in readers:
            reader.replace_input_with(node, copy)
        copies.append(copy.name)
    joint.recompile()
    return copies


def _drop_unsaved(forward: fx.GraphModule, names: Iterable[str]) -> None:
    """Within forward, the input itself is read; a copy stays only where it, or a view, is saved."""
    nodes = {n.name: n for n in forward.graph.nodes}
    saved = {owner(n) for n in output_arguments(forward) if isinstance(n, fx.Node)}
    (output,) = forward.graph.find_nodes(op="output")
    for copy in [nodes[name] for name in names if name in nodes]:
        (source,) = copy.all_input_nodes
        if copy not in saved:
            copy.replace_all_uses_with(source)
            forward.graph.erase_node(copy)
            continue
        for reader in [n for n in copy.users if n is not output and view_base(n) is not copy]:
            reader.replace_input_with(copy, source)
    forward.recompile()
