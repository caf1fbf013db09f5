"""What an FX node is to the planner: constant, scalar, view, fused or kernel.

Only looks at a node: its target's schema and tags, and the fake value in ``node.meta["val"]``.
"""

from __future__ import annotations

import enum
import functools
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

import sympy
import torch
from torch import fx

from dtrcompile.passes.declared import declaration
from dtrcompile.passes.errors import CaptureError
from dtrcompile.passes.program.sizes import present_sizes
from dtrcompile.passes.torch_private import (
    FakeTensor,
    HigherOrderOperator,
    OpOverload,
    OpOverloadPacket,
)

aten = torch.ops.aten
prims = torch.ops.prims

_NONE: Mapping[fx.Node, fx.Node] = MappingProxyType({})


class Role(enum.Enum):
    """How a node's value comes to be.

    CONSTANT: from outside (placeholder, attribute).  SCALAR: a number or symbol; owns no bytes that
    count.  VIEW: aliases its argument's storage.  ITEM: an element of a tuple.  FUSED: pointwise,
    reduction or indirect load, which Inductor writes as a loop and may fuse.  KERNEL: a call of its
    own (matrix product, convolution, scatter, library call), including everything with an effect.
    """

    CONSTANT = enum.auto()
    SCALAR = enum.auto()
    VIEW = enum.auto()
    ITEM = enum.auto()
    FUSED = enum.auto()
    KERNEL = enum.auto()


_MARK = "dtr"


@dataclass(frozen=True, slots=True)
class Mark:
    """What was decided about a node, for those who see it later; it goes with the node's copies.

    Attributes:
        operator: of the program, of a node that is a kernel.
        output_of: the operator of the program that the node gives a storage to.
        step: of the plan that it was emitted for.
        group: equal for neighbouring steps that were one kernel in the default split.
        storage: of the program, of its owner.
        size_bytes: of a constant's storage, where several inputs share it.
        is_buffer: it has to become a buffer, though it could be computed inside of its readers.
        recomputes: the node that it computes again.
        speed_workspace_bytes: what its kernel may hold inside for the sake of its speed.
        slack_bytes: what may be held beyond the plan while it runs; None: that is not known.
    """

    operator: int | None = None
    output_of: int | None = None
    step: int | None = None
    group: int | None = None
    storage: int | None = None
    size_bytes: int | None = None
    is_buffer: bool = False
    recomputes: str = ""
    speed_workspace_bytes: int = 0
    slack_bytes: int | None = None


_UNMARKED = Mark()


def mark_of(node: fx.Node) -> Mark:
    """What was decided about a node."""
    found: Mark = node.meta.get(_MARK, _UNMARKED)
    return found


def mark(node: fx.Node, **changes: Any) -> None:
    """Decide about a node; ``changes`` are fields of `Mark`."""
    node.meta[_MARK] = replace(mark_of(node), **changes)


# Inductor lowers these to loops although they carry neither the pointwise nor the reduction tag.
_FUSED_PACKETS = frozenset(
    {
        aten.arange,
        aten.argmax,
        aten.argmin,
        aten.cat,
        aten.constant_pad_nd,
        aten.copy,
        aten.embedding,
        aten.empty,
        aten.empty_like,
        aten.expand_copy,
        aten.flip,
        aten.full,
        aten.full_like,
        aten.gather,
        aten.index,
        aten._unsafe_index,
        aten.index_select,
        aten.lift_fresh_copy,
        aten.max,
        aten.mean,
        aten.min,
        aten.native_dropout_backward,
        aten.new_empty,
        aten.new_full,
        aten.new_ones,
        aten.new_zeros,
        aten.ones,
        aten.ones_like,
        aten.prod,
        aten.repeat,
        aten.scalar_tensor,
        aten.select_scatter,
        aten.slice_scatter,
        aten.std,
        aten.sum,
        aten.tril,
        aten.triu,
        aten.var,
        aten.var_mean,
        aten.zeros,
        aten.zeros_like,
        prims.convert_element_type,
        prims.inductor_lookup_seed,
        prims.inductor_randint,
        prims.inductor_random,
        prims.iota,
        prims.prepare_softmax_online,
    }
)

# Views by behaviour whose schema does not say so.
_VIEW_PACKETS = frozenset({aten._unsafe_view})
# Named views by their schema, but may copy.
_NOT_VIEW_PACKETS = frozenset({aten.contiguous, aten.to, aten._to_copy})

# Deterministic once their seed is given.
SEEDED_RANDOM_PACKETS = frozenset({prims.inductor_random, prims.inductor_randint})

