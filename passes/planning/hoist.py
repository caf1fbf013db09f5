"""Copies to the host and back, moved to where compute hides them.

A planner that decides while it walks forward copies at the last moment: a storage is offloaded when
memory runs out, and fetched when it is read, so compute waits for both.  Here the whole plan is
known.  In turn:

1. recomputations and copies that nothing reads go, frees move to the last use (as `tighten`);
2. a storage that was sent away stays where the bytes in between have room for it, those that were
   away the shortest first;
3. a copy to the host is issued once the storage is complete and the engine is free, those that
   must be gone first before the others, and the storage is freed as soon as that costs no wait,
   or as late as there is room for it;
4. a copy back is issued just in time, walking backwards from the last: late enough to hold no
   memory for nothing, early enough for those behind it on the engine, and later where the budget
   leaves no room.

Computations keep their order and their peaks only shrink, except for 2 and 4, which keep to the
budget.  Step 4 is the "no later than needed, no earlier than there is room" of vDNN's prefetch (Rhu
et al., MICRO 2016, section III), with times in place of its one-layer window.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate

import numpy as np

from dtrcompile.passes.program.host_link import HostLink
from dtrcompile.passes.program.index import ProgramIndex
from dtrcompile.passes.program.liveness import Liveness
from dtrcompile.passes.program.plan import (
    Boundary,
    Compute,
    Free,
    Offload,
    Prefetch,
    Step,
    unknown_step,
)


def hoist(
    index: ProgramIndex, steps: Sequence[Step], budget_bytes: int, link: HostLink
) -> tuple[Step, ...]:
    """A valid plan's steps with its copies moved; the referee says whether it costs less.

    A plan within the budget stays within it.  Linear in the steps, but for the waits' ranges.
    """
    line = _Line(index, _tidied(index, steps))
    line.keep_what_fits(budget_bytes)
    line.send_early(budget_bytes, link)
    line.fetch_in_time(budget_bytes, link)
    return line.steps()


@dataclass(frozen=True, slots=True)
class _Entry:
    """A step other than a free, and the storages that are freed after it."""

    step: Compute | Boundary | Offload | Prefetch
    frees: list[int]


def _tidied(index: ProgramIndex, steps: Sequence[Step]) -> list[_Entry]:
    """Without what nothing reads; frees at the last use, a copy to the host being one."""
    # Forwards: which tensors does each step define that were not defined before it?
    defined = [False] * len(index.producer)
    has_run = [False] * index.n_operators
    on_host: dict[int, list[int]] = {}
    defines: list[list[int]] = []
    again: list[bool] = []
    for step in steps:
        new: list[int] = []
        again.append(False)
        match step:
            case Compute(o):
                again[-1] = has_run[o]
                has_run[o] = True
                new = [t for t in index.outputs[o] if not defined[t]]
            case Prefetch(s):
                new = on_host[s]
            case Offload(s):
                on_host[s] = [t for t in index.tensors_of[s] if defined[t]]
            case Free(s):
                for t in index.tensors_of[s]:
                    defined[t] = False
            case Boundary():
                pass
            case _:
                raise unknown_step(step)
        for t in new:
            defined[t] = True
        defines.append(new)

    # Backwards: what is read later, here or from the host?
    live = Liveness(index.storage_of, index.n_storages)
    from_host: dict[int, set[int]] = {}
    entries: list[_Entry] = []

    live.read(index.end_outputs)
    for at in range(len(steps) - 1, -1, -1):
        step = steps[at]
        frees: list[int] = []
        match step:
            case Free():
                continue
            case Boundary():
                live.read(index.boundary_outputs)
            case Compute(o):
                if again[at] and not live.any_live(defines[at]):
                    continue
                frees = live.dead((*index.input_storages[o], *index.roots[o]))
                live.define(defines[at])
                live.read(index.inputs[o])
            case Prefetch(s):
                wanted = [t for t in defines[at] if live.is_live[t]]
                if not wanted:
                    continue
                from_host.setdefault(s, set()).update(wanted)
                live.define(wanted)
            case Offload(s):
                if s not in from_host:
                    continue
                frees = live.dead([s])
                live.read(sorted(from_host.pop(s)))
            case _:
                raise unknown_step(step)
        entries.append(_Entry(step, frees))
    entries.reverse()
    return entries


@dataclass(slots=True)
class _Away:
    """One stay of a storage on the host.  Positions are slots; a step follows its slot.

    Attributes:
        copied: whether it begins with a copy to the host (else one is there from before).
        ready: slot after which that copy may be issued.
        last_read: slot before which the storage may not be freed.
        free, fetch: slots after which it is freed and fetched.
        first_read: the first slot that needs it to be there.
        floor: slot before which it may not be fetched: until then it is there as the by-product
            of another recomputation; -1 if it is not.
        offload: slot after which the copy to the host is issued.
    """

    storage: int
    copied: bool
    ready: int
    last_read: int
    free: int
    fetch: int = -1
    first_read: int = -1
    floor: int = -1
    offload: int = field(init=False)

    def __post_init__(self) -> None:
        self.offload = self.free


class _Line:
    """A plan as a line of slots (computations and the boundary), and what happens in between.

    Attributes:
        during_bytes: what is held in each slot, with the stays as they are now.
    """

    def __init__(self, index: ProgramIndex, entries: Sequence[_Entry]) -> None:
        self.index = index
        self.slots: list[Compute | Boundary] = []
        self.frees: list[list[int]] = []
        self.stays: list[_Away] = []
        during: list[int] = []
        live_bytes = index.program.constant_bytes
        size_bytes = index.size_bytes
        resident = [False] * index.n_storages
        # Slot of the last definition of one of its tensors, or of the first read since a fetch.
        made = [-1] * index.n_storages
        read = [-1] * index.n_storages
        arriving: dict[int, _Away] = {}  # fetched and not read yet
        ready: dict[int, int] = {}  # offloaded and not freed yet -> slot
        away: dict[int, _Away] = {}  # freed with a copy on the host
        copied: set[int] = set()

        def waits_for(storages: Sequence[int]) -> None:
            for s in storages:
                if s in arriving:
                    arriving.pop(s).first_read = made[s] = len(self.slots) - 1

        for entry in entries:
            match entry.step:
                case Compute(o):
                    self.slots.append(entry.step)
                    self.frees.append([])
                    slot = len(self.slots) - 1
                    at_bytes = live_bytes + index.workspace_bytes[o]
                    for s in index.roots[o]:
                        at_bytes += size_bytes[s]
                        if not resident[s]:
                            resident[s] = True
                            live_bytes += size_bytes[s]
                    # A run that would make it again for another output must find it there, too.
                    waits_for((*index.input_storages[o], *index.roots[o]))
                    for s in index.input_storages[o]:
                        read[s] = slot
                    for t in index.outputs[o]:
                        made[index.storage_of[t]] = slot
                    during.append(at_bytes)
                case Boundary():
                    self.slots.append(entry.step)
                    self.frees.append([])
                    live_bytes += index.tangent_bytes
                    waits_for(sorted(index.program.held_from_boundary))
                    for s in index.program.held_from_boundary:
                        read[s] = len(self.slots) - 1
                    during.append(live_bytes)
                case Offload(s):
                    ready[s] = max(made[s], 0)
                    copied.add(s)
                case Prefetch(s):
                    stay = away.pop(s)
                    stay.fetch = len(self.slots) - 1
                    self.stays.append(stay)
                    arriving[s] = stay
                    resident[s] = True
                    live_bytes += size_bytes[s]
                case _:
                    raise unknown_step(entry.step)
            slot = len(self.slots) - 1
            for s in entry.frees:
                live_bytes -= size_bytes[s]
                resident[s] = False
                if s in away:
                    away[s].floor = slot  # it was computed again meanwhile, for another output
                elif s in copied:
                    # Whether it comes back is known at its fetch; until then it is only freed.
                    away[s] = _Away(s, s in ready, ready.pop(s, -1), max(made[s], read[s]), slot)
                self.frees[slot].append(s)
        for stay in arriving.values():
            stay.first_read = len(self.slots)  # an output: the end waits for it
        for stay in self.stays:
            self.frees[stay.free].remove(stay.storage)
        self.during_bytes = np.array(during, dtype=np.int64)
        self.time_ns = list(
            accumulate(
                (
                    index.operator_cost_ns[slot.operator] if isinstance(slot, Compute) else 0
                    for slot in self.slots
                ),
                initial=0,
            )
        )

    def keep_what_fits(self, budget_bytes: int) -> None:
        """End stays on the host for which there was room on the device."""
        gone: set[int] = set()
        for at in sorted(
            range(len(self.stays)),
            key=lambda i: (self.stays[i].fetch - self.stays[i].free, i),
        ):
            stay = self.stays[at]
            span = self.during_bytes[stay.free + 1 : stay.fetch + 1]
            size = self.index.size_bytes[stay.storage]
            if stay.floor < 0 and (not len(span) or int(span.max()) + size <= budget_bytes):
                span += size
                gone.add(at)
        self._end(gone)

    def _end(self, gone: set[int]) -> None:
        """Take the stays out; a later one that used the copy of one makes it itself."""
        owed: dict[int, _Away] = {}
        kept = []
        for at, stay in enumerate(self.stays):
            if at in gone:
                if stay.copied:
                    owed[stay.storage] = stay
                continue
            if stay.copied:
                owed.pop(stay.storage, None)
            elif stay.storage in owed:
                before = owed.pop(stay.storage)
                stay.copied, stay.ready, stay.offload = True, before.ready, before.offload
            kept.append(stay)
        self.stays = kept

    def send_early(self, budget_bytes: int, link: HostLink) -> None:
        """Issue copies to the host as early as the engine is free; free when they are done."""
        time_ns = self.time_ns
        ready: dict[int, list[_Away]] = {}
        for stay in self.stays:
            if stay.copied:
                ready.setdefault(stay.ready, []).append(stay)
        heap: list[tuple[int, int, _Away]] = []
        engine_free_ns = 0
        late: list[tuple[_Away, int]] = []
        for slot in range(len(self.slots)):
            for stay in ready.get(slot, ()):
                heapq.heappush(heap, (stay.free, stay.storage, stay))
            next_end_ns = time_ns[min(slot + 2, len(time_ns) - 1)]
            while heap and (engine_free_ns < next_end_ns or heap[0][0] <= slot):
                _, _, stay = heapq.heappop(heap)
                start_ns = max(engine_free_ns, time_ns[slot + 1])
                engine_free_ns = start_ns + link.transfer_ns(self.index.size_bytes[stay.storage])
                stay.offload = slot
                done = bisect_left(time_ns, engine_free_ns) - 1
                if done > stay.free:
                    late.append((stay, done))
                else:
                    self._free_early(stay, max(done, slot))
        for stay in self.stays:
            if not stay.copied:
                self._free_early(stay, stay.last_read)
        for stay, done in late:
            self._free_late(stay, done, budget_bytes)

    def _free_early(self, stay: _Away, slot: int) -> None:
        early = min(max(slot, stay.last_read), stay.free)
        self.during_bytes[early + 1 : stay.free + 1] -= self.index.size_bytes[stay.storage]
        stay.free = early

    def _free_late(self, stay: _Away, slot: int, budget_bytes: int) -> None:
        if stay.floor >= 0:
            return
        span = self.during_bytes[stay.free + 1 : min(slot, stay.fetch) + 1]
        size = self.index.size_bytes[stay.storage]
        full = np.flatnonzero(span + size > budget_bytes)
        room = int(full[0]) if len(full) else len(span)
        span[:room] += size
        stay.free += room

    def fetch_in_time(self, budget_bytes: int, link: HostLink) -> None:
        """Issue copies back just in time, where the budget has room."""
        during, time_ns = self.during_bytes, self.time_ns
        sizes = self.index.size_bytes
        for stay in self.stays:
            during[stay.fetch + 1 : stay.first_read] -= sizes[stay.storage]
            stay.fetch = stay.first_read - 1
        engine_busy_ns = time_ns[-1]
        gone: set[int] = set()
        order = sorted(range(len(self.stays)), key=lambda i: (-self.stays[i].first_read, -i))
        for at in order:
            stay = self.stays[at]
            size = sizes[stay.storage]
            deadline_ns = min(time_ns[stay.first_read], engine_busy_ns)
            start_ns = deadline_ns - link.transfer_ns(size)
            lowest = max(stay.free, stay.floor)
            wanted = min(max(bisect_right(time_ns, start_ns) - 2, lowest), stay.fetch)
            full = np.flatnonzero(during[wanted + 1 : stay.first_read] + size > budget_bytes)
            if len(full):
                wanted += int(full[-1]) + 1
            during[wanted + 1 : stay.first_read] += size
            stay.fetch = wanted
            engine_busy_ns = max(start_ns, time_ns[wanted + 1])
            if wanted <= stay.free:
                gone.add(at)  # it need not leave at all
        self._end(gone)

    def steps(self) -> tuple[Step, ...]:
        """The plan's steps."""
        offloads: list[list[_Away]] = [[] for _ in self.slots]
        leaving: list[list[int]] = [list(f) for f in self.frees]
        fetches: list[list[_Away]] = [[] for _ in self.slots]
        for stay in self.stays:
            if stay.copied:
                offloads[stay.offload].append(stay)
            leaving[stay.free].append(stay.storage)
            fetches[stay.fetch].append(stay)
        steps: list[Step] = []
        for slot, step in enumerate(self.slots):
            steps.append(step)
            steps.extend(
                Offload(a.storage)
                for a in sorted(offloads[slot], key=lambda a: (a.free, a.storage))
            )
            steps.extend(Free(s) for s in leaving[slot])
            steps.extend(
                Prefetch(a.storage)
                for a in sorted(fetches[slot], key=lambda a: (a.first_read, a.storage))
            )
        return tuple(steps)
