"""Checkmate's linear program, over a `program.Program`.

Jain, Jain, Nrusimha, Gholami, Abbeel, Keutzer, Stoica, Gonzalez: *Checkmate: Breaking the Memory
Wall with Optimal Tensor Rematerialization*, MLSys 2020, sections 4.2 to 4.8.  Time is cut into
*stages*; in stage t operator t runs for the first time, and operators before it may run again, each
at most once and in program order (the frontier-advancing form, equation 5 and section 4.6)::

    R[t,k] = 1    operator k runs in stage t                R[t,t] = 1, R[t,k] = 0 for k > t
    S[t,s] = 1    storage s is in memory when stage t begins

    minimize  Σ cost[k] · R[t,k]                                                        (1a)
    R[t,j] ≤ R[t,i] + S[t,i]            for every i that j reads                         (1b)
    S[t,i] ≤ R[t-1,i] + S[t-1,i]                                                         (1c)
    memory while k runs in stage t ≤ budget                                              (2-9)

What a `program.Program` has and the paper's graphs do not:

* storages of several bytes an operator, and views of them: S is for each storage, and ``V[t,x]``
  says that view x is defined when stage t begins, which needs its storage there;
* an operator that runs again while an output of it is in memory holds both during that run;
* workspace while an operator runs; constants all the time, tangents from the boundary;
* an operator that may run once: R is 0 after its first stage.  A pinned storage: S is 1 up to its
  last reader's stage.  Forward outputs: S is 1 from the boundary on;
* outputs must be in memory together: where there are any, the boundary and the end are operators
  of their own without cost, which read them.

Two linearizations of the memory:

* `Memory.PAPER`, equations 6 to 9: a running sum U[t,k], and FREE[t,s,k] = 1 if k is the last to
  read s in stage t and s is not kept, linearized with κ; FREE[t,k,k] = 0, but for an operator with
  several outputs, one of which nobody may read.
* `Memory.LIVE`, ours: H[t,s,k] = 1 if s is in memory while k, the m-th reader of s, runs.  It is
  bounded from below by R[t,k], by the H of the next reader, and after the last by S[t+1,s].  The
  same plans (and those that drop a value at once that FREE[t,k,k] = 0 holds until its stage ends)
  from as many variables, without κ: its relaxation is tighter, and its account is the referee's.

No solver is imported here.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from dtrcompile.passes.errors import OptionError
from dtrcompile.passes.planning.settings import (
    MAX_NODES,
    MAX_NODES_IN_FULL,
    MAX_SIZE_UNITS,
)
from dtrcompile.passes.program.index import ProgramIndex
from dtrcompile.passes.program.plan import (
    Boundary,
    Compute,
    Free,
    Offload,
    Prefetch,
    Step,
    unknown_step,
)

NONE = -1
"""No variable: the entry is 0."""

Bits = NDArray[np.bool_]


class Memory(enum.Enum):
    """How the memory is made linear; see the module docstring."""

    PAPER = "paper"
    LIVE = "live"


@dataclass(frozen=True, slots=True)
class Stages:
    """A program as Checkmate sees it: nodes are its operators, the boundary and the end among them.

    Attributes:
        operator: for each node, its operator, or None for the boundary and the end.
        reads: for each node, tensors that it reads, without constants.
        makes: for each node, tensors that it makes, without constants.
        node_of: for each tensor, the node that makes it, -1 for constants.
        readers: for each storage, the nodes that read a tensor of it, ascending.
        boundary: the node before which the boundary is passed; None without one.
        boundary_is_node: whether that node is the boundary itself.
    """

    index: ProgramIndex
    operator: tuple[int | None, ...]
    reads: tuple[tuple[int, ...], ...]
    makes: tuple[tuple[int, ...], ...]
    node_of: tuple[int, ...]
    readers: tuple[tuple[int, ...], ...]
    boundary: int | None
    boundary_is_node: bool

    @staticmethod
    def of(index: ProgramIndex) -> Stages:
        """Build it, in time linear in the program."""
        program = index.program
        operator: list[int | None] = []
        reads: list[tuple[int, ...]] = []
        boundary: int | None = None
        at_boundary = program.boundary is not None and (
            bool(index.boundary_outputs) or program.boundary == index.n_operators
        )
        for o in range(index.n_operators + 1):
            if o == program.boundary:
                boundary = len(operator)
                if at_boundary:
                    operator.append(None)
                    reads.append(index.boundary_outputs)
            if o < index.n_operators:
                operator.append(o)
                reads.append(tuple(dict.fromkeys(index.inputs[o])))
        if index.end_outputs:
            operator.append(None)
            reads.append(index.end_outputs)
        makes = tuple(() if o is None else index.outputs[o] for o in operator)
        node_of = [NONE] * len(index.producer)
        for k, made in enumerate(makes):
            for x in made:
                node_of[x] = k
        readers: list[list[int]] = [[] for _ in range(index.n_storages)]
        for k, read in enumerate(reads):
            for s in dict.fromkeys(index.storage_of[x] for x in read):
                readers[s].append(k)
        return Stages(
            index,
            tuple(operator),
            tuple(reads),
            makes,
            tuple(node_of),
            tuple(tuple(r) for r in readers),
            boundary,
            at_boundary,
        )

    def __len__(self) -> int:
        return len(self.operator)

    def is_view(self, tensor: int) -> bool:
        """Whether it is not the tensor whose computation allocates its storage."""
        return self.index.program.root_tensor[self.index.storage_of[tensor]] != tensor

    def roots(self, node: int) -> tuple[int, ...]:
        """The storages that it allocates."""
        o = self.operator[node]
        return () if o is None else self.index.roots[o]

    def cost_ns(self, node: int) -> int:
        """Of one run."""
        o = self.operator[node]
        return 0 if o is None else self.index.operator_cost_ns[o]

    def workspace_bytes(self, node: int) -> int:
        """Held while it runs."""
        o = self.operator[node]
        return 0 if o is None else self.index.workspace_bytes[o]

    def runs_once(self, node: int) -> bool:
        """Whether it may not run again."""
        o = self.operator[node]
        return o is None or self.index.runs_once[o]

    def fixed_bytes(self, stage: int, node: int) -> int:
        """Constants, and tangents from the boundary on."""
        fixed = self.index.program.constant_bytes
        if self.boundary is not None and (stage, node) >= (self.boundary, self.boundary):
            fixed += self.index.tangent_bytes
        return fixed

    def must_hold(self, storage: int, allocated: int) -> set[int]:
        """The stages at whose beginning it has to be in memory, pinned or held by the caller."""
        program = self.index.program
        stages: set[int] = set()
        if storage in program.held_from_boundary and self.boundary is not None:
            stages.update(range(self.boundary + 1, len(self)))
        if program.storages[storage].pinned is not None:
            by = (k for k in self.readers[storage] if self.operator[k] is not None)
            stages.update(range(allocated + 1, max(by, default=NONE) + 1))
        return stages


@dataclass(frozen=True, slots=True)
class Choice:
    """A decision: which node runs in which stage, what is kept between stages.

    Attributes:
        runs: stage by node.
        kept: stage by tensor: defined when the stage begins; for a root tensor: its storage is in
            memory.
    """

    runs: Bits
    kept: Bits


@dataclass(slots=True)
class LinearProgram:
    """Minimize ``cost · x`` subject to ``low ≤ A x ≤ high`` and bounds; A as triplets."""

    cost: list[float] = field(default_factory=list)
    lower: list[float] = field(default_factory=list)
    upper: list[float] = field(default_factory=list)
    integer: list[bool] = field(default_factory=list)
    row: list[int] = field(default_factory=list)
    column: list[int] = field(default_factory=list)
    value: list[float] = field(default_factory=list)
    low: list[float] = field(default_factory=list)
    high: list[float] = field(default_factory=list)

    def variable(
        self, lower: float = 0.0, upper: float = 1.0, cost: float = 0.0, integer: bool = True
    ) -> int:
        """A new variable's column."""
        self.lower.append(lower)
        self.upper.append(upper)
        self.cost.append(cost)
        self.integer.append(integer)
        return len(self.cost) - 1

    def constrain(
        self,
        terms: Iterable[tuple[int, float]],
        low: float = -math.inf,
        high: float = math.inf,
    ) -> None:
        """``low ≤ Σ coefficient · variable ≤ high``; terms without a variable are 0."""
        row = len(self.low)
        for column, value in terms:
            if column != NONE and value:
                self.row.append(row)
                self.column.append(column)
                self.value.append(value)
        self.low.append(low)
        self.high.append(high)

    def at_most(self, left: int, *right: int) -> None:
        """``left ≤ Σ right``, for variables."""
        if left != NONE:
            self.constrain([(left, 1.0), *((r, -1.0) for r in right)], high=0.0)


