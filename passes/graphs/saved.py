"""What forward saves for backward, of a plan: the values that backward needs and cannot make."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from torch import fx

from dtrcompile.passes.graphs.capture import Captured
from dtrcompile.passes.graphs.modules import calls_of, output_arguments, placeholders
from dtrcompile.passes.nodes import (
    Role,
    is_sequence,
    is_symbolic_number,
    is_tensor,
    role,
    settled_number,
    value,
    view_base,
)
from dtrcompile.passes.program.plan import (
    Boundary,
    Compute,
    Free,
    Offload,
    Prefetch,
    Step,
    unknown_step,
)
from dtrcompile.passes.torch_private import find_symbol_binding_fx_nodes, free_symbols


@dataclass(frozen=True)
class Saved:
    """Nodes of the default split whose values backward receives from forward, by output group.

    Attributes:
        tensors: those with a version check first.
        opaque: neither tensors nor numbers, such as the token of an effect.
        numbers: those that bind a symbol first.
    """

    tensors: tuple[fx.Node, ...]
    opaque: tuple[fx.Node, ...]
    numbers: tuple[fx.Node, ...]

    @property
    def as_returned(self) -> tuple[fx.Node, ...]:
        """In the order in which forward returns them."""
        return (*self.tensors, *self.opaque, *self.numbers)


def fetched_in_backward(steps: Iterable[Step]) -> list[int]:
    """Storages that were copied to the host in forward and come back in backward, ascending.

    Args:
        steps: of the plan, after the boundary.
    """
    fetched: set[int] = set()
    copied: set[int] = set()
    for step in steps:
        match step:
            case Offload(s):
                copied.add(s)
            case Prefetch(s):
                fetched |= {s} - copied
            case Compute() | Free() | Boundary():
                pass
            case _:
                raise unknown_step(step)
    return sorted(fetched)


def saved_for_backward(
    captured: Captured, resident: Collection[int], steps: Sequence[Step], *, is_tight: bool = True
) -> Saved:
    """What backward receives from forward.

    Args:
        resident: storages that are in memory when forward ends.
        steps: of the plan, after the boundary.
        is_tight: nothing stays longer than it is read (`tighten`); else backward holds what it
            frees without reading it, such as what was still being copied to the host.
    """
    assert captured.backward is not None
    bindings: Mapping[object, fx.Node] = find_symbol_binding_fx_nodes(captured.forward.graph)
    needs = _Needs(captured, bindings)
    # Backward's own numbers, first, as they are emitted whatever the plan says.
    for node in calls_of(captured.backward):
        if role(node) is Role.SCALAR:
            for n in map(captured.resolve, node.all_input_nodes):
                if not is_tensor(n) and not is_sequence(n):
                    needs.add(n)
    needs.walk(resident, steps, is_tight)
    for argument in output_arguments(captured.backward):
        if isinstance(argument, fx.Node):
            needs.add(argument)

    order = {n: i for i, n in enumerate(captured.forward.graph.nodes)}
    needed = sorted(needs.nodes, key=order.__getitem__)
    tensors = sorted(filter(is_tensor, needed), key=has_no_version_check)  # stable
    numbers = [n for n in needed if is_symbolic_number(n)]
    opaque = [n for n in needed if not is_tensor(n) and not is_symbolic_number(n)]
    extra = _symbols_to_bind(captured, needs.symbols, bindings, tensors, numbers)
    binding = set(bindings.values())
    return Saved(
        tuple(tensors),
        tuple(opaque),
        (
            *extra,
            *(n for n in numbers if n in binding),
            *(n for n in numbers if n not in binding),
        ),
    )


def _symbols_to_bind(
    captured: Captured,
    needed: Collection[object],
    bindings: Mapping[object, fx.Node],
    tensors: Sequence[fx.Node],
    numbers: Sequence[fx.Node],
) -> list[fx.Node]:
    """Numbers to save beside: every symbol in the shape of an input must be bound by an input."""
    assert captured.backward is not None
    symbols = set(needed)
    for node in (*tensors, *numbers):
        symbols |= set(free_symbols(node.meta["val"]))
    for node in placeholders(captured.backward):
        if "val" in node.meta:
            symbols |= set(free_symbols(node.meta["val"]))
    bound = set(numbers)
    return [
        bindings[s] for s in sorted(symbols, key=str) if s in bindings and bindings[s] not in bound
    ]


class _Needs:
    """What backward reads that it does not make.

    Attributes:
        nodes: values of forward's, in the order in which they are met.
        symbols: sizes that backward computes from symbols.
    """

    def __init__(self, captured: Captured, bindings: Mapping[object, fx.Node]) -> None:
        self.captured = captured
        self.bindings = bindings
        self.nodes: dict[fx.Node, None] = {}
        self.symbols: set[object] = set()
        self.made: set[int] = set()  # storages that backward has computed

    def walk(self, resident: Collection[int], steps: Iterable[Step], is_tight: bool) -> None:
        """Add what the steps of backward read."""
        present = set(resident)
        for step in steps:
            match step:
                case Compute(o):
                    operator = self.captured.operators[o]
                    members = set(operator.nodes)
                    for n in (n for node in operator.nodes for n in node.all_input_nodes):
                        if self.captured.resolve(n) not in members:
                            self.add(n)
                    made = {self.captured.storage_of[n] for n in operator.outputs}
                    self.made |= made - present  # the others are a multi-output's duplicates
                    present |= made
                case Free(s):
                    if s in present and not is_tight:
                        self.add(self.captured.storage_nodes[s])
                    present.discard(s)
                case Offload(s):
                    self.add(self.captured.storage_nodes[s])
                case Prefetch(s):
                    self.made.add(s)
                    present.add(s)
                case Boundary():
                    pass
                case _:
                    raise unknown_step(step)

    def add(self, n: fx.Node) -> None:
        """Add a value that backward reads, or what it makes that from."""
        n = self.captured.resolve(n)
        is_of_forward = n.graph is self.captured.forward.graph
        if n.op == "placeholder":
            if is_of_forward:
                self.nodes.setdefault(n)
        elif n.op == "call_function":
            s = self.captured.storage_of.get(n)
            if s is not None:
                if s not in self.made:
                    self.nodes.setdefault(n)
            elif settled_number(n) is None:
                if is_of_forward and _is_number(n):
                    self.nodes.setdefault(n)
                else:
                    self._add_sources(n)

    def _add_sources(self, n: fx.Node) -> None:
        """Add what backward makes a view or a number of its own from."""
        is_scalar = role(n) is Role.SCALAR
        found = _symbols(n)
        if is_scalar and found and found <= self.bindings.keys():
            self.symbols |= found  # it is made from symbols, not from what has that size
        elif is_scalar or view_base(n) is not None:
            for m in n.all_input_nodes:
                self.add(m)


def _is_number(n: fx.Node) -> bool:
    """Whether a call's result is no tensor: a size, or what a kernel reads from data."""
    kind = role(n)
    is_read = kind is Role.KERNEL and not is_tensor(n)
    return (kind is Role.SCALAR or is_read) and not is_sequence(n)


def _symbols(number: fx.Node) -> set[object]:
    """The symbols of a size's expression."""
    return set(free_symbols(value(number))) if is_symbolic_number(number) else set()


def has_no_version_check(node: fx.Node) -> bool:
    """Whether autograd may be given the saved value without looking for changes in place."""
    return bool(node.meta.get("saved_tensor_with_no_vc_check", False))
