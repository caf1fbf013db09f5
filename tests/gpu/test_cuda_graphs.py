"""On a device: the kernels of a plan, recorded as CUDA graphs."""

from __future__ import annotations

import pytest
import torch
from torch._dynamo.utils import counters

from dtrcompile.demo.memory import static_bytes
from dtrcompile.passes.device.allocators import library_blocks
from tests.gpu.comparing import (
    DEVICE,
    ROWS,
    assert_as_exact_as,
    compiled,
    exact_gradients,
    gradients,
    net_and_batch,
    report,
)

pytestmark = [pytest.mark.gpu, pytest.mark.inductor]

STEPS = 5  # the first run as they are, the next is recorded, the others are replayed


@pytest.mark.parametrize("budget", ["60%", "min"])
def test_recorded_steps(budget: str) -> None:
    module, x = net_and_batch()
    exact = exact_gradients(module, x)
    plain = gradients(module, torch.compile(module), x)
    counters.clear()
    call = compiled(module, budget, inductor={"mode": "reduce-overhead"})
    for _ in range(STEPS):
        torch.compiler.cudagraph_mark_step_begin()
        assert_as_exact_as(gradients(module, call, x), plain, exact)
    assert not counters["inductor"]["cudagraph_skips"]
    assert report().recomputed_runs > 0


def test_a_recorded_step_stays_within_its_budget() -> None:
    module, x = net_and_batch(rows=4 * ROWS)
    gradients(module, module, x)  # cuBLAS makes its workspaces
    module.zero_grad(set_to_none=True)
    beside_bytes = torch.cuda.memory_allocated() - static_bytes(module, x)
    call = compiled(module, "60%", inductor={"mode": "reduce-overhead"})
    most_bytes = 0
    for _ in range(STEPS):
        torch.compiler.cudagraph_mark_step_begin()
        module.zero_grad(set_to_none=True)
        call(x).backward()
        most_bytes = max(most_bytes, torch.cuda.max_memory_allocated())
    budget_bytes = report().budget_bytes
    assert budget_bytes is not None
    # They are made again for the stream that records, and no budget counts them.
    libraries_bytes = sum(library_blocks(DEVICE))
    assert most_bytes - beside_bytes <= budget_bytes + libraries_bytes
