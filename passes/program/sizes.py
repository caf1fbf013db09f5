"""Values for a graph's symbolic sizes: what it is planned for, and what it holds at others.

With dynamic shapes PyTorch traces a graph once, with symbols in place of sizes, and each symbol has
a *hint*, the value that it had while tracing.  A plan is made, and its bytes are counted, for one
set of values; `at_sizes` says which, for everything inside of it that asks `nodes.hint`.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TypeAlias

import sympy


@dataclass(frozen=True)
class Sizes:
    """A value for each symbol of a graph, in the order of the symbols' names."""

    values: tuple[tuple[sympy.Symbol, int], ...]

    @staticmethod
    def of(values: Mapping[sympy.Symbol, int]) -> Sizes:
        """From a mapping."""
        return Sizes(tuple(sorted(values.items(), key=lambda item: str(item[0]))))

    @functools.cached_property
    def by_symbol(self) -> dict[sympy.Symbol, sympy.Integer]:
        """For sympy's substitution."""
        return {symbol: sympy.Integer(value) for symbol, value in self.values}

    def evaluate(self, expression: sympy.Expr) -> int | None:
        """The expression's value; None if it has a symbol without one."""
        return _evaluated(expression, self)

    def __str__(self) -> str:
        return ", ".join(f"{symbol} = {value}" for symbol, value in self.values)


@functools.lru_cache(maxsize=1 << 16)
def _evaluated(expression: sympy.Expr, sizes: Sizes) -> int | None:
    value = expression.xreplace(sizes.by_symbol)
    return int(value) if value.is_Integer else None


@dataclass(frozen=True, eq=False)
class Measurable:
    """A size that is no expression, but can be found at any sizes; compared by identity."""

    name: str
    bytes_at: Callable[[Sizes], int]


Term: TypeAlias = "sympy.Expr | Measurable"
"""A size in bytes, in a graph's symbols."""


_PRESENT: ContextVar[Sizes | None] = ContextVar("dtrcompile_sizes", default=None)


def present_sizes() -> Sizes | None:
    """The sizes that count here; None for the hints."""
    return _PRESENT.get()


@contextlib.contextmanager
def at_sizes(sizes: Sizes | None) -> Iterator[None]:
    """Everything inside sees these values in place of the hints; None: the hints again."""
    token = _PRESENT.set(sizes)
    try:
        yield
    finally:
        _PRESENT.reset(token)
