"""What the caching allocator takes from the device for training steps, one after the other.

The requests of forward and backward are those of the schedule's trace, the optimizer's are those of
its own code.  The model is on the device before the first step; its inputs come before each step;
gradients go before the next; optimizer state stays.  From some step on, a step takes nothing more.
"""

from __future__ import annotations

from collections.abc import Sequence

from dtrcompile.passes.device.caching_allocator import Block, CachingAllocator
from dtrcompile.passes.device.optimizer_step import Request
from dtrcompile.passes.inductor.schedule_trace import Cause, ScheduleTrace

# The first makes the optimizer's state, the second finds the pieces that the first left, and what
# the third takes is what all others take.
_STEPS = 3


def reserved_bytes(
    trace: ScheduleTrace,
    optimizers: Sequence[tuple[Sequence[Request], Sequence[Request]]],
    *,
    expandable_segments: bool,
    library_blocks: Sequence[int],
) -> int:
    """The most that is reserved, which is what is reserved in the end.

    Args:
        trace: of a step's wrappers.
        optimizers: what each asks for in its first step, and in any later one.
        library_blocks: what libraries ask for at their first calls, and keep.
    """
    allocator = CachingAllocator(expandable_segments=expandable_segments)
    steps = _Steps(allocator, trace)
    for block_bytes in library_blocks:
        allocator.allocate(block_bytes)
    for step in range(_STEPS):
        steps.run()
        for first, later in optimizers:
            steps.optimize(first if step == 0 else later, keeps=step == 0)
    return allocator.reserved_bytes


class _Steps:
    """Takes steps on an allocator.

    Attributes:
        parameters: serial numbers of what is there for good.
        gradients: of the step before.
    """

    def __init__(self, allocator: CachingAllocator, trace: ScheduleTrace) -> None:
        self.allocator = allocator
        self.trace = trace
        self.gradients: list[Block] = []
        self.parameters = frozenset(e.serial for e in trace.events if e.cause is Cause.PARAMETER)
        for event in trace.events:
            if event.cause is Cause.PARAMETER and event.size_bytes:
                allocator.allocate(event.size_bytes)

    def run(self) -> None:
        """Forward and backward."""
        self._free(self.gradients)
        live: dict[int, Block] = {}
        for event in self.trace.events:
            if event.cause is Cause.ROUNDING or event.serial in self.parameters:
                continue
            if event.is_given_back:
                if event.serial in live:
                    self.allocator.free(live.pop(event.serial))
            elif event.size_bytes:
                live[event.serial] = self.allocator.allocate(event.size_bytes)
        self.gradients = [live.pop(s) for s in self.trace.gradients if s in live]
        self._free(list(live.values()))

    def optimize(self, requests: Sequence[Request], *, keeps: bool) -> None:
        """A step of an optimizer, which keeps what it does not give back, or nothing."""
        live: dict[int, Block] = {}
        for request in requests:
            if request.size_bytes is None:
                if request.serial in live:
                    self.allocator.free(live.pop(request.serial))
            elif request.size_bytes:
                live[request.serial] = self.allocator.allocate(request.size_bytes)
        if not keeps:
            self._free(list(live.values()))

    def _free(self, blocks: Sequence[Block]) -> None:
        for block in blocks:
            self.allocator.free(block)
