"""Live bytes over a step, from the allocator's own events.

This is the other side of the promise: nothing here knows about plans.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile


@dataclass(frozen=True)
class LiveMemory:
    """Bytes live on the device after each allocation and each free of one step.

    Attributes:
        at_s: seconds since the step's first event, ascending.
        live_bytes: one entry for each of ``at_s``, what was there before the step included.
        peak_bytes: the most at any moment.
    """

    at_s: tuple[float, ...]
    live_bytes: tuple[int, ...]
    peak_bytes: int


def trace_step(step: Callable[[], object], static_bytes: int, device: torch.device) -> LiveMemory:
    """Run ``step`` once and record its memory.

    Args:
        step: forward and backward.  Gradients must be unset, so that the step allocates them.
        static_bytes: parameters, buffers and inputs, which were there before.
    """
    activities = [ProfilerActivity.CPU]
    before_bytes = 0
    if device.type == "cuda":
        activities.append(ProfilerActivity.CUDA)
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before_bytes = torch.cuda.memory_allocated(device)
    with profile(activities=activities, profile_memory=True) as profiler:
        step()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
    events = [
        event
        for event in profiler.profiler.kineto_results.events()
        if event.name() == "[memory]" and event.device_type().name.lower() == device.type
    ]
    events.sort(key=lambda event: event.start_ns())
    at_s, live, now = [0.0], [static_bytes], static_bytes
    for event in events:
        now += event.nbytes()
        at_s.append((event.start_ns() - events[0].start_ns()) / 1e9)
        live.append(now)
    peak_bytes = max(live)
    if device.type == "cuda":
        peak_bytes = torch.cuda.max_memory_allocated(device) - before_bytes + static_bytes
    return LiveMemory(tuple(at_s), tuple(live), peak_bytes)


def static_bytes(*objects: nn.Module | torch.Tensor) -> int:
    """Bytes of parameters, buffers and inputs, each storage once; on CUDA, of their blocks."""
    tensors = [
        tensor
        for item in objects
        for tensor in ([item] if isinstance(item, torch.Tensor) else _tensors_of(item))
    ]
    blocks = _cuda_blocks() if any(tensor.is_cuda for tensor in tensors) else {}
    storages = [tensor.untyped_storage() for tensor in tensors]
    return sum({s.data_ptr(): blocks.get(s.data_ptr(), s.nbytes()) for s in storages}.values())


def _tensors_of(model: nn.Module) -> list[torch.Tensor]:
    return [*model.parameters(), *model.buffers()]


def _cuda_blocks() -> dict[int, int]:
    """Address -> bytes of the caching allocator's blocks, which may be larger than what is asked.

    Other allocators do not tell.
    """
    if torch.cuda.get_allocator_backend() != "native":
        return {}
    blocks: dict[int, int] = {}
    for segment in torch.cuda.memory_snapshot():
        address = segment["address"]
        for block in segment["blocks"]:
            blocks[address] = block["size"]
            address += block["size"]
    return blocks
