"""Planning without compiling: the outcome leaves PyTorch's compilation as an exception."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from contextvars import ContextVar

from dtrcompile.options import Budget
from dtrcompile.outside.surroundings import SurroundingBytes
from dtrcompile.passes.errors import InfeasibleBudgetError
from dtrcompile.passes.fitting.fit import Outcome


class ProbedPlan(BaseException):
    """Carries the outcome of planning.  It is not an error, so nothing on the way handles it.

    Attributes:
        outcomes: one for each budget that was asked for; a refusal where no plan fits.
        input_names: of the traced graph's inputs, as the user's program reads them.
        beside: what no graph holds.
        around_bytes: of a training step, what is there when an optimizer steps.
        reserved_bytes: for each outcome that this is asked for, what the caching allocator of a GPU
            takes from it over some steps; None for a refusal, and on a CPU.
    """

    def __init__(
        self,
        outcomes: Sequence[Outcome | InfeasibleBudgetError],
        input_names: Sequence[str],
        beside: SurroundingBytes,
        around_bytes: int,
    ) -> None:
        super().__init__()
        self.outcomes = outcomes
        self.input_names = input_names
        self.beside = beside
        self.around_bytes = around_bytes
        self.reserved_bytes: Sequence[int | None] = ()

    @property
    def outcome(self) -> Outcome:
        """Of the only budget.

        Raises:
            InfeasibleBudgetError: if no plan fits.
        """
        (outcome,) = self.outcomes
        if isinstance(outcome, InfeasibleBudgetError):
            raise outcome
        return outcome


_BUDGETS: ContextVar[Sequence[Budget] | None] = ContextVar("dtrcompile_probing", default=None)


def is_probing() -> bool:
    """Whether graphs are only to be planned, and `ProbedPlan` raised, instead of compiled."""
    return _BUDGETS.get() is not None


def probed_budgets() -> Sequence[Budget]:
    """The budgets to plan a graph for; none: that of its options."""
    return _BUDGETS.get() or ()


@contextlib.contextmanager
def probing(budgets: Sequence[Budget] = ()) -> Iterator[None]:
    """Inside of the ``with`` block, graphs are planned and not compiled.

    Args:
        budgets: to plan for one after the other; none: that of the options.
    """
    token = _BUDGETS.set(budgets)
    try:
        yield
    finally:
        _BUDGETS.reset(token)
