"""Matrix products without the zeros that Inductor pads their operands with.

Tensor cores read operands whose rows begin at multiples of 16 bytes; on others a product takes
several times as long (`device.costs`).  So Inductor pads operands with zeros before the step is
split (``torch/_inductor/fx_passes/pad_mm.py``), where a measurement on the GPU says that this is
faster.  The padded copies take memory: of the logits of GPT-2, whose vocabulary has 50257 words,
there are two at a time.  Here the products are taken back to what the user wrote.

A product of padded operands, cut to the size that it has without the padding, is the product of the
operands: what is added to a sum along the inner dimension is zero times zero.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import fx

from dtrcompile.passes.graphs.modules import call_like, copied_module

aten = torch.ops.aten
# Each with the places of its two factors; what comes before them is added to their product.
_PRODUCTS = {
    aten.mm.default: (0, 1),
    aten.bmm.default: (0, 1),
    aten.addmm.default: (1, 2),
    aten.baddbmm.default: (1, 2),
}


def without_padding(gm: fx.GraphModule) -> tuple[fx.GraphModule, int]:
    """The same graph with products of operands that are not padded.

    Returns:
        A copy, or ``gm`` itself if no product is padded, and the number of those that were.
    """
    if not gm.graph.find_nodes(op="call_function", target=aten.constant_pad_nd.default):
        return gm, 0
    copy = copied_module(gm)
    count = sum(_take_back(copy.graph, node) for node in list(copy.graph.nodes))
    if not count:
        return gm, 0
    copy.graph.eliminate_dead_code()
    copy.recompile()
    return copy, count


def _take_back(graph: fx.Graph, product: fx.Node) -> bool:
    """Compute a product without padding, if it has any that can be left out."""
    places = _PRODUCTS.get(product.target)
    if places is None:
        return False
    factors = [product.args[place] for place in places]
    sources, (left, right) = zip(*map(_source_and_padding, factors), strict=True)
    (rows, inner), (inner_too, columns) = left, right
    if inner != inner_too or not any((*left, *right)):
        return False
    dims = product.meta["val"].dim()
    cuts = _cuts(product, {dims - 2: rows, dims - 1: columns})
    if cuts is None:
        return False
    with graph.inserting_before(product):
        args = list(product.args)
        for place, source in zip(places, sources, strict=True):
            args[place] = source
        if places[0] > 0:
            args[0] = _cut_addend(graph, product, rows=rows, columns=columns)
        made = call_like(graph, product, product.target, args, **product.kwargs)
    for cut in cuts:
        cut.replace_all_uses_with(made)
    return True


def _source_and_padding(factor: object) -> tuple[object, tuple[int, int]]:
    """What was padded, and with how many zeros after its rows and columns; itself if it was not."""
    assert isinstance(factor, fx.Node)
    if factor.target is not aten.constant_pad_nd.default:
        return factor, (0, 0)
    source, padding, *value = factor.args
    assert isinstance(padding, Sequence)
    before, after = padding[::2], padding[1::2]  # from the last dimension on
    of_columns, of_rows, *of_others = (*after, 0, 0)[: max(2, len(after))]
    is_zero = not value or value[0] == 0
    if not is_zero or any(before) or any(of_others) or of_rows < 0 or of_columns < 0:
        return factor, (0, 0)
    return source, (of_rows, of_columns)


def _cuts(node: fx.Node, excess: dict[int, int]) -> list[fx.Node] | None:
    """The nodes at which a padded result has lost its padding; None if it is read before.

    Args:
        excess: dimension -> by how much it is too large.
    """
    left = {dim: size for dim, size in excess.items() if size}
    if not left:
        return [node]
    found: list[fx.Node] = []
    for user in node.users:
        if user.target is not aten.slice.Tensor:
            return None
        _, dim, start, *_ = (*user.args, 0, 0)[:3]
        dims, size = node.meta["val"].dim(), user.meta["val"].shape
        place = int(dim) % dims  # type: ignore[call-overload]
        is_whole = len(user.args) < 5 or user.args[4] == 1
        has_lost = place in left and size[place] == node.meta["val"].shape[place] - left[place]
        if start not in (0, None) or not is_whole or not has_lost:
            return None
        cuts = _cuts(user, {**left, place: 0})
        if cuts is None:
            return None
        found += cuts
    return found


def _cut_addend(graph: fx.Graph, product: fx.Node, *, rows: int, columns: int) -> object:
    """What is added to the product, without the padding of the result."""
    addend = product.args[0]
    assert isinstance(addend, fx.Node)
    for dim, excess in ((-1, columns), (-2, rows)):
        shape = addend.meta["val"].shape
        # (One of a single row or column is added to all.)
        if excess and len(shape) >= -dim and shape[dim] > 1:
            size = int(product.meta["val"].shape[dim]) - excess
            addend = call_like(
                graph, addend, aten.slice.Tensor, (addend, len(shape) + dim, 0, size)
            )
    return addend
