"""Writes: what a graph writes into its inputs, and when.

AOTAutograd makes a graph without side effects, then lets it copy the new values of what was written
into (parameters, an optimizer's state, running statistics) at its very end.  Until then every old
value and every new one is in memory, and with them the gradients that the new values are computed
from.  `with_early_writes` gives the same graph an order in which each new value is computed and
written as soon as nothing reads the old one any more.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import fx

from dtrcompile.passes.graphs.modules import calls_of, copied_module
from dtrcompile.passes.nodes import (
    effect_of,
    is_mutating,
    is_tensor,
    numel,
    owner,
    tensor_values,
    view_base,
)

# In masks over a graph's writes, the first bit is for what the graph returns.
_RETURNED = 1


def final_writes(calls: Sequence[fx.Node]) -> dict[fx.Node, fx.Node]:
    """Copies of new values into inputs of the graph that no call reads afterwards.

    Returns:
        Copy -> input.
    """
    read_at: dict[fx.Node, int] = {}
    copies: dict[fx.Node, tuple[int, fx.Node]] = {}
    for position, call in enumerate(calls):
        for n in call.all_input_nodes:
            read_at[owner(n)] = position
        target = call.args[0] if call.target is torch.ops.aten.copy_.default else None
        if isinstance(target, fx.Node) and target.op == "placeholder" and not call.users:
            copies[call] = position, target
    return {call: target for call, (at, target) in copies.items() if read_at[target] == at}


def only_final_writes(calls: Sequence[fx.Node]) -> dict[fx.Node, fx.Node]:
    """As `final_writes`; none where calls write elsewhere too, since then their order matters."""
    writes = final_writes(calls)
    return {} if any(is_mutating(n) for n in calls if n not in writes) else writes


def with_early_writes(gm: fx.GraphModule) -> fx.GraphModule:
    """The same graph, with each new value written as early as can be.

    Returns:
        A copy with another order; ``gm`` itself where nothing can come earlier, or where the graph
        has other effects, whose order matters.
    """
    calls = calls_of(gm)
    writes = only_final_writes(calls)
    if not writes:
        return gm
    order = _order(calls, writes)
    if order == calls:
        return gm
    ordered = copied_module(gm)
    nodes = {n.name: n for n in ordered.graph.nodes}
    (output,) = ordered.graph.find_nodes(op="output")
    for call in order:
        output.prepend(nodes[call.name])
    ordered.graph.lint()
    ordered.recompile()
    return ordered


class _Bundle:
    """Writes whose new values are computed together.

    Attributes:
        writes: the copies.
        nodes: what is computed for them alone.
        awaits: calls that have to come first: what they need, and what reads the old values.
    """

    def __init__(self) -> None:
        self.writes: list[fx.Node] = []
        self.nodes: set[fx.Node] = set()
        self.awaits: set[fx.Node] = set()


def _order(calls: Sequence[fx.Node], writes: dict[fx.Node, fx.Node]) -> list[fx.Node]:
    """The calls, each bundle of writes as soon as what it awaits has run."""
    own = _computed_for_writes(calls, writes)
    bundles = _bundles(calls, writes, own)
    waiting: dict[fx.Node, list[_Bundle]] = {}
    for bundle in bundles:
        for node in bundle.awaits:
            waiting.setdefault(node, []).append(bundle)
    place = {n: i for i, n in enumerate(calls)}
    ordered: dict[fx.Node, None] = {}

    def add(bundle: _Bundle) -> None:
        ordered.update(dict.fromkeys(sorted(bundle.nodes - ordered.keys(), key=place.__getitem__)))
        ordered.update(dict.fromkeys(bundle.writes))

    for bundle in bundles:
        if not bundle.awaits:
            add(bundle)
    for call in calls:
        if call in ordered or call in writes:
            continue
        # What is computed for a write alone is not put off: a gradient takes the place of what it
        # is computed from.
        ordered[call] = None
        for bundle in waiting.get(call, ()):
            bundle.awaits.remove(call)
            if not bundle.awaits:
                add(bundle)
    assert len(ordered) == len(calls)
    return list(ordered)


def _computed_for_writes(
    calls: Sequence[fx.Node], writes: dict[fx.Node, fx.Node]
) -> frozenset[fx.Node]:
    """Calls that only the writes of one parameter need, and numbers that only writes need."""
    reached = {write: 1 << i for i, write in enumerate(writes, 1)}  # as a mask
    for call in reversed(calls):
        if call not in writes:
            reached[call] = functools.reduce(
                operator.or_, (reached.get(user, _RETURNED) for user in call.users), 0
            )
    alone = _of_one_parameter(writes, reached)
    reached_by = {target: reached[write] for write, target in writes.items()}
    own: set[fx.Node] = set()
    for call in reversed(calls):
        mask = reached[call]
        if call in writes or not mask or mask & _RETURNED or effect_of(call) is not None:
            continue
        if not all(user in own or user in writes for user in call.users):
            continue  # backward needs it
        # What reads the old value of another parameter comes before that is written.
        read = (reached_by[o] for n in call.all_input_nodes if (o := owner(n)) in reached_by)
        together = alone[mask.bit_length() - 1]
        if _is_number(call) or all(part & ~together == 0 for part in (mask, *read)):
            own.add(call)
    return frozenset(own)


def _of_one_parameter(
    writes: dict[fx.Node, fx.Node], reached: Mapping[fx.Node, int]
) -> dict[int, int]:
    """For each write, by its bit, a mask of those that belong to the same parameter.

    An optimizer's state is read for its parameter's update alone, where a parameter is also read in
    forward.
    """
    of = {i: 1 << i for i in range(1, len(writes) + 1)}
    for target in writes.values():
        mask = functools.reduce(operator.or_, (reached[user] for user in target.users), 0)
        if mask & _RETURNED or _is_number(target):
            continue
        members = [i for i in of if mask >> i & 1]
        joined = functools.reduce(operator.or_, (of[i] for i in members), 0)
        of.update((i, joined) for i in of if joined >> i & 1)
    return of


def _is_number(call: fx.Node) -> bool:
    return not is_tensor(call) or all(numel(v) <= 1 for v in tensor_values(call))


def _bundles(
    calls: Sequence[fx.Node], writes: dict[fx.Node, fx.Node], own: frozenset[fx.Node]
) -> list[_Bundle]:
    """The writes, together if they share more than a number, or one reads what another writes."""
    readers: dict[fx.Node, list[fx.Node]] = {}
    for call in calls:
        if call not in writes and view_base(call) is None:
            for n in call.all_input_nodes:
                readers.setdefault(owner(n), []).append(call)
    bundle_of: dict[fx.Node, _Bundle] = {}  # of what is more than a number
    found: list[_Bundle] = []
    for write, target in writes.items():
        bundle = _Bundle()
        bundle.writes.append(write)
        awaited = _add_needed(bundle, write.all_input_nodes, own)
        awaited.update(readers.get(target, ()))
        awaited = {*awaited - own, *_add_needed(bundle, awaited & own, own)}
        bundle.awaits.update(n for n in awaited if n.op == "call_function")
        joined = {id(b): b for n in bundle.nodes if (b := bundle_of.get(n)) is not None}
        for other in joined.values():
            found.remove(other)
            bundle.writes = [*other.writes, *bundle.writes]
            bundle.nodes |= other.nodes
            bundle.awaits |= other.awaits
        bundle_of.update((n, bundle) for n in bundle.nodes if not _is_number(n))
        found.append(bundle)
    return found


def _add_needed(
    bundle: _Bundle, needed: Iterable[fx.Node], own: frozenset[fx.Node]
) -> set[fx.Node]:
    """Add all that a bundle computes itself; returns what it needs beside."""
    others: set[fx.Node] = set()
    stack = list(needed)
    while stack:
        n = stack.pop()
        if n not in own:
            others.add(n)
        elif n not in bundle.nodes:
            bundle.nodes.add(n)
            stack.extend(n.all_input_nodes)
    return others