# Pure if the graphs are that they are given.
_PURE_HIGHER_ORDER = frozenset({torch.ops.higher_order.flex_attention})

_COLLECTIVE_NAMESPACES = frozenset({"_c10d_functional", "c10d", "c10d_functional", "symm_mem"})
_PURE_NAMESPACES = frozenset({"aten", "prims", "inductor", "quantized_decomposed"})
# PyTorch's other operators.
_OWN_NAMESPACES = (
    _PURE_NAMESPACES
    | _COLLECTIVE_NAMESPACES
    | {
        "_inductor_test",
        "_quantized",
        "ao",
        "debugprims",
        "export",
        "fsdp",
        "higher_order",
        "mkl",
        "mkldnn",
        "mkldnn_prepacked",
        "onednn",
        "prim",
        "profiler",
        "quantized",
        "rngprims",
        "sparse",
        "streams",
    }
)


def packet(node: fx.Node) -> object:
    """The overload packet of an operator node, else its target."""
    return node.target.overloadpacket if isinstance(node.target, OpOverload) else node.target


def value(node: fx.Node) -> object:
    """The fake value of a node, or None where there is none."""
    return node.meta.get("val")


def attribute(node: fx.Node) -> Any:
    """What a get_attr node refers to."""
    return operator.attrgetter(str(node.target))(node.graph.owning_module)


def is_tensor(node: fx.Node) -> bool:
    """Whether the node's value is one tensor."""
    return isinstance(value(node), torch.Tensor)


def is_sequence(node: fx.Node) -> bool:
    """Whether the node's value is a tuple or list (of a multi-output operator or a split).

    Some higher-order operators carry no fake value; what is only ever indexed is a sequence.
    """
    val = value(node)
    if val is None and node.op == "call_function" and node.users:
        return all(user.target is operator.getitem for user in node.users)
    return isinstance(val, (tuple, list))


def is_symbolic_number(node: fx.Node) -> bool:
    """Whether the node's value is a number that depends on symbolic sizes or on data."""
    return isinstance(value(node), torch.types.py_sym_types)


def settled_number(node: fx.Node) -> int | float | None:
    """A number that is known while graphs are made, such as a size that a guard has fixed."""
    if node.op != "call_function" or role(node) is not Role.SCALAR:
        return None
    val = value(node)
    if isinstance(val, torch.SymInt) and val.node.expr.is_Integer:
        return int(val.node.expr)
    return val if isinstance(val, (int, float)) else None


def _is_view_target(target: object) -> bool:
    return isinstance(target, OpOverload) and _is_view(target)


@functools.cache
def _is_view(target: OpOverload) -> bool:
    if target.overloadpacket in _VIEW_PACKETS:
        return True
    if target.overloadpacket in _NOT_VIEW_PACKETS:
        return False
    schema = target._schema
    reads = any(a.alias_info is not None and not a.alias_info.is_write for a in schema.arguments)
    return reads and not schema.is_mutable and any(r.alias_info for r in schema.returns)


def is_mutating(node: fx.Node) -> bool:
    """Whether the operator writes into an argument."""
    return isinstance(node.target, OpOverload) and node.target._schema.is_mutable


def mutated_arguments(node: fx.Node) -> list[fx.Node]:
    """The argument nodes that a mutating operator writes into."""
    assert isinstance(node.target, OpOverload)
    written: list[fx.Node] = []
    arguments = node.target._schema.arguments
    for index, argument in enumerate(arguments):
        if argument.alias_info is None or not argument.alias_info.is_write:
            continue
        given = _given(node, index, argument)
        candidates = given if isinstance(given, (list, tuple)) else [given]
        written.extend(n for n in candidates if isinstance(n, fx.Node))
    return written


def role(node: fx.Node) -> Role:
    """Classify a placeholder, attribute or call.

    Raises:
        CaptureError: for a node kind that a compiled graph does not hold.
    """
    if node.op in ("placeholder", "get_attr"):
        return Role.CONSTANT if is_tensor(node) else Role.SCALAR
    if node.op != "call_function":
        raise CaptureError(
            f"node {node.name!r} is a {node.op!r}; expected the flat graph that AOTAutograd makes"
        )
    if node.target is operator.getitem and is_sequence(node.args[0]):  # type: ignore[arg-type]
        return Role.ITEM if is_tensor(node) else Role.SCALAR
    if not is_tensor(node) and not is_sequence(node):
        has_tensor_input = any(is_tensor(n) for n in node.all_input_nodes)
        is_size = packet(node) in (aten.sym_size, aten.sym_stride, aten.sym_numel)
        effect = isinstance(node.target, (OpOverload, HigherOrderOperator)) and not is_size
        # An operator whose value is read from a tensor's data, or which returns nothing, runs at
        # its place; arithmetic on sizes does not.
        return Role.KERNEL if effect and (has_tensor_input or value(node) is None) else Role.SCALAR
    if _is_view_target(node.target):
        return Role.VIEW
    if is_mutating(node):
        return Role.KERNEL
    if isinstance(node.target, OpOverload) and not needs_own_kernel(node):
        tags = node.target.tags
        if (
            node.target.overloadpacket in _FUSED_PACKETS
            or torch.Tag.pointwise in tags
            or torch.Tag.reduction in tags
        ):
            return Role.FUSED
    return Role.KERNEL


