"""Value numbers: which nodes of the default split and of emitted graphs have the same value.

Two nodes have one number if they are the same operator, given arguments of the same numbers (Cocke
and Schwartz, Programming Languages and Their Compilers, 1970: value numbering).  Inputs are told by
their part in the graphs, not by their names: forward's by position, what backward receives by the
forward output that it is, its other inputs by position again.  Nothing that emission notes down
about a node is read, but for the expressions of symbolic sizes: one size may be computed in several
ways.

What may run only once (`nodes.effect_of`: random numbers, writes, collectives) is told by its place
among all such calls of the step, so that a second run of one has a number of its own.  A value that
is read after its storage was written into is another than before.

Linear in the nodes and their arguments.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field

import torch
from torch import fx

from dtrcompile.passes.device.host_copies import offload, prefetch, wait_for_copy
from dtrcompile.passes.graphs.emit import free
from dtrcompile.passes.graphs.modules import output_arguments, placeholders
from dtrcompile.passes.graphs.split import Split
from dtrcompile.passes.nodes import (
    Role,
    attribute,
    effect_of,
    is_mutating,
    is_sequence,
    is_symbolic_number,
    is_tensor,
    mutated_arguments,
    role,
    settled_number,
    value,
    view_base,
)


@dataclass(frozen=True)
class Effect:
    """A call that may run only once.

    Attributes:
        node: the call.
        given: the number of what it computes from, its operator included.
        is_backward: which graph it is in.
    """

    node: fx.Node
    given: int
    is_backward: bool


@dataclass
class Numbered:
    """A forward and a backward graph whose values have numbers.

    Attributes:
        number: of each node's value.
        computed: of each call that makes tensors or has an effect, the number.
        owner: the node that owns the storage of a node's value, across both graphs.
        effects: in the order in which they run.
        outputs, gradients: the numbers of all that forward returns to the user, and of all that
            backward returns.
        other_inputs: how many inputs of backward are no values of forward's.
    """

    number: dict[fx.Node, int] = field(default_factory=dict)
    computed: dict[fx.Node, int] = field(default_factory=dict)
    owner: dict[fx.Node, fx.Node] = field(default_factory=dict)
    effects: list[Effect] = field(default_factory=list)
    outputs: tuple[int, ...] = ()
    gradients: tuple[int, ...] = ()
    other_inputs: int = 0


class ValueNumbers:
    """One table of numbers, for graphs that are to be compared."""

    def __init__(self) -> None:
        self._numbers: dict[object, int] = {}

    def of(self, *key: object) -> int:
        """The number of what is made in this way."""
        return self._numbers.setdefault(key, len(self._numbers))

    def number(
        self,
        split: Split,
        updated: frozenset[int] = frozenset(),
        place: Mapping[fx.Node, int] | None = None,
    ) -> Numbered:
        """Number the values of two graphs.

        Args:
            updated: positions of forward's inputs that are updated when it has returned.
            place: of each call with an effect, where it runs among them; None: where it stands.
        """
        walk = _Walk(self, split, place)
        walk.graph(split.forward)
        walk.found.outputs = walk.results(split.forward)[: split.num_fwd_outputs]
        for i, node in enumerate(placeholders(split.forward)):
            if i in updated:
                walk.version[walk.found.owner[node]] = self.of("updated", i)
        if split.backward is not None:
            walk.is_backward = True
            walk.graph(split.backward)
            walk.found.gradients = walk.results(split.backward)
        if place is not None:
            walk.found.effects.sort(key=lambda effect: place[effect.node])
        return walk.found


class _Walk:
    def __init__(
        self, numbers: ValueNumbers, split: Split, place: Mapping[fx.Node, int] | None
    ) -> None:
        self.numbers = numbers
        self.split = split
        self.place = place
        self.found = Numbered()
        self.version: dict[fx.Node, int] = {}  # of an owner's storage, since it was written into
        self.is_backward = False

    def graph(self, gm: fx.GraphModule) -> None:
        """Number one graph's nodes."""
        inputs = 0
        for node in gm.graph.nodes:
            if node.op == "placeholder":
                if node in self.split.same_value:
                    source = self.split.same_value[node]
                    self.found.number[node] = self.found.number[source]
                    self.found.owner[node] = self.found.owner[source]
                    continue
                self._own(node, self._input(node, inputs))
                inputs += 1
            elif node.op == "get_attr":
                self._own(node, self.numbers.of("constant", id(attribute(node))))
            elif node.op == "call_function" and node.target is not free:
                self._call(node)
        if self.is_backward:
            self.found.other_inputs = inputs

    def _own(self, node: fx.Node, number: int) -> None:
        self.found.number[node] = number
        self.found.owner[node] = node

    def _input(self, node: fx.Node, index: int) -> int:
        if is_symbolic_number(node):
            return self._size(node)
        return self.numbers.of("tangent" if self.is_backward else "input", index)

    def _size(self, node: fx.Node) -> int:
        """By its expression: it may be computed from the inputs' sizes or read from a tensor."""
        return self.numbers.of("size", value(node).node.expr)  # type: ignore[attr-defined]

    def _call(self, node: fx.Node) -> None:
        found = self.found
        if node.target in (offload, prefetch):
            # A copy has the value of what it is a copy of, in a storage of its own.
            source = node.args[0]
            assert isinstance(source, fx.Node)
            self._own(node, found.number[source])
            return
        if node.target is wait_for_copy:
            return  # (what is waited for is checked with the memory)
        kind = role(node)
        base = view_base(node)
        found.owner[node] = node if base is None else found.owner[base]
        # A view is of the same place, whatever is written there; what reads it sees what is there.
        is_place = kind in (Role.VIEW, Role.ITEM)
        given = self.numbers.of(
            node.target,
            tuple(self.key(a, is_place) for a in node.args),
            tuple((name, self.key(a, is_place)) for name, a in sorted(node.kwargs.items())),
        )
        number = given
        if kind is Role.KERNEL and effect_of(node) is not None:
            place = len(found.effects) if self.place is None else self.place[node]
            found.effects.append(Effect(node, given, self.is_backward))
            number = self.numbers.of("effect", place)
            if is_mutating(node):
                for written in mutated_arguments(node):
                    self.version[found.owner[written]] = number
        if kind is not Role.SCALAR or is_sequence(node):
            found.computed[node] = number
        if is_symbolic_number(node) and number == given:
            number = self._size(node)
        found.number[node] = number

    def key(self, argument: object, is_place: bool = False) -> Hashable:
        """Equal for arguments of one value."""
        match argument:
            case fx.Node():
                return self._read(argument, is_place)
            case list() | tuple():
                return ("sequence", *(self.key(a, is_place) for a in argument))
            case dict():
                return ("dict", *((k, self.key(a, is_place)) for k, a in argument.items()))
            case slice(start=start, stop=stop, step=step):
                return ("slice", *(self.key(a, is_place) for a in (start, stop, step)))
            case float() | complex():
                return type(argument), repr(argument)  # not a number is itself; zero has a sign
            case torch.SymInt() | torch.SymFloat() | torch.SymBool():
                return "size", argument.node.expr
            case Hashable():
                return type(argument), argument  # 1 is not True
            case _:
                return "object", id(argument)

    def _read(self, node: fx.Node, is_place: bool) -> Hashable:
        # (One that forward settled may be handed to backward, or stand there as the number itself.)
        settled = settled_number(self.split.same_value.get(node, node))
        if settled is not None:
            return self.key(settled)
        number = self.found.number[node]
        version = None if is_place else self.version.get(self.found.owner[node])
        return number if version is None else ("written", number, version)

    def results(self, gm: fx.GraphModule) -> tuple[int, ...]:
        """The numbers of what a graph returns."""
        return tuple(self.numbers.of("result", self.key(a)) for a in output_arguments(gm))


def is_owner(node: fx.Node) -> bool:
    """Whether a call makes a tensor that is not a view of another."""
    return node.op == "call_function" and is_tensor(node) and view_base(node) is None
