"""Capture: the default split's forward and backward graphs become one `Program`.

Where in the pipeline: after AOTAutograd, Inductor's joint-graph passes and the default min-cut
partitioner (or, for inference, on the one graph there is).  The program is the forward graph
followed by the backward graph, so at an ample budget the result is the default's.

`grouping` says which nodes are one operator; here they get storages, costs and a place in the
program.  The schedule that Inductor makes of the emitted graphs is read back by
`inductor.schedule_trace` and is what the promise is made of; the program only has to be good enough
to plan with.  So that the trace can say what a library call held, each KERNEL node carries the
number of its operator, ``operator`` in its `nodes.Mark`, and so do its copies in emitted graphs;
what owns an operator's storage carries it as ``output_of``.
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import sympy
import torch
from torch import fx

from dtrcompile.passes.device.allocators import EXACT, Allocator
from dtrcompile.passes.device.costs import CostModel, cost_form
from dtrcompile.passes.errors import CaptureError
from dtrcompile.passes.graphs.grouping import CapturedOperator, group
from dtrcompile.passes.graphs.modules import output_arguments, placeholders
from dtrcompile.passes.graphs.split import Split
from dtrcompile.passes.graphs.storage_sizes import (
    allocated_bytes,
    allocated_expression,
    tensor_of,
    viewed_bytes,
)
from dtrcompile.passes.nodes import (
    Role,
    draws_random_numbers,
    extent_bytes,
    extent_expression,
    has_unbacked_size,
    is_sequence,
    is_tensor,
    mark,
    owner,
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
    IntermediateBaseAOTOutput,
    PlainAOTOutput,
)


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

    @property
    def graphs(self) -> tuple[fx.GraphModule, ...]:
        """Forward, and backward where there is one."""
        return (self.forward,) if self.backward is None else (self.forward, self.backward)

    def handing_on(self, handed_on: HandedOn) -> Captured:
        """The same, where the caller holds none of these outputs and tangents in backward.

        What backward returns again counts until the end.
        """
        if self.backward is None or handed_on == self.handed_on:
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
                viewed_bytes(sharing[storage.id])
                if storage.is_constant
                else allocated_bytes(self.storage_nodes[storage.id], self.same_value)
            )
            for storage in self.program.storages
        )

    @functools.cached_property
    def shared_constants(self) -> frozenset[int]:
        """Storages of which several constants are views."""
        return frozenset(s for n, s in self.storage_of.items() if self.storage_nodes[s] is not n)

    def storage_expressions(self) -> tuple[sympy.Expr, ...]:
        """Of each storage its size in the graph's symbols, before the allocator rounds it up."""
        found: list[sympy.Expr] = []
        for storage, size_bytes in zip(self.program.storages, self.storage_bytes(), strict=True):
            node = self.storage_nodes[storage.id]
            if not storage.is_constant:
                found.append(allocated_expression(node, self.same_value))
            elif storage.id not in self.shared_constants:
                found.append(extent_expression(tensor_of(node)))
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
        found: dict[sympy.Symbol, torch.SymInt] = {}
        for node in (n for graph in self.graphs for n in placeholders(graph)):
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
        # Those of layers that are alike cost the same.
        costs_ns = {o: self.cost_model.cost_ns(*self._priced(o)) for o in set(self._alike)}
        operators = tuple(
            replace(
                program.operators[o],
                cost_ns=costs_ns[first],
                workspace_bytes=_unread_output_bytes(self.operators[o]),
            )
            for o, first in enumerate(self._alike)
        )
        storages = tuple(replace(storage, size_bytes=size_bytes) for storage, size_bytes in sized)
        return replace(program, storages=storages, operators=operators)

    @functools.cached_property
    def _alike(self) -> tuple[int, ...]:
        """Of each operator, the first that costs the same at any sizes."""
        first: dict[Hashable, int] = {}
        forms = (cost_form(*self._priced(o)) for o in range(len(self.operators)))
        return tuple(first.setdefault(form, o) for o, form in enumerate(forms))

    def _priced(self, operator: int) -> tuple[list[fx.Node], list[fx.Node], list[fx.Node]]:
        """What `CostModel.cost_ns` is asked of an operator."""
        inputs = self.program.operators[operator].inputs
        return _priced(self.operators[operator], inputs, self.storage_nodes)

    def resolve(self, node: fx.Node) -> fx.Node:
        """The node that makes the value: through a backward placeholder to the forward."""
        return self.same_value.get(node, node)

    def owner(self, node: fx.Node) -> fx.Node:
        """The node that owns the storage of a tensor node's value, through views."""
        return owner(node, self.same_value)


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
    static_input_indices = tuple(static_input_indices)
    split = Split.of(forward, backward, num_fwd_outputs, draws)
    _refuse_unknown_sizes(split)
    operators = group(split)
    builder = _ProgramBuilder(split, cost_model)
    for node, kind in _constants(split, static_input_indices):
        builder.add_constant(node, kind)
    # Of final writes it is known from when on the old value is gone.
    builder.forbid_rereading(
        split.written_inputs(n for n in split.calls if n not in split.final_writes)
    )
    for node in split.calls:
        mark(node, output_of=None)  # of a capture in another order
    for captured in operators:
        builder.add_operator(captured)
    return Captured(
        builder.program(allocator, name),
        forward,
        backward,
        num_fwd_outputs,
        tuple(operators),
        tuple(builder.storage_nodes),
        builder.storage_of,
        dict(split.same_value),
        static_input_indices,
        cost_model,
        allocator,
    )