def needs_own_kernel(node: fx.Node) -> bool:
    """Unseeded randomness and complex numbers are not fused."""
    if not isinstance(node.target, OpOverload):
        return True
    if torch.Tag.nondeterministic_seeded in node.target.tags:
        return True
    return any(v.dtype.is_complex for v in tensor_values(node))


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


def owner(node: fx.Node, same_value: Mapping[fx.Node, fx.Node] = _NONE) -> fx.Node:
    """Follow views, and elements of lists of views, up to the node that owns the storage.

    Args:
        same_value: backward placeholder -> the forward node that it receives.
    """
    node = same_value.get(node, node)
    while True:
        base = view_base(node)
        if base is None:
            return node
        node = same_value.get(base, base)


def tensor_values(node: fx.Node) -> list[torch.Tensor]:
    """The fake tensors that a node makes: one, or a multi-output operator's."""
    val = value(node)
    values = val if isinstance(val, (tuple, list)) else (val,)
    return [v for v in values if isinstance(v, torch.Tensor)]


def has_unbacked_size(tensor: torch.Tensor) -> bool:
    """Whether a size is not known when the graph is traced: it depends on a tensor's values, or the
    user wants nothing assumed about it (`torch._dynamo.decorators.mark_unbacked`)."""
    return any(isinstance(size, torch.SymInt) and not size.node.has_hint() for size in tensor.shape)


def _is_without_dropout(node: fx.Node) -> bool:
    """Whether the dropout inside the operator is off, for which alone fused attention is tagged
    random."""
    assert isinstance(node.target, OpOverload)
    return any(
        argument.name == "dropout_p" and _given(node, index, argument) == 0.0
        for index, argument in enumerate(node.target._schema.arguments)
    )


def _given(node: fx.Node, index: int, argument: torch.Argument) -> object:
    """What a node passes for an argument of its operator's schema."""
    if index < len(node.args):
        return node.args[index]
    return node.kwargs.get(argument.name, argument.default_value)


def _inner_graphs(node: fx.Node) -> list[fx.Graph]:
    """The graphs that a higher-order operator is given."""
    found = (attribute(n) for n in node.all_input_nodes if n.op == "get_attr")
    return [module.graph for module in found if isinstance(module, fx.GraphModule)]


def draws_random_numbers(node: fx.Node) -> bool:
    """Whether a library call takes its numbers from the generator, whose state it moves on."""
    return (
        isinstance(node.target, OpOverload)
        and torch.Tag.nondeterministic_seeded in node.target.tags
        and not _is_without_dropout(node)
    )


def effect_of(node: fx.Node) -> str | None:
    """Why running the node again is not the same as running it once, or None if it is."""
    target = node.target
    if isinstance(target, HigherOrderOperator):
        if target not in _PURE_HIGHER_ORDER:
            return f"higher-order operator {target.name()}"
        inner = (n for graph in _inner_graphs(node) for n in graph.nodes)
        return next(filter(None, map(effect_of, inner)), None)
    if not isinstance(target, OpOverload):
        return None
    if target.namespace in _COLLECTIVE_NAMESPACES:
        return "a collective"
    if target._schema.is_mutable:
        return "it writes into an argument"
    if draws_random_numbers(node):
        return "it draws random numbers without a saved seed"
    if not target._schema.returns:
        return "it is run for its effect"
    if target.namespace not in _PURE_NAMESPACES and not _is_declared_pure(target):
        return (
            f"custom operator {target} is not known to be pure; dtrcompile.declare_operator says so"
        )
    return None


