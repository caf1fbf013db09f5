"""Operators that tracing takes for a function in Python."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

from dtrcompile.passes.torch_private import DispatchKey, OpOverload


@contextlib.contextmanager
def python_kernel(op: OpOverload, key: DispatchKey, function: Callable[..., Any]) -> Iterator[None]:
    """Inside of the ``with`` block, PyTorch's dispatcher in Python calls ``function`` for a key."""
    op._dispatch_cache.clear()
    try:
        with mock.patch.dict(op.py_kernels, {key: function}):
            yield
    finally:
        op._dispatch_cache.clear()