def _refuse_unknown_sizes(split: Split) -> None:
    graphs = [split.forward] if split.backward is None else [split.forward, split.backward]
    for node in (n for gm in graphs for n in gm.graph.nodes):
        if any(has_unbacked_size(v) for v in tensor_values(node)):
            raise CaptureError(
                f"the size of {node.name!r} is not known before the step runs, so no bytes can"
                " be promised. Where values decide it, leave capture_dynamic_output_shape_ops"
                " and capture_scalar_outputs of torch._dynamo.config at False: the graph then"
                " ends before, and the next knows the size. Mark an input with"
                " torch._dynamo.mark_dynamic, not with mark_unbacked."
            )


def _constants(
    split: Split, static_input_indices: Sequence[int]
) -> list[tuple[fx.Node, StorageKind]]:
    """Tensors from outside, in the order of the graphs; of backward's, what only it takes."""
    indices = set(static_input_indices)
    static = {n for i, n in enumerate(placeholders(split.forward)) if i in indices}
    constants: list[tuple[fx.Node, StorageKind]] = []
    for node in split.forward.graph.nodes:
        if node.op == "get_attr" or node in static:
            constants.append((node, StorageKind.PARAMETER))
        elif node.op == "placeholder":
            constants.append((node, StorageKind.INPUT))
    for node in [] if split.backward is None else split.backward.graph.nodes:
        if node.op == "get_attr":
            constants.append((node, StorageKind.PARAMETER))
        elif node.op == "placeholder" and node not in split.same_value:
            constants.append((node, StorageKind.TANGENT))
    return [(node, kind) for node, kind in constants if is_tensor(node)]


