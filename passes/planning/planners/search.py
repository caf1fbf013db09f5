"""Local search over retention intervals: ruin and recreate.

Large-neighbourhood search as in Moccasin (Bartan et al., ICML 2023, section 3), which starts from
a greedy plan too and re-plans parts of it by CP-SAT.  Here a part is re-planned by a greedy rule,
because many cheap repairs find more than a few exact ones in the same time: some evictions that
lie close together are undone (*ruin*); then storages are evicted, the least cost for the excess
that it removes first, until every stage fits (*repair*); then whatever the slack allows is kept
(*fill*).  What costs no more than before stays, and for a while a little more may stay as well
(record-to-record travel: Dueck, J. Comp. Physics 104, 1993).

The work is counted (`Search.work`), never timed, and random numbers come from a fixed seed and are
used only with operations that IEEE 754 rounds exactly: the same program, budget and limit give the
same plan everywhere.
"""

from __future__ import annotations

import math
import random

import numpy as np
import numpy.typing as npt

from dtrcompile.passes.planning.planners.intervals import IntArray, Intervals
from dtrcompile.passes.planning.settings import (
    ACCEPTED_WORSENING_SHARE,
    DETOUR_SHARE,
    DURATION_POWERS,
    EXTRA_REPAIRS,
    MAX_JOURNAL_CHANGES,
    MAX_TRIES,
    MAX_TRIES_UNTIL_ONE_HELPS,
    MAX_UNDONE_EVICTIONS,
    MEAN_FURTHER_UNDONE_EVICTIONS,
    ONE_LOCKED_PROBABILITY,
    REPAIRS_PER_UNDONE_EVICTION,
    SCORE_NOISES,
)


