"""A plan as retention intervals, with moves whose effect is known at once.

The same solution space as Moccasin (Bartan et al., ICML 2023, section 2) and Checkmate (Jain et
al., MLSys 2020, section 4): time is cut into *stages*, one for each operator's first run, in
baseline order; in stage t some operators run again, each at most once, then operator t runs for
the first time.  A tensor is *touched* in the stages in which it is made or read.  Between two
touches it is kept, or it is evicted and made *again* in the stage of the second one.  Those flags
are the whole decision: which operators run again, what they read, the bytes in each stage and the
cost follow from them.

`Intervals` changes them one at a time and keeps the consequences up to date, in time that depends
on what changes and not on the program: what is evicted touches what it is computed from, what is
kept again lets go of it.  Every change is noted in a journal, so that a series of moves can be
taken back.

Only a storage's first tensor (its *root*) has bytes and a flag of its own.  A view is made again
where its storage was, if it is touched there.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections import deque
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from dtrcompile.passes.planning.planners.improve import BOUNDARY, Schedule, tidy
from dtrcompile.passes.planning.planners.journal import Journal
from dtrcompile.passes.planning.settings import (
    MAX_SEARCHED_STAGE_RUNS,
    WORK_PER_NEW_TOUCH,
)
from dtrcompile.passes.program.index import ProgramIndex

IntArray = npt.NDArray[np.int64]

# No stage: a first touch has none before it.
_NO_TOUCH = -1


class Intervals:
    """The present decision and all that follows from it.

    Attributes:
        cost_ns: of all operators that run.
        held_bytes: for each stage, the most that is held in it.
        journal: of all changes, to take moves back; what they cost in `work` stays.
        work: what the moves so far cost, in units of very roughly 2 µs.
        segment_item, segment_start, segment_stop, segment_kept: one slot for each pair of
            neighbouring touches of a root that may be evicted between them; start is -1 where the
            slot is free.
    """

    def __init__(self, index: ProgramIndex, budget_bytes: int) -> None:
        self.index = index
        self.budget_bytes = budget_bytes
        program = index.program
        boundary = program.boundary
        n = index.n_operators
        self.boundary_stage = n + 2 if boundary is None else boundary
        # An operator's stage; the boundary is a stage of its own, and so is the end.
        self.stage_of = [o + (boundary is not None and o >= boundary) for o in range(n)]
        self.n_stages = n + 1 + (boundary is not None)
        self.own = [-1] * self.n_stages
        for o, t in enumerate(self.stage_of):
            self.own[t] = o
        self.end = self.n_stages - 1
        # What writes over an input holds more afterwards, if the input is kept.
        self.overwriting = {t for o, t in enumerate(self.stage_of) if index.workspace_bytes[o] < 0}

        # Storages that an operator reads or makes.
        self.touched = [
            tuple(
                dict.fromkeys((*index.input_storages[o], *(index.storage_of[u] for u in outputs)))
            )
            for o, outputs in enumerate(index.outputs)
        ]
        roots = set(program.root_tensor)
        n_items = len(index.producer)
        self.is_root = [t in roots for t in range(n_items)]
        self.root_of = [program.root_tensor[s] for s in index.storage_of]
        self.item_bytes = [
            index.size_bytes[index.storage_of[t]] if self.is_root[t] else 0 for t in range(n_items)
        ]
        self.views_of: dict[int, list[int]] = {}
        for t in range(n_items):
            if not self.is_root[t] and index.producer[t] >= 0:
                self.views_of.setdefault(self.root_of[t], []).append(t)
        # From which stage on, and up to which, eviction is ruled out.
        self.fixed_from = [self.n_stages] * n_items
        self.fixed_to = [-1] * n_items
        for s, r in enumerate(program.root_tensor):
            if index.makes_once[s] or index.size_bytes[s] == 0:
                self.fixed_from[r] = -1
            if s in program.held_from_boundary:
                self.fixed_from[r] = min(self.fixed_from[r], self.boundary_stage)
            if index.pinned_until[s] >= 0:
                self.fixed_to[r] = self.stage_of[index.pinned_until[s]]

        self.touches: list[list[int]] = [[] for _ in range(n_items)]
        self.counts: list[dict[int, int]] = [{} for _ in range(n_items)]
        self.again: list[set[int]] = [set() for _ in range(n_items)]
        self.runs: dict[int, list[int]] = {}
        self.needs: dict[tuple[int, int], int] = {}
        self.anchors: dict[tuple[int, int], list[int]] = {}
        self.cost_ns = program.cost_ns
        self.work = 0
        self.journal = Journal()
        self._note = self.journal.note
        self.dirty: set[int] = set()
        self.queue: deque[tuple[int, int, bool]] = deque()

        self.slot: dict[tuple[int, int], int] = {}
        self.known_ns: dict[tuple[int, int], float] = {}
        self.free_slots: list[int] = []
        self._grow(0)
        self._start()

    def _start(self) -> None:
        """Everything is kept."""
        index = self.index
        for o in range(index.n_operators):
            t = self.stage_of[o]
            for u in (*index.outputs[o], *index.inputs[o]):
                self._count_with_root(u, t)
        for stage, tensors in (
            (self.boundary_stage, index.boundary_outputs),
            (self.end, index.end_outputs),
        ):
            for u in tensors:
                self._count_with_root(u, stage)
        self.plain_bytes = [self._still(t) for t in range(self.n_stages)]
        self.still_bytes = [self._of_stage(t) for t in range(self.n_stages)]
        self._count_bytes()
        self.journal.clear()

    def _count_bytes(self) -> None:
        """`held_bytes` from scratch."""
        change = np.zeros(self.n_stages + 1, dtype=np.int64)
        for u, touches in enumerate(self.touches):
            size = self.item_bytes[u]
            if size:
                again = self.again[u]
                for a, b in pairwise(touches):
                    if b not in again:
                        change[a + 1] += size
                        change[b] -= size
        program = self.index.program
        change[0] += program.constant_bytes
        if program.boundary is not None:
            change[program.boundary + 1] += self.index.tangent_bytes
        still = np.array(self.still_bytes, dtype=np.int64)
        self.held_bytes: IntArray = np.cumsum(change)[:-1] + still

    def _still(self, t: int) -> int:
        """Bytes that stage ``t`` touches where nothing runs again in it."""
        index = self.index
        o = self.own[t]
        size = index.size_bytes
        if o < 0:
            return sum(size[s] for s in self._needed(t)) + self._arriving(t)
        return sum(size[s] for s in self.touched[o]) + index.workspace_bytes[o]

    # Changes.  Each notes itself, with other arguments, as what takes it back.

    def _add_cost(self, cost_ns: int) -> None:
        self._note((self._add_cost, (-cost_ns,)))
        self.cost_ns += cost_ns

    def _hold(self, start: int, stop: int, size_bytes: int) -> None:
        """``size_bytes`` more in the stages strictly between."""
        if size_bytes and stop - start > 1:
            self._note((self._hold, (start, stop, -size_bytes)))
            self.held_bytes[start + 1 : stop] += size_bytes

    def _set_still(self, t: int, still_bytes: int) -> None:
        """``t`` holds that beside what passes through."""
        before_bytes = self.still_bytes[t]
        self._note((self._set_still, (t, before_bytes)))
        self.held_bytes[t] += still_bytes - before_bytes
        self.still_bytes[t] = still_bytes

    def _flip(self, u: int, t: int) -> None:
        """Made again at ``t``, or no longer."""
        self._note((self._flip, (u, t)))
        again = self.again[u]
        if t in again:
            again.remove(t)
        else:
            again.add(t)
        if self.is_root[u]:
            slot = self.slot.get((u, t))
            if slot is not None:
                self.segment_kept[slot] = t not in again

    def _count(self, u: int, t: int, change: int) -> None:
        """``u`` is touched in stage ``t`` once more (1) or once less (-1) than before."""
        self._note((self._count, (u, t, -change)))
        counts = self.counts[u]
        before = counts.get(t, 0)
        if before + change:
            counts[t] = before + change
            if before:
                return
        else:
            del counts[t]
        touches = self.touches[u]
        at = bisect_left(touches, t)
        if before:
            del touches[at]
            if self.is_root[u]:
                self._set_segment(u, _NO_TOUCH, t)
                if at < len(touches):
                    self._set_segment(u, touches[at - 1] if at else _NO_TOUCH, touches[at])
        else:
            touches.insert(at, t)
            if self.is_root[u]:
                if at + 1 < len(touches):
                    self._set_segment(u, t, touches[at + 1])
                if at:
                    self._set_segment(u, touches[at - 1], t)

    def _count_with_root(self, u: int, t: int) -> None:
        """``u`` is touched in stage ``t`` once more, and so is its root."""
        self._count(u, t, 1)
        if not self.is_root[u]:
            self._count(self.root_of[u], t, 1)

    # Segments follow from the touches, so that nothing of them is noted.

    def _set_segment(self, u: int, start: int, stop: int) -> None:
        """The segment of ``u`` that ends at ``stop`` begins at ``start``.

        It has a slot unless there is none (`_NO_TOUCH`), or eviction is ruled out.
        """
        slot = self.slot.get((u, stop))
        if start == _NO_TOUCH or start >= self.fixed_from[u] or stop <= self.fixed_to[u]:
            if slot is not None:
                del self.slot[u, stop]
                self.segment_start[slot] = -1
                self.segment_kept[slot] = False
                self.free_slots.append(slot)
            return
        if slot is None:
            if not self.free_slots:
                self._grow(2 * len(self.segment_item) + 64)
            slot = self.free_slots.pop()
            self.slot[u, stop] = slot
            self.segment_item[slot] = u
            self.segment_stop[slot] = stop
            self.segment_bytes[slot] = self.item_bytes[u]
            self.segment_ns[slot] = self.known_ns.get(
                (u, stop), self.index.operator_cost_ns[self.index.producer[u]]
            )
            self.segment_kept[slot] = stop not in self.again[u]
        self.segment_start[slot] = start

    def _grow(self, capacity: int) -> None:
        old = len(self.segment_item) if capacity else 0

        def longer(values: npt.NDArray[Any] | None, fill: Any, kind: Any) -> npt.NDArray[Any]:
            new = np.full(capacity, fill, dtype=kind)
            if values is not None:
                new[:old] = values
            return new

        get = self.__dict__.get
        self.segment_item: IntArray = longer(get("segment_item"), 0, np.int64)
        self.segment_start: IntArray = longer(get("segment_start"), -1, np.int64)
        self.segment_stop: IntArray = longer(get("segment_stop"), 0, np.int64)
        self.segment_bytes: IntArray = longer(get("segment_bytes"), 0, np.int64)
        self.segment_ns: npt.NDArray[np.float64] = longer(get("segment_ns"), 0.0, np.float64)
        self.segment_kept: npt.NDArray[np.bool_] = longer(get("segment_kept"), False, np.bool_)
        self.free_slots.extend(range(capacity - 1, old - 1, -1))

    def learn(self, slot: int, added_ns: int) -> None:
        """Evicting in that segment costs so much, as things stand; a guess for later."""
        self.segment_ns[slot] = added_ns
        self.known_ns[int(self.segment_item[slot]), int(self.segment_stop[slot])] = added_ns

    # Consequences

    def touch(self, u: int, t: int) -> None:
        """``u`` is read in stage ``t``, once more than before."""
        self.work += 1
        root = self.root_of[u]
        if root != u:
            self.touch(root, t)
        counts = self.counts[u]
        if t in counts:
            self._count(u, t, 1)
            return
        self.work += WORK_PER_NEW_TOUCH
        touches = self.touches[u]
        at = bisect_left(touches, t)
        before = touches[at - 1]
        after = touches[at] if at < len(touches) else -1
        self._count(u, t, 1)
        if root != u:
            again = self.again[u]
            if self._made_between(root, before, t):
                self._flip(u, t)
                self._need(u, t)
            if after >= 0 and after in again and not self._made_between(root, t, after):
                self._flip(u, after)
                self._release(u, after)
            return
        size = self.item_bytes[u]
        again = self.again[u]
        self.dirty.add(t)
        if after >= 0 and after not in again:
            self._hold(t - 1, t + 1, -size)
            return
        if after < 0:
            self.dirty.add(before)
            if (
                before >= self.fixed_from[u]
                or t <= self.fixed_to[u]
                or self.has_room(before, t, size)
            ):
                self._hold(before, t, size)
                return
            self._flip(u, t)
            self._made_again(u, t)
            return
        # Evicted between its neighbours: made again here, and kept from here if there is room.
        self._flip(u, t)
        self._made_again(u, t)
        if after in again and self.has_room(t, after, size):
            self._keep(u, after)

    def untouch(self, u: int, t: int) -> None:
        """``u`` is read in stage ``t`` once less."""
        self.work += 1
        root = self.root_of[u]
        if self.counts[u][t] > 1:
            self._count(u, t, -1)
        else:
            self.work += WORK_PER_NEW_TOUCH
            touches = self.touches[u]
            at = bisect_left(touches, t)
            before = touches[at - 1]
            after = touches[at + 1] if at + 1 < len(touches) else -1
            if root == u:
                self._untouch_root(u, before, t, after)
            else:
                was_again = t in self.again[u]
                if was_again:
                    self._flip(u, t)
                self._count(u, t, -1)
                if was_again:
                    self._release(u, t)
                self._review(u, root, after)
        if root != u:
            self.untouch(root, t)

    def _untouch_root(self, u: int, before: int, t: int, after: int) -> None:
        size = self.item_bytes[u]
        again = self.again[u]
        self.dirty.add(t)
        self.dirty.add(before)
        if t not in again:
            self._count(u, t, -1)
            if after >= 0 and after not in again:
                self._hold(t - 1, t + 1, size)
            else:
                self._hold(before, t, -size)
            return
        if after < 0 or after in again:
            self._flip(u, t)
            self._count(u, t, -1)
            self._release(u, t)
            self._review_views(u, t)
            return
        # It was made here for a later reader; keep it since the reader before, or make it there.
        self.dirty.add(after)
        if self.has_room(before, t + 1, size):
            self._hold(before, t + 1, size)
            self._flip(u, t)
            self._count(u, t, -1)
            self._release(u, t)
        else:
            self._hold(t, after, -size)
            self._flip(u, t)
            self._flip(u, after)
            self._count(u, t, -1)
            self._need(u, after)
            self._release(u, t)
        self._review_views(u, t)

    def evict(self, u: int, t: int, most_ns: float = math.inf) -> bool:
        """Evict root ``u`` between its touch in ``t`` and the one before.

        False where the plan would then cost more than ``most_ns``; the caller must undo it.
        """
        touches = self.touches[u]
        before = touches[bisect_left(touches, t) - 1]
        self._hold(before, t, -self.item_bytes[u])
        self.dirty.add(before)
        self.dirty.add(t)
        self._flip(u, t)
        self._made_again(u, t)
        return self._settle_touches(most_ns)

    def keep(self, u: int, t: int) -> None:
        """Keep root ``u`` between its touch in ``t`` and the one before."""
        self._keep(u, t)
        self._settle_touches()

    def _settle_touches(self, most_ns: float = math.inf) -> bool:
        """What changed makes operators run again or not, and they touch what they read."""
        queue = self.queue
        while queue:
            if self.cost_ns > most_ns:
                queue.clear()
                return False
            p, t, more = queue.popleft()
            if more:
                self.touch(p, t)
            else:
                self.untouch(p, t)
        return True

    def _keep(self, u: int, t: int) -> None:
        touches = self.touches[u]
        before = touches[bisect_left(touches, t) - 1]
        self._hold(before, t, self.item_bytes[u])
        self.dirty.add(before)
        self.dirty.add(t)
        self._flip(u, t)
        self._release(u, t)
        self._review_views(u, t)

    def _made_again(self, u: int, t: int) -> None:
        self._need(u, t)
        self._review_views(u, t)

    def _review_views(self, root: int, t: int) -> None:
        """``root`` is made again in ``t``, or no longer: so may be its views."""
        for v in self.views_of.get(root, ()):
            touches = self.touches[v]
            at = bisect_left(touches, t)
            if 0 < at < len(touches):
                self._review(v, root, touches[at])

    def _review(self, v: int, root: int, t: int) -> None:
        if t < 0:
            return
        touches = self.touches[v]
        at = bisect_left(touches, t)
        if not 0 < at < len(touches) or touches[at] != t:
            return
        wanted = self._made_between(root, touches[at - 1], t)
        if wanted != (t in self.again[v]):
            self._flip(v, t)
            if wanted:
                self._need(v, t)
            else:
                self._release(v, t)

    def _made_between(self, root: int, after: int, upto: int) -> bool:
        again = self.again[root]
        if not again:
            return False
        if upto in again:
            return True
        if len(again) < 4:
            return any(after < t <= upto for t in again)
        touches = self.touches[root]
        for at in range(bisect_left(touches, after + 1), len(touches)):
            if touches[at] > upto:
                return False
            if touches[at] in again:
                return True
        return False

    def has_room(self, start: int, stop: int, size_bytes: int) -> bool:
        """Whether that fits in all stages strictly between."""
        if stop - start <= 1 or not size_bytes:
            return True
        return int(self.held_bytes[start + 1 : stop].max()) + size_bytes <= self.budget_bytes

    def _need(self, u: int, t: int) -> None:
        """The producer of ``u`` must run again in stage ``t``."""
        index = self.index
        o = index.producer[u]
        count = self.needs.get((o, t), 0)
        self.journal.assign(self.needs, (o, t), count + 1)
        self.dirty.add(t)
        if count:
            # It stands before the readers of its other outputs, not yet of this one.
            runs = self.runs[t]
            earlier = runs[: runs.index(o)] if len(index.outputs[o]) > 1 else ()
            if any(u in index.inputs[r] for r in earlier):
                self.journal.assign(self.runs, t, sorted(runs))
            return
        self._add_cost(index.operator_cost_ns[o])
        self.journal.assign(self.runs, t, self._inserted(o, t))
        self.queue.extend((p, t, True) for p in index.inputs[o])

    def _release(self, u: int, t: int) -> None:
        """``u`` need not be made again in stage ``t``."""
        o = self.index.producer[u]
        if u in self.anchors.get((o, t), ()):
            others = [v for v in self.anchors[o, t] if v != u]
            self.journal.assign(self.anchors, (o, t), others)
            self.untouch(u, t)
        self._drop_need(o, t)

    def _drop_need(self, o: int, t: int) -> None:
        """One reason less to run ``o`` in stage ``t``."""
        count = self.needs[o, t] - 1
        self.journal.assign(self.needs, (o, t), count)
        self.dirty.add(t)
        anchors = self.anchors.get((o, t), [])
        if count and count == len(anchors):
            # It only runs for what is read later: that is for the reader to ask for.
            self.journal.assign(self.anchors, (o, t), None)
            for v in anchors:
                self.untouch(v, t)
        elif not count:
            self._add_cost(-self.index.operator_cost_ns[o])
            self.journal.assign(self.runs, t, [r for r in self.runs[t] if r != o])
            self.queue.extend((p, t, False) for p in self.index.inputs[o])

    def _inserted(self, o: int, t: int) -> list[int]:
        """The operators of stage ``t`` with ``o`` among them: just before its first reader."""
        index = self.index
        runs = self.runs.get(t)
        if runs is None:
            return [o]
        self.work += len(runs) // 4
        if len(runs) > MAX_SEARCHED_STAGE_RUNS:
            # Baseline order is always possible; looking for the reader would be quadratic.
            return sorted([*runs, o])
        outputs = set(index.outputs[o])
        at = len(runs)
        for k, r in enumerate(runs):
            if not outputs.isdisjoint(index.inputs[r]):
                at = k
                break
        made = {index.producer[p] for p in index.inputs[o]}
        if not made.isdisjoint(runs[at:]):
            return sorted([*runs, o])
        return [*runs[:at], o, *runs[at:]]

    def reorder(self, t: int) -> bool:
        """Depth first, longest branch first, where stage ``t`` then holds less; whether it does."""
        runs = self.runs.get(t, [])
        if len(runs) < 2:
            return False
        self.work += 8 * len(runs)
        ordered = self._depth_first(t, runs)
        if ordered == runs:
            return False
        mark = len(self.journal)
        self.journal.assign(self.runs, t, ordered)
        before_bytes = int(self.held_bytes[t])
        self.dirty.add(t)
        self.settle()
        if self.held_bytes[t] < before_bytes:
            return True
        self.journal.roll_back(mark)
        return False

    def _depth_first(self, t: int, runs: list[int]) -> list[int]:
        index = self.index
        own = self.own[t]
        members = set(runs)
        depth: dict[int, int] = {}
        below: dict[int, list[int]] = {}
        for o in sorted(runs) + ([own] if own >= 0 else []):
            below[o] = list(
                dict.fromkeys(p for u in index.inputs[o] if (p := index.producer[u]) in members)
            )
            depth[o] = 1 + sum(depth[p] for p in below[o])
            below[o].sort(key=lambda p: (depth[p], p))
        ordered: dict[int, None] = {}
        # The stage's own operator first; what only later stages read comes after it.
        stack = sorted(runs) + ([own] if own >= 0 else [])
        while stack:
            o = stack[-1]
            missing = [p for p in below[o] if p not in ordered]
            if missing and o not in ordered:
                stack.extend(missing)
                continue
            stack.pop()
            ordered[o] = None
        return [o for o in ordered if o != own]

    # Bytes within a stage

    def settle(self) -> None:
        """Bring `held_bytes` up to date."""
        for t in self.dirty:
            local_bytes = self._of_stage(t)
            if local_bytes != self.still_bytes[t]:
                self._set_still(t, local_bytes)
        self.dirty.clear()

    def _kept_after(self, u: int, t: int) -> bool:
        touches = self.touches[u]
        at = bisect_right(touches, t)
        return at < len(touches) and touches[at] not in self.again[u]

    def entries(self, t: int) -> list[tuple[int, list[int]]]:
        """(operator or `BOUNDARY`, storages freed after it) in the order of stage ``t``."""
        index = self.index
        roots = index.program.root_tensor
        operators = list(self.runs.get(t, ()))
        own = self.own[t]
        last: dict[int, int] = {}
        if own >= 0:
            operators.append(own)
        elif t == self.boundary_stage:
            operators.append(BOUNDARY)
        for k, o in enumerate(operators):
            if o != BOUNDARY:
                for s in self.touched[o]:
                    last[s] = k
        frees: list[list[int]] = [[] for _ in operators]
        needed = self._needed(t)
        for s, k in last.items():
            if s not in needed and not self._kept_after(roots[s], t):
                frees[k].append(s)
        return list(zip(operators, frees, strict=True))

    def _of_stage(self, t: int) -> int:
        """The most that stage ``t`` holds of what it touches."""
        is_plain = t not in self.runs and t not in self.overwriting
        return self.plain_bytes[t] if is_plain else self._local(t)

    def _local(self, t: int) -> int:
        """`_of_stage`, operator by operator."""
        index = self.index
        size, roots, touched = index.size_bytes, index.program.root_tensor, self.touched
        operators = self.runs.get(t, [])
        own = self.own[t]
        if own >= 0:
            operators = [*operators, own]
        last: dict[int, int] = {}
        for k, o in enumerate(operators):
            for s in touched[o]:
                last[s] = k
        for s in self._needed(t):
            last[s] = len(operators)
        # Resident: since before, or made in this stage.  What this stage makes but does not touch
        # passes through, or is dropped at once.
        resident: set[int] = set()
        live = 0
        for s in last:
            r = roots[s]
            if t in self.counts[r] and t not in self.again[r] and self.touches[r][0] < t:
                resident.add(s)
                live += size[s]
        most = live
        for k, o in enumerate(operators):
            at = live + index.workspace_bytes[o]
            for s in index.roots[o]:
                at += size[s]
                if s not in resident and t in self.counts[roots[s]]:
                    resident.add(s)
                    live += size[s]
            if at > most:
                most = at
            for s in touched[o]:
                if last[s] == k and s in resident and not self._kept_after(roots[s], t):
                    resident.remove(s)
                    live -= size[s]
        self.work += 8 + len(operators)
        return max(most, live + self._arriving(t))

    def _arriving(self, t: int) -> int:
        """The tangents come with the boundary, after what runs again before it."""
        return self.index.tangent_bytes if t == self.boundary_stage else 0

    def _needed(self, t: int) -> set[int]:
        """Storages that stage ``t`` itself asks for, where it is the boundary or the end."""
        if self.own[t] >= 0:
            return set()
        index = self.index
        tensors = index.boundary_outputs if t == self.boundary_stage else index.end_outputs
        return {index.storage_of[u] for u in tensors}

    # In and out

    def schedule(self) -> Schedule:
        """The plan, tidied."""
        operators: list[int] = []
        frees: list[list[int]] = []
        for t in range(self.n_stages):
            for o, freed in self.entries(t):
                operators.append(o)
                frees.append(freed)
        return tidy(self.index, operators, frees)

    def load(self, schedule: Schedule) -> None:
        """Take over a schedule's decisions; only from the state in which everything is kept.

        What is evicted and made again within one stage is kept there, so more may be held than
        the schedule holds.
        """
        index = self.index
        made = self._made(schedule)
        brings: dict[tuple[int, int], list[int]] = {}
        for t, o, items in made:
            if (o, t) not in brings:
                # Its readers are not known yet: for now it is needed as such.
                brings[o, t] = []
                self.needs[o, t] = 1
                self.cost_ns += index.operator_cost_ns[o]
                self.runs.setdefault(t, []).append(o)
                for p in index.inputs[o]:
                    self._count_with_root(p, t)
            brings[o, t] += items
        for (o, t), items in brings.items():
            for u in dict.fromkeys(items):
                if not self.is_root[u] or not self.item_bytes[u]:
                    continue
                if t not in self.counts[u]:
                    self._count(u, t, 1)
                    self.anchors.setdefault((o, t), []).append(u)
                self._flip(u, t)
                self.needs[o, t] += 1
        self._bring_views(brings)
        self._count_bytes()
        self.dirty.update(self.runs, self.overwriting)
        for u, touches in enumerate(self.touches):
            if not self.is_root[u] and self.again[self.root_of[u]]:
                for t in touches[1:]:
                    self._review(u, self.root_of[u], t)
        for o, t in reversed(brings):
            self._drop_need(o, t)
        self._settle_touches()
        self.settle()
        self.journal.clear()

    def _bring_views(self, brings: dict[tuple[int, int], list[int]]) -> None:
        """A view that comes with what runs again is there for its readers in later stages."""
        for (o, t), items in brings.items():
            for u in dict.fromkeys(items):
                root = self.root_of[u]
                if root == u or t in self.counts[u]:
                    continue
                touches = self.touches[u]
                before = touches[bisect_left(touches, t) - 1]
                if self._made_between(root, before, t):
                    self._count_with_root(u, t)
                    self.anchors.setdefault((o, t), []).append(u)

    def _made(self, schedule: Schedule) -> list[tuple[int, int, list[int]]]:
        """Each recomputation: (stage, operator, tensors that it brings and that stay a while)."""
        index = self.index
        stages = [0] * len(schedule.operators)
        has_run = [False] * index.n_operators
        first = [False] * len(schedule.operators)
        for at, o in enumerate(schedule.operators):
            if o == BOUNDARY or not has_run[o]:
                first[at] = True
                if o != BOUNDARY:
                    has_run[o] = True
        t = self.end
        for at in range(len(stages) - 1, -1, -1):
            if first[at]:
                o = schedule.operators[at]
                t = self.boundary_stage if o == BOUNDARY else self.stage_of[o]
            stages[at] = t
        defined = [False] * len(index.producer)
        freed_in = [-1] * index.n_storages
        made = []
        for at, o in enumerate(schedule.operators):
            t, frees = stages[at], schedule.frees[at]
            new: list[int] = []
            if o != BOUNDARY:
                new = [u for u in index.outputs[o] if not defined[u]]
                for u in new:
                    defined[u] = True
            if not first[at]:
                storage_of = index.storage_of
                kept = [
                    u for u in new if storage_of[u] not in frees and freed_in[storage_of[u]] != t
                ]
                made.append((t, o, kept))
            for s in frees:
                freed_in[s] = t
                for u in index.tensors_of[s]:
                    defined[u] = False
        return made
