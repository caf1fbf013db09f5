"""Functions that Dynamo leaves as they are."""

from __future__ import annotations

from collections.abc import Callable
from typing import ParamSpec, TypeVar

from dtrcompile.passes.torch_private import FrameAction, FrameExecStrategy, set_code_exec_strategy

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")


def untraced(function: Callable[Parameters, Result]) -> Callable[Parameters, Result]:
    """Have Dynamo run a function, and all that it calls, without compiling any of it.

    Autograd and optimizers call functions of ours.  Where the user compiles a function that runs
    backward, Dynamo would take these for a part of it.

    It is the function itself that is returned: the wrapper of `torch.compiler.disable` would hold
    what it is given, and how many hold a gradient is counted.
    """
    strategy = FrameExecStrategy(FrameAction.SKIP, FrameAction.SKIP)
    set_code_exec_strategy(function.__code__, strategy)  # type: ignore[attr-defined]
    return function