@dataclass(slots=True)
class Model:
    """The linear program of a program and a budget, and where its variables are.

    Attributes:
        runs: stage by node -> column of R.
        kept: stage by tensor -> column of S (root tensors) or V (views).
        cost_unit_ns: the objective counts in multiples of it.
        whole_costs: every operator's cost is one.
    """

    stages: Stages
    linear: LinearProgram
    runs: NDArray[np.int64]
    kept: NDArray[np.int64]
    cost_unit_ns: float
    whole_costs: bool

    def bound_ns(self, bound: float) -> float:
        """What an objective that none is below says of the cost, which may come in steps."""
        if self.whole_costs and math.isfinite(bound):
            bound = math.ceil(bound - 1e-5)
        return max(bound * self.cost_unit_ns, float(self.stages.index.program.cost_ns))

    def choice(self, x: NDArray[np.float64], threshold: float = 0.5) -> Choice:
        """The decision that a solution stands for."""
        return Choice(
            (self.runs != NONE) & (x[self.runs] > threshold),
            (self.kept != NONE) & (x[self.kept] > threshold),
        )


def build(
    stages: Stages,
    budget_bytes: int,
    memory: Memory = Memory.LIVE,
    most_cost_ns: int | None = None,
) -> Model:
    """Checkmate's program for ``budget_bytes``.

    Args:
        most_cost_ns: leave out what costs more; a plan of that cost is known.

    Raises:
        OptionError: the program is too large for it.
    """
    if len(stages) > MAX_NODES:
        raise OptionError(
            f"Checkmate's program is for up to {MAX_NODES} operators, this one has"
            f" {len(stages)}; use the planner 'auto'"
        )
    return _Builder(stages, budget_bytes, memory, most_cost_ns).build()


