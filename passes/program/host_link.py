"""Copies between the device and the host: what one takes, and what they hold compute up.

Checkpoints can be copied to the host and back instead of being computed again (Rhu et al., *vDNN*,
MICRO 2016, section III; Peng et al., *Capuchin*, ASPLOS 2020, section 4, which chooses between the
two by cost).  The model is theirs: one copy engine in each direction, which takes its copies in the
order in which they are issued, beside a compute stream.  What is left out: pinned host memory has
no limit, and a copy takes nothing of the device's own memory bandwidth.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from dtrcompile.passes.errors import OptionError


@dataclass(frozen=True, slots=True)
class HostLink:
    """The way between device and host memory; the same in both directions, at the same time.

    Attributes:
        bytes_per_ns: bandwidth; 1 byte/ns is 1 GB/s (10⁹).  May be infinite.
        latency_ns: of each copy, on top; the engine is busy with it.

    Raises:
        OptionError: on construction, for a bandwidth that is not positive or a negative latency.
    """

    bytes_per_ns: float
    latency_ns: int = 0

    def __post_init__(self) -> None:
        if not self.bytes_per_ns > 0:
            raise OptionError(f"bytes_per_ns must be positive, not {self.bytes_per_ns!r}.")
        if self.latency_ns < 0:
            raise OptionError(f"latency_ns must be at least 0, not {self.latency_ns!r}.")

    def transfer_ns(self, size_bytes: int) -> int:
        """How long one copy takes once it starts, in whole ns, rounded up."""
        return self.latency_ns + math.ceil(size_bytes / self.bytes_per_ns)


class LinkClock:
    """Compute and the two engines, side by side; the definition of `stall_ns`.

    Attributes:
        now_ns: the compute stream's clock, stalls included.
        stall_ns: how long compute has waited for copies.
        copied_bytes: sent to the host so far.
    """

    __slots__ = ("_arrives_ns", "_in_free_ns", "_link", "_out_free_ns", "_sent_ns", "copied_bytes",
                 "now_ns", "stall_ns")  # fmt: skip

    def __init__(self, link: HostLink) -> None:
        self._link = link
        self._out_free_ns = self._in_free_ns = 0
        self._sent_ns: dict[int, int] = {}  # storage -> when its copy to the host is complete
        self._arrives_ns: dict[int, int] = {}  # storage -> when its copy to the device is complete
        self.now_ns = self.stall_ns = self.copied_bytes = 0

    def run(self, cost_ns: int) -> None:
        """Compute for that long."""
        self.now_ns += cost_ns

    def offload(self, storage: int, size_bytes: int) -> None:
        """Issue a copy to the host; it starts when the engine and the bytes are there."""
        start_ns = max(self._out_free_ns, self.now_ns, self._arrives_ns.get(storage, 0))
        self._out_free_ns = start_ns + self._link.transfer_ns(size_bytes)
        self._sent_ns[storage] = self._out_free_ns
        self.copied_bytes += size_bytes

    def prefetch(self, storage: int, size_bytes: int) -> None:
        """Issue a copy to the device."""
        start_ns = max(self._in_free_ns, self.now_ns)
        self._in_free_ns = start_ns + self._link.transfer_ns(size_bytes)
        self._arrives_ns[storage] = self._in_free_ns

    def wait_for(self, storages: Iterable[int]) -> None:
        """Compute needs these storages' bytes."""
        if self._arrives_ns:
            for storage in storages:
                self._wait_until(self._arrives_ns.pop(storage, 0))

    def free(self, storage: int) -> None:
        """The storage's device bytes go: no copy may still be reading or writing them."""
        self._wait_until(self._arrives_ns.pop(storage, 0))
        self._wait_until(self._sent_ns.pop(storage, 0))

    def _wait_until(self, time_ns: int) -> None:
        if time_ns > self.now_ns:
            self.stall_ns += time_ns - self.now_ns
            self.now_ns = time_ns
