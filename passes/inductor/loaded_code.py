"""The source of every wrapper that Inductor writes, or that PyTorch's caches load, in this thread.

AOTAutograd's cache hands out compiled graphs without asking the partitioner or the inner compiler.
Inductor calls ``GraphLowering.save_output_code``, where that is set, with the source of each
wrapper, written or loaded; it is set here for as long as somebody in this process listens.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any

from dtrcompile.passes.torch_private import GraphLowering

_NOTED: ContextVar[list[str] | None] = ContextVar("dtrcompile_loaded_code", default=None)
_LOCK = threading.Lock()
_users = 0
_before: Callable[[str], Any] | None = None


@contextlib.contextmanager
def noting_code() -> Iterator[list[str]]:
    """Collect the sources, in the order in which they are written or loaded."""
    global _users, _before
    found: list[str] = []
    with _LOCK:
        if not _users:
            _before, GraphLowering.save_output_code = GraphLowering.save_output_code, _note
        _users += 1
    token = _NOTED.set(found)
    try:
        yield found
    finally:
        _NOTED.reset(token)
        with _LOCK:
            _users -= 1
            if not _users:
                GraphLowering.save_output_code, _before = _before, None


def _note(source: str) -> None:
    noted, before = _NOTED.get(), _before
    if noted is not None:
        noted.append(source)
    if before is not None:
        before(source)
