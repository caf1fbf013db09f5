"""On a device: the budget ``"auto"`` is what is free."""

from __future__ import annotations

import gc

import pytest
import torch
from torch import nn

import dtrcompile
from dtrcompile.demo.memory import static_bytes
from tests.gpu.comparing import DEVICE, compiled, gradients, net_and_batch, report
from workloads.training import relative_error

pytestmark = [pytest.mark.gpu, pytest.mark.inductor]

_MIB = 2**20


def fill_up_to(left_bytes: int) -> torch.Tensor:
    """Take all but so much of what is free."""
    gc.collect()
    torch.cuda.empty_cache()
    free_bytes, _ = torch.cuda.mem_get_info()
    return torch.empty(free_bytes - left_bytes, dtype=torch.uint8, device=DEVICE)


def unbudgeted_bytes(module: nn.Module, x: torch.Tensor) -> int:
    """What a step allocates without a budget; libraries are loaded then."""
    gradients(module, compiled(module, "100%"), x)
    found = report().baseline_peak_bytes - static_bytes(module, x)
    module.zero_grad(set_to_none=True)
    torch._dynamo.reset()
    dtrcompile.clear_reports()
    return found


def test_where_there_is_room_nothing_is_computed_again() -> None:
    module, x = net_and_batch()
    gradients(module, compiled(module, "auto"), x)
    found = report()
    free_bytes, total_bytes = torch.cuda.mem_get_info()
    assert found.recomputed_runs == 0
    assert found.budget_bytes is not None
    assert abs(found.budget_bytes - free_bytes) <= 0.1 * total_bytes + 256 * _MIB


def test_on_a_device_that_is_nearly_full() -> None:
    module, x = net_and_batch()
    expected = gradients(module, module, x)
    needed_bytes = unbudgeted_bytes(module, x)
    # Plans use up to what is free; compiling measures workspaces meanwhile.
    others = fill_up_to(int(0.8 * needed_bytes))
    call = compiled(module, "auto")
    for _ in range(3):
        found = gradients(module, call, x)
    assert relative_error(found, expected) <= 1e-5
    assert report().recomputed_runs > 0
    assert report().budget_bytes is not None
    del others
