"""Checks an emitted graph against its plan, node by node, before anything runs it.

Independent of `emit`: it reads only the finished graphs, walks them with a set of what is in
memory, and compares the bytes after each step with the referee's.
"""

from __future__ import annotations

from torch import fx

from dtrcompile.passes.errors import VerificationError
from dtrcompile.passes.graphs.capture import Captured
from dtrcompile.passes.graphs.emit import Emitted, free
from dtrcompile.passes.nodes import mark_of, view_base
from dtrcompile.passes.program.plan import Boundary, Compute, Plan, refuse_copies
from dtrcompile.passes.program.program import StorageKind
from dtrcompile.passes.program.replay import MemoryTimeline


def verify_emitted(
    captured: Captured, plan: Plan, timeline: MemoryTimeline, emitted: Emitted
) -> None:
    """Check that nothing is used after its free and that each step holds what the plan says.

    Raises:
        VerificationError: naming the node and the step.
        UnsupportedPlanError: if the plan copies to the host.
    """
    refuse_copies(plan, "verify_emitted")
    program = captured.program
    constants = {s.id for s in program.storages if s.is_constant} - program.handed_on
    tangents = {s.id for s in program.storages if s.kind is StorageKind.TANGENT}
    _walk(captured, timeline, emitted.forward, constants - tangents)
    if emitted.backward is not None:
        boundary = next(i for i, s in enumerate(plan.steps) if isinstance(s, Boundary))
        _walk(captured, timeline, emitted.backward, constants | program.held_in_backward)
        names = [n.name for n in emitted.backward.graph.find_nodes(op="placeholder")]
        returned = {
            n.name for n in emitted.forward.graph.find_nodes(op="output")[0].all_input_nodes
        }
        originals = {n.name for n in captured.backward.graph.find_nodes(op="placeholder")}  # type: ignore[union-attr]
        for name in names:
            if name not in returned and name not in originals:
                raise VerificationError(f"backward takes {name!r}, which forward does not return")
        for node in emitted.backward.graph.nodes:
            step_index = mark_of(node).step
            if step_index is not None and step_index <= boundary and node.op == "call_function":
                raise VerificationError(f"{node.name!r} of a forward step is in backward")
    computed = {
        mark_of(n).step
        for gm in (emitted.forward, emitted.backward)
        if gm is not None
        for n in gm.graph.nodes
        if n.op == "call_function" and n.target is not free
    }
    for index, step in enumerate(plan.steps):
        if isinstance(step, Compute) and index not in computed:
            raise VerificationError(f"step {index} of the plan computes nothing in the graphs")


def _walk(
    captured: Captured, timeline: MemoryTimeline, gm: fx.GraphModule, resident: set[int]
) -> None:
    program = captured.program
    sizes = {s.id: s.size_bytes for s in program.storages}
    owners: dict[fx.Node, int] = {}
    freed: dict[fx.Node, int] = {}
    always = sum(sizes[s] for s in resident)
    live_bytes = always
    nodes = list(gm.graph.nodes)
    for index, node in enumerate(nodes):
        for n in node.all_input_nodes:
            base = n
            while (up := view_base(base)) is not None:
                base = up
            if base in freed:
                raise VerificationError(
                    f"{node.name!r} uses {n.name!r}, freed at step {freed[base]}"
                )
        mark = mark_of(node)
        step = -1 if mark.step is None else mark.step
        if node.target is free:
            (owner,) = node.all_input_nodes
            if owner not in owners:
                raise VerificationError(f"step {step} frees {owner.name!r}, not in memory")
            live_bytes -= sizes[owners.pop(owner)]
            freed[owner] = step
        elif mark.storage is not None and mark.storage not in resident:
            owners[node] = mark.storage
            live_bytes += sizes[owners[node]]
        ends_step = index + 1 == len(nodes) or mark_of(nodes[index + 1]).step != mark.step
        if ends_step and node.op == "call_function" and 0 <= step < len(timeline.after_bytes):
            expected = timeline.after_bytes[step]
            if live_bytes != expected:
                raise VerificationError(
                    f"after step {step} ({node.name!r}) the graph holds {live_bytes} bytes,"
                    f" the plan {expected}"
                )
