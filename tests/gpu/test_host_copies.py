"""On a device: plans that copy to the host and back, beside compute."""

from __future__ import annotations

import pytest
import torch

from dtrcompile.passes.device import host_copies
from dtrcompile.passes.device.host_bandwidth import measured_bytes_per_ns
from dtrcompile.passes.device.host_copies import offload, prefetch, wait_for_copy
from tests.gpu.comparing import (
    DEVICE,
    assert_as_exact_as,
    compiled,
    exact_gradients,
    gradients,
    net_and_batch,
    peak_bytes,
    report,
)

pytestmark = [pytest.mark.gpu, pytest.mark.inductor]


@pytest.mark.parametrize("budget", ["60%", "min"])
def test_a_step_with_copies(budget: str) -> None:
    module, x = net_and_batch()
    exact = exact_gradients(module, x)
    plain = gradients(module, torch.compile(module), x)
    torch._dynamo.reset()
    call = compiled(module, budget, offload="measured")
    for _ in range(5):
        assert_as_exact_as(gradients(module, call, x), plain, exact)
    assert report().offloaded_bytes > 0
    assert peak_bytes(module, call, x) <= report().promised_peak_bytes


def test_what_comes_back_is_what_was_sent() -> None:
    """Compute goes on meanwhile, and takes the memory that was freed."""
    tensors = [torch.randn(1 << 22, device=DEVICE)[:: n + 1] for n in range(8)]
    expected = [t.clone() for t in tensors]
    on_host = []
    while tensors:
        tensor = tensors.pop(0)
        on_host.append(offload(tensor))
        wait_for_copy(on_host[-1], tensor)
        del tensor
        torch.full((1 << 22,), float("nan"), device=DEVICE)
    back = [prefetch(copy, torch.device("cuda", torch.cuda.current_device())) for copy in on_host]
    assert all(copy.is_pinned() for copy in on_host)
    for ours, theirs in zip(back, expected, strict=True):
        wait_for_copy(ours)
        assert torch.equal(ours, theirs)


def test_a_copy_of_a_step_that_failed_is_let_go() -> None:
    """Its memory is nobody's until the copy is complete, and then free again."""
    torch.cuda.synchronize()
    before_bytes = torch.cuda.memory_allocated()
    tensor = torch.randn(1 << 24, device=DEVICE)
    offload(tensor)  # nothing waits for it
    address = tensor.data_ptr()
    del tensor
    assert any(copy.source.data_ptr() == address for copy in host_copies._UNDER_WAY.values())
    torch.cuda.synchronize()
    small = torch.zeros(1, device=DEVICE)
    wait_for_copy(offload(small), small)
    del small
    assert not host_copies._UNDER_WAY
    assert torch.cuda.memory_allocated() == before_bytes


def test_the_measured_bandwidth_is_one_of_a_device() -> None:
    """Between an old PCIe slot and a link of the next generations, in 10⁹ bytes/s."""
    device = torch.device("cuda", torch.cuda.current_device())
    assert 1 <= measured_bytes_per_ns(device) <= 1000
