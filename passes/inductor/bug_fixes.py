"""Errors of Inductor's that give wrong results, put right while our graphs are compiled.

Each is here for as long as a supported version of PyTorch has it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from dtrcompile.passes.torch_private import SchedulerNode, StarDep, WeakDep


def recompute_and_rename(node: Any, *args: Any, **kwargs: Any) -> None:
    """In place of ``SchedulerNode.recompute_size_and_body``: what it forgets is put back.

    What reads a buffer that a scatter wrote into depends on the scatter by a new name for the
    buffer.  To fuse loops on the CPU, Inductor computes what a loop reads anew, and forgets the new
    names (torch 2.12 and 2.13: unless it reads something else by a dependency of its own making).
    The loop may then run before the scatter, and read zeros: in the backward of a U-Net, whose
    nearest upsampling is such a scatter, half of the gradients.
    """
    made = [dep for dep in node.read_writes.reads if isinstance(dep, (WeakDep, StarDep))]
    _RECOMPUTE(node, *args, **kwargs)
    names = {dep.name for dep in node.read_writes.reads}
    forgotten = [dep for dep in made if dep.name not in names]
    if forgotten or not names.isdisjoint(node.mutation_renames):
        known = node.read_writes
        for dep in forgotten:
            known = known.with_read(dep)
        node.set_read_writes(known.rename(node.mutation_renames))


_RECOMPUTE = SchedulerNode.recompute_size_and_body


def write_out_alpha(gm: fx.GraphModule) -> None:
    """Multiply by ``alpha`` before a product is added to, in place of passing it to the addition.

    Inductor's patterns match a call whatever keywords it has that they do not mention (up to torch
    2.14).  ``torch.add(a @ b, c, alpha=0.1)`` becomes an ``addmm`` that adds all of ``c``: with
    weight decay, SGD's update is that.
    """
    for node in gm.graph.find_nodes(op="call_function", target=torch.ops.aten.add.Tensor):
        alpha = node.kwargs.get("alpha", 1)
        if alpha == 1 or not any(n.target is _PRODUCT for n in node.all_input_nodes):
            continue
        first, second = node.args
        if not isinstance(second, fx.Node):
            node.args, node.kwargs = (first, second * alpha), {}
            continue
        with gm.graph.inserting_before(node):
            scaled = gm.graph.call_function(torch.ops.aten.mul.Tensor, (second, alpha))
        scaled.meta = dict(node.meta)
        scaled.meta["val"] = torch.ops.aten.mul.Tensor(second.meta["val"], alpha)
        node.args, node.kwargs = (first, scaled), {}
    gm.recompile()


_PRODUCT = torch.ops.aten.mm.default
