"""Errors of Inductor's that give wrong results, put right while our graphs are compiled.

Each is here for as long as a supported version of PyTorch has it.
"""

from __future__ import annotations

from typing import Any

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
