"""The peak as a formula in the graph's symbolic sizes: a maximum of sums.

A schedule takes and gives back memory in the same order at any sizes, so what is held at a moment
is a sum of sizes, each an expression in the symbols, and the peak is the largest of these sums.
Nearly all moments are below another at all sizes that the symbols may have, and are dropped: a
moment goes if another holds at least as much of every term, or, where the terms are polynomials, if
the difference has no negative coefficient once each symbol is written as its smallest value plus
something.  What is left is a handful of sums, evaluated in microseconds.

What a library call holds inside is no expression; it is a term that is measured where it is asked
for (`passes.workspaces`), and at the few moments that are left only.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np
import sympy

from dtrcompile.passes.device.allocators import Allocator
from dtrcompile.passes.errors import format_bytes
from dtrcompile.passes.fitting.measured import Measured
from dtrcompile.passes.inductor.schedule_trace import Cause, ScheduleTrace
from dtrcompile.passes.program.program import Phase
from dtrcompile.passes.program.sizes import Measurable, Sizes, Term

Moment: TypeAlias = Mapping[Term, int]
"""Term -> how often it is held at that moment."""


@dataclass(frozen=True)
class PeakFormula:
    """A maximum of sums of terms.

    Attributes:
        terms: the sizes of storages, in bytes, before the allocator rounds them up.
        counts: moments x terms, how often each is held; pruned.
        allocator: what it counts for a storage.
    """

    terms: tuple[Term, ...]
    counts: np.ndarray
    allocator: Allocator
    _functions: dict[tuple[sympy.Symbol, ...], Callable[..., Sequence[int]]] = field(
        default_factory=dict, repr=False
    )

    @staticmethod
    def of(
        moments: Iterable[Moment],
        allocator: Allocator,
        least: Mapping[sympy.Symbol, int],
    ) -> PeakFormula:
        """Of all moments of a schedule.

        Args:
            least: symbol -> the smallest value that it may have; 0 for those that are missing.
        """
        distinct = list(dict.fromkeys(frozenset(moment.items()) for moment in moments))
        terms = list(dict.fromkeys(term for moment in distinct for term, _ in moment))
        index = {term: i for i, term in enumerate(terms)}
        counts = np.zeros((len(distinct), len(terms)), dtype=np.int64)
        for row, moment in enumerate(distinct):
            for term, count in moment:
                counts[row, index[term]] = count
        basis = _in_a_basis(terms, allocator, least)
        kept = _undominated(counts @ basis)
        counts = counts[kept]
        used = np.flatnonzero(counts.any(axis=0))
        return PeakFormula(tuple(terms[i] for i in used), counts[:, used], allocator)

    def at(self, sizes: Sizes) -> int:
        """The peak in bytes where the symbols have these values."""
        if not len(self.counts):
            return 0
        symbols = tuple(symbol for symbol, _ in sizes.values)
        function = self._functions.get(symbols)
        if function is None:
            function = self._functions[symbols] = self._compiled(symbols)
        found = function(*(value for _, value in sizes.values))
        block_bytes = self.allocator.block_bytes
        held = [
            term.bytes_at(sizes) if isinstance(term, Measurable) else int(found[i])
            for i, term in enumerate(self.terms)
        ]
        blocks = np.array([block_bytes(size_bytes) for size_bytes in held], dtype=np.int64)
        return int((self.counts @ blocks).max())

    def moments(self) -> list[Moment]:
        """What is held at the moments that are left."""
        return [{self.terms[i]: int(row[i]) for i in np.flatnonzero(row)} for row in self.counts]

    @property
    def symbols(self) -> frozenset[sympy.Symbol]:
        """All that appear."""
        expressions = [t for t in self.terms if isinstance(t, sympy.Expr)]
        return frozenset().union(*(e.free_symbols for e in expressions))

    def _compiled(self, symbols: tuple[sympy.Symbol, ...]) -> Callable[..., Sequence[int]]:
        expressions = [0 if isinstance(t, Measurable) else t for t in self.terms]
        return sympy.lambdify(symbols, expressions, modules=[_FUNCTIONS, "math"], cse=True)  # type: ignore[no-any-return]

    def __str__(self) -> str:
        sums = [self._sum(row) for row in self.counts]
        return sums[0] if len(sums) == 1 else f"max({', '.join(sums)})"

    def _sum(self, row: np.ndarray) -> str:
        total = sympy.Integer(0)
        others: list[str] = []
        for term, count in zip(self.terms, row.tolist(), strict=True):
            if count and isinstance(term, Measurable):
                others.append(f"workspace of {term.name}")
            elif count and isinstance(term, sympy.Integer):
                total += count * self.allocator.block_bytes(int(term))
            elif count:
                total += count * term
        constant, rest = sympy.expand(total).as_coeff_Add()
        parts = [format_bytes(int(constant))] if constant or not rest else []
        parts += [_with_unit(part) for part in sympy.Add.make_args(rest) if part]
        return " + ".join(parts + others).replace("+ -", "- ")


def _with_unit(part: sympy.Expr) -> str:
    coefficient, rest = part.as_coeff_Mul()
    text = str(rest).replace("**", "^").replace("*", "·")
    if not coefficient.is_Integer:
        return f"{str(part).replace('*', '·')} B"
    sign = "-" if coefficient < 0 else ""
    return f"{sign}{format_bytes(abs(int(coefficient)))}·{text}"


def _floor_div(a: int, b: int) -> int:
    return a // b


# PyTorch's functions of symbolic sizes, by the names of their classes.
_FUNCTIONS: dict[str, Callable[..., int]] = {
    "FloorDiv": _floor_div,
    "CleanDiv": _floor_div,
    "CeilDiv": lambda a, b: -(-a // b),
    "Mod": lambda a, b: a % b,
    "PythonMod": lambda a, b: a % b,
    "ModularIndexing": lambda a, b, c: (a // b) % c,
    "Max": max,
    "Min": min,
    "PowByNatural": lambda a, b: a**b,
    "Identity": lambda a: a,
}


def _in_a_basis(
    terms: Sequence[Term], allocator: Allocator, least: Mapping[sympy.Symbol, int]
) -> np.ndarray:
    """Each term as coefficients of functions that are nowhere negative.

    Polynomials, where the allocator rounds nothing up, become coefficients of monomials in what the
    symbols are above their smallest values; every other term is a function of its own.
    """
    is_exact = allocator.granule_bytes == 1 and allocator.splits_all
    columns: dict[object, int] = {}
    entries: list[tuple[int, int, int]] = []
    for row, term in enumerate(terms):
        coefficients: dict[object, int] | None = None
        if isinstance(term, sympy.Integer):
            coefficients = {(): allocator.block_bytes(int(term))}
        elif is_exact and isinstance(term, sympy.Expr):
            coefficients = _coefficients(term, least)
        if coefficients is None:
            coefficients = {term: 1}
        for key, coefficient in coefficients.items():
            entries.append((row, columns.setdefault(key, len(columns)), coefficient))
    basis = np.zeros((len(terms), max(len(columns), 1)), dtype=np.int64)
    for row, column, coefficient in entries:
        basis[row, column] += coefficient
    return basis


def _coefficients(term: sympy.Expr, least: Mapping[sympy.Symbol, int]) -> dict[object, int] | None:
    """Of a polynomial with integer coefficients; None for anything else."""
    symbols = sorted(term.free_symbols, key=str)
    shifted = term.xreplace({s: s + least.get(s, 0) for s in symbols})
    try:
        polynomial = sympy.Poly(shifted, *symbols)
    except sympy.PolynomialError:
        return None
    if any(not c.is_Integer for c in polynomial.coeffs()):
        return None
    found: dict[object, int] = {}
    for powers, coefficient in polynomial.terms():
        key = tuple((str(s), p) for s, p in zip(symbols, powers, strict=True) if p)
        found[key] = int(coefficient)
    return found


def _undominated(rows: np.ndarray) -> list[int]:
    """Rows that no other is at least as large as in every column; of equal ones the first."""
    order = np.argsort(-rows.sum(axis=1), kind="stable")
    kept: list[int] = []
    front = np.empty((0, rows.shape[1]), dtype=rows.dtype)
    for i in order.tolist():
        if len(kept) and bool((front >= rows[i]).all(axis=1).any()):
            continue
        kept.append(i)
        front = rows[kept]
    return sorted(kept)


@dataclass(frozen=True)
class Moments:
    """What graphs hold, moment by moment.

    Attributes:
        forward, backward: all moments of each; backward is empty for inference.
        boundary: when forward has returned.
        saved: of that, what forward saved for backward.
    """

    forward: Sequence[Moment]
    backward: Sequence[Moment]
    boundary: Moment
    saved: Moment


def moments_of(trace: ScheduleTrace) -> Moments:
    """Of a schedule that was traced in symbols; a formula rounds to blocks by itself."""
    found: dict[Phase, list[Moment]] = {Phase.FORWARD: [], Phase.BACKWARD: []}
    held: Counter[Term] = Counter()
    at_boundary: Counter[Term] = Counter()
    saved: Counter[Term] = Counter()
    events = [e for e in trace.events if e.cause is not Cause.ROUNDING]
    for event, following in itertools.zip_longest(events, events[1:]):
        assert event.size is not None
        count = -1 if event.is_given_back else 1
        held[event.size] += count
        if not held[event.size]:
            del held[event.size]
        if event.phase is Phase.FORWARD:
            at_boundary = +held
            saved[event.size] += count * (event.serial in trace.saved)
        if not event.is_given_back and (following is None or following.moment != event.moment):
            found[event.phase].append(dict(held))
    return Moments(found[Phase.FORWARD], found[Phase.BACKWARD], at_boundary, +saved)


@dataclass(frozen=True)
class StepFormulas:
    """What the graphs of a step hold, in their symbols; the fields as in `measured.Measured`.

    Attributes:
        requires: conditions under which this is what they hold.
    """

    forward_peak: PeakFormula
    backward_peak: PeakFormula | None
    boundary: PeakFormula
    saved: PeakFormula
    requires: tuple[sympy.Basic, ...] = ()

    @staticmethod
    def of(
        moments: Moments,
        allocator: Allocator,
        least: Mapping[sympy.Symbol, int],
        requires: Iterable[sympy.Basic] = (),
    ) -> StepFormulas:
        """From all moments; the other arguments as `PeakFormula.of`'s."""

        def formula(held: Sequence[Moment]) -> PeakFormula:
            return PeakFormula.of(held, allocator, least)

        return StepFormulas(
            formula(moments.forward),
            formula(moments.backward) if moments.backward else None,
            formula([moments.boundary]),
            formula([moments.saved]),
            tuple(requires),
        )

    def hold_at(self, sizes: Sizes) -> bool:
        """Whether the formulas are right for these sizes."""
        return all(c.xreplace(sizes.by_symbol) == sympy.true for c in self.requires)

    def at(self, sizes: Sizes) -> Measured:
        """In bytes; what is at the peak is not told."""
        forward_bytes = self.forward_peak.at(sizes)
        backward_bytes = 0 if self.backward_peak is None else self.backward_peak.at(sizes)
        return Measured(
            peak_bytes=max(forward_bytes, backward_bytes),
            peak_at="",
            split={},
            forward_peak_bytes=forward_bytes,
            backward_peak_bytes=backward_bytes,
            boundary_bytes=self.boundary.at(sizes),
            saved_bytes=self.saved.at(sizes),
        )

    def agrees_with(self, measured: Measured, sizes: Sizes) -> bool:
        """Whether a count at these sizes found the same."""
        here = self.at(sizes)
        return all(
            getattr(here, name) == getattr(measured, name)
            for name in (
                "forward_peak_bytes",
                "backward_peak_bytes",
                "boundary_bytes",
                "saved_bytes",
            )
        )

    def __str__(self) -> str:
        if self.backward_peak is None:
            return str(self.forward_peak)
        peaks = (self.forward_peak, self.backward_peak)
        moments = [moment for peak in peaks for moment in peak.moments()]
        least = {symbol: 1 for peak in peaks for symbol in peak.symbols}
        return str(PeakFormula.of(moments, self.forward_peak.allocator, least))
