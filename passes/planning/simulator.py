"""DTR, run once at compile time: the staging of Kirisame et al., ICLR 2021.

The paper's runtime (section 2 and appendix C) is a cache with four callbacks: *allocate* makes
room, *evict* drops the storage that the heuristic picks, *rematerialize* computes a missing tensor
again, *perform* runs an operator.  Here the four run on a `program.Program` in program order and
record what they do; the record is the plan.

What is done differently, because the whole program is known:

* a storage that nothing needs again is freed at once; "needs" includes the storages that were
  evicted and are computed from it, so the next use of a storage is known exactly;
* rematerialization is a loop with its own stack (for chains of any length), pins only the inputs of
  the operator that is about to run, and may drop what the operators below it on the stack wait for;
* an operator that may run only once is a hard constraint.  A storage is *locked* while it could
  not be computed again; a locked storage that is freed is *banished* (the paper's word for freed
  for good), which locks what is computed from it.  A locked storage is freed only when nothing
  needs it, not even through evicted storages, so every evicted storage can always be computed
  again.

With a host link an eviction may be a copy to the host instead, where that is expected to cost less
(`link_forecast`).  A storage that is on the host is *away*, not absent: it needs nothing to come
back, so it may be locked, and it is in no evicted neighborhood.

Memory is counted as `replay.replay` counts it: tests compare the two step by step.
"""

from __future__ import annotations

import enum
from bisect import bisect_left
from dataclasses import dataclass, field

import numpy as np

from dtrcompile.passes.errors import InfeasibleBudgetError
from dtrcompile.passes.planning.heuristics import HDTREq, Heuristic, Ids, Pool, PoolState
from dtrcompile.passes.planning.link_forecast import LinkForecast
from dtrcompile.passes.planning.neighborhoods import make_tracker
from dtrcompile.passes.program.host_link import HostLink, LinkClock
from dtrcompile.passes.program.index import NEVER, ProgramIndex
from dtrcompile.passes.program.plan import Boundary, Compute, Free, Offload, Prefetch, Step


class Deallocation(enum.Enum):
    """What to do with a storage that the program does not read again (appendix C.3).

    EAGER: free it; it may be computed again to serve an evicted descendant.
    BANISH: free it for good once no evicted storage needs it; what is computed from it is locked.
    IGNORE: leave it to the heuristic; whatever is left is freed at the end.
    """

    EAGER = "eager"
    BANISH = "banish"
    IGNORE = "ignore"


@dataclass(frozen=True, slots=True)
class SimulatorOptions:
    """How the simulator runs; the defaults give the best plans.

    Attributes:
        heuristic: what to evict first.
        deallocation: see `Deallocation`.
        ignore_small: pass over storages below 1 % of the average size, while there are others
            (section 4.2 of the paper).
        sample: score only a random √n of the pool (section 4.2).
        batch: evict storages in the order of one sort of the scores, without scoring again, until
            there is room.
        hold_sources: keep storages that could not be computed again (seeds, saved random states)
            beyond their last use, as long as more bytes than theirs are computed from them.
        cost_limit: give up at this multiple of the baseline's cost and of its operator count.
        walk_limit: see `neighborhoods.make_tracker`.
        seed: of ``sample``.
        host_link: the host link; None means that storages are computed again, never moved.
        link_price: see `link_forecast.LinkForecast`.
    """

    heuristic: Heuristic = field(default_factory=HDTREq)
    deallocation: Deallocation = Deallocation.EAGER
    ignore_small: bool = False
    sample: bool = False
    batch: bool = False
    hold_sources: bool = True
    cost_limit: float = 8.0
    walk_limit: int = 256
    seed: int = 0
    host_link: HostLink | None = None
    link_price: float = 0.1


@dataclass(frozen=True, slots=True)
class Simulation:
    """What a run recorded.

    Attributes:
        steps: the plan's steps.
        during_bytes, after_bytes: the simulator's own account, one entry for each step.
        cost_ns: cost of all operators that ran, and of the waits for copies.
    """

    steps: tuple[Step, ...]
    during_bytes: tuple[int, ...]
    after_bytes: tuple[int, ...]
    cost_ns: int


