"""The largest batch, or the longest sequence, that trains within a budget.

The peak of the smallest plan is a formula in the size (`passes.peak_formula`).  The size at which
it meets the budget is only a first guess, because the smallest plan for one size is not the
smallest for another.  From there on, sizes are planned exactly as `torch.compile` would plan them,
until one fits and the next, or one a thousandth larger, does not.  Nothing is compiled to kernels
or run.
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from dtrcompile.elsewhere import Elsewhere, elsewhere_of
from dtrcompile.options import Budget, Options
from dtrcompile.passes.errors import (
    CaptureError,
    InfeasibleBudgetError,
    OptionError,
    VerificationError,
    format_bytes,
)
from dtrcompile.passes.fitting.fit import Outcome
from dtrcompile.passes.program.sizes import Sizes
from dtrcompile.passes.target.tracing import not_traced
from dtrcompile.probe import planned_for

log = logging.getLogger("dtrcompile")

SYMBOLS: Mapping[str, int] = {"batch": 0, "length": 1}
"""Names of dimensions; a number names any other."""

# Larger sizes are told to so many parts: each look takes as long as a plan.
_EXACT_UP_TO = 1000

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
        size: the largest size that trains within the budget.
        refused_size: one that does not: the next, or, above 1,000, one at most a thousandth larger.
            If ``most`` trains, ``most + 1``, which was not looked at.
        budget_bytes: the budget for that size.
        points: this size and a few smaller ones, ascending.
    """

    symbol: str
    size: int
    refused_size: int
    budget_bytes: int
    points: tuple[SizePoint, ...]

    def to_json(self) -> str:
        """One JSON object with a key for each field."""
        return json.dumps(asdict(self))

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
    device: str | None = None,
    dtype: torch.dtype | None = None,
    autocast: torch.dtype | None = None,
    **options: Any,
) -> Largest:
    """The largest size at which a training step of ``model`` stays within a budget: exactly up to
    1,000, to a thousandth above that.

    Only the planning is run: inputs of other sizes are made by repeating the given ones.

    Args:
        inputs: of any size that trains, and not smaller than 2.
        symbol: ``"batch"`` (dimension 0), ``"length"`` (dimension 1), or the number of a dimension.
            The size is changed in every input tensor that has the same size in this dimension as
            the first tensor with this dimension.
        budget: as option ``budget``, in bytes; a share or ``"min"`` grows with the size.
        most: larger sizes are not looked at; None means 2 ** 20 times the given size.
        device: the device to plan for: a GPU that need not be there, such as ``"cuda:H100-80GB"``
            (`dtrcompile.passes.target.devices.TARGETS`), all of whose memory may be taken if no
            budget is given; without it, where the tensors are.
        dtype: of the model's floating-point parameters, buffers and inputs; without it, their own.
        autocast: plan as if the step ran under ``torch.autocast`` with this dtype.
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
    return _Search(model, inputs, symbol, parsed, most, elsewhere_of(device, dtype, autocast)).run()


class _Search:
    def __init__(
        self,
        model: nn.Module,
        inputs: Sequence[Any],
        symbol: str | int,
        options: Options,
        most: int | None,
        elsewhere: Elsewhere,
    ) -> None:
        self.model = model
        self.elsewhere = elsewhere
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
                found.append(self._of_size(value, size).requires_grad_(value.requires_grad))
            else:
                found.append(value)
        return found

    @torch.no_grad()
    def _of_size(self, value: Tensor, size: int) -> Tensor:
        if self.elsewhere.moves:  # to where it has no data
            shape = [*value.shape]
            shape[self.dimension] = size
            return torch.empty(shape, dtype=value.dtype, device="meta")
        index = torch.arange(size, device=value.device) % self.size
        return value.index_select(self.dimension, index)

    def outcome(self, size: int) -> Outcome | InfeasibleBudgetError:
        """What `torch.compile` would plan for a size."""
        if size not in self.outcomes:
            try:
                self.outcomes[size] = self._planned(size, self.options)
            except InfeasibleBudgetError as refusal:
                self.outcomes[size] = refusal
            log.info("%s %d: %s", self.symbol, size, "fits" if self.fits(size) else "does not fit")
        return self.outcomes[size]

    def _planned(self, size: int, options: Options, **how: Any) -> Outcome:
        planned = planned_for(
            self.model, self.inputs_of(size), options, elsewhere=self.elsewhere, **how
        )
        return planned.outcome

    def fits(self, size: int) -> bool:
        return isinstance(self.outcome(size), Outcome)

    def run(self) -> Largest:
        low, high = self._largest(min(self._guess(), self.most))
        sizes = {max(1, int(low * part)) for part in _PARTS} | {low}
        points = [self._point(size) for size in sorted(sizes) if self.fits(size)]
        found = self.outcome(low)
        assert isinstance(found, Outcome) and found.budget_bytes is not None
        return Largest(self.symbol, low, high, found.budget_bytes, tuple(points))

    def _guess(self) -> int:
        """Where the smallest plan for the given size meets the budget, if that can be told."""
        try:
            return self._size_of_formula()
        except (CaptureError, VerificationError) as error:
            # The model can be planned for sizes that are numbers, perhaps, and not for a symbol.
            log.info("%s: no formula (%s); starting from %d", self.symbol, error, self.size)
            return self.size

    def _size_of_formula(self) -> int:
        smallest = replace(self.options, budget=Budget.parse("min"))
        target = self.elsewhere.target
        available_bytes = None if target is None else target.available_bytes
        budget_bytes = self.options.resolve_budget_bytes(0, available_bytes)
        marked = {i: self.dimension for i, v in enumerate(self.inputs) if self._changes(v)}
        if self.size < 2:
            return self.size
        outcome = self._planned(self.size, smallest, dynamic_dimensions=marked)
        by_sizes, symbols = outcome.measured.by_sizes, outcome.captured.symbols
        if by_sizes is None or len(symbols) != 1 or budget_bytes is None:
            return self.size
        (symbol,) = symbols

        def is_within(size: int) -> bool:
            return by_sizes.at(Sizes.of({symbol: size})).peak_bytes <= budget_bytes

        # From below: what library calls hold inside is measured at each size that is looked at, on
        # tensors of that size.
        with self.elsewhere.entered(), not_traced():
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

    def _largest(self, size: int) -> tuple[int, int]:
        """A size that fits and its successor, or about that, which does not.

        Args:
            size: to look at first.

        Raises:
            InfeasibleBudgetError: if not even 1 fits.
        """
        low, high = 0, self.most + 1  # what is known to fit, and what is not
        n_short = 0  # steps that halved nothing, one after the other
        while True:
            width = high - low
            if self.fits(size):
                low = size
            else:
                high = size
            step = max(1, low // _EXACT_UP_TO)
            if high - low <= step:
                break
            n_short = n_short + 1 if 2 * (high - low) > width else 0
            if high > self.most:
                size = min(2 * low, self.most)
            elif n_short == 2:
                size, n_short = (low + high) // 2, 0
            else:
                size = max(low + step, min(self._size_of_budget(), high - step))
        refusal = self.outcome(1) if not low else None
        if isinstance(refusal, InfeasibleBudgetError):
            raise refusal
        return low, high

    def _size_of_budget(self) -> int:
        """Where the smallest peaks that refusals name would meet the budget, along a line."""
        named = [
            (size, outcome.minimum_bytes, outcome.budget_bytes)
            for size, outcome in sorted(self.outcomes.items())
            if isinstance(outcome, InfeasibleBudgetError)
        ]
        (size, peak_bytes, budget_bytes), *others = named
        if not peak_bytes or not budget_bytes:
            return size // 2
        bytes_of_one = peak_bytes / size
        if others and (larger_bytes := others[0][1] or 0) > peak_bytes:
            bytes_of_one = (larger_bytes - peak_bytes) / (others[0][0] - size)
        return size - math.ceil((peak_bytes - budget_bytes) / bytes_of_one)

    def _point(self, size: int) -> SizePoint:
        outcome = self.outcome(size)
        assert isinstance(outcome, Outcome)
        return SizePoint(
            size, outcome.measured.peak_bytes, outcome.stats.overhead, outcome.stats.cost_ns
        )
