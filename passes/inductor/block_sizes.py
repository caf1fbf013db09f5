"""Kernels that choose their block sizes in a step, without holding more than the step does.

A Triton kernel that may be launched with several block sizes tries all of them when it is first
called, in the middle of the first step.  Inductor allocates two things for that, which the promise
does not count, and for which a device that is nearly full has no room:

* A buffer of the size of the device's L2 cache (50 MiB on an H100, 60 MiB on an H200).  It is
  written before each run, so that the kernel finds its operands in memory.
* Copies of what the kernel writes over, since it runs more than once.  They are made on the host
  where they would raise the peak so far, but not in the forward graph of a training step, whose
  peak Inductor expects at its end.  A plan's forward may have it anywhere.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

from dtrcompile.passes.torch_private import CachingAutotuner, InductorBenchmarker


def benchmark_without_buffer(
    benchmarker: Any, call: Callable[[], Any], *args: Any, **kwargs: Any
) -> Any:
    """In place of ``InductorBenchmarker.benchmark_gpu``, whose buffer becomes one element.

    Small operands may be in the cache then, as they often are in a step.
    """
    # (Every release takes the size from there if it is there.)
    with mock.patch.dict(vars(benchmarker), L2_cache_size=_ELEMENT_BYTES):
        return _BENCHMARK(benchmarker, call, *args, **kwargs)


def copy_below_peak(tuner: Any, *args: Any, **kwargs: Any) -> Any:
    """In place of ``CachingAutotuner.copy_args_to_cpu_if_needed``: as in backward, everywhere."""
    with mock.patch.object(tuner, "optimize_mem", True):
        return _COPY(tuner, *args, **kwargs)


_ELEMENT_BYTES = 4
_BENCHMARK = InductorBenchmarker.benchmark_gpu
_COPY = CachingAutotuner.copy_args_to_cpu_if_needed
