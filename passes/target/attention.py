"""Which kernel `scaled_dot_product_attention` takes on a target: PyTorch's own choice, made again.

PyTorch chooses in C++, by the properties of the device that is there
(``aten/src/ATen/native/transformers/cuda/sdp_utils.cpp``): on data-centre GPUs from Hopper on
cuDNN's attention, then flash attention, memory-efficient attention, and the formula.
``attention.cpp`` says what each of them is given.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch

from dtrcompile.passes.releases import release_of
from dtrcompile.passes.target.devices import Target

aten = torch.ops.aten

_FLASH_CAPABILITY, _EFFICIENT_CAPABILITY = (8, 0), (5, 0)
# Major capabilities on which cuDNN's attention comes first (``check_prefer_cudnn_attention``).
_PREFER_CUDNN = (9, 10)
_MAX_CUDNN_WIDTH = 128
_FLASH_ALIGNMENT = 8
_MAX_FLASH_WIDTH, _MAX_ROCM_FLASH_WIDTH = 256, 512
# With less shared memory, training takes no wider heads (``check_requires_grad_and_head_dim_...``).
_SMALL_CAPABILITIES = ((8, 6), (8, 7), (8, 9), (12, 0), (12, 1))
_SMALL_FLASH_WIDTHS = (192, 224)
# The memory-efficient kernel reads a bias in pieces of so many elements.
_BIAS_ALIGNMENT = 8
# From this release on it lets several queries share a key.
_EFFICIENT_GROUPS_RELEASE = (2, 15)


@dataclass(frozen=True, slots=True)
class _Call:
    """The arguments of a call, and what follows from them."""

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    mask: torch.Tensor | None
    dropout_p: float
    is_causal: bool
    scale: float | None
    groups: bool

    @property
    def tensors(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return self.query, self.key, self.value

    @property
    def trains(self) -> bool:
        return torch.is_grad_enabled() and any(t.requires_grad for t in self.tensors)

    @property
    def is_dense(self) -> bool:
        """Four dimensions, one dtype and batch, and rows without gaps."""
        return (
            self.query.dim() == self.key.dim() == self.value.dim() == 4
            and self.query.dtype == self.key.dtype == self.value.dtype
            and self.query.shape[0] == self.key.shape[0] == self.value.shape[0]
            and all(t.stride(-1) == 1 and t.shape[2] > 0 for t in self.tensors)
        )

    @property
    def is_half(self) -> bool:
        return self.query.dtype in (torch.float16, torch.bfloat16)

    @property
    def widths(self) -> tuple[int, int]:
        """Of query and key, and of value."""
        return int(self.query.shape[-1]), int(self.value.shape[-1])

    @property
    def heads_are_equal(self) -> bool:
        return bool(self.query.shape[1] == self.key.shape[1] == self.value.shape[1])

    @property
    def heads_are_grouped(self) -> bool:
        heads, shared = int(self.query.shape[1]), int(self.key.shape[1])
        return self.groups and shared == int(self.value.shape[1]) and heads % shared == 0


def attend(
    target: Target,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """As ``aten::scaled_dot_product_attention``, by the operators that ``target`` would run."""
    call = _Call(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
    if _takes_cudnn(target, call):
        return _cudnn(call)
    if _takes_flash(target, call):
        return _flash(call)
    if _takes_efficient(target, call):
        return _efficient(call)
    bias = None if attn_mask is None else _added(attn_mask, query.dtype)
    found: Any = aten._scaled_dot_product_attention_math(
        query, key, value, bias, dropout_p, is_causal, None, scale=scale, enable_gqa=enable_gqa
    )
    return found[0]  # type: ignore[no-any-return]


def _takes_cudnn(target: Target, call: _Call) -> bool:
    mask = call.mask
    return (
        target.capability[0] in _PREFER_CUDNN
        and not target.is_rocm
        and torch.backends.cuda.cudnn_sdp_enabled()
        and not torch.are_deterministic_algorithms_enabled()
        and call.is_half
        and call.is_dense
        and all(width % 8 == 0 and width <= _MAX_CUDNN_WIDTH for width in call.widths)
        and call.query.shape[-1] == call.key.shape[-1]
        and call.dropout_p * 16 == int(call.dropout_p * 16)
        and call.key.shape[2] > 1
        and not (call.query.shape[2] == 1 and call.dropout_p)
        and (call.heads_are_equal or call.heads_are_grouped)
        and (mask is None or (mask.dim() in (2, 4) and not mask.requires_grad))
    )


def _takes_flash(target: Target, call: _Call) -> bool:
    width = call.widths[0]
    limit = _MAX_ROCM_FLASH_WIDTH if target.is_rocm else _MAX_FLASH_WIDTH
    if target.capability in _SMALL_CAPABILITIES and call.trains:
        first, second = _SMALL_FLASH_WIDTHS
        if first < width <= second or (width > second and call.dropout_p):
            return False
    return (
        torch.backends.cuda.flash_sdp_enabled()
        and target.capability >= _FLASH_CAPABILITY
        and call.is_half
        and call.is_dense
        and call.mask is None
        and width == call.key.shape[-1] == call.widths[1]
        and width <= limit
        and (call.heads_are_equal or call.heads_are_grouped)
        and not (call.is_causal and call.query.shape[2] != call.key.shape[2])
    )


def _takes_efficient(target: Target, call: _Call) -> bool:
    dtypes = [torch.float16, torch.float32]
    if target.has_bfloat16:
        dtypes.append(torch.bfloat16)
    has_tensor_cores = target.capability >= (8, 0) or call.is_half
    alignment = 16 // call.query.element_size() if has_tensor_cores else 1
    may_group = release_of(torch.__version__) >= _EFFICIENT_GROUPS_RELEASE
    return (
        torch.backends.cuda.mem_efficient_sdp_enabled()
        and target.capability >= _EFFICIENT_CAPABILITY
        and call.query.dtype in dtypes
        and call.is_dense
        and call.query.shape[-1] == call.key.shape[-1]
        and all(width % alignment == 0 for width in call.widths)
        and (call.heads_are_equal or (may_group and call.heads_are_grouped))
        and (call.mask is None or call.mask.stride(-1) == 1)
    )


def _cudnn(call: _Call) -> torch.Tensor:
    bias = None if call.mask is None else _added(call.mask, call.query.dtype)
    found: Any = aten._scaled_dot_product_cudnn_attention(
        *call.tensors, bias, call.trains, call.dropout_p, call.is_causal, False, scale=call.scale
    )
    return found[0]  # type: ignore[no-any-return]


def _flash(call: _Call) -> torch.Tensor:
    width = call.widths[0]
    scale = 1 / math.sqrt(width) if call.scale is None else call.scale
    more = -width % _FLASH_ALIGNMENT
    tensors = call.tensors
    if more:
        query, key, value = (torch.nn.functional.pad(t, (0, more)) for t in tensors)
        tensors = query, key, value
    found: Any = aten._scaled_dot_product_flash_attention(
        *tensors, call.dropout_p, call.is_causal, False, scale=scale
    )
    return found[0][..., :width] if more else found[0]  # type: ignore[no-any-return]


def _efficient(call: _Call) -> torch.Tensor:
    bias = None if call.mask is None else _bias(call.mask, call.query, call.key)
    found: Any = aten._scaled_dot_product_efficient_attention(
        *call.tensors, bias, call.trains, call.dropout_p, call.is_causal, scale=call.scale
    )
    return found[0]  # type: ignore[no-any-return]


def _bias(mask: torch.Tensor, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    """What is added to the scores, with rows that begin where the kernel can read them."""
    mask = _added(mask, query.dtype)
    strides = [stride for stride, size in zip(mask.stride(), mask.shape, strict=True) if size > 1]
    is_aligned = all(stride % _BIAS_ALIGNMENT == 0 for stride in strides[:-1])
    if not is_aligned or mask.stride(-1) != 1:
        columns = mask.shape[-1]
        more = _BIAS_ALIGNMENT - columns % _BIAS_ALIGNMENT
        mask = torch.nn.functional.pad(mask, (0, more))[..., :columns]
    return mask.expand(query.shape[0], query.shape[1], query.shape[2], key.shape[2])


def _added(mask: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A mask as what is added to the scores."""
    if mask.dtype is torch.bool:
        return torch.where(mask, 0.0, -math.inf).to(dtype)
    return mask
