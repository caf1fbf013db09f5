"""How large the storages of a captured graph are: in bytes, and in the graph's symbols."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

import sympy
import torch
from torch import fx

from dtrcompile.passes.nodes import (
    extent_bytes,
    extent_expression,
    hint,
    owned_bytes,
    owned_expression,
    storage_key,
    value,
)


def viewed_bytes(nodes: Sequence[fx.Node]) -> int:
    """Bytes of a storage from outside, of which these nodes are views."""
    first, *others = map(tensor_of, nodes)
    size_bytes = extent_bytes(first)
    for val in others:
        whole_bytes = max(hint(val.untyped_storage().nbytes()), size_bytes)
        size_bytes = min(size_bytes + extent_bytes(val), whole_bytes)
    return size_bytes


def viewed_storages(
    tensors: Iterable[torch.Tensor], key: Callable[[torch.UntypedStorage], int]
) -> dict[int, int]:
    """``key`` of a storage -> bytes of it that these tensors view: what they count as inputs.

    The rest of the storage is the caller's: a batch may be a view of a whole data set.
    """
    found: dict[int, int] = {}
    for tensor in tensors:
        storage = tensor.untyped_storage()
        viewed_bytes = found.get(key(storage), 0) + extent_bytes(tensor)
        found[key(storage)] = min(viewed_bytes, storage.nbytes())
    return found


def allocated_bytes(node: fx.Node, same_value: Mapping[fx.Node, fx.Node]) -> int:
    """Bytes of the storage that a node owns, by what it computes."""
    val = tensor_of(node)
    return extent_bytes(val) if _returns_argument(node, same_value) else owned_bytes(val)


def allocated_expression(node: fx.Node, same_value: Mapping[fx.Node, fx.Node]) -> sympy.Expr:
    """As `allocated_bytes`, in the graph's symbols."""
    val = tensor_of(node)
    return extent_expression(val) if _returns_argument(node, same_value) else owned_expression(val)


def tensor_of(node: fx.Node) -> torch.Tensor:
    """The fake tensor of a node that is one."""
    val = value(node)
    assert isinstance(val, torch.Tensor)
    return val


def _returns_argument(node: fx.Node, same_value: Mapping[fx.Node, fx.Node]) -> bool:
    """Whether the trace let an operator return its argument's storage; a run may not."""
    own = storage_key(tensor_of(node))
    sources = (value(same_value.get(n, n)) for n in node.all_input_nodes)
    return any(isinstance(s, torch.Tensor) and storage_key(s) == own for s in sources)
