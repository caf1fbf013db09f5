"""What planning does at the moment, for whoever shows it to people."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextvars import ContextVar

# The names of what planning does among PyTorch's compile-time events, which
# ``torch._dynamo.utils.compile_times()`` lists and ``tlparse`` draws as a flame chart.
CAPTURE = "dtrcompile.capture"
PLANNING = "dtrcompile.planning"
EMISSION = "dtrcompile.emission"
LOWERING = "dtrcompile.lowering"
CHECK = "dtrcompile.check"

_LISTENER: ContextVar[Callable[[str], None] | None] = ContextVar("dtrcompile_stage", default=None)


def stage(text: str) -> None:
    """Planning begins with this: ``"lowering plan 3"``."""
    listener = _LISTENER.get()
    if listener is not None:
        listener(text)


@contextlib.contextmanager
def listening(listener: Callable[[str], None]) -> Iterator[None]:
    """Within it, ``listener`` is told each stage, in this thread."""
    token = _LISTENER.set(listener)
    try:
        yield
    finally:
        _LISTENER.reset(token)
