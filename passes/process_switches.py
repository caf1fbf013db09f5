"""PyTorch's process-wide switches that choose among kernels, and so decide what is allocated."""

from __future__ import annotations

import torch

from dtrcompile.passes.torch_private import mkldnn_enabled


def process_switches() -> tuple[object, ...]:
    """Their values now: part of the key of whatever is remembered about a kernel or a wrapper.

    Dynamo compiles again where most of them change (the number of threads, for example, by which
    attention on a CPU allocates its buffers).
    """
    return (
        torch.get_num_threads(),
        torch.are_deterministic_algorithms_enabled(),
        mkldnn_enabled(),
        *(module.fp32_precision for module in _WITH_A_PRECISION),
        torch.backends.cudnn.enabled,
        torch.backends.cudnn.benchmark,
        torch.backends.cudnn.deterministic,
        torch.backends.cuda.flash_sdp_enabled(),
        torch.backends.cuda.mem_efficient_sdp_enabled(),
        torch.backends.cuda.math_sdp_enabled(),
        torch.backends.cuda.cudnn_sdp_enabled(),
    )


# `torch.set_float32_matmul_precision` sets them too.  What it set, like ``allow_tf32``, can no
# longer be asked for once one of them was set by itself: PyTorch raises a RuntimeError.
_WITH_A_PRECISION = (
    torch.backends.cuda.matmul,
    torch.backends.cudnn.conv,
    torch.backends.cudnn.rnn,
    torch.backends.mkldnn.matmul,
    torch.backends.mkldnn.conv,
    torch.backends.mkldnn.rnn,
)


def has_float32_products_in_lower_precision(device_type: str) -> bool:
    """Whether a library may compute products of float32 in TF32 or in bfloat16."""
    library = torch.backends.mkldnn if device_type == "cpu" else torch.backends.cuda
    return library.matmul.fp32_precision in ("tf32", "bf16")
