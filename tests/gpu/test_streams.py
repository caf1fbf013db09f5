"""On a device: steps on another stream than the default one, and on two at once."""

from __future__ import annotations

import pytest
import torch

from tests.gpu.comparing import (
    compiled,
    gradients,
    net_and_batch,
    peak_bytes,
    report,
)
from workloads.training import gradients_of, relative_error

pytestmark = [pytest.mark.gpu, pytest.mark.inductor]

SAME = 1e-5


def test_a_step_on_another_stream() -> None:
    module, x = net_and_batch()
    expected = gradients(module, module, x)
    call = compiled(module)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            ours = gradients(module, call, x)
        held_bytes = peak_bytes(module, call, x)
    torch.cuda.current_stream().wait_stream(stream)
    assert relative_error(ours, expected) <= SAME
    assert held_bytes <= report().promised_peak_bytes


def test_two_models_on_two_streams() -> None:
    """Forward of one runs beside backward of the other, for several steps."""
    pairs = [net_and_batch(seed) for seed in (1, 2)]
    expected = [gradients(module, module, x) for module, x in pairs]
    calls = [compiled(module) for module, _ in pairs]
    for (module, x), call in zip(pairs, calls, strict=True):
        gradients(module, call, x)  # compiled one after the other
    streams = [torch.cuda.Stream() for _ in pairs]
    torch.cuda.synchronize()
    for _ in range(5):
        losses = []
        for (module, x), call, stream in zip(pairs, calls, streams, strict=True):
            module.zero_grad(set_to_none=True)
            with torch.cuda.stream(stream):
                losses.append(call(x))
        for loss, stream in zip(losses, streams, strict=True):
            with torch.cuda.stream(stream):
                loss.backward()
    torch.cuda.synchronize()
    for (module, _), theirs in zip(pairs, expected, strict=True):
        assert relative_error(gradients_of(module), theirs) <= SAME


def test_a_batch_that_another_stream_copies() -> None:
    """As a loader that fetches the next batch while a step runs."""
    module, x = net_and_batch()
    batches = [torch.randn(x.shape).pin_memory() for _ in range(4)]
    expected = [gradients(module, module, batch.to(x.device)) for batch in batches]
    call = compiled(module)
    gradients(module, call, x)
    loading = torch.cuda.Stream()
    found = []
    for batch in batches:
        with torch.cuda.stream(loading):
            fetched = batch.to(x.device, non_blocking=True)
        torch.cuda.current_stream().wait_stream(loading)
        fetched.record_stream(torch.cuda.current_stream())
        found.append(gradients(module, call, fetched))
    for ours, theirs in zip(found, expected, strict=True):
        assert relative_error(ours, theirs) <= SAME
