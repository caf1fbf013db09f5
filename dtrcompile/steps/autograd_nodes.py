"""What autograd's node of a compiled graph's call tells: what it saved, who holds what."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from dtrcompile.passes.torch_private import storage_use_count, tensor_use_count


def _holders_in_python() -> int:
    storage = torch.empty(1).untyped_storage()
    return storage_use_count(storage._cdata)


# How often Python's object for a storage, once there is one, holds the storage: once, as long as
# anything else does.
PYTHONS_HOLD = _holders_in_python()


def saved_tensors(node: Any) -> list[torch.Tensor] | None:
    """What a node has saved; None where that is gone."""
    try:
        return [*node.saved_tensors, *(getattr(node, "_tensors_no_vc_check", None) or ())]
    except RuntimeError:
        return None


def _tensors(gradients: Sequence[Any]) -> Iterator[torch.Tensor]:
    """Of the arguments of a node's method: one list of gradients, or each by itself."""
    boxed = gradients[0] if len(gradients) == 1 and isinstance(gradients[0], list) else gradients
    return (g for g in boxed if isinstance(g, torch.Tensor) and g.layout is torch.strided)


def storages_of(gradients: Sequence[Any]) -> list[tuple[StorageWeakRef, int]]:
    """Each storage once, and its bytes."""
    storages = {g.untyped_storage()._cdata: g.untyped_storage() for g in _tensors(gradients)}
    return [(StorageWeakRef(s), s.nbytes()) for s in storages.values()]


def holders_of(gradients: Sequence[Any]) -> tuple[int, ...]:
    """How many hold each gradient and its storage: to be compared with another call's."""
    return tuple(
        sys.getrefcount(g) + tensor_use_count(g) + storage_use_count(g.untyped_storage()._cdata)
        for g in _tensors(gradients)
    )


_UNHELD = holders_of(([torch.empty(1)],))


def are_unheld(holders: Sequence[int]) -> bool:
    """Whether nobody but the list that a backward is given holds its gradients."""
    return all(n <= _UNHELD[0] for n in holders)


def backward_node(result: Any) -> Any:
    """The autograd node of a compiled graph's outputs, None without one."""
    if not torch.is_grad_enabled():
        return None
    for output in result if isinstance(result, (tuple, list)) else (result,):
        node = output.grad_fn if isinstance(output, torch.Tensor) else None
        # An output that is a view is made from the compiled function's by autograd.  Asked of the
        # type, because reading the attribute unpacks what was saved, or raises if it is gone.
        while node is not None and not hasattr(type(node), "saved_tensors"):
            node = node.next_functions[0][0] if node.next_functions else None
        if node is not None:
            return node
    return None


def waits(reference: weakref.ref[Any]) -> bool:
    """Whether a node still holds its saved tensors: it lives, and backward has not run."""
    node = reference()
    if node is None:
        return False
    try:
        # (``saved_tensors`` would unpack them, and so compute a checkpointed block again.)
        return node._raw_saved_tensors is not None
    except RuntimeError:
        return False
