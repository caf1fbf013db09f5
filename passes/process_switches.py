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
        torch.get_float32_matmul_precision(),
        torch.are_deterministic_algorithms_enabled(),
        mkldnn_enabled(),
        torch.backends.cudnn.enabled,
        torch.backends.cudnn.benchmark,
        torch.backends.cudnn.deterministic,
        torch.backends.cuda.flash_sdp_enabled(),
        torch.backends.cuda.mem_efficient_sdp_enabled(),
        torch.backends.cuda.math_sdp_enabled(),
        torch.backends.cuda.cudnn_sdp_enabled(),
    )
