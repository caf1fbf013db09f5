"""Which kernel `scaled_dot_product_attention` takes on a target: PyTorch's own choice, made again.

PyTorch chooses in C++, by the properties of the device that is there
(``aten/src/ATen/native/transformers/cuda/sdp_utils.cpp``: flash attention, else memory-efficient
attention, else the formula; ``attention.cpp``: what each of them is given).  cuDNN's attention,
which newer releases prefer on some devices, keeps what flash attention keeps.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from dtrcompile.passes.target.devices import Target

aten = torch.ops.aten

_FLASH_CAPABILITY, _EFFICIENT_CAPABILITY = (8, 0), (5, 0)
_FLASH_ALIGNMENT = 8
_MAX_FLASH_WIDTH = 256
# The memory-efficient kernel reads a bias in pieces of so many elements.
_BIAS_ALIGNMENT = 16


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
    if _takes_flash(target, query, key, value, attn_mask, enable_gqa):
        return _flash(query, key, value, dropout_p, is_causal, scale)
    if _takes_efficient(target, query, key, value):
        return _efficient(query, key, value, attn_mask, dropout_p, is_causal, scale)
    bias = None if attn_mask is None else _added(attn_mask, query.dtype)
    found: Any = aten._scaled_dot_product_attention_math(
        query, key, value, bias, dropout_p, is_causal, None, scale=scale, enable_gqa=enable_gqa
    )
    return found[0]  # type: ignore[no-any-return]


def _takes_flash(
    target: Target,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    enable_gqa: bool,
) -> bool:
    return (
        torch.backends.cuda.flash_sdp_enabled()
        and target.capability >= _FLASH_CAPABILITY
        and query.dim() == 4
        and mask is None
        and query.dtype in (torch.float16, torch.bfloat16)
        and query.dtype == key.dtype == value.dtype
        and query.shape[-1] == key.shape[-1] == value.shape[-1]
        and query.shape[-1] <= _MAX_FLASH_WIDTH
        and (enable_gqa or query.shape[1] == key.shape[1] == value.shape[1])
        and query.shape[0] == key.shape[0] == value.shape[0]
    )


def _takes_efficient(
    target: Target, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
) -> bool:
    dtypes = [torch.float16, torch.float32]
    if target.has_bfloat16:
        dtypes.append(torch.bfloat16)
    alignment = 16 // query.element_size()
    return (
        torch.backends.cuda.mem_efficient_sdp_enabled()
        and target.capability >= _EFFICIENT_CAPABILITY
        and query.dim() == 4
        and query.dtype in dtypes
        and query.dtype == key.dtype == value.dtype
        and query.shape[:2] == key.shape[:2] == value.shape[:2]
        and query.shape[-1] == key.shape[-1]
        and all(t.shape[-1] % alignment == 0 for t in (query, value))
    )


def _flash(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
) -> torch.Tensor:
    width = query.shape[-1]
    scale = 1 / math.sqrt(width) if scale is None else scale
    more = -width % _FLASH_ALIGNMENT
    if more:
        query, key, value = (torch.nn.functional.pad(t, (0, more)) for t in (query, key, value))
    found: Any = aten._scaled_dot_product_flash_attention(
        query, key, value, dropout_p, is_causal, False, scale=scale
    )
    return found[0][..., :width] if more else found[0]  # type: ignore[no-any-return]


def _efficient(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
) -> torch.Tensor:
    bias = None if mask is None else _bias(mask, query, key)
    keeps = torch.is_grad_enabled() and any(t.requires_grad for t in (query, key, value))
    found: Any = aten._scaled_dot_product_efficient_attention(
        query, key, value, bias, keeps, dropout_p, is_causal, scale=scale
    )
    return found[0]  # type: ignore[no-any-return]


def _bias(mask: torch.Tensor, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    """What is added to the scores, in rows as long as the kernel reads them."""
    mask = _added(mask, query.dtype)
    columns = mask.shape[-1]
    more = -columns % _BIAS_ALIGNMENT
    if more:
        mask = torch.nn.functional.pad(mask, (0, more))[..., :columns]
    return mask.expand(query.shape[0], query.shape[1], query.shape[2], key.shape[2])


def _added(mask: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A mask as what is added to the scores."""
    if mask.dtype is torch.bool:
        mask = torch.where(mask, 0.0, -math.inf)
    return mask.to(dtype)