def simulate(
    index: ProgramIndex, budget_bytes: int, options: SimulatorOptions | None = None
) -> Simulation:
    """Run the program under the budget.

    Raises:
        InfeasibleBudgetError: if this run finds no plan; the error states no minimum.
    """
    return Simulator(index, budget_bytes, options or SimulatorOptions()).run()


class Simulator:
    """One run; `steps` is what it has recorded, even after it has given up.

    Attributes:
        has_held_sources: `SimulatorOptions.hold_sources` made a difference to this run.
    """

    def __init__(self, index: ProgramIndex, budget_bytes: int, options: SimulatorOptions) -> None:
        self.index = index
        self.budget_bytes = budget_bytes
        self.options = options
        n = index.n_storages
        # A storage is not computed yet, resident, absent (see neighborhoods), or banished.
        self.resident = [False] * n
        self.absent = [False] * n
        self.banished = [False] * n
        self.defined = [False] * len(index.producer)
        self.next_direct = [u[0] if u else NEVER for u in index.uses]
        self.next_use = list(self.next_direct)
        self.locks = [int(once) for once in index.makes_once]
        self.wanted = [0] * n
        self.held = [False] * n
        # A finished output has no reader left: all of them must be in memory together later, so
        # evicting one only helps where there is no other way.
        self.finished_from = [NEVER + 1] * n
        for s in index.program.output_storages:
            self.finished_from[s] = index.n_operators
        for s in index.program.held_from_boundary:
            self.finished_from[s] = index.program.boundary or 0
        self.dead: list[int] = []
        self.leftover: set[int] = set()  # locked and unneeded, kept for what depends on it
        self.has_held_sources = False  # there was ever one of these

        # With a link only: where storages are, and the tensors that a prefetch would define.
        self.away = [False] * n
        self.on_host: dict[int, frozenset[int]] = {}
        link = options.host_link
        self.clock = None if link is None else LinkClock(link)

        self.position = 0
        self.live_bytes = index.program.constant_bytes
        self.cost_ns = 0
        self.runs = 0
        baseline_ns = max(index.program.cost_ns, 1)
        self.most_cost_ns = options.cost_limit * baseline_ns
        self.most_runs = options.cost_limit * max(index.n_operators, 1) + 16
        self.steps: list[Step] = []
        self.during_bytes: list[int] = []
        self.after_bytes: list[int] = []

        sizes = [s for s in index.size_bytes if s]
        self.small_bytes = sum(sizes) / len(sizes) * 0.01 if sizes else 0.0
        self.evictable = np.zeros(n, dtype=np.bool_)
        self.time_ns = [*index.time_ns]
        self.state = PoolState(
            size_bytes=np.maximum(np.array(index.size_bytes, dtype=np.float64), 1.0),
            cost_ns=np.array(index.cost_ns, dtype=np.float64),
            neighborhood_ns=np.zeros(n),
            last_access_ns=np.zeros(n),
            next_use_ns=np.array([self._time(p) for p in self.next_use]),
        )
        self.tracker = make_tracker(
            options.heuristic.neighborhood,
            index,
            self.state,
            self.absent,
            self.next_use,
            options.walk_limit,
        )
        self.forecast = (
            None if link is None else LinkForecast(index, self.state, link, options.link_price)
        )

    # The main loop

    def run(self) -> Simulation:
        """Run once.

        Raises:
            InfeasibleBudgetError: see `simulate`.
        """
        index = self.index
        boundary = index.program.boundary
        if self.live_bytes > self.budget_bytes:
            raise InfeasibleBudgetError(self.budget_bytes)
        for o in range(index.n_operators):
            if o == boundary:
                self.cross_boundary(o)
            self.advance_to(o)
            self.bring(index.inputs[o], o)
        if boundary == index.n_operators:
            self.cross_boundary(boundary)
        self.advance_to(index.n_operators)
        self.bring(index.end_outputs, -1)
        keep = index.program.output_storages
        if self.clock is not None:
            self.clock.wait_for(keep)
        for s in range(index.n_storages):
            if self.resident[s] and s not in keep:
                self.drop(s)
        self.end_frees()
        if self.live_bytes > self.budget_bytes:
            raise InfeasibleBudgetError(self.budget_bytes)
        cost_ns = self.cost_ns + (0 if self.clock is None else self.clock.stall_ns)
        return Simulation(
            tuple(self.steps), tuple(self.during_bytes), tuple(self.after_bytes), cost_ns
        )

    def advance_to(self, position: int) -> None:
        self.position = position
        self.state.baseline_clock_ns = self.time_ns[position]

    def cross_boundary(self, position: int) -> None:
        """Have every forward output in memory, then let the tangents in."""
        index = self.index
        self.advance_to(position)
        self.bring(index.boundary_outputs, -1)
        held = sorted(index.program.held_from_boundary)
        for s in held:
            self.held[s] = True
            self.refresh_evictable(s)
        self.make_room(index.tangent_bytes, (), [])
        self.live_bytes += index.tangent_bytes
        self.record(Boundary(), self.live_bytes)
        if self.clock is not None:
            self.clock.wait_for(held)
        if position < index.n_operators:  # else the same position is the end's
            for s in held:
                self.pass_use(s, position)
        self.free_dead()

    def record(self, step: Step, during_bytes: int) -> None:
        if isinstance(step, Free | Offload) and self.during_bytes:
            # Freed right after the operator that wrote over it.
            during_bytes = min(during_bytes, self.during_bytes[-1])
        else:
            self.end_frees()
        self.steps.append(step)
        self.during_bytes.append(during_bytes)
        self.after_bytes.append(self.live_bytes)

    def end_frees(self) -> None:
        """Count what the last operator did not write over: it is there beside the result."""
        if self.steps:
            self.during_bytes[-1] = max(self.during_bytes[-1], self.after_bytes[-1])

    # Rematerialize and perform

    def bring(self, tensors: tuple[int, ...], operator: int) -> None:
        """Define ``tensors`` together, then run ``operator`` (-1: none)."""
        index = self.index
        defined, producer = self.defined, index.producer
        if operator >= 0 and all(defined[t] for t in tensors):
            self.perform(operator, [])
            return
        # A frame: operator, the tensors it waits for, their storages, how often it still may wait.
        storages = (
            index.input_storages[operator]
            if operator >= 0
            else tuple(dict.fromkeys(index.storage_of[t] for t in tensors))
        )
        stack: list[_Frame] = []
        self.push(stack, _Frame(operator, tensors, storages))
        while stack:
            frame = stack[-1]
            missing = [t for t in frame.tensors if not defined[t]]
            if missing:
                frame.waits -= 1
                if frame.waits < 0:
                    raise InfeasibleBudgetError(self.budget_bytes)
                if self.clock is not None:
                    # Those on the host last: what is computed again needs room meanwhile.
                    uncopied = [t for t in missing if not self.can_fetch(t)]
                    if not uncopied:
                        self.fetch(index.storage_of[missing[0]], frame, stack)
                        continue
                    missing = uncopied
                # Alternating ends lets two inputs that evict each other try both orders.
                o = producer[missing[frame.waits % 2 - 1]]
                self.push(stack, _Frame(o, index.inputs[o], index.input_storages[o]))
                continue
            self.pop(stack)
            if frame.operator >= 0:
                self.perform(frame.operator, stack)

    def can_fetch(self, t: int) -> bool:
        """Whether tensor ``t`` is on the host, to come back by a copy."""
        s = self.index.storage_of[t]
        return self.away[s] and t in self.on_host[s]

    def fetch(self, s: int, frame: _Frame, stack: list[_Frame]) -> None:
        """Bring ``s``, which ``frame`` waits for, back from the host."""
        assert self.clock is not None
        self.make_room(self.index.size_bytes[s], frame.storages, stack)
        self.live_bytes += self.index.size_bytes[s]
        self.record(Prefetch(s), self.live_bytes)
        self.clock.prefetch(s, self.index.size_bytes[s])
        for t in self.on_host[s]:
            self.defined[t] = True
        self.state.last_access_ns[s] = self.state.clock_ns
        self.arrive(s)
        self.free_dead()

    def push(self, stack: list[_Frame], frame: _Frame) -> None:
        stack.append(frame)
        for s in frame.storages:
            self.wanted[s] += 1
            self.evictable[s] = False

    def pop(self, stack: list[_Frame]) -> None:
        for s in stack.pop().storages:
            self.wanted[s] -= 1
            if not self.wanted[s]:
                self.refresh_evictable(s)
                if self.next_use[s] == NEVER and self.resident[s]:
                    self.dead.append(s)

    def perform(self, o: int, stack: list[_Frame]) -> None:
        index, state = self.index, self.state
        inputs, roots = index.input_storages[o], index.roots[o]
        new_bytes = sum(index.size_bytes[s] for s in roots)
        extra_bytes = index.workspace_bytes[o]
        self.make_room(new_bytes + extra_bytes, inputs, stack)
        fresh = [s for s in roots if not self.resident[s]]
        for s in roots:
            if self.resident[s]:
                extra_bytes += index.size_bytes[s]
        for s in fresh:
            self.live_bytes += index.size_bytes[s]
        self.record(Compute(o), self.live_bytes + extra_bytes)
        self.cost_ns += index.operator_cost_ns[o]
        self.runs += 1
        if self.cost_ns > self.most_cost_ns or self.runs > self.most_runs:
            raise InfeasibleBudgetError(self.budget_bytes)
        if self.clock is not None:
            self.clock.wait_for(inputs)
            self.clock.run(index.operator_cost_ns[o])
        for t in index.outputs[o]:
            self.defined[t] = True

        state.clock_ns += index.operator_cost_ns[o]
        for s in inputs:
            state.last_access_ns[s] = state.clock_ns
        for s in fresh:
            state.last_access_ns[s] = state.clock_ns
            if self.away[s] and not self.on_host[s].issubset(index.outputs[o]):
                self.drop(s)  # the host has views of it which this run did not make
            else:
                self.arrive(s)
        if o == self.position:
            for s in inputs:
                self.pass_use(s, o)
        self.free_dead()

    def arrive(self, s: int) -> None:
        """``s`` is in memory again, or for the first time; its parents may be done."""
        self.absent[s] = False
        self.resident[s] = True
        if self.forecast is not None:
            self.away[s] = False
            self.forecast.on_resident(s)
        self.state.next_use_ns[s] = self._time(self.next_use[s])
        self.tracker.on_resident(s)
        self.refresh_evictable(s)
        if self.next_use[s] == NEVER:
            self.dead.append(s)
        self.relax_parents(s)

    # Next uses

    def _time(self, position: int) -> float:
        return float("inf") if position == NEVER else self.time_ns[position]

    def set_next_use(self, s: int, position: int) -> None:
        if self.absent[s] and (position == NEVER) != (self.next_use[s] == NEVER):
            self.next_use[s] = position
            self.tracker.on_absent_use(s)
        self.next_use[s] = position
        if not self.absent[s]:
            self.state.next_use_ns[s] = self._time(position)
            if position == NEVER and self.resident[s]:
                self.dead.append(s)

    def pass_use(self, s: int, position: int) -> None:
        """The program's use of ``s`` at ``position`` is done."""
        uses = self.index.uses[s]
        at = bisect_left(uses, position + 1)
        self.next_direct[s] = uses[at] if at < len(uses) else NEVER
        self.relax(s)
        self.refresh_evictable(s)

    def relax(self, s: int) -> None:
        """Find the next use of ``s`` anew, and of all that evicted storages pass it on to."""
        stack = [s]
        while stack:
            r = stack.pop()
            position = self.next_direct[r]
            for c in self.index.children[r]:
                if self.absent[c] and self.next_use[c] < position:
                    position = self.next_use[c]
            for c in self.index.view_children[r]:
                # Such a view may be undefined although its storage is in memory.
                if (self.resident[c] or self.absent[c] or self.away[c]) and self.next_use[
                    c
                ] < position:
                    position = self.next_use[c]
            if position != self.next_use[r]:
                self.set_next_use(r, position)
                if self.absent[r]:
                    stack.extend(self.index.parents[r])

    def relax_parents(self, s: int) -> None:
        for p in self.index.parents[s]:
            if self.next_use[p] >= self.next_use[s]:
                self.relax(p)

    # Evict and free

    def refresh_evictable(self, s: int) -> None:
        self.evictable[s] = (
            not self.wanted[s] and self.next_direct[s] < self.finished_from[s] and self.may_evict(s)
        )

    def may_evict(self, s: int) -> bool:
        return (
            self.resident[s]
            and (not self.locks[s] or self.clock is not None)
            and not self.held[s]
            and self.index.size_bytes[s] > 0
            and (self.index.pinned_until[s] < 0 or self.next_direct[s] == NEVER)
        )

    def drop(self, s: int) -> None:
        """Take ``s`` out of memory, without recording whether it can come back."""
        self.resident[s] = False
        self.evictable[s] = False
        before_bytes = self.live_bytes
        self.live_bytes -= self.index.size_bytes[s]
        for t in self.index.tensors_of[s]:
            self.defined[t] = False
        self.record(Free(s), before_bytes)
        if self.clock is not None:
            self.clock.free(s)

    def evict(self, s: int) -> None:
        self.state.draws += 1
        if self.forecast is not None and self.copying_is_cheaper(s, self.forecast):
            self.send_away(s, self.forecast)
        else:
            self.drop(s)
            self.become_absent(s)

    def copying_is_cheaper(self, s: int, forecast: LinkForecast) -> bool:
        """Whether copying ``s`` is cheaper than computing it again, which may be impossible."""
        if self.locks[s]:
            return True
        copy_ns = forecast.cost_ns(np.array([s]))[0]
        return bool(copy_ns <= self.state.cost_ns[s] + self.state.neighborhood_ns[s])

    def is_on_host(self, s: int) -> bool:
        """Whether all tensors of ``s`` that are defined could come back by a copy."""
        here = self.on_host.get(s)
        return here is not None and all(
            t in here or not self.defined[t] for t in self.index.tensors_of[s]
        )

    def send_away(self, s: int, forecast: LinkForecast) -> None:
        """Evict ``s`` to the host; no copy is needed if an earlier one is there."""
        assert self.clock is not None
        if not self.is_on_host(s):
            self.record(Offload(s), self.live_bytes)
            self.clock.offload(s, self.index.size_bytes[s])
            self.on_host[s] = frozenset(t for t in self.index.tensors_of[s] if self.defined[t])
            forecast.on_offload(s)
        self.drop(s)
        self.away[s] = True
        forecast.on_away(s)
        # To the neighborhoods it is as good as gone: none of them passes through it.
        self.tracker.on_banished(s)

    def become_absent(self, s: int) -> None:
        self.absent[s] = True
        self.tracker.on_absent(s)
        position = self.next_use[s]
        if position == NEVER:
            return
        stack = [s]
        seen = 0
        while stack:
            for p in self.index.parents[stack.pop()]:
                if position < self.next_use[p]:
                    seen += 1
                    if seen > self.options.walk_limit and self.next_use[p] != NEVER:
                        continue  # whether it is needed must be exact, when need not
                    self.set_next_use(p, position)
                    if self.absent[p]:
                        stack.append(p)

    def banish(self, s: int) -> None:
        """Record that ``s``, which nothing needs and which is freed, can never be computed again.

        Neither can absent storages that are computed from it (appendix C.3 of the paper).
        """
        stack = [s]
        while stack:
            r = stack.pop()
            if self.banished[r]:
                continue
            self.tracker.on_banished(r)
            self.banished[r] = True
            self.absent[r] = False
            for c in self.index.children[r]:
                self.locks[c] += 1
                if self.clock is None:
                    self.evictable[c] = False
                if self.absent[c]:
                    stack.append(c)

    def free_dead(self) -> None:
        """Free what nothing needs; freeing can end the need for what it was computed from."""
        while self.dead:
            s = self.dead.pop()
            if not self.resident[s] or self.next_use[s] != NEVER or self.wanted[s]:
                continue
            if self.options.deallocation is Deallocation.IGNORE and not self.locks[s]:
                continue
            if self.forecast is not None and self.is_on_host(s):
                self.send_away(s, self.forecast)
            elif self.locks[s]:
                if self.options.hold_sources and self.serves_more_than_itself(s):
                    self.leftover.add(s)
                    self.has_held_sources = True
                    continue
                self.drop(s)
                self.banish(s)
            elif self.options.deallocation is Deallocation.BANISH:
                self.drop(s)
                self.banish(s)
            else:
                self.drop(s)
                self.become_absent(s)

    def serves_more_than_itself(self, s: int) -> bool:
        """Whether the needed storages that can only be computed from ``s`` outweigh it.

        What is computed from a needed storage does not count, because it can be computed again
        from that storage.
        """
        index = self.index
        total, limit = 0, index.size_bytes[s]
        seen = {s}
        stack = [s]
        while stack and len(seen) < 64:
            for c in index.children[stack.pop()]:
                if c in seen or index.makes_once[c] or self.banished[c]:
                    continue
                seen.add(c)
                if self.next_use[c] != NEVER:
                    total += index.size_bytes[c]
                    if total > limit:
                        return True
                else:
                    stack.append(c)
        return False

    # Allocate

    def make_room(
        self,
        size_bytes: int,
        pinned: tuple[int, ...],
        stack: list[_Frame],
    ) -> None:
        """Evict until ``size_bytes`` more fit; ``pinned`` stays."""
        if self.live_bytes + size_bytes <= self.budget_bytes:
            return
        protected = set(pinned)
        for s in protected:
            self.evictable[s] = False
        while (excess := self.live_bytes + size_bytes - self.budget_bytes) > 0:
            ids = np.flatnonzero(self.evictable)
            if len(ids):
                self.evict_from(ids, excess)
            elif not (
                self.drop_leftover(protected)
                or self.evict_wanted(protected, stack)
                or self.evict_finished(protected)
            ):
                raise InfeasibleBudgetError(self.budget_bytes)
        for s in protected:
            self.refresh_evictable(s)

    def evict_from(self, ids: Ids, excess: int) -> None:
        options = self.options
        sizes = self.state.size_bytes
        if options.ignore_small:
            large = ids[sizes[ids] >= self.small_bytes]
            ids = large if len(large) else ids
        if options.sample:
            rng = np.random.default_rng((options.seed, self.state.draws))
            ids = np.sort(rng.choice(ids, size=max(1, int(len(ids) ** 0.5)), replace=False))
        self.tracker.refresh(ids, self.evictable)
        copy_ns = None if self.forecast is None else self.forecast.cost_ns(ids)
        scores = options.heuristic.scores(Pool(ids, self.state, copy_ns))
        if not options.batch:
            self.evict(int(ids[int(np.argmin(scores))]))
            return
        for s in ids[np.argsort(scores, kind="stable")].tolist():
            # An eviction can end the need for another storage's eviction, never forbid one.
            self.evict(s)
            excess -= self.index.size_bytes[s]
            if excess <= 0:
                return

    def drop_leftover(self, protected: set[int]) -> bool:
        """Give up a storage that was only kept so that others could be computed again."""
        best = -1
        for s in sorted(self.leftover):
            if not self.resident[s]:
                self.leftover.discard(s)
            elif (
                self.next_use[s] == NEVER
                and s not in protected
                and not self.wanted[s]
                and not self.held[s]
                and (best < 0 or self.index.size_bytes[s] > self.index.size_bytes[best])
            ):
                best = s
        if best < 0 or not self.index.size_bytes[best]:
            return False
        self.leftover.discard(best)
        self.drop(best)
        self.banish(best)
        return True

    def evict_wanted(self, protected: set[int], stack: list[_Frame]) -> bool:
        """Evict what an operator further down the stack waits for."""
        waiting = {s for frame in stack for s in frame.storages}
        ids = [s for s in sorted(waiting - protected) if self.may_evict(s)]
        if ids:
            self.evict_cheapest(ids)
        return bool(ids)

    def evict_finished(self, protected: set[int]) -> bool:
        """Evict an output that only waits for the end, or for the boundary."""
        ids = [
            s
            for s in sorted(self.index.program.output_storages)
            if s not in protected and not self.wanted[s] and self.may_evict(s)
        ]
        if ids:
            self.evict_cheapest(ids)
        return bool(ids)

    def evict_cheapest(self, ids: list[int]) -> None:
        mask = np.zeros(self.index.n_storages, dtype=np.bool_)
        mask[ids] = True
        self.tracker.refresh(np.array(ids), mask)
        cost = self.state.cost_ns[ids] + self.state.neighborhood_ns[ids]
        if self.forecast is not None:
            cost = np.minimum(cost, self.forecast.cost_ns(np.array(ids)))
        self.evict(ids[int(np.argmin(cost / self.state.size_bytes[ids]))])


@dataclass(slots=True)
class _Frame:
    operator: int
    tensors: tuple[int, ...]
    storages: tuple[int, ...]
    waits: int = field(init=False)

    def __post_init__(self) -> None:
        self.waits = 3 * len(self.tensors) + 3