class _ProgramBuilder:
    """The program as far as it is known: constants first, then one operator after the other.

    Every storage has one tensor here, and constants that share a storage are read through its
    first: tensor ids are storage ids.
    """

    def __init__(self, split: Split, cost_model: CostModel) -> None:
        self.split = split
        self.cost_model = cost_model
        self.storages: list[Storage] = []
        self.tensors: list[Tensor] = []
        self.operators: list[Operator] = []
        self.boundary: int | None = None
        self.storage_nodes: list[fx.Node] = []
        self.storage_of: dict[fx.Node, int] = {}
        self.sharing: dict[object, list[fx.Node]] = {}  # by their storage: constants
        self.written: frozenset[int] = frozenset()
        self.returned = {split.owner(n) for n in split.user_outputs}
        self.gradients = {split.owner(n) for n in split.gradients}

    def _add_storage(
        self, node: fx.Node, size_bytes: int, kind: StorageKind, producer: int | None
    ) -> int:
        s = self.storage_of[node] = len(self.storages)
        self.storages.append(Storage(s, node.name, size_bytes, kind))
        self.tensors.append(Tensor(s, node.name, s, producer))
        self.storage_nodes.append(node)
        return s

    def add_constant(self, node: fx.Node, kind: StorageKind) -> None:
        """Add what comes from outside; it may be a view of the storage of one added before."""
        sharing = self.sharing.setdefault(storage_key(tensor_of(node)), [])
        sharing.append(node)
        size_bytes = viewed_bytes(sharing)
        if len(sharing) == 1:
            self._add_storage(node, size_bytes, kind, None)
        else:
            s = self.storage_of[node] = self.storage_of[sharing[0]]
            self.storages[s] = replace(self.storages[s], size_bytes=size_bytes)

    def forbid_rereading(self, written: Iterable[fx.Node]) -> None:
        """Say which constants the step writes into: what reads one directly may run only once,
        because afterwards it is not the same value."""
        self.written = frozenset(self.storage_of[n] for n in written if n in self.storage_of)

    def add_operator(self, captured: CapturedOperator) -> None:
        """Add an operator, the storages that it allocates, and the marks of its nodes.

        Raises:
            CaptureError: if it reads what nothing before it made.
        """
        o = len(self.operators)
        named = captured.outputs[0] if captured.outputs else captured.nodes[-1]
        is_backward = self.split.is_backward(named)
        if is_backward and self.boundary is None:
            self.boundary = o
        inputs = self._inputs(captured)
        not_recomputable = self._why_not_recomputable(captured, inputs)
        for node in captured.nodes:
            if self.split.roles[node] is Role.KERNEL:
                mark(node, operator=o)
        for node in captured.outputs:
            mark(node, output_of=o)
        cost_ns = self.cost_model.cost_ns(*_priced(captured, inputs, self.storage_nodes))
        self.operators.append(
            Operator(
                id=o,
                name=named.name,
                phase=Phase.BACKWARD if is_backward else Phase.FORWARD,
                inputs=inputs,
                outputs=tuple(
                    self._add_storage(
                        node, allocated_bytes(node, self.split.same_value), self._kind(node), o
                    )
                    for node in captured.outputs
                ),
                cost_ns=cost_ns,
                workspace_bytes=_unread_output_bytes(captured),
                not_recomputable=not_recomputable,
                overwrites=tuple(
                    self.storage_of[self.split.final_writes[node]]
                    for node in captured.nodes
                    if node in self.split.final_writes
                ),
            )
        )

    def _inputs(self, captured: CapturedOperator) -> tuple[int, ...]:
        """The storages that an operator reads, in the order of its nodes."""
        members = set(captured.nodes)
        inputs: dict[int, None] = {}
        for node in captured.nodes:
            for n in self.split.inputs_of(node):
                if n in members or not (is_tensor(n) or is_sequence(n)):
                    continue
                source = self.split.owner(n)
                if source in members:
                    continue
                if source not in self.storage_of:
                    raise CaptureError(
                        f"{node.name!r} reads {n.name!r}, whose storage has no owner;"
                        " please report this graph"
                    )
                inputs[self.storage_of[source]] = None
        return tuple(inputs)

    def _why_not_recomputable(
        self, captured: CapturedOperator, inputs: tuple[int, ...]
    ) -> str | None:
        reason = next(filter(None, map(why_not_recomputable, captured.nodes)), None)
        if reason is None and not captured.outputs:
            return "it is run for its effect"
        if reason is None and self.written.intersection(inputs):
            return "it reads an input that the step writes into"
        return reason

    def _kind(self, node: fx.Node) -> StorageKind:
        if node in self.returned:
            return StorageKind.OUTPUT
        return StorageKind.GRADIENT if node in self.gradients else StorageKind.INTERMEDIATE

    def program(self, allocator: Allocator, name: str) -> Program:
        """The program of all that was added; the allocator says what counts for a storage."""
        boundary = self.boundary
        if self.split.backward is not None and boundary is None:
            boundary = len(self.operators)
        wanted = dict.fromkeys(self.storage_of[self.split.owner(n)] for n in self.split.results)
        return Program(
            tuple(
                replace(s, size_bytes=allocator.block_bytes(s.size_bytes)) for s in self.storages
            ),
            tuple(self.tensors),
            _run_before_overwriting(self.operators, wanted),
            tuple(wanted),
            boundary,
            name=name,
        )


