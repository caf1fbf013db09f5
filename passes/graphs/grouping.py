"""Grouping: which nodes of the default split are one operator of the program.

Operators are what Inductor will run, not FX nodes.  A KERNEL node (`nodes.Role`) is an operator.
FUSED nodes are grouped greedily, in graph order, the way Inductor's scheduler fuses a producer with
its consumers: a cluster stays open until something outside it reads one of its values, or until
waiting for the next consumer would keep many of its inputs alive (a gradient that is added up over
the steps of an unrolled loop: the sum so far is kept instead of all terms).  A FUSED
value is *materialized* (has a storage) if a kernel, another cluster or an output reads it, unless
all that reads it there is an indirect load, which computes the few elements that it takes; each
materialized value is one operator, whose nodes are the *cone* of unmaterialized nodes above it.
Views own no bytes and are made again at each use.

What is approximate: Inductor may also inline a cheap value into several kernels, or split a
cluster.  The program only has to be good enough to plan with.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass

import torch
from torch import fx

from dtrcompile.passes.graphs.split import Split
from dtrcompile.passes.graphs.storage_sizes import allocated_bytes
from dtrcompile.passes.nodes import (
    Role,
    is_mutating,
    is_sequence,
    is_tensor,
    mutated_arguments,
    numel,
    packet,
    tensor_values,
    view_base,
)
from dtrcompile.passes.torch_private import OpOverload

# A cluster that reads so many values is run when it can be, if that frees memory: as many as
# Inductor itself lets a value read before it computes it once (``config.realize_reads_threshold``).
_MANY_READS = 4
# The part of a value that may be read beside what it is computed from: the mean of each row, say.
_STATISTICS_DIVISOR = 16
# A sum whose terms come one after the other, with kernels between, takes each when it comes.
_TERMS = 2
_ADD = torch.ops.aten.add

_INDIRECT_LOADS = frozenset(
    {torch.ops.aten.gather, torch.ops.aten.index, torch.ops.aten.index_select}
)


@dataclass(frozen=True, slots=True)
class CapturedOperator:
    """The FX nodes of one operator of the program.

    Attributes:
        nodes: the cone in topological order, views on the way included.
        outputs: the nodes that own the operator's output storages.
        cluster: operators with the same number are expected in one Inductor kernel.
    """

    nodes: tuple[fx.Node, ...]
    outputs: tuple[fx.Node, ...]
    cluster: int


def group(split: Split) -> list[CapturedOperator]:
    """All operators in the order in which the baseline runs them."""
    loads = _Loads(split)
    clusters = _Clustering(split, loads).run()
    materialized = _materialized(split, loads, clusters)
    return _placed(split, clusters, materialized)


# --- what a call reads --------------------------------------------------------------------------


class _Loads:
    """What each call reads from memory, and what it computes itself where it needs it."""

    def __init__(self, split: Split) -> None:
        self.split = split
        self.written = {
            split.owner(n)
            for call in split.calls
            if is_mutating(call)
            for n in mutated_arguments(call)
        }

    def of(self, node: fx.Node) -> tuple[list[fx.Node], list[fx.Node]]:
        """Owners of what ``node`` reads, and what it computes itself where it needs it.

        An indirect load (the loss of the right class, out of the logarithms of all) takes a few
        elements of a large value.  Inductor computes those in its loop, and never all of them,
        where they come from other values element by element.
        """
        split = self.split
        read: dict[fx.Node, None] = {}
        inlined: dict[fx.Node, None] = {}
        stack = split.inputs_of(node)[::-1]
        while stack:
            n = stack.pop()
            n = split.owner(n) if is_tensor(n) or is_sequence(n) else n
            if n in inlined:
                continue
            if split.roles[node] is Role.FUSED and self._is_inlined(n, node):
                inlined[n] = None
                stack.extend(split.inputs_of(n)[::-1])
            else:
                read[n] = None
        return list(read), list(inlined)

    def _is_inlined(self, source: fx.Node, reader: fx.Node) -> bool:
        """Whether ``reader`` computes the elements of ``source`` that it takes; not if saved."""
        split = self.split
        return (
            packet(reader) in _INDIRECT_LOADS
            and self._is_pointwise(source)
            and split.is_backward(source) == split.is_backward(reader)
            and _loop_numel(source) > _loop_numel(reader)
        )

    def _is_pointwise(self, node: fx.Node) -> bool:
        """Whether a loop computes it element by element."""
        target = node.target
        return (
            self.split.roles.get(node) is Role.FUSED
            and isinstance(target, OpOverload)
            and torch.Tag.pointwise in target.tags
        )

    def is_cheaper_inside(self, source: fx.Node, reader: fx.Node) -> bool:
        """Whether a loop of another cluster computes the elements of ``source`` that it reads.

        It does where what they are computed from has no more bytes: normalized values, say, or the
        exponential of a half-precision value.  Inductor does so too, where it may choose.  But what
        is smaller than the loop, such as a statistic of each row, would be computed many times.
        """
        split = self.split
        if (
            not is_tensor(source)
            or not self._is_pointwise(source)
            or not _loads_cost_most(source)
            or _loop_numel(source) < _loop_numel(reader)
        ):
            return False
        read = [n for n in self.of(source)[0] if is_tensor(n) and not self.is_generator(n)]
        if not self.written.isdisjoint(read):
            return False  # a later loop would read the new value
        read_bytes = sum(allocated_bytes(n, split.same_value) for n in read)
        value_bytes = allocated_bytes(source, split.same_value)
        return read_bytes <= value_bytes + value_bytes // _STATISTICS_DIVISOR

    def is_generator(self, node: fx.Node) -> bool:
        """A loop that reads no tensor (full, arange): written into each loop that reads it."""
        return (
            self.split.roles.get(node) is Role.FUSED
            and is_tensor(node)
            and not any(is_tensor(n) or is_sequence(n) for n in node.all_input_nodes)
        )


# --- clusters -----------------------------------------------------------------------------------


@dataclass(slots=True)
class _Cluster:
    """FUSED nodes that are expected in one kernel.

    Attributes:
        loop_numel: iterations of its loop nest.
        runs_at: position of its latest member: everything that it reads is there by then.
        read_by: computed values from outside that it reads.
        is_open: whether a consumer may still join it.
    """

    loop_numel: int
    runs_at: int
    read_by: set[fx.Node]
    is_open: bool = True


class _Clustering:
    """Walks the calls once; clusters that join are kept in a union-find."""

    def __init__(self, split: Split, loads: _Loads) -> None:
        self.split = split
        self.loads = loads
        self.clusters: list[_Cluster] = []
        self.parent: list[int] = []
        self.cluster_of: dict[fx.Node, int] = {}
        self.last_kernel = -1
        self.last_read = _last_reads(split)
        self.old_value_readers = _old_value_readers(split)
        self.writing: set[int] = set()  # clusters that the latest calls were writes of

    def run(self) -> dict[fx.Node, int]:
        """Cluster number of each FUSED node, and of each ITEM of one."""
        for index, node in enumerate(self.split.calls):
            if index == self.split.first_backward_call:
                self._close_all()
            kind = self.split.roles[node]
            if kind is Role.ITEM:
                source = node.args[0]
                if source in self.cluster_of:
                    self.cluster_of[node] = self.cluster_of[source]  # type: ignore[index]
            elif node in self.split.final_writes and self._joins_its_loop(node):
                self._write(index, node)
            elif kind is Role.KERNEL:
                self._kernel(index, node)
            elif kind is Role.FUSED:
                self._loop(index, node)
        return {n: self._find(c) for n, c in self.cluster_of.items()}

    def _find(self, c: int) -> int:
        parent = self.parent
        while parent[c] != c:
            parent[c] = parent[parent[c]]
            c = parent[c]
        return c

    def _end_writes(self) -> None:
        """What comes after writes does not delay them."""
        for c in self.writing:
            self.clusters[self._find(c)].is_open = False
        self.writing.clear()

    def _close_all(self) -> None:
        for cluster in self.clusters:
            cluster.is_open = False

    def _close(self, source: fx.Node) -> None:
        self.clusters[self._find(self.cluster_of[source])].is_open = False

    def _fused_sources(self, read: Sequence[fx.Node]) -> list[fx.Node]:
        """Of what is read, what a cluster computes."""
        return [n for n in read if n in self.cluster_of and not self.loads.is_generator(n)]

    def _kernel(self, index: int, node: fx.Node) -> None:
        """A kernel closes the clusters that it reads: their values are in memory by then."""
        self._end_writes()
        self.last_kernel = index
        if is_mutating(node):
            # Loops that read the old value must not be delayed past the write.
            self._close_all()
        read, _ = self.loads.of(node)
        for source in self._fused_sources(read):
            self._close(source)

    def _joins_its_loop(self, write: fx.Node) -> bool:
        """Whether a new value is written by the loop that computes it."""
        source = write.args[1]
        return (
            isinstance(source, fx.Node)
            and source in self.cluster_of
            and self.clusters[self._find(self.cluster_of[source])].is_open
        )

    def _write(self, index: int, node: fx.Node) -> None:
        """A write joins the loop that computes its value; what reads the old one runs before."""
        mine = self.cluster_of[node] = self._find(self.cluster_of[node.args[1]])  # type: ignore[index]
        self.clusters[mine].runs_at = index
        self.writing.add(mine)
        for reader in self.old_value_readers[node]:
            if reader in self.cluster_of and self._find(self.cluster_of[reader]) != mine:
                self._close(reader)

    def _loop(self, index: int, node: fx.Node) -> None:
        """A loop joins the open clusters that it reads, and closes the others."""
        self._end_writes()
        read, inlined = self.loads.of(node)
        mine = self._new_cluster(index, node)
        for source in self._fused_sources(read):
            other = self._find(self.cluster_of[source])
            if other == self._find(mine):
                continue
            if self._may_join(self._find(mine), other, source, node):
                self._join(self._find(mine), other, source, index)
            else:
                self.clusters[other].is_open = False
        for source in inlined:
            # It runs up to here, should anything else want its value in memory.
            if self._find(self.cluster_of[source]) != self._find(mine):
                self._close(source)
        self.cluster_of[node] = mine

    def _new_cluster(self, index: int, node: fx.Node) -> int:
        read = map(self.split.owner, self.split.inputs_of(node))
        read_by = {n for n in read if n in self.last_read}
        self.parent.append(len(self.clusters))
        self.clusters.append(_Cluster(_loop_numel(node), index, read_by))
        return len(self.clusters) - 1

    def _may_join(self, mine: int, other: int, source: fx.Node, consumer: fx.Node) -> bool:
        cluster = self.clusters[other]
        return (
            cluster.is_open
            and _same_loops(cluster.loop_numel, self.clusters[mine].loop_numel, source)
            and self._should_wait(other, source, consumer)
        )

    def _join(self, mine: int, other: int, source: fx.Node, index: int) -> None:
        joined, into = self.clusters[mine], self.clusters[other]
        self.parent[mine] = other
        into.loop_numel = max(into.loop_numel, joined.loop_numel)
        into.runs_at = index
        into.read_by = (into.read_by | joined.read_by) - {source}

    def _should_wait(self, other: int, source: fx.Node, consumer: fx.Node) -> bool:
        """Whether a cluster had better run with the consumer that has come than on its own."""
        cluster = self.clusters[other]
        many = _TERMS if packet(source) is packet(consumer) is _ADD else _MANY_READS
        if self.last_kernel < cluster.runs_at or len(cluster.read_by) < many:
            return True
        ending = [
            n
            for n in cluster.read_by
            if self.last_read[n] <= cluster.runs_at
            and (n not in self.cluster_of or self._find(self.cluster_of[n]) != other)
        ]
        if len(ending) < many or not is_tensor(source):
            return True
        freed_bytes = sum(allocated_bytes(n, self.split.same_value) for n in ending)
        return freed_bytes <= allocated_bytes(source, self.split.same_value)


def _loads_cost_most(node: fx.Node) -> bool:
    """Whether the time of a loop over a value is that of its loads and stores.

    On a CPU, exponentials take longer, and Inductor computes them once.
    """
    return bool(node.meta["val"].device.type != "cpu")


def _last_reads(split: Split) -> dict[fx.Node, int]:
    """For each computed value that owns memory, where it is read last."""
    last_read: dict[fx.Node, int] = {}
    for index, node in enumerate(split.calls):
        if is_tensor(node) and view_base(node) is None:
            last_read[node] = index
        for n in split.inputs_of(node):
            source = split.owner(n)
            if source in last_read:
                last_read[source] = index
    for node in split.results:
        last_read[split.owner(node)] = len(split.calls)
    return last_read


def _old_value_readers(split: Split) -> dict[fx.Node, list[fx.Node]]:
    """For each final write, the calls that read what it overwrites."""
    readers: dict[fx.Node, list[fx.Node]] = {target: [] for target in split.final_writes.values()}
    for node in split.calls if readers else ():
        for n in split.inputs_of(node):
            readers.get(split.owner(n), []).append(node)
    return {write: readers[target] for write, target in split.final_writes.items()}


def _loop_numel(node: fx.Node) -> int:
    """Iterations of the loop nest that Inductor writes for a FUSED node."""
    # An embedding or an index reads few elements of a large table; a reduction reads all.
    read = [node, *node.all_input_nodes] if _reduces(node) else [node]
    return max((numel(v) for n in read for v in tensor_values(n)), default=0)


def _reduces(node: fx.Node) -> bool:
    target = node.target
    return isinstance(target, OpOverload) and (
        torch.Tag.reduction in target.tags
        or target.overloadpacket
        in (torch.ops.aten.sum, torch.ops.aten.mean, torch.ops.aten.var_mean, torch.ops.aten.prod)
    )


def _same_loops(producer_numel: int, consumer_numel: int, source: fx.Node) -> bool:
    """Whether Inductor could run a consumer's loop in the producer's kernel.

    Equal iteration counts fuse; a consumer of a reduction's small result is its epilogue; a small
    producer is inlined into a larger consumer.
    """
    if producer_numel <= consumer_numel:
        return True
    return any(numel(v) == consumer_numel for v in tensor_values(source))


# --- operators ----------------------------------------------------------------------------------


def _materialized(
    split: Split, loads: _Loads, clusters: Mapping[fx.Node, int]
) -> AbstractSet[fx.Node]:
    """FUSED and ITEM nodes whose value gets a storage."""
    materialized = {source for n in split.results if (source := split.owner(n)) in clusters}
    calls = [n for n in split.calls if split.roles[n] not in (Role.VIEW, Role.ITEM)]
    # Kernels first: what is in memory for them is in memory for loops too.
    for node in sorted(calls, key=lambda n: split.roles[n] is Role.FUSED):
        is_loop = split.roles[node] is Role.FUSED
        stack, seen = loads.of(node)[0], set[fx.Node]()
        while stack:
            source = stack.pop()
            if source in seen or source not in clusters:
                continue
            seen.add(source)
            if clusters.get(node) == clusters[source]:
                continue
            if not is_tensor(source) or (is_loop and loads.is_generator(source)):
                continue
            if is_loop and source not in materialized and loads.is_cheaper_inside(source, node):
                stack.extend(loads.of(source)[0])
            else:
                materialized.add(source)
    return materialized


def _placed(
    split: Split, clusters: Mapping[fx.Node, int], materialized: AbstractSet[fx.Node]
) -> list[CapturedOperator]:
    """The operators, each where it runs.

    A cluster runs where its last member stands: everything that it reads is there by then, and
    nothing outside of it read before (it was open).
    """
    runs_at: dict[int, int] = {}
    for node, cluster in clusters.items():
        runs_at[cluster] = max(runs_at.get(cluster, -1), split.position[node])
    placed: list[tuple[int, int, CapturedOperator]] = []
    writes: dict[int, list[fx.Node]] = {}
    next_cluster = len(split.calls)
    for position, node in enumerate(split.calls):
        if node in materialized:
            cluster = clusters[node]
            nodes = (*_cone_above(split, node, materialized), node)
            placed.append((runs_at[cluster], position, CapturedOperator(nodes, (node,), cluster)))
        elif node in clusters and node in split.final_writes:
            writes.setdefault(clusters[node], []).append(node)
        elif split.roles[node] is Role.KERNEL:
            elements = _elements(split, node) if is_sequence(node) else []
            nodes = (*_cone_above(split, node, materialized), node, *elements)
            outputs = _kernel_outputs(split, node, elements)
            placed.append((position, position, CapturedOperator(nodes, outputs, next_cluster)))
            next_cluster += 1
    for cluster, copies in writes.items():
        # One operator, the last of its cluster: none may read an old value after it.
        cones = {n for copy in copies for n in _cone_above(split, copy, materialized)}
        nodes = (*sorted(cones, key=split.position.__getitem__), *copies)
        end = (runs_at[cluster], len(split.calls))
        placed.append((*end, CapturedOperator(nodes, (), cluster)))
    placed.sort(key=lambda item: item[:2])
    return [item for _, _, item in placed]


def _kernel_outputs(
    split: Split, node: fx.Node, elements: Sequence[fx.Node]
) -> tuple[fx.Node, ...]:
    """The nodes that own what a kernel allocates."""
    if elements:
        return tuple(n for n in elements if split.roles[n] is Role.ITEM)
    return (node,) if is_tensor(node) and view_base(node) is None else ()


def _elements(split: Split, node: fx.Node) -> list[fx.Node]:
    """Tensors of a multi-output kernel, and the sequences inside its result, in graph order."""
    elements: list[fx.Node] = []
    stack = [node]
    while stack:
        for user in stack.pop().users:
            if user.target is not operator.getitem:
                continue
            if is_tensor(user):
                elements.append(user)
            elif is_sequence(user):
                elements.append(user)
                stack.append(user)
    return sorted(elements, key=split.position.__getitem__)


def _cone_above(
    split: Split, node: fx.Node, materialized: AbstractSet[fx.Node]
) -> tuple[fx.Node, ...]:
    """Unmaterialized nodes, views included, that ``node`` needs, in graph order."""
    cone: set[fx.Node] = set()
    stack = split.inputs_of(node)
    while stack:
        n = stack.pop()
        if n not in cone and n not in materialized and _is_inner(split, n):
            cone.add(n)
            stack.extend(split.inputs_of(n))
    return tuple(sorted(cone, key=split.position.__getitem__))


def _is_inner(split: Split, node: fx.Node) -> bool:
    """Whether a value that has no storage of its own is made again by what needs it."""
    match split.roles.get(node):
        case Role.VIEW | Role.FUSED:
            return True
        case Role.ITEM:
            source = node.args[0]
            assert isinstance(source, fx.Node)
            return view_base(node) is not None or split.roles.get(source) is Role.FUSED
        case _:
            return False
