"""What moving a storage to the host would cost, while it is not known yet what else will be moved.

The simulator copies at the last moment, and compute waits for every copy; `hoist` then moves the
copies to where compute hides them.  So the choice between copying and computing again must not be
made by what the simulator waits, but by what will be left of it: a copy to the host can have begun
when the storage was computed and the engine was free; a copy back shares its engine with all that
is away and is needed before.
"""

from __future__ import annotations

import numpy as np

from dtrcompile.passes.planning.heuristics import Array, Ids, PoolState
from dtrcompile.passes.program.host_link import HostLink
from dtrcompile.passes.program.index import ProgramIndex

_AT_LEAST_NS = 1e-9  # scores divide by other facts; copies for nothing must still differ by those


class LinkForecast:
    """Told of every copy; prices the next one.

    ``price`` is what a ns of copying counts for even where compute hides it: link time that is
    taken here is missing elsewhere.
    """

    def __init__(self, index: ProgramIndex, state: PoolState, link: HostLink, price: float) -> None:
        self.state = state
        self.price = price
        self.transfer_ns: Array = np.array(
            [float(link.transfer_ns(size_bytes)) for size_bytes in index.size_bytes]
        )
        self.resident_since_ns = np.zeros(index.n_storages)
        self.is_on_host = np.zeros(index.n_storages, dtype=np.bool_)
        self.out_free_ns = 0.0
        self.away: set[int] = set()

    def on_resident(self, s: int) -> None:
        """``s`` was computed, or came back."""
        self.away.discard(s)
        self.resident_since_ns[s] = self.state.clock_ns

    def on_offload(self, s: int) -> None:
        """``s`` is copied to the host: book the engine."""
        start_ns = max(self.out_free_ns, float(self.resident_since_ns[s]))
        self.out_free_ns = start_ns + float(self.transfer_ns[s])
        self.is_on_host[s] = True

    def on_away(self, s: int) -> None:
        """``s`` is on the host only."""
        self.away.add(s)

    def cost_ns(self, ids: Ids) -> Array:
        """Of moving each to the host and back, the others staying where they are."""
        state, transfer_ns = self.state, self.transfer_ns[ids]
        start_ns = np.maximum(self.out_free_ns, self.resident_since_ns[ids])
        out_wait_ns = np.maximum(start_ns + transfer_ns - state.clock_ns, 0.0)
        new = ~self.is_on_host[ids]

        away = np.fromiter(self.away, np.intp, len(self.away))
        needed_ns = state.next_use_ns[away]
        order = np.argsort(needed_ns, kind="stable")
        booked_ns = np.concatenate(([0.0], np.cumsum(self.transfer_ns[away[order]])))
        before_ns = booked_ns[np.searchsorted(needed_ns[order], state.next_use_ns[ids])]
        distance_ns = np.maximum(state.next_use_ns[ids] - state.baseline_clock_ns, 0.0)
        in_wait_ns = np.maximum(before_ns + transfer_ns - distance_ns, 0.0)

        waits_ns = in_wait_ns + np.where(new, out_wait_ns, 0.0)
        return np.maximum(waits_ns + self.price * transfer_ns * (1.0 + new), _AT_LEAST_NS)
