"""On a device: kernels try several block sizes in the first step, and hold nothing for it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from dtrcompile.passes.torch_private import CachingAutotuner
from tests.gpu.comparing import (
    assert_as_exact_as,
    compiled,
    exact_gradients,
    gradients,
    net_and_batch,
)

pytestmark = [pytest.mark.gpu, pytest.mark.inductor]

# A block of the allocator is rounded up.
_ROOM_BYTES = 2**20


def test_choosing_block_sizes_raises_no_peak(monkeypatch: pytest.MonkeyPatch) -> None:
    module, x = net_and_batch()
    exact = exact_gradients(module, x)
    plain = gradients(module, torch.compile(module), x)
    rises_bytes: list[int] = []
    choose = CachingAutotuner.autotune_to_one_config

    def noting(tuner: Any, *args: Any, **kwargs: Any) -> Any:
        torch.cuda.reset_peak_memory_stats()
        before_bytes = torch.cuda.memory_allocated()
        chosen = choose(tuner, *args, **kwargs)
        rises_bytes.append(torch.cuda.max_memory_allocated() - before_bytes)
        return chosen

    call = compiled(module, "min", inductor={"max_autotune_pointwise": True})
    monkeypatch.setattr(CachingAutotuner, "autotune_to_one_config", noting)
    assert_as_exact_as(gradients(module, call, x), plain, exact)
    assert rises_bytes
    assert max(rises_bytes) <= _ROOM_BYTES