class Search:
    """Improves ``state`` in place."""

    def __init__(self, state: Intervals, seed: int = 0) -> None:
        self.state = state
        self.random = random.Random(seed)
        self.noise = np.random.default_rng(seed)
        self.looks = 0

    @property
    def work(self) -> int:
        """Work so far, in units of very roughly 2 µs: changes, and looking for them."""
        return self.state.work + self.looks

    @property
    def fits(self) -> bool:
        """Whether the state holds to its budget."""
        return int(self.state.held_bytes.max()) <= self.state.budget_bytes

    # Recreate

    def excess(self) -> IntArray:
        """Bytes above the budget in each stage."""
        excess: IntArray = np.maximum(self.state.held_bytes - self.state.budget_bytes, 0)
        return excess

    def repair(
        self,
        most_ns: float = math.inf,
        most_evictions: float = math.inf,
        *,
        locked: frozenset[tuple[int, int]] = frozenset(),
        blur: float = 0.0,
        power: float = 1.0,
        work_limit: float = math.inf,
    ) -> bool:
        """Evict until every stage fits.

        Args:
            most_ns, most_evictions, work_limit: where to give up.
            locked: (root, stage) of evictions that are ruled out.
            blur: how much chance there is in the choice.
            power: of the length of the excess that an eviction removes; at 0 only the stage that
                holds most counts.

        Returns:
            False, with the state left as it then is, if it gives up or finds no more to evict.
        """
        state = self.state
        while True:
            excess = self.excess()
            t = int(excess.argmax())
            if not excess[t]:
                return True
            most_evictions -= 1
            if state.cost_ns >= most_ns or most_evictions < 0 or self.work > work_limit:
                return False
            if state.reorder(t):
                continue
            if not self._relieve(t, excess, locked, blur, power, most_ns):
                return False

    def _relieve(
        self,
        t: int,
        excess: IntArray,
        locked: frozenset[tuple[int, int]],
        blur: float,
        power: float,
        most_ns: float,
    ) -> bool:
        """One eviction that makes stage ``t`` hold less."""
        state = self.state
        slots = np.flatnonzero(
            state.segment_kept & (state.segment_start < t) & (state.segment_stop > t)
        )
        self.looks += 40 + len(state.segment_kept) // 256 + len(slots) // 4
        if not len(slots):
            return False
        over = np.concatenate(([0], np.cumsum(excess > 0)))
        lengths = over[state.segment_stop[slots]] - over[state.segment_start[slots] + 1]
        weights = _power(lengths, power)
        sizes = state.segment_bytes[slots]
        scores = (state.segment_ns[slots] + 1e-3) / (np.minimum(sizes, excess[t]) * weights)
        if blur:
            scores *= 1.0 + blur * self.noise.random(len(slots))
        total = int(excess.sum())
        best: tuple[float, int, int] | None = None
        tries = 0
        for k in np.argsort(scores, kind="stable").tolist():
            if tries >= (MAX_TRIES_UNTIL_ONE_HELPS if best is None else MAX_TRIES):
                break
            if best is not None and scores[k] >= best[0]:
                break
            slot = int(slots[k])
            u, stop = int(state.segment_item[slot]), int(state.segment_stop[slot])
            if (u, stop) in locked:
                continue
            tries += 1
            mark, before_ns = len(state.journal), state.cost_ns
            enough_ns = most_ns
            if best is not None:  # no eviction of these bytes that costs more can be better
                enough_ns = min(most_ns, before_ns + best[0] * int(sizes[k]) * float(weights[k]))
            done = state.evict(u, stop, enough_ns)
            added_ns = state.cost_ns - before_ns
            gain = 0.0
            if done:
                state.settle()
                left = self.excess()
                here = float(excess[t] - left[t])
                if here > 0:
                    ratio = max(total - int(left.sum()), 0) / here
                    gain = here * _power_of_one(ratio, power)
            self.looks += 20 + len(excess) // 512
            state.journal.roll_back(mark)
            state.learn(slot, added_ns)
            if gain > 0 and (best is None or (added_ns + 1e-3) / gain < best[0]):
                best = ((added_ns + 1e-3) / gain, u, stop)
        if best is None:
            return False
        state.evict(best[1], best[2])
        state.settle()
        return True

    def fill(self) -> None:
        """Keep whatever the slack allows, what costs most for its bytes and stages first."""
        state = self.state
        while True:
            slots = self._evicted()
            self.looks += 100 + len(state.held_bytes) // 32 + len(slots) // 2
            start, stop = state.segment_start[slots], state.segment_stop[slots]
            sizes = state.segment_bytes[slots]
            fits = state.budget_bytes - _range_max(state.held_bytes, start + 1, stop) >= sizes
            slots = slots[fits]
            density = state.segment_ns[slots] / (sizes[fits] * (stop[fits] - start[fits]))
            kept = [self._try_to_keep(int(slots[k])) for k in np.argsort(-density, kind="stable")]
            if not any(kept):
                return

    def _evicted(self) -> IntArray:
        state = self.state
        return np.flatnonzero((state.segment_start >= 0) & ~state.segment_kept)

    def _try_to_keep(self, slot: int) -> bool:
        """Keep a segment if it fits and saves anything."""
        state = self.state
        start, stop = int(state.segment_start[slot]), int(state.segment_stop[slot])
        if start < 0 or state.segment_kept[slot]:
            return False
        if not state.has_room(start, stop, int(state.segment_bytes[slot])):
            return False
        mark, before_ns = len(state.journal), state.cost_ns
        state.keep(int(state.segment_item[slot]), stop)
        state.settle()
        self.looks += 20
        if state.cost_ns < before_ns and self.fits:
            return True
        state.journal.roll_back(mark)
        return False

    # Ruin

    def ruin(self, count: int) -> frozenset[tuple[int, int]]:
        """Keep ``count`` evicted storages that lie close together; their (root, stage)."""
        state = self.state
        slots = self._evicted()
        self.looks += 40 + len(slots) // 4
        if not len(slots):
            return frozenset()
        first = slots[self.random.randrange(len(slots))]
        near = np.abs(state.segment_stop[slots] - state.segment_stop[first]) + np.abs(
            state.segment_start[slots] - state.segment_start[first]
        )
        blurred = (
            near * (0.2 + self.noise.random(len(slots))) * (0.2 + self.noise.random(len(slots)))
        )
        kept = set()
        for k in np.argsort(blurred, kind="stable")[:count].tolist():
            slot = slots[k]
            if state.segment_start[slot] >= 0 and not state.segment_kept[slot]:
                u, t = int(state.segment_item[slot]), int(state.segment_stop[slot])
                state.keep(u, t)
                kept.add((u, t))
        state.settle()
        return frozenset(kept)

    def _ruin_size(self) -> int:
        further = MEAN_FURTHER_UNDONE_EVICTIONS
        probability = further / (further + 1)
        count = 1
        while count < MAX_UNDONE_EVICTIONS and self.random.random() < probability:
            count += 1
        return count

    # Both

    def run(
        self,
        work_limit: int,
        start_share: float = 0.0,
        stop_share: float = 1.0,
        least_ns: int = 0,
    ) -> None:
        """Search until that much work is done, and leave the best state that was found.

        Args:
            start_share, stop_share: which part of a longer search this is; what may stay becomes
                less from 0 to 1.
            least_ns: no plan costs less; the search ends there.
        """
        state = self.state
        start = self.work
        baseline_ns = state.index.program.cost_ns
        least_ns = max(least_ns, baseline_ns)
        best_ns = state.cost_ns
        state.journal.clear()
        while (done := (self.work - start) / max(work_limit, 1)) < 1.0 and best_ns > least_ns:
            extra_ns = best_ns - baseline_ns
            share = start_share + done * (stop_share - start_share)
            allowed_ns = best_ns + ACCEPTED_WORSENING_SHARE * (1.0 - share) * extra_ns
            mark = len(state.journal)
            count = self._ruin_size()
            locked = self.ruin(count)
            if locked and self.random.random() < ONE_LOCKED_PROBABILITY:
                locked = frozenset(self.random.sample(sorted(locked), 1))
            if self.repair(
                allowed_ns + DETOUR_SHARE * extra_ns,
                REPAIRS_PER_UNDONE_EVICTION * count + EXTRA_REPAIRS,
                locked=locked,
                blur=self.random.choice(SCORE_NOISES),
                power=self.random.choice(DURATION_POWERS),
                work_limit=start + work_limit,
            ):
                self.fill()
            if state.cost_ns > allowed_ns or not self.fits:
                state.journal.roll_back(mark)
            elif state.cost_ns <= best_ns:
                best_ns = state.cost_ns
                state.journal.clear()
            elif len(state.journal) > MAX_JOURNAL_CHANGES:
                state.journal.roll_back(0)
        state.journal.roll_back(0)


def _power(values: IntArray, power: float) -> npt.NDArray[np.float64]:
    """``values ** power`` for the powers whose result is rounded the same way everywhere."""
    if power == 0.0:
        return np.ones(len(values))
    return np.sqrt(values) if power == 0.5 else values.astype(np.float64)


def _power_of_one(value: float, power: float) -> float:
    if power == 0.0:
        return 1.0
    return math.sqrt(value) if power == 0.5 else value


def _range_max(values: IntArray, start: IntArray, stop: IntArray) -> IntArray:
    """The largest of ``values[start:stop]`` for each pair; the least integer where that is empty.

    A sparse table: `values` once for each power of two.
    """
    length = stop - start
    result = np.full(len(start), np.iinfo(np.int64).min, dtype=np.int64)
    row, width = values, 1
    longest = int(length.max(initial=0))
    while width <= longest:
        here = (length >= width) & (length < 2 * width)
        a, b = start[here], stop[here]
        result[here] = np.maximum(row[a], row[b - width])
        if 2 * width <= longest:
            row = np.maximum(row[:-width], row[width:])
        width *= 2
    return result
