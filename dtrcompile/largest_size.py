"""The largest batch, or the longest sequence, that trains within a budget.

The peak of the smallest plan is a formula in the size (`passes.peak_formula`).  The size at which
it meets the budget is only a first guess, because the smallest plan for one size is not the
smallest for another.  From there on, sizes are planned exactly as `torch.compile` would plan them,
until one fits and the next does not.  Nothing is compiled to kernels or run.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from dtrcompile.options import Budget, Options
from dtrcompile.passes.errors import InfeasibleBudgetError, OptionError, format_bytes
from dtrcompile.passes.fitting.fit import Outcome
from dtrcompile.passes.program.sizes import Sizes
from dtrcompile.probe import planned_outcome

log = logging.getLogger("dtrcompile")

SYMBOLS: Mapping[str, int] = {"batch": 0, "length": 1}
"""Names of dimensions; a number names any other."""

# Parts of the largest size at which the overhead is told, so that a person sees what it costs.
_PARTS = (1 / 4, 1 / 2, 3 / 4)


@dataclass(frozen=True, slots=True)
class SizePoint:
    """A size that trains within the budget.

    Attributes:
        promised_peak_bytes: the most that a step holds.
        overhead: planned cost / baseline cost.
        cost_ns: planned cost of a step, by the cost model.
    """

    size: int
    promised_peak_bytes: int
    overhead: float
    cost_ns: int

    @property
    def relative_throughput(self) -> float:
        """The size per planned nanosecond; only ratios of such values mean anything."""
        return self.size / self.cost_ns if self.cost_ns else 0.0


@dataclass(frozen=True, slots=True)
class Largest:
    """The result of `largest`.

    Attributes:
        symbol: what was varied.
        size: the largest size that trains within the budget; the next does not.
        budget_bytes: the budget for that size.
        points: this size and a few smaller ones, ascending.
    """

    symbol: str
    size: int
    budget_bytes: int
    points: tuple[SizePoint, ...]

    def __str__(self) -> str:
        best = max(point.relative_throughput for point in self.points)
        lines = [
            f"largest {self.symbol} within {format_bytes(self.budget_bytes)}: {self.size}",
            f"  {self.symbol:>8}  {'peak':>10}  overhead  throughput of the best (planned)",
        ]
        lines += [
            f"  {p.size:>8}  {format_bytes(p.promised_peak_bytes):>10}  {p.overhead:8.3f}"
            f"  {p.relative_throughput / best if best else 1.0:.2f}"
            for p in self.points
        ]
        return "\n".join(lines)


def largest(
    model: nn.Module,
    *inputs: Tensor,
    symbol: str | int = "batch",
    budget: object = None,
    most: int | None = None,
    **options: Any,
) -> Largest:
    """The largest size at which a training step of ``model`` stays within a budget.

    Only the planning is run: inputs of other sizes are made by repeating the given ones.

    Args:
        inputs: of any size that trains, and not smaller than 2.
        symbol: ``"batch"`` (dimension 0), ``"length"`` (dimension 1), or the number of a dimension.
            The size is changed in every input tensor that has the same size in this dimension as
            the first tensor with this dimension.
        budget: as option ``budget``, in bytes; a share or ``"min"`` grows with the size.
        most: larger sizes are not looked at; None means 2 ** 20 times the given size.
        options: as for ``torch.compile(..., backend="dtr")``.

    Raises:
        InfeasibleBudgetError: if not even the smallest size fits.
        OptionError: for a budget that grows with the size, or inputs without that dimension.
    """
    given = dict(options) if budget is None else {**options, "budget": budget}
    parsed = Options.parse(given)
    if parsed.is_share or parsed.budget.kind.value == "min":
        raise OptionError(
            f"largest needs a budget in bytes, not {parsed.budget}: a share of the unbudgeted peak"
            " grows with the size. Pass budget='8GiB'."
        )
    return _Search(model, inputs, symbol, parsed, most).run()


class _Search:
    def __init__(
        self,
        model: nn.Module,
        inputs: Sequence[Any],
        symbol: str | int,
        options: Options,
        most: int | None,
    ) -> None:
        self.model = model
        self.inputs = inputs
        self.options = options
        self.symbol = str(symbol) if isinstance(symbol, str) else f"size of dimension {symbol}"
        if isinstance(symbol, str) and symbol not in SYMBOLS:
            raise OptionError.unknown("symbol", symbol, SYMBOLS)
        self.dimension = SYMBOLS[symbol] if isinstance(symbol, str) else symbol
        self.size = self._given_size()
        self.most = most or self.size << 20
        self.outcomes: dict[int, Outcome | InfeasibleBudgetError] = {}

    def _given_size(self) -> int:
        for value in self.inputs:
            if isinstance(value, Tensor) and value.dim() > self.dimension >= 0:
                return int(value.shape[self.dimension])
        raise OptionError(
            f"no input has a dimension {self.dimension}, which is to be changed. Pass the tensors"
            " that the model is called with, and symbol='batch' (dimension 0), 'length' (dimension"
            " 1) or the number of a dimension."
        )

    def _changes(self, value: object) -> bool:
        return (
            isinstance(value, Tensor)
            and value.dim() > self.dimension
            and value.shape[self.dimension] == self.size
        )

    def inputs_of(self, size: int) -> list[Any]:
        """The given inputs, repeated up to ``size``."""
        found: list[Any] = []
        for value in self.inputs:
            if self._changes(value):
                index = torch.arange(size, device=value.device) % self.size
                with torch.no_grad():
                    found.append(
                        value.index_select(self.dimension, index).requires_grad_(
                            value.requires_grad
                        )
                    )
            else:
                found.append(value)
        return found

    def outcome(self, size: int) -> Outcome | InfeasibleBudgetError:
        """What `torch.compile` would plan for a size."""
        if size not in self.outcomes:
            try:
                self.outcomes[size] = planned_outcome(
                    self.model, self.inputs_of(size), self.options
                )
            except InfeasibleBudgetError as refusal:
                self.outcomes[size] = refusal
            log.info("%s %d: %s", self.symbol, size, "fits" if self.fits(size) else "does not fit")
        return self.outcomes[size]

    def fits(self, size: int) -> bool:
        return isinstance(self.outcome(size), Outcome)

    def run(self) -> Largest:
        low, high = self._bracket(min(self._guess(), self.most))
        while high - low > 1:
            middle = (low + high) // 2
            if self.fits(middle):
                low = middle
            else:
                high = middle
        sizes = {max(1, int(low * part)) for part in _PARTS} | {low}
        points = [self._point(size) for size in sorted(sizes) if self.fits(size)]
        found = self.outcome(low)
        assert isinstance(found, Outcome) and found.budget_bytes is not None
        return Largest(self.symbol, low, found.budget_bytes, tuple(points))

    def _guess(self) -> int:
        """Where the smallest plan for the given size meets the budget."""
        smallest = replace(self.options, budget=Budget.parse("min"))
        budget_bytes = self.options.resolve_budget_bytes(0, None)
        marked = {i: self.dimension for i, v in enumerate(self.inputs) if self._changes(v)}
        if self.size < 2:
            return self.size
        outcome = planned_outcome(
            self.model, self.inputs_of(self.size), smallest, dynamic_dimensions=marked
        )
        by_sizes, symbols = outcome.measured.by_sizes, outcome.captured.symbols
        if by_sizes is None or len(symbols) != 1 or budget_bytes is None:
            return self.size
        (symbol,) = symbols

        def is_within(size: int) -> bool:
            return by_sizes.at(Sizes.of({symbol: size})).peak_bytes <= budget_bytes

        # From below: what library calls hold inside is measured at each size that is looked at, on
        # tensors of that size.
        low, high = 1, self.size
        while high < self.most and is_within(high):
            low, high = high, min(2 * high, self.most)
        while low < high:
            middle = (low + high + 1) // 2
            if is_within(middle):
                low = middle
            else:
                high = middle - 1
        return low

    def _bracket(self, guess: int) -> tuple[int, int]:
        """A size that fits and a larger one that does not, near the guess."""
        step = 1
        if self.fits(guess):
            low = guess
            while low < self.most:
                high = min(low + step, self.most)
                if not self.fits(high):
                    return low, high
                low, step = high, 2 * step
            return low, low + 1
        high = guess
        while high > 1:
            low = max(high - step, 1)
            if self.fits(low):
                return low, high
            high, step = low, 2 * step
        refusal = self.outcome(high)
        assert isinstance(refusal, InfeasibleBudgetError)
        raise refusal

    def _point(self, size: int) -> SizePoint:
        outcome = self.outcome(size)
        assert isinstance(outcome, Outcome)
        return SizePoint(
            size, outcome.measured.peak_bytes, outcome.stats.overhead, outcome.stats.cost_ns
        )
