"""The caching allocator's rules, on requests that were followed by hand."""

from __future__ import annotations

import itertools
import random

import pytest

from dtrcompile.passes.device.caching_allocator import CachingAllocator

MIB = 1 << 20


def test_small_requests_share_segments_of_two_mib() -> None:
    allocator = CachingAllocator()
    blocks = [allocator.allocate(MIB) for _ in range(2)]
    assert allocator.reserved_bytes == 2 * MIB
    allocator.allocate(1)  # no room is left, so there is a second segment
    assert allocator.reserved_bytes == 4 * MIB
    assert allocator.allocated_bytes == 2 * MIB + 512
    assert [block.size_bytes for block in blocks] == [MIB, MIB]


def test_large_requests_share_segments_of_twenty_mib() -> None:
    allocator = CachingAllocator()
    allocator.allocate(9 * MIB)
    allocator.allocate(9 * MIB)
    assert allocator.reserved_bytes == 20 * MIB
    allocator.allocate(3 * MIB)  # 2 MiB are left
    assert allocator.reserved_bytes == 40 * MIB


def test_a_huge_request_has_a_segment_of_its_own() -> None:
    allocator = CachingAllocator()
    block = allocator.allocate(10 * MIB + 1)
    assert allocator.reserved_bytes == 12 * MIB
    # What is left, a little less than 2 MiB, is more than 1 MiB and is split off.
    assert block.size_bytes == 10 * MIB + 512


def test_a_large_block_is_handed_out_whole_if_little_is_left_of_it() -> None:
    allocator = CachingAllocator()
    allocator.free(allocator.allocate(12 * MIB))
    block = allocator.allocate(11 * MIB)
    assert block.size_bytes == 12 * MIB
    assert allocator.reserved_bytes == 12 * MIB


def test_free_neighbours_are_joined_and_used_again() -> None:
    allocator = CachingAllocator()
    blocks = [allocator.allocate(6 * MIB) for _ in range(3)]
    assert allocator.reserved_bytes == 20 * MIB
    allocator.free(blocks[0])
    allocator.free(blocks[2])
    allocator.allocate(12 * MIB)  # the pieces are apart
    assert allocator.reserved_bytes == 32 * MIB
    allocator.free(blocks[1])
    allocator.allocate(18 * MIB)
    assert allocator.reserved_bytes == 32 * MIB


def test_the_smallest_block_that_is_large_enough_is_taken() -> None:
    allocator = CachingAllocator()
    larger, smaller = allocator.allocate(30 * MIB), allocator.allocate(20 * MIB)
    allocator.free(larger)
    allocator.free(smaller)
    assert allocator.allocate(15 * MIB) is smaller


def test_expandable_segments_grow_by_what_is_missing() -> None:
    allocator = CachingAllocator(expandable_segments=True)
    first = allocator.allocate(30 * MIB)
    assert allocator.reserved_bytes == 40 * MIB
    allocator.allocate(30 * MIB)  # 10 MiB are there, 20 are missing
    assert allocator.reserved_bytes == 60 * MIB
    allocator.free(first)
    block = allocator.allocate(30 * MIB - 512)
    assert block.size_bytes == 30 * MIB - 512


def test_the_end_of_an_expandable_segment_is_left_for_what_only_it_can_grow_to() -> None:
    allocator = CachingAllocator(expandable_segments=True)
    first = allocator.allocate(30 * MIB)
    allocator.allocate(28 * MIB)  # 2 MiB are left at the end
    allocator.free(first)
    assert allocator.allocate(2 * MIB) is first


@pytest.mark.parametrize("expandable_segments", [False, True])
@pytest.mark.parametrize("seed", range(5))
def test_blocks_in_use_never_overlap_and_nothing_is_lost(
    seed: int, expandable_segments: bool
) -> None:
    draw = random.Random(seed)
    allocator = CachingAllocator(expandable_segments=expandable_segments)
    asked: dict[int, int] = {}
    live = []
    for _ in range(2_000):
        if live and draw.random() < 0.5:
            allocator.free(live.pop(draw.randrange(len(live))))
        else:
            size_bytes = int(2 ** draw.uniform(0, 25))
            block = allocator.allocate(size_bytes)
            asked[id(block)] = size_bytes
            assert block.size_bytes >= size_bytes
            live.append(block)
        assert allocator.allocated_bytes == sum(b.size_bytes for b in live)
    spans = sorted((b.address, b.address + b.size_bytes) for b in live)
    assert all(end <= start for (_, end), (start, _) in itertools.pairwise(spans))
    for block in live:
        allocator.free(block)
    assert allocator.allocated_bytes == 0
    assert allocator.reserved_bytes >= allocator.peak_allocated_bytes
