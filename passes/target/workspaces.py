"""What library calls hold inside on a GPU that is not there: bounds, since nothing can be measured.

==============================  ==================================================================
call                            bound
==============================  ==================================================================
matrix products                 up to PyTorch 2.14 nothing: cuBLAS's workspace stays for the life of
                                the process (`library_blocks`); from 2.15 on that workspace, for
                                each call
flash attention                 without dropout, partial results in float32, where the keys are
                                split among multiprocessors that would be idle
flash attention, backward       the gradient of the query in float32, a number for each of its rows;
                                where several queries share a key, its gradient for each of them;
                                copies of what does not lie in memory as the kernel reads it
memory-efficient attention      of wide heads in half precision, the result in float32
the same, backward              the gradient of the query in float32, a number for each of its rows;
                                of wider heads in half precision, those of key and value too; a copy
                                of the result's gradient, or a float32 product with it
anything else                   a copy of every argument and result: cuDNN's attention and
                                convolutions, sorting
==============================  ==================================================================

The sizes of attention are those of ``flash_api.cpp``, ``attention_backward.cu`` and
``mem_eff_attention/kernel_backward.h`` in PyTorch, those of cuBLAS of ``CublasHandlePool.cpp``.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from dtrcompile.passes.releases import release_of
from dtrcompile.passes.target.devices import Target
from dtrcompile.passes.torch_private import OpOverload

_FLOAT_BYTES = 4
_MIB = 1 << 20
_ROWS_OF_A_BLOCK, _MOST_SPLITS = 64, 128
# From this release on cuBLAS's workspace is given back after each call.
_NOTHING_KEPT_RELEASE = (2, 15)
# The memory-efficient kernels work on tiles of at most so many rows and columns.
_TILE = 128
# Wider heads have results, or gradients of keys, that do not fit into registers.
_WIDE_RESULT, _WIDE_GRADIENT = 128, 64


def product_bytes(capability: tuple[int, int], *, is_rocm: bool = False) -> int:
    """What cuBLAS is given for a product, unless ``CUBLAS_WORKSPACE_CONFIG`` says otherwise."""
    config = os.environ.get("CUBLAS_WORKSPACE_CONFIG", "")
    pairs = re.findall(r":(\d+):(\d+)", config)
    if pairs:
        return sum(int(size) * int(count) for size, count in pairs) << 10
    if is_rocm:  # hipBLAS's and hipBLASLt's
        return (128 + 76) * _MIB
    return 32 * _MIB if capability >= (9, 0) else 8 * _MIB + (128 << 10)


def keeps_workspaces(*, is_rocm: bool = False) -> bool:
    """Whether this PyTorch keeps the workspace of products for the life of the process."""
    asked = os.environ.get("TORCH_CUBLAS_WORKSPACE_CACHE", "") == "1"
    return asked or is_rocm or release_of(torch.__version__) < _NOTHING_KEPT_RELEASE


def foreseen_bytes(target: Target, func: OpOverload, args: Sequence[object]) -> int | None:
    """The bound for a call; None: a copy of every argument and result."""
    bound = _BOUNDS.get(func._schema.name)
    if bound is None:
        return None
    return bound(_Given(target, args, [t for t in args if isinstance(t, torch.Tensor)]))


@dataclass(frozen=True, slots=True)
class _Given:
    """A call.

    Attributes:
        tensors: of ``args``, in order.
    """

    target: Target
    args: Sequence[object]
    tensors: Sequence[torch.Tensor]


def _product(given: _Given) -> int:
    target = given.target
    if keeps_workspaces(is_rocm=target.is_rocm):
        return 0
    return product_bytes(target.capability, is_rocm=target.is_rocm)


def _flash(given: _Given) -> int:
    query, key = given.tensors[:2]
    dropout_p = given.args[3] if len(given.args) > 3 else 0.0
    batch, heads, rows, width = map(int, query.shape)
    columns_of_a_block = 256 if width <= 64 else 128 if width <= 128 else 64
    blocks = batch * heads * _parts(rows, _ROWS_OF_A_BLOCK)
    processors = 2 * given.target.multiprocessors
    if dropout_p or blocks >= 0.8 * processors:
        return 0
    splits = min(_MOST_SPLITS, processors, _parts(int(key.shape[2]), columns_of_a_block))
    return splits * batch * heads * rows * _float_row(width) * _FLOAT_BYTES


def _float_row(width: int) -> int:
    """Elements of a row in float32, and a number for it."""
    return _rounded(width, 32 if width <= 128 else 64) + 1


def _flash_backward(given: _Given) -> int:
    gradient, query, key, value, result = given.tensors[:5]
    batch, heads, rows, width = map(int, query.shape)
    size_bytes = batch * heads * _rounded(rows, 128) * _float_row(width) * _FLOAT_BYTES
    if int(key.shape[1]) != heads:
        of_each_query = (int(t.numel()) // int(key.shape[1]) * heads for t in (key, value))
        size_bytes += sum(of_each_query) * key.element_size()
    return size_bytes + _copied(gradient) + _copied(result)


def _copied(tensor: torch.Tensor) -> int:
    """A copy with the heads inside of the rows, where it does not lie so."""
    if tensor.transpose(1, 2).is_contiguous():
        return 0
    return int(tensor.numel()) * tensor.element_size()


def _efficient(given: _Given) -> int:
    query, _, value = given.tensors[:3]
    width = max(int(query.shape[-1]), int(value.shape[-1]))
    if query.element_size() != 2 or width <= _WIDE_RESULT:
        return 0
    batch, heads, rows = map(int, query.shape[:3])
    return batch * heads * rows * int(value.shape[-1]) * _FLOAT_BYTES


def _efficient_backward(given: _Given) -> int:
    gradient, query, key, value = given.tensors[:4]
    batch, heads, rows, width = map(int, query.shape)
    per_head = _rounded(rows, _TILE) * _rounded(width, _TILE) + rows
    is_half = query.element_size() == 2
    if is_half and max(width, int(value.shape[-1])) > _WIDE_GRADIENT:
        columns = _rounded(int(key.shape[2]), _TILE)
        per_head += columns * sum(_rounded(int(t.shape[-1]), _TILE) for t in (key, value))
    workspace_bytes = batch * heads * per_head * _FLOAT_BYTES
    # The product of result and gradient, in float32, is gone before the workspace is there.
    product = int(gradient.numel()) * _FLOAT_BYTES * (3 if is_half else 1)
    return _copied(gradient) + max(workspace_bytes, product)


def _parts(size: int, of: int) -> int:
    return -(-size // of)


def _rounded(size: int, multiple: int) -> int:
    return _parts(size, multiple) * multiple


_BOUNDS: Mapping[str, Callable[[_Given], int]] = {
    "aten::mm": _product,
    "aten::addmm": _product,
    "aten::bmm": _product,
    "aten::baddbmm": _product,
    "aten::_scaled_dot_product_flash_attention": _flash,
    "aten::_scaled_dot_product_flash_attention_backward": _flash_backward,
    "aten::_scaled_dot_product_efficient_attention": _efficient,
    "aten::_scaled_dot_product_efficient_attention_backward": _efficient_backward,
}
