"""How fast copies to the host and back are on a device: for option ``offload="measured"``.

Both directions are measured at once, as a step may use them.  The result is rounded to two digits,
which hides most jitter but not a different machine: plans may then differ from machine to machine
and from rank to rank.  To plan the same everywhere, name a bandwidth instead.
"""

from __future__ import annotations

import functools
import math
import time

import torch

from dtrcompile.passes.device.host_copies import offload, prefetch, wait_for_copy
from dtrcompile.passes.errors import OptionError
from dtrcompile.passes.target.devices import current_target

_COPIED_BYTES = 64 << 20
_REPEATS = 5


def measured_bytes_per_ns(device: torch.device) -> float:
    """Bandwidth of the link between a device and the host, in each direction; 1 byte/ns is 1 GB/s.

    Raises:
        OptionError: if the device is not there.
    """
    if current_target() is not None:
        raise OptionError(
            "option offload='measured' runs copies on the device, and this step is planned for a"
            " device that is not there. Name the bandwidth of its link to the host instead, such as"
            " '25GB/s'."
        )
    return _measured(device)


@functools.cache
def _measured(device: torch.device) -> float:
    tensor = torch.zeros(_COPIED_BYTES, dtype=torch.uint8, device=device)
    on_host = offload(tensor)
    wait_for_copy(on_host, tensor)
    shortest_ns = min(_both_ways_ns(tensor, on_host) for _ in range(_REPEATS))
    return _two_digits(_COPIED_BYTES / shortest_ns)


def _both_ways_ns(tensor: torch.Tensor, on_host: torch.Tensor) -> int:
    _synchronize(tensor.device)
    start_ns = time.perf_counter_ns()
    back = prefetch(on_host, tensor.device)
    sent = offload(tensor)
    wait_for_copy(back)
    wait_for_copy(sent, tensor)
    _synchronize(tensor.device)
    return time.perf_counter_ns() - start_ns


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _two_digits(number: float) -> float:
    return round(number, 1 - math.floor(math.log10(number)))
