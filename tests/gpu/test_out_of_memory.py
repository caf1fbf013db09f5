"""On a device: where memory runs out in the middle of a step, the process goes on, and the next
step is right."""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from unittest import mock

import pytest
import torch

from dtrcompile.demo.memory import static_bytes
from tests.gpu.comparing import (
    DEVICE,
    compiled,
    gradients,
    net_and_batch,
    peak_bytes,
    report,
)
from workloads.training import relative_error

pytestmark = [pytest.mark.gpu, pytest.mark.inductor]

EVERY = 10
SAME = 1e-5


@dataclass
class Allocations:
    """What Inductor's code allocates with, which counts, and may fail once."""

    allocate: Callable[..., torch.Tensor]
    count: int = 0
    failing: int | None = None

    def __call__(self, *args: Any) -> torch.Tensor:
        if self.count == self.failing:
            self.failing = None
            raise torch.OutOfMemoryError("CUDA out of memory. Not really: a test said so.")
        self.count += 1
        return self.allocate(*args)


def test_every_tenth_allocation_fails() -> None:
    module, x = net_and_batch()
    expected = gradients(module, module, x)
    guards = torch._C._dynamo.guards
    name = f"_empty_strided_{DEVICE.type}"
    allocations = Allocations(getattr(guards, name))
    with mock.patch.object(guards, name, allocations):
        call = compiled(module)
        for _ in range(3):
            gradients(module, call, x)
    allocations.count = 0
    gradients(module, call, x)
    total = allocations.count
    assert total > 2 * EVERY, "the code allocates by another function"
    for failing in range(0, total, EVERY):
        allocations.count, allocations.failing = 0, failing
        with pytest.raises(torch.OutOfMemoryError):
            gradients(module, call, x)
        assert allocations.failing is None
        assert relative_error(gradients(module, call, x), expected) <= SAME, failing
    gc.collect()
    assert peak_bytes(module, call, x) <= report().promised_peak_bytes


@pytest.mark.parametrize("share", [0.1, 0.4, 0.7])
def test_memory_is_really_out(share: float) -> None:
    """The allocator may take no more than a share of what a step takes beside what is there."""
    module, x = net_and_batch()
    expected = gradients(module, module, x)
    call = compiled(module)
    for _ in range(2):
        gradients(module, call, x)
    module.zero_grad(set_to_none=True)
    torch.cuda.empty_cache()
    _, total_bytes = torch.cuda.mem_get_info()
    step_bytes = report().promised_peak_bytes - static_bytes(module, x)
    allowed_bytes = torch.cuda.memory_reserved() + share * step_bytes
    torch.cuda.set_per_process_memory_fraction(allowed_bytes / total_bytes)
    try:
        with pytest.raises(torch.OutOfMemoryError):
            for _ in range(3):
                gradients(module, call, x)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert relative_error(gradients(module, call, x), expected) <= SAME
    assert peak_bytes(module, call, x) <= report().promised_peak_bytes
