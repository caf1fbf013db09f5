"""What autograd's node of a compiled graph's call tells: what it saved, who holds what."""

from __future__ import annotations

import sys
import weakref
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.autograd.graph import GradientEdge, get_gradient_edge
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


# Set on the nodes of calls that were found.
_IS_KNOWN = "_dtrcompile_is_known"
# Between an output and the compiled function's node, there are a view or a copy or two.
_MAX_NODES_LOOKED_AT = 32


def backward_node(result: Any) -> Any:
    """The autograd node of the call that has just returned these outputs, None without one.

    To be asked once for each call: a node that was found belongs to that call, and is not taken for
    the node of a later one that returns, or writes into, what that call returned.
    """
    if not torch.is_grad_enabled():
        return None
    for output in result if isinstance(result, (tuple, list)) else (result,):
        node = _unknown_compiled(output.grad_fn) if isinstance(output, torch.Tensor) else None
        if node is not None:
            setattr(node, _IS_KNOWN, True)
            return node
    return None


def held_edges(result: Any) -> list[GradientEdge]:
    """What keeps the nodes of these outputs alive when the outputs are gone.

    Up to PyTorch 2.12, holding the Python object of a compiled function's node does not.
    """
    outputs = result if isinstance(result, (tuple, list)) else (result,)
    return [
        get_gradient_edge(o) for o in outputs if isinstance(o, torch.Tensor) and o.requires_grad
    ]


def _unknown_compiled(first: Any) -> Any:
    """The nearest node of a compiled function that no earlier call was found to have.

    Autograd makes an output that is a view from the compiled function's, and an input that was
    written into by a copy: its node has the input's earlier node before the compiled function's.
    """
    left, seen = deque([first]), 0
    while left and seen < _MAX_NODES_LOOKED_AT:
        node = left.popleft()
        seen += 1
        if node is None or hasattr(node, _IS_KNOWN):
            continue
        # Asked of the type, because reading the attribute unpacks what was saved, or raises if it
        # is gone.
        if hasattr(type(node), "saved_tensors"):
            return node
        left.extend(following for following, _ in node.next_functions)
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
