"""`recompute`: only the inputs of what runs inside are kept, whatever the budget.

The one-line scope for what the user knows better than any planner, in the manner of OneFlow's
checkpointing scope.  It is a request, not a plan: what is inside is computed again in backward from
its inputs; random numbers are not drawn again; and the planner may recompute more in order to stay
within the budget.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, TypeVar, overload

_Function = TypeVar("_Function", bound=Callable[..., Any])

_scopes = itertools.count()


def _fresh_scope() -> int:
    return next(_scopes)


# What torch.compiler.assume_constant_result does, which would import torch: Dynamo calls the
# function while it traces, so each `with` that it meets is a scope of its own.
_fresh_scope._dynamo_marked_constant = True  # type: ignore[attr-defined]


@overload
def recompute() -> AbstractContextManager[None]: ...


@overload
def recompute(function: _Function) -> _Function: ...


def recompute(function: Callable[..., Any] | None = None) -> Any:
    """Keep only the inputs of what runs inside; as a context manager or a decorator.

    ::

        with dtrcompile.recompute():
            x = block(x)


        @dtrcompile.recompute
        def attention(q, k, v): ...

    Outside of ``torch.compile(..., backend="dtr")`` it does nothing.

    Args:
        function: the function to decorate; with None, the context manager is returned.
    """
    from torch.fx.traceback import annotate

    from dtrcompile.passes.graphs.recompute_tags import SCOPE

    if function is None:
        return annotate({SCOPE: _fresh_scope()})

    @functools.wraps(function)
    def inside(*args: Any, **kwargs: Any) -> Any:
        with recompute():
            return function(*args, **kwargs)

    return inside
