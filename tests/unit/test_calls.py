"""Which storages the calls of a step count, and at which moments."""

from __future__ import annotations

from collections import Counter
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from dtrcompile.steps.calls import Call, emptied_now, external_bytes, storage_identity


def _call_with(*tensors: Tensor) -> Call[Any]:
    graph = mock.Mock(planned=None)
    return Call.of(graph, tensors, (), Counter(), None)


def test_an_address_that_is_used_again_is_another_storage() -> None:
    """FSDP empties the parameters that it gathered, and the allocator gives their memory to the
    next: what counted by addresses depended on the allocator's mood."""
    weight = torch.empty(64)
    first = _call_with(weight)
    address = weight.data_ptr()
    weight.untyped_storage().resize_(0)
    others = [torch.empty(64) for _ in range(8)]
    again = next((o for o in others if o.data_ptr() == address), others[0])
    assert external_bytes([first, _call_with(again)]) == 2 * 256


def test_an_emptied_input_counts_only_while_it_holds_its_bytes() -> None:
    weights, batch = [torch.empty(64) for _ in range(4)], torch.empty(8)
    calls = list[Call[Any]]()
    for weight in weights:
        call = _call_with(weight, batch)
        call.emptied_in_forward = emptied_now(calls)
        calls.append(call)
        weight.untyped_storage().resize_(0)
    assert emptied_now(calls) == {storage_identity(w.untyped_storage()) for w in weights}
    assert external_bytes(calls, (), emptied_now(calls)) == 32
    for k in (3, 2, 1, 0):
        # Gathered for this backward, and ahead for the next.
        for weight in weights[max(0, k - 1) : k + 1]:
            weight.untyped_storage().resize_(256)
        calls[k].emptied_in_backward = emptied_now(calls)
        weights[k].untyped_storage().resize_(0)
    assert external_bytes(calls) == 2 * 256 + 32
    assert external_bytes([c for c in calls if c is not calls[1]]) == 2 * 256 + 32


def test_slices_of_one_storage_count_each_byte_once() -> None:
    """A recurrent cell is called with the steps of a sequence, which are views of one storage."""
    steps = torch.empty(4, 16, 8)
    whole_bytes = steps.untyped_storage().nbytes()
    calls = [_call_with(step) for step in steps]
    assert external_bytes(calls[:1]) == whole_bytes // 4
    assert external_bytes(calls) == whole_bytes
    assert external_bytes([*calls, *calls]) == whole_bytes
    # Rows 0 to 8 and 4 to 12 of 16.
    overlapping = [_call_with(steps[0, :8]), _call_with(steps[0, 4:12])]
    assert external_bytes(overlapping) == 12 * 8 * 4
    for call in calls:
        call.see_next_step()
    assert external_bytes([_call_with(torch.empty(1))], calls) == whole_bytes + 4
