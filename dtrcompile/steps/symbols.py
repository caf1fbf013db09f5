"""Where the values of a Dynamo graph's symbolic sizes are found in what it is called with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import sympy
import torch
from torch import fx

from dtrcompile.passes.graphs.modules import placeholders
from dtrcompile.passes.program.sizes import Sizes


@dataclass(frozen=True, slots=True)
class Symbol:
    """A symbolic size and an argument that tells its value.

    Attributes:
        argument: index among the graph's arguments.
        dimension: of that tensor; None where the argument is the value.
        hint: its value while the graph was traced.
        most: the largest value that it may have (``mark_dynamic(..., max=...)``), None for no such.
    """

    symbol: sympy.Symbol
    argument: int
    dimension: int | None
    hint: int
    most: int | None

    def value(self, args: Sequence[Any]) -> int:
        """Its value in a call."""
        given = args[self.argument]
        return int(given if self.dimension is None else given.shape[self.dimension])


@dataclass(frozen=True)
class Symbols:
    """The symbolic sizes of one graph; none where all its sizes are fixed."""

    symbols: tuple[Symbol, ...]

    @staticmethod
    def of_graph(gm: fx.GraphModule) -> Symbols:
        """Of a graph as Dynamo hands it to a backend."""
        found: dict[sympy.Symbol, Symbol] = {}

        def add(size: object, argument: int, dimension: int | None) -> None:
            if not isinstance(size, torch.SymInt) or size.node.hint is None:
                return
            symbol = size.node.expr
            if isinstance(symbol, sympy.Symbol) and symbol not in found:
                upper = size.node.shape_env.var_to_range[symbol].upper
                most = int(upper) if isinstance(upper, sympy.Integer) else None
                found[symbol] = Symbol(symbol, argument, dimension, int(size.node.hint), most)

        values = [node.meta.get("example_value") for node in placeholders(gm)]
        for index, value in enumerate(values):
            add(value, index, None)
        for index, value in enumerate(values):
            if isinstance(value, torch.Tensor):
                for dimension, size in enumerate(value.shape):
                    add(size, index, dimension)
        return Symbols(tuple(found.values()))

    def __bool__(self) -> bool:
        return bool(self.symbols)

    def values(self, args: Sequence[Any]) -> tuple[int, ...]:
        """One value a symbol, in a call with these arguments."""
        return tuple([symbol.value(args) for symbol in self.symbols])

    def hints(self) -> tuple[int, ...]:
        """The values while the graph was traced."""
        return tuple(symbol.hint for symbol in self.symbols)

    def sizes(self, values: Sequence[int]) -> Sizes:
        """For planning and counting."""
        return Sizes.of({s.symbol: v for s, v in zip(self.symbols, values, strict=True)})

    def scaled(
        self, values: Sequence[int], grown: Sequence[bool], factor: float
    ) -> tuple[int, ...]:
        """The values with those that grew made larger still, as far as they may become."""
        return tuple(
            value if not grows else min(round(value * factor), symbol.most or round(value * factor))
            for symbol, value, grows in zip(self.symbols, values, grown, strict=True)
        )
