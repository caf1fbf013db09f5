"""Which matrix products Inductor will pad on a GPU that is not there.

On a GPU, Inductor measures whether a product takes less time with its operands padded
(``should_pad`` in ``torch/_inductor/fx_passes/pad_mm.py``).  Here it is foreseen: that is so where
the product is long enough to be worth the copies, by Inductor's own rule, and the tensor cores
cannot read its rows at once.  On an H100, Inductor padded the products with the head of a GPT with
a vocabulary of 50257 words, and the peak without a budget was the one foreseen, to the byte
(`bench.gpu`, part "promise").
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch

from dtrcompile.passes.device.costs import (
    DevicePeaks,
    device_peaks,
    misaligned_slowdown,
    row_bytes,
    size_hint,
)
from dtrcompile.passes.process_switches import has_float32_products_in_lower_precision
from dtrcompile.passes.torch_private import pad_mm

# As ``is_mm_compute_bound`` has it.
_BALANCE_SHARE = 0.5


@contextlib.contextmanager
def foreseen() -> Iterator[None]:
    """Inside of the ``with`` block, nothing is measured to decide about padding."""
    with mock.patch.object(pad_mm, "should_pad", _should_pad):
        yield


def _should_pad(match: Any, mat1: Any, mat2: Any, op: Any, input: Any = None) -> bool:  # noqa: ARG001
    """In place of ``should_pad``, with the same arguments.

    Args:
        match: what the pattern matched.
        mat1, mat2: the fake operands; of ``bmm`` they have three dimensions.
        op: the packet of ``mm``, ``addmm`` or ``bmm``.
        input: what ``addmm`` adds.
    """
    with (
        mock.patch.object(pad_mm, "has_triton", lambda: True),
        # (They say otherwise to C++: see `target.tracing`.)
        mock.patch.object(pad_mm, "check_device", _are_on_gpu),
    ):
        if not pad_mm.can_pad(mat1, mat2, op, input):
            return False
    return is_faster(mat1, mat2, device_peaks(mat1.device))


def is_faster(left: torch.Tensor, right: torch.Tensor, peaks: DevicePeaks) -> bool:
    """Whether a product takes less time with padding on a GPU of these peaks."""
    m, k, n = map(size_hint, (*left.shape[-2:], right.shape[-1]))
    peak = peaks.matrix_peak(left.dtype, tf32=has_float32_products_in_lower_precision("cuda"))
    rows_bytes = row_bytes(left), row_bytes(right), n * left.element_size()
    if peak <= peaks.vector_flops or misaligned_slowdown(rows_bytes) == 1:
        return False
    intensity = m * n * k / (m * k + n * k + m * n)
    return intensity > _BALANCE_SHARE * peak / peaks.bandwidth


def _are_on_gpu(*tensors: torch.Tensor) -> bool:
    return all(tensor.device.type == "cuda" for tensor in tensors)
