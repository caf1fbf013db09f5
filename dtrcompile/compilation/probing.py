"""Planning without compiling: the outcome leaves PyTorch's compilation as an exception."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar

from dtrcompile.passes.fitting.fit import Outcome


class ProbedPlan(BaseException):
    """Carries the outcome of planning.  It is not an error, so nothing on the way handles it."""

    def __init__(self, outcome: Outcome) -> None:
        super().__init__()
        self.outcome = outcome


_PROBING: ContextVar[bool] = ContextVar("dtrcompile_probing", default=False)


def is_probing() -> bool:
    """Whether graphs are only to be planned, and `ProbedPlan` raised, instead of compiled."""
    return _PROBING.get()


@contextlib.contextmanager
def probing() -> Iterator[None]:
    """Inside of the ``with`` block, graphs are planned and not compiled."""
    token = _PROBING.set(True)
    try:
        yield
    finally:
        _PROBING.reset(token)
