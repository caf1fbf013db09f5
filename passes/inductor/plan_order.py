"""Keeps Inductor from fusing kernels across the steps of a plan.

A recompute that the plan placed late can be fused *horizontally* with an early kernel that reads
the same buffer, which brings the recomputed value back to where it was evicted from; a producer
fused with a far consumer (*vertically*) runs the consumer early; and a pattern that spans steps
moves a kernel.  A veto costs no buffer, where an ordering edge (``control_deps``) would force the
value into memory.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from dtrcompile.passes.device.host_copies import prefetch
from dtrcompile.passes.inductor.layouts import (
    lowered_in,
)
from dtrcompile.passes.nodes import mark, mark_of
from dtrcompile.passes.torch_private import (
    NHWC_STRIDE_ORDER,
    AllocateLine,
    CppScheduling,
    ExternKernel,
    GraphLowering,
    InductorChoices,
    IRNode,
    NopKernelSchedulerNode,
    OrderedSet,
    TensorBox,
    V,
    is_match,
)


def _marked(scheduler_node: Any, field_name: str) -> list[Any]:
    """What the origins of a scheduler node are marked with, where they are."""
    return [
        marked
        for snode in scheduler_node.get_nodes()
        if snode.node is not None
        for origin in snode.node.get_origins()
        if (marked := getattr(mark_of(origin), field_name)) is not None
    ]


def _group(scheduler_node: Any) -> int | None:
    """The plan's group of a scheduler node: its latest origin's; None if it has none."""
    return max(_marked(scheduler_node, "group"), default=None)


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
    for its reader.  But what `as_strided` reads has the strides that were traced: it reads memory,
    whatever its layout is.
    """
    with lowered_in(graph, node):
        result = _RUN_NODE(graph, node)
    if node.target is prefetch:
        # Its own allocation, though Inductor takes an input on the host for one of unknown address.
        graph.unaligned_buffers.discard(result.get_name())
    if mark_of(node).is_buffer and isinstance(result, TensorBox):
        # Before it is asked for a layout: what is no buffer yet would be copied into one that does
        # not know which node it was lowered from.
        result.realize()
        is_free = not any(user.target in _READ_MEMORY for user in node.users)
        if is_free and len(result.get_size()) == 4 and node in graph.nodes_prefer_channels_last:
            with IRNode.current_origins(OrderedSet([node])):
                return ExternKernel.require_stride_order(result, NHWC_STRIDE_ORDER)
    return result


_RUN_NODE = GraphLowering.run_node
_READ_MEMORY = (
    torch.ops.aten.as_strided.default,
    torch.ops.aten.as_strided_scatter.default,
    torch.ops.aten.resize.default,
    torch.ops.aten.resize_as.default,
)


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


def allow_late_frees(gm: fx.GraphModule, during_bytes: Sequence[int], peak_bytes: int) -> None:
    """Let what a plan has freed be held for longer wherever the peak does not rise for it.

    Args:
        during_bytes: held while a step of the plan runs, one entry a step.
        peak_bytes: of the plan, in this graph.
    """
    for node in gm.graph.nodes:
        step = mark_of(node).step
        if step is not None:
            mark(node, slack_bytes=max(peak_bytes - during_bytes[step], 0))


@dataclass
class Functions:
    """The C++ functions of a graph that is lowered.

    Inductor puts all loops between two library calls into one function, allocates everything before
    it and frees everything after it.  The plan frees in between.  A function therefore ends where
    the next loop, with all that the function has not freed yet, would hold more than the plan's
    peak.  (Not wherever something is freed: each function is one more file for the C++ compiler,
    which is the larger part of a compilation.)

    Attributes:
        following: name of a kernel -> the kernel that comes next.
        buffer_bytes: of each buffer, and of each input that is freed.
        all_bytes: all that the graph ever allocates.
        late_bytes: buffer -> what the plan has freed before it is computed, and its function has
            not.
    """

    following: dict[str, Any]
    buffer_bytes: dict[str, int]
    all_bytes: int
    late_bytes: dict[str, int] = field(default_factory=dict)

    @staticmethod
    def of(graph: Any) -> Functions:
        """Of a graph whose kernels are written now."""
        if hasattr(graph, _FUNCTIONS):
            known: Functions = getattr(graph, _FUNCTIONS)
            return known
        kernels = [
            node for node in graph.scheduler.nodes if not isinstance(node, NopKernelSchedulerNode)
        ]
        buffer_bytes = {name: _bytes_of(graph, name) for name in graph.name_to_buffer}
        all_bytes = sum(buffer_bytes.values())
        # Inputs that are the caller's, in AOTAutograd's naming, are not freed.
        buffer_bytes.update(
            (name, _bytes_of(graph, name))
            for name, given in graph.graph_inputs.items()
            if isinstance(given, TensorBox) and not name.startswith(("primals", "tangents"))
        )
        following = {node.get_name(): after for node, after in itertools.pairwise(kernels)}
        found = Functions(following, buffer_bytes, all_bytes)
        setattr(graph, _FUNCTIONS, found)
        return found

    def ends_before_next(self, graph: Any) -> bool:
        """Whether the function ends before the next loop; if not, what it holds then is noted."""
        scheduler = graph.scheduler
        following = self.following.get(scheduler.current_node.get_name())
        if following is None or following.is_extern() or following.is_template():
            return False  # it ends there by itself
        removed, freed = graph.removed_buffers, graph.wrapper_code.freed
        late_bytes = sum(
            self.buffer_bytes.get(name, 0)
            for name in scheduler.buffer_names_to_free
            if name not in removed and name not in freed
        )
        slack_bytes = _slack_bytes(following)
        if slack_bytes is None:
            return late_bytes * _FUNCTION_SHARE > self.all_bytes
        if late_bytes > slack_bytes:
            return True
        self.late_bytes.update(dict.fromkeys(following.get_buffer_names(), late_bytes))
        return False


def late_bytes_of(graph: Any) -> dict[str, int]:
    """Buffer -> what the plan has freed before it is computed, and is freed later."""
    return Functions.of(graph).late_bytes if hasattr(graph, _FUNCTIONS) else {}


def flush_before_too_much_is_held(scheduling: Any) -> bool:
    """Whether to end a C++ function here."""
    return _READY_TO_FLUSH(scheduling) or Functions.of(V.graph).ends_before_next(V.graph)


_READY_TO_FLUSH = CppScheduling.ready_to_flush
# Where Inductor's graph has its `Functions`.
_FUNCTIONS = "dtr_functions"
# Where it is not known what may be held: the part of all that the graph ever allocates that is
# freed late at most.
_FUNCTION_SHARE = 32


def _slack_bytes(scheduler_node: Any) -> int | None:
    """What may be held beyond the plan while a kernel runs; None if it is not known."""
    return min(_marked(scheduler_node, "slack_bytes"), default=None)


def _bytes_of(graph: Any, name: str) -> int:
    """What a buffer or an input holds; 0 for what is no tensor."""
    buffer = graph.name_to_buffer.get(name) or graph.graph_inputs[name]
    size = buffer.maybe_get_size()
    if size is None:
        return 0
    numel = graph.sizevars.optimization_hint(math.prod(size), fallback=1)
    return int(numel) * buffer.get_dtype().itemsize
