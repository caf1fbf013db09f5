"""Joint graphs as Inductor leaves them on a GPU: with padded operands of matrix products."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import fx

aten = torch.ops.aten


def pad_products(gm: fx.GraphModule, alignment: int) -> int:
    """Pad every dimension of every ``mm`` to a multiple, as ``pad_mm.py`` writes it.

    Returns:
        How many products have padding now.
    """
    count = 0
    for node in gm.graph.find_nodes(op="call_function", target=aten.mm.default):
        left, right = node.all_input_nodes if node.args[0] is not node.args[1] else (None, None)
        if left is None:
            continue
        (m, k), (_, n) = left.meta["val"].shape, right.meta["val"].shape
        over_m, over_k, over_n = (-size % alignment for size in (m, k, n))
        if not (over_m or over_k or over_n):
            continue
        count += 1
        with gm.graph.inserting_before(node):
            for place, source, amounts in (
                (0, left, [0, over_k, 0, over_m]),
                (1, right, [0, over_n, 0, over_k]),
            ):
                if any(amounts):
                    pad = _call(gm, aten.constant_pad_nd.default, source, amounts)
                    node.update_arg(place, pad)
        result = node
        node.meta["val"] = node.target(*(a.meta["val"] for a in node.all_input_nodes))
        users = list(node.users)
        for dim, over in ((0, over_m), (1, over_n)):
            if over:
                with gm.graph.inserting_after(result):
                    result = _call(gm, aten.slice.Tensor, result, dim, 0, -over)
        for user in users:
            user.replace_input_with(node, result)
        gm.graph.lint()
    gm.recompile()
    return count


def _call(
    gm: fx.GraphModule, target: Callable[..., object], source: fx.Node, *rest: object
) -> fx.Node:
    made = gm.graph.call_function(target, (source, *rest))
    made.meta["val"] = target(source.meta["val"], *rest)
    return made
