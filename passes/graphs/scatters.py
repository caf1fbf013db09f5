"""Sums of two gradients, one of which is scattered: the scatter adds to the other one in place.

The gradient of an embedding is made by adding rows to a tensor of zeros.  Where its weight is used
a second time (language models whose head is tied to their embedding), that tensor is then added to
the other gradient.  Zeros, the other gradient and their sum are as large as the weight, for a few
thousand rows that are not zero.  Here the rows are added to the other gradient right away: one
tensor less, and one pass over it.  The terms are the same; only the order of their sum is another.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import fx

from dtrcompile.passes.graphs.modules import call_like, copied_module
from dtrcompile.passes.nodes import value

aten = torch.ops.aten
_ADD = aten.add.Tensor
_MASKED = aten._unsafe_masked_index_put_accumulate.default
_UNMASKED = (aten.index_put.default, aten._unsafe_index_put.default)
# In a shorter type, what is added row by row to a large value would be rounded away.
_EXACT = (torch.float32, torch.float64)


def into_gradients(gm: fx.GraphModule, least_bytes: int) -> tuple[fx.GraphModule, int]:
    """The same graph, in which rows are added to gradients instead of to zeros.

    Args:
        least_bytes: of a gradient for which that is done: it changes how the sum is rounded.

    Returns:
        A copy, or ``gm`` itself if it has no such sum, and the number of those that it had.
    """
    if not any(_terms(node, least_bytes) for node in gm.graph.nodes):
        return gm, 0
    copy = copied_module(gm)
    count = 0
    for node in list(copy.graph.nodes):
        terms = _terms(node, least_bytes)
        if terms is not None:
            _add_in_place(copy.graph, node, *terms)
            count += 1
    copy.graph.eliminate_dead_code()
    copy.recompile()
    return copy, count


def _terms(total: fx.Node, least_bytes: int) -> tuple[fx.Node, fx.Node] | None:
    """A gradient and what is scattered into zeros, of which a node is the sum; else None."""
    if total.target is not _ADD or total.kwargs:
        return None
    for gradient, scatter in (total.args, total.args[::-1]):
        if not (isinstance(gradient, fx.Node) and isinstance(scatter, fx.Node)):
            return None
        if not _adds_to_zeros(scatter) or not _is_used_once(gradient):
            continue
        if _are_alike(gradient, scatter, least_bytes):
            return gradient, scatter
    return None


def _adds_to_zeros(node: fx.Node) -> bool:
    is_scatter = node.target is _MASKED or (
        node.target in _UNMASKED and len(node.args) > 3 and node.args[3] is True
    )
    zeros = node.args[0] if is_scatter else None
    return (
        isinstance(zeros, fx.Node)
        and zeros.target is aten.full.default
        and zeros.args[1] == 0
        and _is_used_once(node)
    )


def _is_used_once(node: fx.Node) -> bool:
    """Whether nobody else sees that it is written over."""
    return len(node.users) == 1 and node.op == "call_function"


def _are_alike(gradient: fx.Node, scatter: fx.Node, least_bytes: int) -> bool:
    ours, theirs = value(gradient), value(scatter)
    return (
        isinstance(ours, torch.Tensor)
        and isinstance(theirs, torch.Tensor)
        and ours.dtype == theirs.dtype
        and ours.dtype in _EXACT
        and ours.device == theirs.device
        and all(isinstance(size, int) for size in (*ours.shape, *theirs.shape))
        and ours.shape == theirs.shape
        and ours.numel() * ours.element_size() >= least_bytes
    )


def _add_in_place(graph: fx.Graph, total: fx.Node, gradient: fx.Node, scatter: fx.Node) -> None:
    """Put a scatter that adds to the gradient in the place of the sum.

    Of the masked scatter, Inductor has no form that works in place, so it is written out
    (``torch/_decomp/decompositions.py``, ``_unsafe_masked_index_put_accumulate``).
    """
    with graph.inserting_before(total):
        if scatter.target is not _MASKED:
            made = call_like(graph, total, scatter.target, (gradient, *scatter.args[1:]))
        else:
            _, mask, indices, rows = scatter.args
            assert isinstance(indices, Sequence)
            shape = _tensor(scatter).shape
            inside = [
                None if index is None else _clamped(graph, scatter, index, size)
                for index, size in zip(indices, shape, strict=False)
            ]
            kept = _or_zero(graph, scatter, mask, rows)
            scattered = (gradient, inside, kept, True)
            made = call_like(graph, total, aten._unsafe_index_put.default, scattered)
    total.replace_all_uses_with(made)
    graph.erase_node(total)


def _clamped(graph: fx.Graph, like: fx.Node, index: object, size: int) -> fx.Node:
    """An index that is inside also where the mask leaves its row out."""
    at_least = call_like(graph, like, aten.clamp_min.default, (index, -size))
    return call_like(graph, like, aten.clamp_max.default, (at_least, size - 1))


def _or_zero(graph: fx.Graph, like: fx.Node, mask: object, rows: object) -> fx.Node:
    """Rows where the mask says so, else zeros."""
    assert isinstance(rows, fx.Node)
    of_rows = _tensor(rows)
    zero = graph.call_function(
        aten.full.default,
        ([], 0),
        {"dtype": of_rows.dtype, "device": of_rows.device, "pin_memory": False},
    )
    zero.meta = {**like.meta, "val": of_rows.new_zeros(())}
    zero.meta.pop("tensor_meta", None)
    return call_like(graph, like, aten.where.self, (mask, rows, zero))


def _tensor(node: fx.Node) -> torch.Tensor:
    found = value(node)
    assert isinstance(found, torch.Tensor)
    return found
