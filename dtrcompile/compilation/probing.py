"""Planning without compiling: the outcome leaves PyTorch's compilation as an exception."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass

from dtrcompile.options import Budget
from dtrcompile.outside.surroundings import SurroundingBytes
from dtrcompile.passes.errors import InfeasibleBudgetError
from dtrcompile.passes.fitting.fit import Outcome
from dtrcompile.passes.fitting.measured import Measured


@dataclass(frozen=True)
class StockSplit:
    """PyTorch's split of a step into forward and backward, at a setting of its own.

    Attributes:
        share: ``torch._functorch.config.activation_memory_budget``.
        measured: what it holds.
        cost_ns: of its operators, those that its backward computes again included.
    """

    share: float
    measured: Measured
    cost_ns: int


class ProbedPlan(BaseException):
    """Carries the outcome of planning.  It is not an error, so nothing on the way handles it.

    Attributes:
        outcomes: one for each budget that was asked for; a refusal where no plan fits.
        input_names: of the traced graph's inputs, as the user's program reads them.
        beside: what no graph holds.
        around_bytes: of a training step, what is there when an optimizer steps.
        reserved_bytes: for each outcome that this is asked for, what the caching allocator of a GPU
            takes from it over some steps; None for a refusal, and on a CPU.
        stock: one for each setting of PyTorch's that was asked for.
        loss_bytes: about what a loss of what the graph returns would hold at most, outside of it; 0
            where a loss is among it.
    """

    def __init__(
        self,
        outcomes: Sequence[Outcome | InfeasibleBudgetError],
        input_names: Sequence[str],
        beside: SurroundingBytes,
        around_bytes: int,
        stock: Sequence[StockSplit] = (),
    ) -> None:
        super().__init__()
        self.outcomes = outcomes
        self.input_names = input_names
        self.beside = beside
        self.around_bytes = around_bytes
        self.reserved_bytes: Sequence[int | None] = ()
        self.stock = stock
        self.loss_bytes = 0

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


@dataclass(frozen=True)
class Asked:
    """What a graph is planned for.

    Attributes:
        budgets: one after the other; none: that of its options.
        shares: settings of ``activation_memory_budget`` at which PyTorch splits it too.
    """

    budgets: Sequence[Budget] = ()
    shares: Sequence[float] = ()


_ASKED: ContextVar[Asked | None] = ContextVar("dtrcompile_probing", default=None)


def is_probing() -> bool:
    """Whether graphs are only to be planned, and `ProbedPlan` raised, instead of compiled."""
    return _ASKED.get() is not None


def asked() -> Asked:
    """What a graph is planned for, where it is only planned."""
    return _ASKED.get() or Asked()


@contextlib.contextmanager
def probing(asked: Asked = Asked()) -> Iterator[None]:
    """Inside of the ``with`` block, graphs are planned and not compiled."""
    token = _ASKED.set(asked)
    try:
        yield
    finally:
        _ASKED.reset(token)