def why_not_recomputable(node: fx.Node) -> str | None:
    """Why the node may run only once, or None if it may run again and gives the same value."""
    effect = effect_of(node)
    if effect is not None:
        return effect
    if isinstance(node.target, HigherOrderOperator):
        inner = (n for graph in _inner_graphs(node) for n in graph.nodes)
        return next(filter(None, map(why_not_recomputable, inner)), None)
    policy = node.meta.get("recompute") if isinstance(node.target, OpOverload) else None
    if policy is not None and getattr(policy, "name", "") == "MUST_SAVE":
        return "the user's checkpoint policy says that it must be saved"
    return None


def _is_declared_pure(target: OpOverload) -> bool:
    declared = declaration(target._schema.name)
    return declared is not None and declared.is_pure


def is_custom(target: object) -> bool:
    """Whether an operator, or one overload of it, is not one of PyTorch's."""
    if isinstance(target, OpOverloadPacket):
        namespace = target._qualified_op_name.partition("::")[0]
        return namespace not in _OWN_NAMESPACES
    return isinstance(target, OpOverload) and target.namespace not in _OWN_NAMESPACES


def map_by_name(
    target: object,
    function: Callable[[str, Any], Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """An operator's arguments, each replaced by what a function gives for its name and itself.

    What is no operator of PyTorch's has arguments without names.
    """
    names = [a.name for a in target._schema.arguments] if isinstance(target, OpOverload) else []
    names += [""] * (len(args) - len(names))
    return (
        tuple(function(name, argument) for name, argument in zip(names, args, strict=False)),
        {name: function(name, argument) for name, argument in kwargs.items()},
    )


def is_on_cpu(target: object, name: str) -> bool:
    """Whether an argument of an operator on a GPU is on the CPU, whatever its fake tensor says.

    Memory-efficient attention keeps the random state of its dropout there unless a CUDA graph is
    recorded, and backward dereferences it there ("Seed and Offset Device" in
    ``aten/src/ATen/native/transformers/cuda/attention.cu``).
    """
    return "efficient_attention" in str(target) and name in ("philox_seed", "philox_offset")


def hint(size: int | torch.SymInt, unbacked: int = 0) -> int:
    """A size as a number, without adding a guard.

    Of a symbolic one, its value at the sizes that count here (`sizes.at_sizes`), by default those
    that it was traced with; ``unbacked`` where it had none.
    """
    sizes = present_sizes()
    while isinstance(size, torch.SymInt):
        found = None if sizes is None else sizes.evaluate(size.node.expr)
        if found is None:
            found = size.node.hint
        size = unbacked if found is None else found
    return int(size)


def numel(tensor: torch.Tensor) -> int:
    """Number of elements, symbolic sizes by their hints."""
    count = 1
    for size in tensor.shape:
        count *= hint(size)
    return count


def extent_bytes(tensor: torch.Tensor) -> int:
    """Bytes from a tensor's first to its last element: what its own storage must hold."""
    if tensor.layout is not torch.strided:
        return numel(tensor) * tensor.element_size()
    if numel(tensor) == 0:
        return 0
    last = 0
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        last += (hint(size) - 1) * hint(stride)
    return (last + 1) * tensor.element_size()


def owned_bytes(tensor: torch.Tensor) -> int:
    """Bytes of the storage that an operator allocates for a (fake) output.

    More than its extent where the operator fills part of a larger allocation.
    """
    if not isinstance(tensor, FakeTensor) or tensor.layout is not torch.strided:
        return extent_bytes(tensor)
    return hint(tensor.untyped_storage().nbytes())


def storage_key(tensor: torch.Tensor) -> object:
    """Equal for two fake tensors exactly when they share a storage."""
    if isinstance(tensor, FakeTensor) and tensor.layout is torch.strided:
        return tensor.untyped_storage()._cdata
    return id(tensor)


def expression(size: int | torch.SymInt) -> sympy.Expr:
    """A size in the graph's symbols."""
    return size.node.expr if isinstance(size, torch.SymInt) else sympy.Integer(size)


def extent_expression(tensor: torch.Tensor) -> sympy.Expr:
    """As `extent_bytes`, in the graph's symbols."""
    if any(isinstance(size, int) and size == 0 for size in tensor.shape):
        return sympy.Integer(0)
    sizes, strides = ([expression(n) for n in given] for given in (tensor.shape, tensor.stride()))
    last = sum(((n - 1) * d for n, d in zip(sizes, strides, strict=True)), sympy.Integer(0))
    return sympy.expand((last + 1) * tensor.element_size())


def owned_expression(tensor: torch.Tensor) -> sympy.Expr:
    """As `owned_bytes`, in the graph's symbols."""
    if not isinstance(tensor, FakeTensor) or tensor.layout is not torch.strided:
        return extent_expression(tensor)
    return expression(tensor.untyped_storage().nbytes())
