"""Keeps Inductor from fusing kernels across the steps of a plan.

A recompute that the plan placed late can be fused *horizontally* with an early kernel that reads
the same buffer, which brings the recomputed value back to where it was evicted from; a producer
fused with a far consumer (*vertically*) runs the consumer early; and a pattern that spans steps
moves a kernel.  A veto costs no buffer, where an ordering edge (``control_deps``) would force the
value into memory.
"""

from __future__ import annotations

import math
from typing import Any

from dtrcompile.passes.inductor.layouts import (
    lowered_in,
)
from dtrcompile.passes.nodes import mark_of
from dtrcompile.passes.torch_private import (
    NHWC_STRIDE_ORDER,
    AllocateLine,
    CppScheduling,
    ExternKernel,
    GraphLowering,
    InductorChoices,
    IRNode,
    OrderedSet,
    TensorBox,
    V,
    is_match,
)


def _group(scheduler_node: Any) -> int | None:
    """The plan's group of a scheduler node: its latest origin's; None if it has none."""
    groups = [
        group
        for snode in scheduler_node.get_nodes()
        if snode.node is not None
        for origin in snode.node.get_origins()
        if (group := mark_of(origin).group) is not None
    ]
    return max(groups, default=None)


def in_one_place(match: Any) -> bool:
    """A pattern match that does not move a kernel away from its step.

    Rewriting ``mm`` and a much later ``add`` into one ``addmm`` runs the product at the add, which
    keeps its operands alive until then.  Neighbouring groups are one place.
    """
    if not is_match(match):
        return False
    groups = [g for n in match.nodes if (g := mark_of(n).group) is not None]
    return not groups or max(groups) - min(groups) <= 1


class SameGroupOnly(InductorChoices):
    """Inductor's choices, with a veto against fusing across groups."""

    @staticmethod
    def can_fuse_horizontal(scheduler: Any, node1: Any, node2: Any, shared_data_score: int) -> bool:
        first, second = _group(node1), _group(node2)
        if first is not None and second is not None and first != second:
            return False
        return InductorChoices.can_fuse_horizontal(scheduler, node1, node2, shared_data_score)

    @staticmethod
    def can_fuse_vertical(scheduler: Any, node1: Any, node2: Any, shared_data_score: int) -> bool:
        first, second = _group(node1), _group(node2)
        if first is not None and second is not None and first != second:
            return False
        return InductorChoices.can_fuse_vertical(scheduler, node1, node2, shared_data_score)


def run_node_and_realize(graph: Any, node: Any) -> Any:
    """Lower a node; the owner of a storage becomes a buffer.

    Near convolutions Inductor prefers channels-last; a buffer made contiguous there would be copied
    for its reader.
    """
    with lowered_in(graph, node):
        result = _RUN_NODE(graph, node)
    if mark_of(node).is_buffer and isinstance(result, TensorBox):
        # Before it is asked for a layout: what is no buffer yet would be copied into one that does
        # not know which node it was lowered from.
        result.realize()
        if len(result.get_size()) == 4 and node in graph.nodes_prefer_channels_last:
            with IRNode.current_origins(OrderedSet([node])):
                return ExternKernel.require_stride_order(result, NHWC_STRIDE_ORDER)
    return result


_RUN_NODE = GraphLowering.run_node


def reuse_at_once(line: Any, free_line: Any, size: int) -> bool:
    """Whether an allocation may take a dead buffer: only if nothing ran between.

    Inductor keeps dead buffers for later reuse as long as its own estimate of the peak does not
    rise; that estimate knows no workspaces, and the plan counts a freed storage as free.  What
    Inductor itself refuses stays refused (torch 2.15: buffers of another scheduler, whose indices
    mean nothing here), and buffers for communication, a pool of their own, stay with it.
    """
    is_next = free_line.scheduler_node_index + 1 == line.scheduler_node_index
    return bool((is_next or line.comm_buffer) and _SHOULD_REUSE(line, free_line, size))


_SHOULD_REUSE = AllocateLine.should_reuse_buffer


def flush_before_much_is_freed(scheduling: Any) -> bool:
    """Whether to end a C++ function here.

    Inductor puts all loops between two library calls into one function, allocates everything before
    it and frees everything after it.  The plan frees in between; where that is much, the function
    ends there.
    """
    if _READY_TO_FLUSH(scheduling):
        return True
    graph: Any = V.graph
    if not hasattr(graph, "dtr_buffer_bytes"):
        graph.dtr_buffer_bytes = {name: _bytes_of(graph, name) for name in graph.name_to_buffer}
        graph.dtr_all_bytes = sum(graph.dtr_buffer_bytes.values())
        # Inputs that are the caller's, in AOTAutograd's naming, are not freed.
        graph.dtr_buffer_bytes.update(
            (name, _bytes_of(graph, name))
            for name, given in graph.graph_inputs.items()
            if isinstance(given, TensorBox) and not name.startswith(("primals", "tangents"))
        )
    names = graph.scheduler.buffer_names_to_free - graph.removed_buffers
    freed_bytes = sum(graph.dtr_buffer_bytes.get(name, 0) for name in names)
    return bool(freed_bytes * _FUNCTION_SHARE > graph.dtr_all_bytes)


_READY_TO_FLUSH = CppScheduling.ready_to_flush
# What is freed is much if it is this part of all that the graph ever allocates.  Each function is
# one more file for the C++ compiler, which is the larger part of a compilation.
_FUNCTION_SHARE = 32


def _bytes_of(graph: Any, name: str) -> int:
    """What a buffer or an input holds; 0 for what is no tensor."""
    buffer = graph.name_to_buffer.get(name) or graph.graph_inputs[name]
    size = buffer.maybe_get_size()
    if size is None:
        return 0
    numel = graph.sizevars.optimization_hint(math.prod(size), fallback=1)
    return int(numel) * buffer.get_dtype().itemsize
