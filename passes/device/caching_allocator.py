"""What PyTorch's caching allocator takes from the device: its rules, followed request by request.

A step that holds less than the device has can still run out of memory, because the allocator keeps
what was freed in pieces that the next request does not fit into.  What decides is what it
*reserves*, and that depends on the order of all requests, those of earlier steps included.  The
rules are those of ``c10/cuda/CUDACachingAllocator.cpp`` (``round_size``, ``get_allocation_size``,
``get_free_block``, ``should_split``, ``free_block``), for one stream, and as long as the device has
memory left.  Once it has none, the allocator gives cached segments back and tries again, so a step
may run although this simulation reserves more than there is.

With expandable segments (``PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True``), each pool is one
segment, which grows at its end in pages and whose blocks are all split.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from dataclasses import dataclass, field

GRANULE_BYTES = 512
_MIB = 1 << 20
# Requests up to `SMALL_BYTES` come from segments of `_SMALL_SEGMENT_BYTES`; those below
# `_LARGE_BYTES` from segments of `_LARGE_SEGMENT_BYTES`; any other has a segment of its own.
SMALL_BYTES, _SMALL_SEGMENT_BYTES = _MIB, 2 * _MIB
_LARGE_BYTES, _LARGE_SEGMENT_BYTES = 10 * _MIB, 20 * _MIB
_ROUND_LARGE_BYTES = 2 * _MIB
_SMALL_POOL_ADDRESS = 1 << 60
# What is left of a large block is split off if it is more.
UNSPLIT_BYTES = _MIB


@dataclass(slots=True, eq=False)
class Block:
    """A part of a segment.

    Attributes:
        address: unique among all blocks.
        before, after: its neighbours in the segment.
    """

    address: int
    size_bytes: int
    is_small: bool
    is_free: bool = False
    before: Block | None = field(default=None, repr=False)
    after: Block | None = field(default=None, repr=False)


class CachingAllocator:
    """One process's, on one device.

    Args:
        expandable_segments: as the setting of that name.

    Attributes:
        reserved_bytes: taken from the device at present; it is never given back.
        allocated_bytes: in blocks that are in use.
        peak_allocated_bytes: the most of that.
    """

    def __init__(self, *, expandable_segments: bool = False) -> None:
        self.expandable_segments = expandable_segments
        self.reserved_bytes = self.allocated_bytes = self.peak_allocated_bytes = 0
        # Free blocks by pool: smallest first, then lowest address.
        self._free: dict[bool, list[tuple[int, int, Block]]] = {False: [], True: []}
        self._last: dict[bool, Block | None] = {False: None, True: None}
        self._next_address = {False: 0, True: _SMALL_POOL_ADDRESS}

    def allocate(self, size_bytes: int) -> Block:
        """A block for a request; `free` takes it back."""
        size_bytes = max(GRANULE_BYTES, size_bytes + -size_bytes % GRANULE_BYTES)
        is_small = size_bytes <= SMALL_BYTES
        free = self._free[is_small]
        at = bisect_left(free, size_bytes, key=lambda entry: entry[0])
        if self.expandable_segments and at + 1 < len(free) and free[at][2] is self._last[is_small]:
            at += 1  # the end of the segment counts with what it can still grow to
        if at < len(free):
            block = free.pop(at)[2]
            block.is_free = False
        elif self.expandable_segments:
            block = self._grown(size_bytes, is_small)
        else:
            block = self._segment(size_bytes, is_small)
        self._split(block, size_bytes)
        self.allocated_bytes += block.size_bytes
        self.peak_allocated_bytes = max(self.peak_allocated_bytes, self.allocated_bytes)
        return block

    def free(self, block: Block) -> None:
        """Take a block back, and join it to free neighbours."""
        self.allocated_bytes -= block.size_bytes
        if block.before is not None and block.before.is_free:
            self._take(block.before)
            block = self._joined(block.before, block)
        if block.after is not None and block.after.is_free:
            self._take(block.after)
            block = self._joined(block, block.after)
        self._give(block)

    def _segment(self, size_bytes: int, is_small: bool) -> Block:
        """A new segment for a request."""
        if is_small:
            segment_bytes = _SMALL_SEGMENT_BYTES
        elif size_bytes < _LARGE_BYTES:
            segment_bytes = _LARGE_SEGMENT_BYTES
        else:
            segment_bytes = size_bytes + -size_bytes % _ROUND_LARGE_BYTES
        return self._new(segment_bytes, is_small)

    def _grown(self, size_bytes: int, is_small: bool) -> Block:
        """The pool's only segment, grown at its end by as much as a request needs."""
        last = self._last[is_small]
        tail = last if last is not None and last.is_free else None
        if tail is not None:
            self._take(tail)
            tail.is_free = False
        missing_bytes = size_bytes - (0 if tail is None else tail.size_bytes)
        page_bytes = _SMALL_SEGMENT_BYTES if is_small else _LARGE_SEGMENT_BYTES
        page = self._new(missing_bytes + -missing_bytes % page_bytes, is_small)
        page.before = last
        if last is not None:
            last.after = page
        self._last[is_small] = page
        return page if tail is None else self._joined(tail, page)

    def _new(self, size_bytes: int, is_small: bool) -> Block:
        block = Block(self._next_address[is_small], size_bytes, is_small)
        self._next_address[is_small] += size_bytes
        self.reserved_bytes += size_bytes
        return block

    def _split(self, block: Block, size_bytes: int) -> None:
        """Make a block as small as a request, if what is left is worth it."""
        left_bytes = block.size_bytes - size_bytes
        if block.is_small or self.expandable_segments:
            is_worth_it = left_bytes >= GRANULE_BYTES
        else:
            is_worth_it = left_bytes > UNSPLIT_BYTES
        if not is_worth_it:
            return
        block.size_bytes = size_bytes
        rest = Block(block.address + size_bytes, left_bytes, block.is_small)
        rest.before, rest.after = block, block.after
        if block.after is not None:
            block.after.before = rest
        block.after = rest
        if self._last[block.is_small] is block:
            self._last[block.is_small] = rest
        self._give(rest)

    def _joined(self, first: Block, second: Block) -> Block:
        first.size_bytes += second.size_bytes
        first.after = second.after
        if second.after is not None:
            second.after.before = first
        if self._last[first.is_small] is second:
            self._last[first.is_small] = first
        return first

    def _give(self, block: Block) -> None:
        block.is_free = True
        insort(self._free[block.is_small], _entry(block), key=lambda entry: entry[:2])

    def _take(self, block: Block) -> None:
        free = self._free[block.is_small]
        del free[bisect_left(free, _entry(block)[:2], key=lambda entry: entry[:2])]


def _entry(block: Block) -> tuple[int, int, Block]:
    return block.size_bytes, block.address, block