class _Builder:
    def __init__(
        self, stages: Stages, budget_bytes: int, memory: Memory, most_cost_ns: int | None
    ) -> None:
        self.stages = stages
        self.index = stages.index
        self.budget_bytes = budget_bytes
        self.memory = memory
        self.most_cost_ns = most_cost_ns
        self.n = len(stages)
        self.linear = LinearProgram()
        self.runs = np.full((self.n, self.n), NONE, dtype=np.int64)
        self.kept = np.full((self.n + 1, len(self.index.producer)), NONE, dtype=np.int64)
        self.unit_bytes = self.size_unit()
        self.cost_unit_ns, self.whole_costs = self.cost_unit()

    def size_unit(self) -> float:
        """All sizes are multiples of it, or are rounded up to one."""
        sizes = [*self.index.size_bytes, *self.index.workspace_bytes]
        unit = math.gcd(*sizes) or 1
        return max(unit, self.budget_bytes // MAX_SIZE_UNITS, 1)

    def cost_unit(self) -> tuple[float, bool]:
        """The greatest common divisor where that makes small whole numbers, else a thousandth."""
        costs = [c for c in self.index.operator_cost_ns if c]
        unit = math.gcd(*costs) or 1
        whole = max(costs, default=0) // unit < 1000
        return (float(unit), True) if whole else (sum(costs) / 1000, False)

    def units(self, size_bytes: int) -> float:
        return float(-(-size_bytes // self.unit_bytes))

    def build(self) -> Model:
        self.variables()
        for t in range(self.n):
            self.dependencies(t)
            self.carry(t)
            if self.memory is Memory.LIVE:
                self.live_memory(t)
            else:
                self.paper_memory(t)
        if self.most_cost_ns is not None:
            # One part in 1e9 on top: the bound itself must stay feasible.
            most = self.most_cost_ns / self.cost_unit_ns * (1 + 1e-9)
            terms = [(c, v) for c, v in enumerate(self.linear.cost) if v]
            self.linear.constrain(terms, high=most)
        return Model(
            self.stages, self.linear, self.runs, self.kept, self.cost_unit_ns, self.whole_costs
        )

    def variables(self) -> None:
        stages, linear = self.stages, self.linear
        spare_ns = math.inf
        if self.most_cost_ns is not None:
            spare_ns = self.most_cost_ns - self.index.program.cost_ns
        for k in range(self.n):
            cost = stages.cost_ns(k) / self.cost_unit_ns
            self.runs[k, k] = linear.variable(1.0, 1.0, cost)
            if not stages.runs_once(k) and stages.cost_ns(k) <= spare_ns:
                for t in range(k + 1, self.n):
                    self.runs[t, k] = linear.variable(cost=cost)
        for x, k in enumerate(stages.node_of):
            if k == NONE:
                continue
            s = self.index.storage_of[x]
            hold = set() if stages.is_view(x) else stages.must_hold(s, k)
            for t in range(k + 1, self.n):
                self.kept[t, x] = linear.variable(1.0 if t in hold else 0.0)

    def dependencies(self, t: int) -> None:
        """Equation 1b."""
        for j in range(t + 1):
            for x in self.stages.reads[j]:
                self.linear.at_most(
                    self.runs[t, j], self.runs[t, self.stages.node_of[x]], self.kept[t, x]
                )

    def carry(self, t: int) -> None:
        """Equation 1c; a view is only there with its storage."""
        for x, k in enumerate(self.stages.node_of):
            if k == NONE or self.kept[t + 1, x] == NONE:
                continue
            self.linear.at_most(self.kept[t + 1, x], self.runs[t, k], self.kept[t, x])
            if self.stages.is_view(x):
                self.linear.at_most(self.kept[t + 1, x], self.storage_kept(t + 1, x))

    def storage_kept(self, t: int, x: int) -> int:
        root = self.index.program.root_tensor[self.index.storage_of[x]]
        return int(self.kept[t, root])

    def storages_before(self, t: int) -> Iterable[tuple[int, int, int]]:
        """(storage, root tensor, node that allocates it) of what stage ``t`` may hold."""
        for x, k in enumerate(self.stages.node_of):
            if k != NONE and k <= t and not self.stages.is_view(x):
                yield self.index.storage_of[x], x, k

    def live_memory(self, t: int) -> None:
        """The referee's account, step by step."""
        stages, linear = self.stages, self.linear
        # What each step holds, as differences to the step before.
        change: list[list[tuple[int, float]]] = [[] for _ in range(t + 2)]

        def hold(variable: int, first: int, last: int) -> None:
            if first <= last and variable != NONE:
                change[first].append((variable, size))
                change[last + 1].append((variable, -size))

        for s, x, allocated in self.storages_before(t):
            size = self.units(self.index.size_bytes[s])
            if not size:
                continue
            hold(int(self.kept[t, x]), 0, allocated)
            hold(int(self.runs[t, allocated]), allocated, allocated)
            after = int(self.kept[t + 1, x])
            end = t
            for k in reversed([k for k in stages.readers[s] if k <= t]):
                run = int(self.runs[t, k])
                if run == NONE:
                    continue
                hold(after, k + 1, end)
                end = k
                if after == NONE or k == t:
                    # Nothing else keeps it, or its reader runs for certain.
                    after = run
                    continue
                live = linear.variable(integer=False)
                linear.at_most(run, live)
                linear.at_most(after, live)
                after = live
            hold(after, allocated + 1, end)
        before = NONE
        held: dict[int, float] = {}
        for k in range(t + 1):
            for variable, amount in change[k]:
                held[variable] = held.get(variable, 0.0) + amount
            run = int(self.runs[t, k])
            workspace = self.units(stages.workspace_bytes(k))
            allocates = any(self.index.size_bytes[s] for s in stages.roots(k))
            if k < t and (run == NONE or not (workspace or allocates)):
                continue
            room = self.room(t, k)
            if self.n <= MAX_NODES_IN_FULL:
                linear.constrain([*held.items(), (run, workspace)], high=room)
                continue
            total = linear.variable(0.0, room, integer=False)
            terms = [(v, -c) for v, c in held.items()]
            linear.constrain([(total, 1.0), (before, -1.0), *terms], low=0.0, high=0.0)
            if workspace:
                linear.constrain([(total, 1.0), (run, workspace)], high=room)
            before, held = total, {}

    def room(self, t: int, k: int) -> float:
        """What constants and tangents leave of the budget."""
        left = self.budget_bytes - self.stages.fixed_bytes(t, k)
        return float(left // self.unit_bytes)

    def paper_memory(self, t: int) -> None:
        """Equations 6 to 9."""
        stages, linear, index = self.stages, self.linear, self.index
        freed: list[list[tuple[int, float]]] = [[] for _ in range(t + 1)]
        used: list[tuple[int, float]] = []
        for s, x, allocated in self.storages_before(t):
            size = self.units(index.size_bytes[s])
            if not size:
                continue
            used.append((int(self.kept[t, x]), size))
            ends = [k for k in stages.readers[s] if k <= t]
            if len(stages.makes[allocated]) > 1:
                ends.insert(0, allocated)
                # What ran again beside its own copy leaves one of the two at once.
                spare = linear.variable(integer=False)
                linear.at_most(spare, int(self.runs[t, allocated]))
                linear.at_most(spare, int(self.kept[t, x]))
                freed[allocated].append((spare, size))
            for at, k in enumerate(ends):
                run = int(self.runs[t, k])
                if run == NONE:
                    continue
                later = [int(self.runs[t, j]) for j in ends[at + 1 :]]
                hazards = [v for v in (int(self.kept[t + 1, x]), *later) if v != NONE]
                free = linear.variable()
                # 1 - FREE ≤ hazards ≤ κ (1 - FREE), with hazards = (1 - R[t,k]) + Σ others (9).
                terms = [(v, 1.0) for v in hazards]
                linear.constrain([(free, 1.0), (run, -1.0), *terms], low=0.0)
                most = 1.0 + len(hazards)
                linear.constrain([(free, most), (run, -1.0), *terms], high=most - 1.0)
                freed[k].append((free, size))
        before: list[tuple[int, float]] = used
        for k in range(t + 1):
            run = int(self.runs[t, k])
            new = sum(self.units(index.size_bytes[s]) for s in stages.roots(k))
            workspace = self.units(stages.workspace_bytes(k))
            total = linear.variable(0.0, self.room(t, k), integer=False)
            linear.constrain(
                [(total, 1.0), *((v, -c) for v, c in before), (run, -new - workspace)],
                low=0.0,
                high=0.0,
            )
            before = [(total, 1.0), (run, -workspace), *((v, -c) for v, c in freed[k])]


def steps_of(stages: Stages, choice: Choice) -> tuple[Step, ...]:
    """The steps of a decision: each stage in node order, everything freed after its last use.

    A recomputation that nothing needs is not dropped here.
    """
    index = stages.index
    n = len(stages)
    root_tensor = index.program.root_tensor
    steps: list[Step] = []
    resident: set[int] = set()

    def kept(t: int, s: int) -> bool:
        return t < n and bool(choice.kept[t, root_tensor[s]])

    for t in range(n):
        run = [k for k in range(t + 1) if choice.runs[t, k]]
        last_read = {index.storage_of[x]: k for k in run for x in stages.reads[k]}
        for s in sorted(resident):
            if s not in last_read and not kept(t + 1, s):
                steps.append(Free(s))
                resident.remove(s)
        for k in run:
            if k == t == stages.boundary:
                steps.append(Boundary())
            o = stages.operator[k]
            if o is None:
                continue
            steps.append(Compute(o))
            resident.update(index.roots[o])
            for s in sorted({index.storage_of[x] for x in stages.reads[k]} | set(index.roots[o])):
                if s in resident and last_read.get(s, -1) <= k and not kept(t + 1, s):
                    steps.append(Free(s))
                    resident.remove(s)
    return tuple(steps)


def choice_of(stages: Stages, steps: Sequence[Step]) -> Choice | None:
    """The decision nearest to a plan: what ran in each stage, what was there when it began.

    None if operators run for the first time in another order than the program's, or if it copies
    to the host, of which the model knows nothing.
    """
    index = stages.index
    n = len(stages)
    runs = np.zeros((n, n), dtype=np.bool_)
    kept = np.zeros((n + 1, len(index.producer)), dtype=np.bool_)
    node_of_operator = {o: k for k, o in enumerate(stages.operator) if o is not None}
    defined: set[int] = set()
    stage = 0
    # Runs between two first runs serve the second of them.
    for step in steps:
        if stage == n:
            break
        match step:
            case Boundary():
                if stages.boundary_is_node:
                    if stage != stages.boundary:
                        return None
                    runs[stage, stage] = True
                    stage += 1
                    kept[stage, sorted(defined)] = True
            case Compute(o):
                k = node_of_operator[o]
                if k > stage:
                    return None
                runs[stage, k] = True
                defined.update(index.outputs[o])
                if k == stage:
                    stage += 1
                    kept[stage, sorted(defined)] = True
            case Free(s):
                defined.difference_update(index.tensors_of[s])
                # Freed before anything else ran: it was not kept.
                kept[stage, list(index.tensors_of[s])] &= runs[stage].any()
            case Offload() | Prefetch():
                return None
            case _:
                raise unknown_step(step)
    if stage == n - 1 and stages.operator[stage] is None:
        runs[stage, stage] = True
        stage += 1
    return Choice(runs, kept) if stage == n else None