def _run_before_overwriting(
    operators: Sequence[Operator], returned: Collection[int]
) -> tuple[Operator, ...]:
    """The operators, where none is wanted again after what it reads has been overwritten.

    A storage has one tensor here, with the same id.  Of each operator it is known until when it
    could run again (until a write of what it reads, or of what operators before it read that would
    have to run again for it), and until when its outputs may be wanted (by its readers, and as long
    as these are wanted if they may run again).  Where the second is later than the first, somewhere
    on the way an operator may run only once.  It is the latest, which is one of backward: what is
    worth computing again are forward's values.

    Args:
        returned: storages that are wanted until the end, so that what makes them runs once.
    """
    overwritten_at = {s: op.id for op in operators for s in op.overwrites}
    if not overwritten_at:
        return tuple(operators)
    end = len(operators)
    reason = "it reads an input that is overwritten afterwards"
    found = [
        replace(op, not_recomputable="it is returned, after inputs have been overwritten")
        if op.not_recomputable is None and any(s in returned for s in op.outputs)
        else op
        for op in operators
    ]
    makers = {s: op.id for op in found for s in op.outputs}
    possible = [end] * end
    for op in found:
        possible[op.id] = _possible(op, found, makers, possible, overwritten_at)
    wanted = [end] * end
    of_storage: dict[int, int] = {}
    for op in reversed(found):
        wanted[op.id] = max((of_storage.get(s, -1) for s in op.outputs), default=-1)
        if op.not_recomputable is None and wanted[op.id] > possible[op.id]:
            op = found[op.id] = replace(op, not_recomputable=reason)
        until = op.id if op.not_recomputable is not None else max(op.id, wanted[op.id])
        for s in op.inputs:
            of_storage[s] = max(of_storage.get(s, -1), until)
    # With those operators, others need not run again for what follows, and may after all.
    for op in operators:
        possible[op.id] = _possible(op, found, makers, possible, overwritten_at)
        if found[op.id].not_recomputable == reason and wanted[op.id] <= possible[op.id]:
            found[op.id] = op
    return tuple(found)


def _possible(
    op: Operator,
    operators: Sequence[Operator],
    makers: Mapping[int, int],
    possible: Sequence[int],
    overwritten_at: Mapping[int, int],
) -> int:
    """Until when an operator could run again; of its inputs' makers it is known."""
    end = len(operators)
    until = min((overwritten_at.get(s, end) for s in op.inputs), default=end)
    for s in op.inputs:
        maker = makers.get(s)
        if maker is not None and operators[maker].not_recomputable is None:
            until = min(until, possible[maker])
    return until


def _priced(
    captured: CapturedOperator, inputs: Iterable[int], storage_nodes: Sequence[fx.Node]
) -> tuple[list[fx.Node], list[fx.Node], list[fx.Node]]:
    """What `CostModel.cost_ns` is asked of an operator; ``inputs`` are storages that it reads."""
    kernels = [n for n in captured.nodes if role(n) in (Role.FUSED, Role.KERNEL)]
    return kernels, [storage_nodes[s] for s in inputs], list(captured.outputs)


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


def _unread_output_expression(captured: CapturedOperator) -> sympy.Expr:
    """As `_unread_output_bytes`, in the graph's symbols."""
    return sum((extent_expression(v) for v in _unread_outputs(captured)), sympy.Integer(0))
