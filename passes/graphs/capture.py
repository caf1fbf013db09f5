"""Capture: the default split's forward and backward graphs become one `Program`.

Where in the pipeline: after AOTAutograd, Inductor's joint-graph passes and the default min-cut
partitioner (or, for inference, on the one graph there is).  The program is the forward graph
followed by the backward graph, so at an ample budget the result is the default's.

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
cluster.  The schedule that Inductor makes of the emitted graphs is read back by `schedule` and is
what the promise is made of; the program only has to be good enough to plan with.  So that
`schedule` can say what a library call held, each KERNEL node carries the number of its operator,
``operator`` in its `nodes.Mark`, and so do its copies in emitted graphs; what owns an operator's
storage carries it as ``output_of``.
"""

from __future__ import annotations

import functools
import operator
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import sympy
import torch
from torch import fx

from dtrcompile.passes.device.allocators import EXACT, Allocator
from dtrcompile.passes.device.costs import CostModel
from dtrcompile.passes.errors import CaptureError
from dtrcompile.passes.graphs.modules import output_arguments
from dtrcompile.passes.nodes import (
    Role,
    draws_random_numbers,
    extent_bytes,
    extent_expression,
    has_unbacked_size,
    hint,
    is_mutating,
    is_sequence,
    is_tensor,
    mark,
    mutated_arguments,
    numel,
    owned_bytes,
    owned_expression,
    packet,
    role,
    storage_key,
    tensor_values,
    value,
    why_not_recomputable,
)
from dtrcompile.passes.program.program import (
    Operator,
    Phase,
    Program,
    Storage,
    StorageKind,
    Tensor,
)
from dtrcompile.passes.program.sizes import Sizes
from dtrcompile.passes.torch_private import (
    InputMutationAOTOutput,
    IntermediateBaseAOTOutput,
    PlainAOTOutput,
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


@dataclass(frozen=True)
class HandedOn:
    """What the caller of a graph does not hold in its backward.

    Attributes:
        outputs: indices among what the graph returns to the user; None: all.
        tangents: all of them, beyond their last use.
    """

    outputs: frozenset[int] | None = frozenset()
    tangents: bool = False

    def __and__(self, other: HandedOn) -> HandedOn:
        if self.outputs is None or other.outputs is None:
            outputs = other.outputs if self.outputs is None else self.outputs
        else:
            outputs = self.outputs & other.outputs
        return HandedOn(outputs, self.tangents and other.tangents)


NOTHING_HANDED_ON = HandedOn()
# Autograd gives gradients away to a compiled graph that takes them in a list, from some release on.
ALL_HANDED_ON = HandedOn(None, hasattr(torch.autograd.Function, "boxed_grads_call"))


@dataclass(frozen=True)
class Captured:
    """A program and the way back from it to the graphs.

    Attributes:
        program: what planners see.
        forward, backward: the default split's modules (backward None for inference).
        num_fwd_outputs: how many of forward's outputs are the user's; the rest are saved.
        operators: one entry an operator of the program.
        storage_nodes: for each storage, the node that owns it.
        storage_of: node -> storage id, for owners and constants (several constants may share one).
        same_value: backward placeholder -> the forward node that it receives.
        static_input_indices: which forward inputs are parameters and buffers.
        cost_model: what operators cost.
        allocator: what it counts for the storages; their sizes in the program are that.
        handed_on: as in the program.
    """

    program: Program
    forward: fx.GraphModule
    backward: fx.GraphModule | None
    num_fwd_outputs: int
    operators: tuple[CapturedOperator, ...]
    storage_nodes: tuple[fx.Node, ...]
    storage_of: dict[fx.Node, int]
    same_value: dict[fx.Node, fx.Node]
    static_input_indices: tuple[int, ...]
    cost_model: CostModel
    allocator: Allocator
    handed_on: HandedOn = NOTHING_HANDED_ON

    def handing_on(self, handed_on: HandedOn) -> Captured:
        """The same, where the caller holds none of these outputs and tangents in backward.

        What backward returns again counts until the end, and so does all in graphs of symbolic
        sizes.
        """
        if self.backward is None or self.symbols or handed_on == self.handed_on:
            return self
        program = self.program
        held = set(self._owners(output_arguments(self.backward)))
        given: set[int] = set()
        for s, index in self.returned:
            is_given = index is not None and (
                handed_on.outputs is None or index in handed_on.outputs
            )
            (given if is_given else held).add(s)
        given &= program.held_from_boundary
        if handed_on.tangents:
            given |= {s.id for s in program.storages if s.kind is StorageKind.TANGENT}
        storages = tuple(
            replace(s, is_handed_on=s.id in given and s.id not in held) for s in program.storages
        )
        return replace(self, program=replace(program, storages=storages), handed_on=handed_on)

    @property
    def returned(self) -> list[tuple[int, int | None]]:
        """Of each of forward's outputs its storage, and its index among what the user gets."""
        (out,) = self.forward.graph.find_nodes(op="output")
        described = list(out.meta.get("desc") or ())[: self.num_fwd_outputs]
        outputs = self._owners(output_arguments(self.forward)[: self.num_fwd_outputs])
        # Where the user gets a view of an intermediate, the whole is returned as well.
        of_user = (d.base_of if isinstance(d, IntermediateBaseAOTOutput) else d for d in described)
        return [
            (s, d.idx if isinstance(d, PlainAOTOutput) else None)
            for s, d in zip(outputs, of_user, strict=False)
        ]

    def _owners(self, arguments: Iterable[object]) -> list[int]:
        """The storages of a graph's results; -1 for what has none."""
        return [
            self.storage_of.get(self.owner(a), -1) if isinstance(a, fx.Node) else -1
            for a in arguments
        ]

    @property
    def draws(self) -> dict[int, fx.Node]:
        """Operator -> its node, of those that draw random numbers, in the program's order."""
        return {
            o: node
            for o, operator in enumerate(self.operators)
            for node in operator.nodes
            if draws_random_numbers(node)
        }

    def with_draws(self, order: Sequence[int]) -> Captured:
        """The same graphs as a program that runs these operators, of `draws`, in this order."""
        draws = self.draws
        return capture(
            self.forward,
            self.backward,
            num_fwd_outputs=self.num_fwd_outputs,
            static_input_indices=self.static_input_indices,
            cost_model=self.cost_model,
            allocator=self.allocator,
            draws=[draws[o] for o in order],
            name=self.program.name,
        ).handing_on(self.handed_on)

    def storage_bytes(self) -> tuple[int, ...]:
        """Of each storage, at the sizes that count here (`sizes.at_sizes`)."""
        sharing: dict[int, list[fx.Node]] = {}
        for node, s in self.storage_of.items():
            sharing.setdefault(s, []).append(node)
        return tuple(
            self.allocator.block_bytes(
                _constant_bytes(sharing[storage.id])
                if storage.is_constant
                else _owned_bytes(self.storage_nodes[storage.id], self.same_value)
            )
            for storage in self.program.storages
        )

    def storage_expressions(self) -> tuple[sympy.Expr, ...]:
        """Of each storage its size in the graph's symbols, before the allocator rounds it up."""
        sharing = Counter(self.storage_of.values())
        found: list[sympy.Expr] = []
        for storage, size_bytes in zip(self.program.storages, self.storage_bytes(), strict=True):
            node = self.storage_nodes[storage.id]
            if not storage.is_constant:
                found.append(_owned_expression(node, self.same_value))
            elif sharing[storage.id] == 1:
                found.append(extent_expression(_tensor(node)))
            else:
                found.append(sympy.Integer(size_bytes))  # views of parameters
        return tuple(found)

    def workspace_expressions(self) -> dict[int, sympy.Expr]:
        """Operator -> what it holds only while it runs, as the program counts it."""
        found = {o: _unread_output_expression(c) for o, c in enumerate(self.operators)}
        return {o: size for o, size in found.items() if size != 0}

    @functools.cached_property
    def symbols(self) -> dict[sympy.Symbol, torch.SymInt]:
        """The symbols among the sizes of the graphs' inputs."""
        graphs = [self.forward] if self.backward is None else [self.forward, self.backward]
        found: dict[sympy.Symbol, torch.SymInt] = {}
        for node in (n for graph in graphs for n in graph.graph.nodes if n.op == "placeholder"):
            val = value(node)
            for size in val.shape if isinstance(val, torch.Tensor) else (val,):
                if isinstance(size, torch.SymInt) and isinstance(size.node.expr, sympy.Symbol):
                    found.setdefault(size.node.expr, size)
        return found

    @property
    def hints(self) -> Sizes:
        """The values of `symbols` while the graphs were traced."""
        return Sizes.of({symbol: int(size.node.hint) for symbol, size in self.symbols.items()})

    @property
    def least_sizes(self) -> dict[sympy.Symbol, int]:
        """The smallest value that each of `symbols` may have."""
        lowers = {
            symbol: size.node.shape_env.var_to_range[symbol].lower
            for symbol, size in self.symbols.items()
        }
        return {s: int(low) if isinstance(low, sympy.Integer) else 0 for s, low in lowers.items()}

    def resized(self) -> Program:
        """The same program at the sizes that count here (`sizes.at_sizes`)."""
        program = self.program
        sized = zip(program.storages, self.storage_bytes(), strict=True)
        operators = tuple(
            replace(
                op,
                cost_ns=_cost_ns(self.cost_model, captured, op.inputs, self.storage_nodes),
                workspace_bytes=_unread_output_bytes(captured),
            )
            for op, captured in zip(program.operators, self.operators, strict=True)
        )
        storages = tuple(replace(storage, size_bytes=size_bytes) for storage, size_bytes in sized)
        return replace(program, storages=storages, operators=operators)

    def resolve(self, node: fx.Node) -> fx.Node:
        """The node that makes the value: through a backward placeholder to the forward."""
        return self.same_value.get(node, node)

    def owner(self, node: fx.Node) -> fx.Node:
        """The node that owns the storage of a tensor node's value, through views."""
        return owner(node, self.same_value)


def owner(node: fx.Node, same_value: dict[fx.Node, fx.Node]) -> fx.Node:
    """Follow views, and elements of lists of views, up to the node that owns the storage."""
    node = same_value.get(node, node)
    while True:
        base = view_base(node)
        if base is None:
            return node
        node = same_value.get(base, base)


def view_base(node: fx.Node) -> fx.Node | None:
    """The argument that a view (or an element of a split) aliases; None for an owner."""
    if node.op != "call_function":
        return None
    kind = role(node)
    if kind is Role.ITEM:
        source = node.args[0]
        assert isinstance(source, fx.Node)
        return source if source.op == "call_function" and role(source) is Role.VIEW else None
    if kind is Role.VIEW:
        for argument in (*node.args, *node.kwargs.values()):
            if isinstance(argument, fx.Node) and (is_tensor(argument) or is_sequence(argument)):
                return argument
    if is_mutating(node) and is_tensor(node):
        # An in-place operator returns the tensor that it wrote into.
        written = mutated_arguments(node)
        return written[0] if written else None
    return None


def capture(
    forward: fx.GraphModule,
    backward: fx.GraphModule | None,
    *,
    num_fwd_outputs: int,
    static_input_indices: Iterable[int],
    cost_model: CostModel,
    allocator: Allocator = EXACT,
    draws: Sequence[fx.Node] = (),
    name: str = "graph",
) -> Captured:
    """Build the program of a forward graph and, for training, its backward graph.

    Args:
        forward, backward: modules after the default split; backward's placeholders carry the names
            of the forward nodes whose values they receive (the partitioner's contract).
        num_fwd_outputs: number of the user's outputs among forward's.
        static_input_indices: which forward inputs are parameters and buffers.
        cost_model: what operators cost.
        allocator: what it counts for a storage is its size in the program.
        draws: nodes that draw random numbers, in the order that they are to have in the program.

    Raises:
        CaptureError: if a graph holds what cannot be planned.
    """
    return _Capture(
        forward,
        backward,
        num_fwd_outputs,
        tuple(static_input_indices),
        cost_model,
        allocator,
        draws,
        name,
    ).run()


# A cluster that reads so many values is run when it can be, if that frees memory: as many as
# Inductor itself lets a value read before it computes it once (``config.realize_reads_threshold``).
_MANY_READS = 4
# A sum whose terms come one after the other, with kernels between, takes each when it comes.
_TERMS = 2
_ADD = torch.ops.aten.add


class _Capture:
    def __init__(
        self,
        forward: fx.GraphModule,
        backward: fx.GraphModule | None,
        num_fwd_outputs: int,
        static_input_indices: tuple[int, ...],
        cost_model: CostModel,
        allocator: Allocator,
        draws: Sequence[fx.Node],
        name: str,
    ) -> None:
        self.forward = forward
        self.backward = backward
        self.num_fwd_outputs = num_fwd_outputs
        self.static_input_indices = static_input_indices
        self.cost_model = cost_model
        self.allocator = allocator
        self.name = name

        self.forward_nodes = list(forward.graph.nodes)
        self.backward_nodes = list(backward.graph.nodes) if backward is not None else []
        self.same_value = self._received()
        self.calls = self._calls(self.forward_nodes, draws)
        self.first_backward_call = len(self.calls)
        self.calls += self._calls(self.backward_nodes, draws)
        self.position = {n: i for i, n in enumerate(self.calls)}
        self.roles = {n: role(n) for n in self.calls}
        self.user_outputs = self._nodes(output_arguments(forward)[:num_fwd_outputs])
        self.gradients = self._nodes(output_arguments(backward)) if backward is not None else []

    def _received(self) -> dict[fx.Node, fx.Node]:
        """Backward placeholder -> forward node, by position: backward takes the numbers first."""
        if self.backward is None:
            return {}
        saved = output_arguments(self.forward)[self.num_fwd_outputs :]
        numbers = [a for a in saved if isinstance(_val(a), torch.types.py_sym_types)]
        others = [a for a in saved if not isinstance(_val(a), torch.types.py_sym_types)]
        inputs = [n for n in self.backward_nodes if n.op == "placeholder"]
        if len(inputs) < len(saved):
            raise CaptureError(
                f"backward takes {len(inputs)} inputs, forward saves {len(saved)} values for it"
            )
        received: dict[fx.Node, fx.Node] = {}
        for node, source in zip(inputs, [*numbers, *others], strict=False):
            if isinstance(source, fx.Node):
                received[node] = source
        return received

    def _calls(self, nodes: Sequence[fx.Node], draws: Sequence[fx.Node]) -> list[fx.Node]:
        """A graph's calls; a draw comes with all that it needs before the one that follows it."""
        calls = [n for n in nodes if n.op == "call_function"]
        present = set(calls)
        draws = [n for n in draws if n in present]
        if not draws or any(is_mutating(n) for n in calls[: max(map(calls.index, draws))]):
            return calls  # what is moved might read what another call writes into
        rank = {n: i for i, n in enumerate(draws)}
        ordered: dict[fx.Node, None] = {}
        for call in calls:
            for draw in draws[: rank.get(call, 0)]:
                if draw not in ordered:
                    needed = {draw}
                    for n in reversed(calls):
                        if n in needed:
                            needed.update(self.inputs_of(n))
                    ordered.update(dict.fromkeys(n for n in calls if n in needed))
            ordered[call] = None
        return list(ordered)

    def _nodes(self, arguments: Sequence[object]) -> list[fx.Node]:
        return [
            self.same_value.get(a, a) for a in arguments if isinstance(a, fx.Node) and is_tensor(a)
        ]

    def owner(self, node: fx.Node) -> fx.Node:
        return owner(node, self.same_value)

    def inputs_of(self, node: fx.Node) -> list[fx.Node]:
        return [self.same_value.get(n, n) for n in node.all_input_nodes]

    def run(self) -> Captured:
        self._refuse_unknown_sizes()
        clusters = self._clusters()
        materialized = self._materialized(clusters)
        constants = self._constants()
        operators = self._operators(clusters, materialized)
        return self._program(constants, operators)

    def _refuse_unknown_sizes(self) -> None:
        for node in (*self.forward_nodes, *self.backward_nodes):
            if any(has_unbacked_size(v) for v in tensor_values(node)):
                raise CaptureError(
                    f"the size of {node.name!r} is not known before the step runs, so no bytes can"
                    " be promised. Where values decide it, leave capture_dynamic_output_shape_ops"
                    " and capture_scalar_outputs of torch._dynamo.config at False: the graph then"
                    " ends before, and the next knows the size. Mark an input with"
                    " torch._dynamo.mark_dynamic, not with mark_unbacked."
                )

    # --- grouping -----------------------------------------------------------------------------

    def _clusters(self) -> dict[fx.Node, int]:
        """Cluster number of each FUSED node, and of each ITEM of one."""
        parent: list[int] = []
        is_open: list[bool] = []
        loop_numel: list[int] = []
        runs_at: list[int] = []
        read_by: list[set[fx.Node]] = []  # computed values from outside
        cluster_of: dict[fx.Node, int] = {}

        def find(c: int) -> int:
            while parent[c] != c:
                parent[c] = parent[parent[c]]
                c = parent[c]
            return c

        def fused_sources(read: list[fx.Node]) -> list[fx.Node]:
            return [n for n in read if n in cluster_of and not self._is_generator(n)]

        last_kernel = -1
        last_read = self._last_reads()

        def should_wait(other: int, source: fx.Node, consumer: fx.Node) -> bool:
            """Whether a cluster had better run with the consumer that has come than on its own."""
            many = _TERMS if packet(source) is packet(consumer) is _ADD else _MANY_READS
            if last_kernel < runs_at[other] or len(read_by[other]) < many:
                return True
            ending = [
                n
                for n in read_by[other]
                if last_read[n] <= runs_at[other]
                and (n not in cluster_of or find(cluster_of[n]) != other)
            ]
            if len(ending) < many or not is_tensor(source):
                return True
            freed_bytes = sum(self._owned_bytes(n) for n in ending)
            return freed_bytes <= self._owned_bytes(source)

        for index, node in enumerate(self.calls):
            if index == self.first_backward_call:
                is_open = [False] * len(is_open)
            kind = self.roles[node]
            if kind in (Role.SCALAR, Role.VIEW):
                continue
            if kind is Role.ITEM:
                source = node.args[0]
                if source in cluster_of:
                    cluster_of[node] = cluster_of[source]  # type: ignore[index]
                continue
            if kind is Role.KERNEL:
                last_kernel = index
                if is_mutating(node):
                    # Loops that read the old value must not be delayed past the write.
                    is_open = [False] * len(is_open)
                for source in fused_sources(self._reads(node)[0]):
                    is_open[find(cluster_of[source])] = False
                continue
            read, inlined = self._reads(node)
            mine = len(parent)
            parent.append(mine)
            is_open.append(True)
            loop_numel.append(_loop_numel(node))
            runs_at.append(index)
            read_by.append({o for n in self.inputs_of(node) if (o := self.owner(n)) in last_read})
            for source in fused_sources(read):
                other = find(cluster_of[source])
                if other == find(mine):
                    continue
                if (
                    is_open[other]
                    and _same_loops(loop_numel[other], loop_numel[find(mine)], source)
                    and should_wait(other, source, node)
                ):
                    root = find(mine)
                    parent[root] = other
                    loop_numel[other] = max(loop_numel[other], loop_numel[root])
                    runs_at[other] = index
                    read_by[other] = (read_by[other] | read_by[root]) - {source}
                else:
                    is_open[other] = False
            for source in inlined:
                # It runs up to here, should anything else want its value in memory.
                if (other := find(cluster_of[source])) != find(mine):
                    is_open[other] = False
            cluster_of[node] = mine
        return {n: find(c) for n, c in cluster_of.items()}

    def _last_reads(self) -> dict[fx.Node, int]:
        """For each computed value that owns memory, where it is read last."""
        last_read: dict[fx.Node, int] = {}
        for index, node in enumerate(self.calls):
            if is_tensor(node) and view_base(node) is None:
                last_read[node] = index
            for n in self.inputs_of(node):
                source = self.owner(n)
                if source in last_read:
                    last_read[source] = index
        for node in (*self.user_outputs, *self.gradients):
            last_read[self.owner(node)] = len(self.calls)
        return last_read

    def _materialized(self, clusters: dict[fx.Node, int]) -> set[fx.Node]:
        """FUSED and ITEM nodes whose value gets a storage."""
        materialized: set[fx.Node] = set()
        for node in (*self.user_outputs, *self.gradients):
            if (source := self.owner(node)) in clusters:
                materialized.add(source)
        for node in self.calls:
            if self.roles[node] is Role.VIEW or self.roles[node] is Role.ITEM:
                continue
            for source in self._reads(node)[0]:
                if not is_tensor(source):
                    continue
                if self._is_generator(source) and self.roles[node] is Role.FUSED:
                    continue
                if source in clusters and clusters.get(node) != clusters[source]:
                    materialized.add(source)
        return materialized

    def _reads(self, node: fx.Node) -> tuple[list[fx.Node], list[fx.Node]]:
        """Owners of what ``node`` reads, and what it computes itself where it needs it.

        An indirect load (the loss of the right class, out of the logarithms of all) takes a few
        elements of a large value.  Inductor computes those in its loop, and never all of them,
        where they come from other values element by element.
        """
        read: dict[fx.Node, None] = {}
        inlined: dict[fx.Node, None] = {}
        stack = self.inputs_of(node)[::-1]
        while stack:
            n = stack.pop()
            n = self.owner(n) if is_tensor(n) or is_sequence(n) else n
            if n in inlined:
                continue
            if self.roles[node] is Role.FUSED and self._is_inlined(n, node):
                inlined[n] = None
                stack.extend(self.inputs_of(n)[::-1])
            else:
                read[n] = None
        return list(read), list(inlined)

    def _is_inlined(self, source: fx.Node, reader: fx.Node) -> bool:
        """Whether ``reader`` computes the elements of ``source`` that it takes; not if saved."""
        if packet(reader) not in _INDIRECT_LOADS or self.roles.get(source) is not Role.FUSED:
            return False
        target = source.target
        in_backward = [self.position[n] >= self.first_backward_call for n in (source, reader)]
        return (
            in_backward[0] == in_backward[1]
            and isinstance(target, torch._ops.OpOverload)
            and torch.Tag.pointwise in target.tags
            and _loop_numel(source) > _loop_numel(reader)
        )

    def _is_generator(self, node: fx.Node) -> bool:
        """A loop that reads no tensor (full, arange): written into each loop that reads it."""
        return (
            self.roles.get(node) is Role.FUSED
            and is_tensor(node)
            and not any(is_tensor(n) or is_sequence(n) for n in node.all_input_nodes)
        )

    def _constants(self) -> list[tuple[fx.Node, StorageKind]]:
        constants: list[tuple[fx.Node, StorageKind]] = []
        static = set(self.static_input_indices)
        index = 0
        for node in self.forward_nodes:
            if node.op == "placeholder":
                if is_tensor(node):
                    is_static = index in static
                    constants.append(
                        (node, StorageKind.PARAMETER if is_static else StorageKind.INPUT)
                    )
                index += 1
            elif node.op == "get_attr" and is_tensor(node):
                constants.append((node, StorageKind.PARAMETER))
        for node in self.backward_nodes:
            if node in self.same_value or not is_tensor(node):
                continue
            if node.op == "placeholder":
                constants.append((node, StorageKind.TANGENT))
            elif node.op == "get_attr":
                constants.append((node, StorageKind.PARAMETER))
        return constants

    # --- operators ----------------------------------------------------------------------------

    def _operators(
        self, clusters: dict[fx.Node, int], materialized: set[fx.Node]
    ) -> list[CapturedOperator]:
        """All operators in the order in which the baseline runs them."""
        # A cluster runs where its last member stands: everything it reads is there by then, and
        # nothing outside read it before (it was open).
        runs_at: dict[int, int] = {}
        for node, cluster in clusters.items():
            runs_at[cluster] = max(runs_at.get(cluster, -1), self.position[node])
        placed: list[tuple[int, int, CapturedOperator]] = []
        next_cluster = len(self.calls)
        for node in self.calls:
            if node in materialized:
                cluster = clusters[node]
                placed_operator = CapturedOperator(self._cone(node, materialized), (node,), cluster)
                placed.append((runs_at[cluster], self.position[node], placed_operator))
            elif self.roles[node] is Role.KERNEL:
                outputs: tuple[fx.Node, ...] = ()
                elements = self._elements(node) if is_sequence(node) else []
                if elements:
                    outputs = tuple(n for n in elements if self.roles[n] is Role.ITEM)
                elif is_tensor(node) and view_base(node) is None:
                    outputs = (node,)
                nodes = (*self._cone_above(node, materialized), node)
                nodes += tuple(elements)
                placed_operator = CapturedOperator(nodes, outputs, next_cluster)
                next_cluster += 1
                placed.append((self.position[node], self.position[node], placed_operator))
        placed.sort(key=lambda item: item[:2])
        return [item for _, _, item in placed]

    def _elements(self, node: fx.Node) -> list[fx.Node]:
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
        return sorted(elements, key=self.position.__getitem__)

    def _cone(self, node: fx.Node, materialized: set[fx.Node]) -> tuple[fx.Node, ...]:
        return (*self._cone_above(node, materialized), node)

    def _cone_above(self, node: fx.Node, materialized: set[fx.Node]) -> tuple[fx.Node, ...]:
        """Unmaterialized nodes, views included, that ``node`` needs, in graph order."""
        cone: set[fx.Node] = set()
        stack = self.inputs_of(node)
        while stack:
            n = stack.pop()
            if n in cone or n not in self.roles or n in materialized:
                continue
            kind = self.roles[n]
            is_inner = kind in (Role.VIEW, Role.FUSED) or (
                kind is Role.ITEM and view_base(n) is not None
            )
            if kind is Role.ITEM and not is_inner:
                source = n.args[0]
                is_inner = self.roles.get(source) is Role.FUSED  # type: ignore[arg-type]
            if is_inner:
                cone.add(n)
                stack.extend(self.inputs_of(n))
        return tuple(sorted(cone, key=self.position.__getitem__))

    def _written_after_forward(self) -> list[fx.Node]:
        """Inputs that AOTAutograd updates when forward has returned (running statistics)."""
        (out,) = self.forward.graph.find_nodes(op="output")
        mutated = [
            kind.mutated_input
            for kind in out.meta.get("desc", ())
            if isinstance(kind, InputMutationAOTOutput)
        ]
        return [
            n for n in self.forward_nodes if n.op == "placeholder" and n.meta.get("desc") in mutated
        ]

    def _owned_bytes(self, node: fx.Node) -> int:
        return _owned_bytes(node, self.same_value)

    # --- the program --------------------------------------------------------------------------

    def _program(
        self,
        constants: list[tuple[fx.Node, StorageKind]],
        captured: list[CapturedOperator],
    ) -> Captured:
        storages: list[Storage] = []
        tensors: list[Tensor] = []
        storage_nodes: list[fx.Node] = []
        storage_of: dict[fx.Node, int] = {}
        shared: dict[object, tuple[int, list[fx.Node]]] = {}
        returned = {self.owner(n) for n in self.user_outputs}
        gradients = {self.owner(n) for n in self.gradients}

        def add(node: fx.Node, kind: StorageKind, producer: int | None) -> int:
            storage_of[node] = len(storages)
            size_bytes = _constant_bytes([node]) if producer is None else self._owned_bytes(node)
            storages.append(Storage(len(storages), node.name, size_bytes, kind))
            tensors.append(Tensor(len(tensors), node.name, storage_of[node], producer))
            storage_nodes.append(node)
            return storage_of[node]

        for node, kind in constants:
            val = value(node)
            assert isinstance(val, torch.Tensor)
            key = storage_key(val)
            if key in shared:  # two inputs that are views of one storage
                s = storages[shared[key][0]]
                shared[key][1].append(node)
                size_bytes = _constant_bytes(shared[key][1])
                storages[s.id] = Storage(s.id, s.name, size_bytes, s.kind)
                storage_of[node] = s.id
                continue
            shared[key] = add(node, kind, None), [node]

        # A constant that the graph writes into (a running statistic, a mutated input) is not the
        # same value afterwards: what reads it directly may run only once.
        written = {
            storage_of[source]
            for node in self.calls
            if is_mutating(node)
            for n in mutated_arguments(node)
            if (source := self.owner(n)) in storage_of
        }

        written |= {storage_of[n] for n in self._written_after_forward() if n in storage_of}

        for node in self.calls:
            mark(node, output_of=None)  # of a capture in another order
        operators: list[Operator] = []
        boundary: int | None = None
        for cap in captured:
            last = cap.nodes[-1]
            is_backward = self.position[cap.outputs[0] if cap.outputs else last] >= (
                self.first_backward_call
            )
            if is_backward and boundary is None:
                boundary = len(operators)
            inputs: dict[int, None] = {}
            members = set(cap.nodes)
            for node in cap.nodes:
                for n in self.inputs_of(node):
                    if n in members or not (is_tensor(n) or is_sequence(n)):
                        continue
                    source = self.owner(n)
                    if source in members:
                        continue
                    if source not in storage_of:
                        raise CaptureError(
                            f"{node.name!r} reads {n.name!r}, whose storage has no owner;"
                            " please report this graph"
                        )
                    inputs[storage_of[source]] = None
            reason = next(filter(None, map(why_not_recomputable, cap.nodes)), None)
            if reason is None and not cap.outputs:
                reason = "it is run for its effect"
            if reason is None and written.intersection(inputs):
                reason = "it reads an input that the step writes into"
            o = len(operators)
            for node in cap.nodes:
                if self.roles[node] is Role.KERNEL:
                    mark(node, operator=o)
            for node in cap.outputs:
                mark(node, output_of=o)
            outputs = [
                add(
                    node,
                    StorageKind.OUTPUT
                    if node in returned
                    else StorageKind.GRADIENT
                    if node in gradients
                    else StorageKind.INTERMEDIATE,
                    o,
                )
                for node in cap.outputs
            ]
            operators.append(
                Operator(
                    id=o,
                    name=(cap.outputs[0] if cap.outputs else last).name,
                    phase=Phase.BACKWARD if is_backward else Phase.FORWARD,
                    # Every storage has one tensor here, and constants that share a storage are
                    # read through its first: tensor ids are storage ids.
                    inputs=tuple(inputs),
                    outputs=tuple(outputs),
                    cost_ns=_cost_ns(self.cost_model, cap, inputs, storage_nodes),
                    workspace_bytes=_unread_output_bytes(cap),
                    not_recomputable=reason,
                )
            )
        if self.backward is not None and boundary is None:
            boundary = len(operators)
        outputs_wanted = dict.fromkeys(
            storage_of[self.owner(n)] for n in (*self.user_outputs, *self.gradients)
        )
        program = Program(
            tuple(
                replace(s, size_bytes=self.allocator.block_bytes(s.size_bytes)) for s in storages
            ),
            tuple(tensors),
            tuple(operators),
            tuple(outputs_wanted),
            boundary,
            name=self.name,
        )
        return Captured(
            program,
            self.forward,
            self.backward,
            self.num_fwd_outputs,
            tuple(captured),
            tuple(storage_nodes),
            storage_of,
            self.same_value,
            self.static_input_indices,
            self.cost_model,
            self.allocator,
        )


def _constant_bytes(nodes: Sequence[fx.Node]) -> int:
    """Bytes of a storage from outside, of which these nodes are views."""
    size_bytes = 0
    for i, node in enumerate(nodes):
        val = value(node)
        assert isinstance(val, torch.Tensor)
        if i == 0:
            size_bytes = extent_bytes(val)
        else:
            whole_bytes = max(hint(val.untyped_storage().nbytes()), size_bytes)
            size_bytes = min(size_bytes + extent_bytes(val), whole_bytes)
    return size_bytes


def _owned_bytes(node: fx.Node, same_value: Mapping[fx.Node, fx.Node]) -> int:
    """Bytes of the storage that ``node`` owns."""
    val = value(node)
    assert isinstance(val, torch.Tensor)
    own = storage_key(val)
    for n in node.all_input_nodes:
        source = value(same_value.get(n, n))
        if isinstance(source, torch.Tensor) and storage_key(source) == own:
            # The trace let an operator return its argument's storage; a run may not.
            return extent_bytes(val)
    return owned_bytes(val)


def _owned_expression(node: fx.Node, same_value: Mapping[fx.Node, fx.Node]) -> sympy.Expr:
    """As `_owned_bytes`, in the graph's symbols."""
    val = _tensor(node)
    own = storage_key(val)
    sources = (value(same_value.get(n, n)) for n in node.all_input_nodes)
    is_shared = any(isinstance(s, torch.Tensor) and storage_key(s) == own for s in sources)
    return extent_expression(val) if is_shared else owned_expression(val)


def _unread_output_expression(captured: CapturedOperator) -> sympy.Expr:
    """As `_unread_output_bytes`, in the graph's symbols."""
    return sum((extent_expression(v) for v in _unread_outputs(captured)), sympy.Integer(0))


def _tensor(node: fx.Node) -> torch.Tensor:
    val = value(node)
    assert isinstance(val, torch.Tensor)
    return val


def _cost_ns(
    cost_model: CostModel,
    captured: CapturedOperator,
    inputs: Iterable[int],
    storage_nodes: Sequence[fx.Node],
) -> int:
    """What an operator costs; ``inputs`` are the storages that it reads."""
    return cost_model.cost_ns(
        [n for n in captured.nodes if role(n) in (Role.FUSED, Role.KERNEL)],
        [storage_nodes[s] for s in inputs],
        list(captured.outputs),
    )


def _unread_output_bytes(captured: CapturedOperator) -> int:
    return sum(map(extent_bytes, _unread_outputs(captured)))


def _unread_outputs(captured: CapturedOperator) -> list[torch.Tensor]:
    """Outputs of a multi-output kernel that nothing reads: allocated, then dropped at once."""
    kernel = next((n for n in captured.nodes if is_sequence(n) and role(n) is Role.KERNEL), None)
    if kernel is None:
        return []
    read = {n.args[1] for n in captured.outputs}
    elements = value(kernel)
    if not isinstance(elements, (tuple, list)):
        return []
    return [v for i, v in enumerate(elements) if isinstance(v, torch.Tensor) and i not in read]


def _val(argument: object) -> object:
    return value(argument) if isinstance(argument, fx.Node) else None


_INDIRECT_LOADS = frozenset(
    {torch.ops.aten.gather, torch.ops.aten.index, torch.ops.aten.index_select}
)


def _loop_numel(node: fx.Node) -> int:
    """Iterations of the loop nest that Inductor writes for a FUSED node."""
    # An embedding or an index reads few elements of a large table; a reduction reads all.
    read = [node, *node.all_input_nodes] if _reduces(node) else [node]
    return max((numel(v) for n in read for v in tensor_values(n)), default=0)


def _reduces(node: fx.Node) -> bool:
    target = node.target
    return isinstance(target, torch._ops.OpOverload) and (
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
