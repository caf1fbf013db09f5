"""What a request counts as."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from dtrcompile.demo.memory import static_bytes
from dtrcompile.passes.device.allocators import EXACT, Allocator, allocator_of, from_settings

MIB = 1 << 20
NATIVE = Allocator(512, splits_all=False)


@pytest.mark.parametrize(
    ("allocator", "size_bytes", "expected"),
    [
        (EXACT, 0, 0),
        (EXACT, 4_000_001, 4_000_001),
        (Allocator(512), 1, 512),
        (Allocator(512), 5 * MIB + 1, 5 * MIB + 512),
        # From 1 MiB down blocks are always split.
        (NATIVE, 0, 0),
        (NATIVE, 513, 1024),
        (NATIVE, MIB - 1, MIB),
        (NATIVE, MIB, MIB),
        (NATIVE, MIB + 1, 2 * MIB + 512),
        (NATIVE, 50 * MIB, 51 * MIB),
        # Larger than all that may be split: up to 20 MiB more.
        (Allocator(512, splits_all=False, max_split_bytes=200 * MIB), 199 * MIB, 200 * MIB),
        (Allocator(512, splits_all=False, max_split_bytes=200 * MIB), 200 * MIB, 220 * MIB),
        # To a fourth of the power of two below; as PyTorch's notes on CUDA have it, 1200 -> 1280.
        (Allocator(1, divisions=(4,)), 1200, 1280),
        (Allocator(512, divisions=(4,)), 1200, 1536),
        (Allocator(512, divisions=(4, 2)), 3 * MIB, 3 * MIB),
        (Allocator(512, divisions=(4, 2)), 3 * MIB + 1, 4 * MIB),
        (Allocator(512, divisions=(4, 1)), 3 * MIB + 1, 3 * MIB + 512),
        (Allocator(512, divisions=(4, 8)), 9 * MIB, 9 * MIB),  # the last entry goes on for ever
        (Allocator(512, divisions=(4, 8)), 9 * MIB + 1, 10 * MIB),
    ],
)
def test_sizes_of_blocks(allocator: Allocator, size_bytes: int, expected: int) -> None:
    assert allocator.block_bytes(size_bytes) == expected


@given(
    sizes=st.tuples(st.integers(0, 1 << 36), st.integers(0, 1 << 36)),
    splits_all=st.booleans(),
    max_split_bytes=st.none() | st.integers(20 * MIB, 1 << 34),
    divisions=st.just(()) | st.lists(st.sampled_from((0, 1, 2, 4, 8)), min_size=16, max_size=16),
)
def test_a_block_holds_its_tensor_and_a_larger_tensor_has_no_smaller_one(
    sizes: tuple[int, int],
    splits_all: bool,
    max_split_bytes: int | None,
    divisions: list[int],
) -> None:
    allocator = Allocator(512, splits_all, max_split_bytes, tuple(divisions))
    small, large = sorted(sizes)
    assert small <= allocator.block_bytes(small) <= allocator.block_bytes(large)
    assert allocator.block_bytes(large) <= 2 * large + 20 * MIB + 512


def settings(**changed: Any) -> dict[str, Any]:
    """As ``torch.cuda.memory._snapshot()`` has them where nothing is set."""
    divisions = {str(1 << i): 0 for i in range(16)}
    default = {"max_split_size": -1, "expandable_segments": False}
    return {**default, "roundup_power2_divisions": divisions, **changed}


def test_settings_of_the_caching_allocator() -> None:
    assert from_settings(settings()) == NATIVE
    assert from_settings(settings(expandable_segments=True)) == Allocator(512)
    assert from_settings(settings(max_split_size=20 * MIB)).max_split_bytes == 20 * MIB
    # Their keys are MiB, as text, and so in no order of numbers.
    divisions = {str(1 << i): parts for i, parts in enumerate((8, 4, 2, 1))}
    allocator = from_settings(settings(roundup_power2_divisions=dict(sorted(divisions.items()))))
    assert allocator.divisions == (8, 4, 2, 1)


def test_each_devices_allocator() -> None:
    cuda = torch.device("cuda")
    assert allocator_of(torch.device("cpu")) is EXACT
    with (
        mock.patch.object(torch.cuda, "get_allocator_backend", lambda: "native"),
        mock.patch(
            "dtrcompile.passes.device.allocators.allocator_snapshot",
            lambda: {"allocator_settings": settings()},
        ),
    ):
        assert allocator_of(cuda) == NATIVE
    with mock.patch.object(torch.cuda, "get_allocator_backend", lambda: "cudaMallocAsync"):
        assert allocator_of(cuda) == Allocator(512)


def test_static_bytes_are_those_of_blocks() -> None:
    module, x = nn.Linear(4, 4), torch.ones(3)
    assert static_bytes(module, x) == 4 * (16 + 4 + 3)
    sizes = {t.untyped_storage().data_ptr(): 512 for t in (*module.parameters(), x)}
    segments = [{"address": a, "blocks": [{"size": n}, {"size": 99}]} for a, n in sizes.items()]
    with (
        mock.patch.object(torch.Tensor, "is_cuda", True),
        mock.patch.object(torch.cuda, "get_allocator_backend", lambda: "native"),
        mock.patch.object(torch.cuda, "memory_snapshot", lambda: segments),
    ):
        assert static_bytes(module, x) == 3 * 512
