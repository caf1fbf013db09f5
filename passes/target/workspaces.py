"""What library calls hold inside on a GPU that is not there: bounds, since nothing can be measured.

==============================  ==================================================================
call                            bound
==============================  ==================================================================
matrix products                 nothing: cuBLAS's workspace is there for the life of the process,
                                and no part of a step (docs/memory-model.md)
flash attention                 partial results in float32, where the keys are split among
                                multiprocessors that would be idle
flash attention, backward       the gradient of the query in float32, a number for each of its rows;
                                where several queries share a key, its gradient for each of them
memory-efficient attention      nothing
the same, backward              the gradients in float32, a number for each row
anything else                   a copy of every argument and result
==============================  ==================================================================

The sizes of attention are those of ``flash_api.cpp`` and ``attention_backward.cu`` in PyTorch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch

from dtrcompile.passes.target.devices import Target
from dtrcompile.passes.torch_private import OpOverload

_FLOAT_BYTES = 4
_ROWS_OF_A_BLOCK, _MOST_SPLITS = 64, 128


def foreseen_bytes(target: Target, func: OpOverload, args: Sequence[object]) -> int | None:
    """The bound for a call; None: a copy of every argument and result."""
    bound = _BOUNDS.get(func._schema.name)
    return None if bound is None else bound(target, [t for t in args if _is_tensor(t)])


def _is_tensor(leaf: object) -> bool:
    return isinstance(leaf, torch.Tensor)


def _nothing(_target: Target, _tensors: Sequence[object]) -> int:
    return 0


def _flash(target: Target, tensors: Sequence[object]) -> int:
    query, key = tensors[:2]
    assert isinstance(query, torch.Tensor) and isinstance(key, torch.Tensor)
    batch, heads, rows, width = map(int, query.shape)
    columns_of_a_block = 256 if width <= 64 else 128 if width <= 128 else 64
    blocks = batch * heads * _parts(rows, _ROWS_OF_A_BLOCK)
    processors = 2 * target.multiprocessors
    if blocks >= 0.8 * processors:
        return 0
    splits = min(_MOST_SPLITS, processors, _parts(int(key.shape[2]), columns_of_a_block))
    return splits * batch * heads * rows * (_rounded(width, 32) + 1) * _FLOAT_BYTES


def _flash_backward(_target: Target, tensors: Sequence[object]) -> int:
    _, query, key, value = tensors[:4]
    assert isinstance(query, torch.Tensor)
    assert isinstance(key, torch.Tensor) and isinstance(value, torch.Tensor)
    batch, heads, rows, width = map(int, query.shape)
    per_row = _rounded(width, 32 if width <= 128 else 64) + 1
    size_bytes = batch * heads * _rounded(rows, 128) * per_row * _FLOAT_BYTES
    if int(key.shape[1]) != heads:
        of_each_query = (t.numel() // int(key.shape[1]) * heads for t in (key, value))
        size_bytes += sum(int(n) * key.element_size() for n in of_each_query)
    return size_bytes


def _efficient_backward(_target: Target, tensors: Sequence[object]) -> int:
    sizes = [t.numel() for t in tensors[1:4] if isinstance(t, torch.Tensor)]
    query = tensors[1]
    assert isinstance(query, torch.Tensor)
    rows = int(query.numel()) // int(query.shape[-1])
    return (sum(map(int, sizes)) + rows) * _FLOAT_BYTES


def _parts(size: int, of: int) -> int:
    return -(-size // of)


def _rounded(size: int, multiple: int) -> int:
    return _parts(size, multiple) * multiple


_BOUNDS: Mapping[str, Callable[[Target, Sequence[object]], int]] = {
    "aten::mm": _nothing,
    "aten::addmm": _nothing,
    "aten::bmm": _nothing,
    "aten::baddbmm": _nothing,
    "aten::_scaled_dot_product_flash_attention": _flash,
    "aten::_scaled_dot_product_flash_attention_backward": _flash_backward,
    "aten::_scaled_dot_product_efficient_attention": _nothing,
    "aten::_scaled_dot_product_efficient_attention_backward": _efficient_backward,
}
