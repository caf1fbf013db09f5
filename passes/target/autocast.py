"""Automatic mixed precision on fake CUDA tensors that are none to C++.

PyTorch casts in C++, and there only what says that it is on the GPU, which the tensors of `tracing`
do not.  So the policies are applied here, to the operators that PyTorch's own header lists for each
of them (``ATen/autocast_mode.h``, which every build of PyTorch comes with).
"""

from __future__ import annotations

import contextlib
import functools
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.utils import _pytree as pytree

from dtrcompile.passes.errors import CaptureError
from dtrcompile.passes.target.python_kernels import python_kernel
from dtrcompile.passes.torch_private import (
    DispatchKey,
    DispatchKeySet,
    ExcludeDispatchKeyGuard,
    OpOverload,
)

_KEY = DispatchKey.AutocastCUDA
_WITHOUT_AUTOCAST = DispatchKeySet(_KEY)
_HEADER = Path(torch.__file__).parent / "include" / "ATen" / "autocast_mode.h"
# These are not in the header's lists, and treated as what promotes.
_ALSO_PROMOTED = ("cat", "stack")

Arguments = tuple[tuple[Any, ...], dict[str, Any]]
Policy = Callable[[OpOverload, Arguments], Arguments]


@contextlib.contextmanager
def autocasting() -> Iterator[None]:
    """Inside of the ``with`` block, ``torch.autocast("cuda")`` has its effect on such tensors."""
    with contextlib.ExitStack() as stack:
        for op, policy in _policies().items():
            cast = functools.partial(_cast, op, policy)
            stack.enter_context(python_kernel(op, _KEY, cast))
        yield


def _cast(op: OpOverload, policy: Policy, *args: Any, **kwargs: Any) -> Any:
    with ExcludeDispatchKeyGuard(_WITHOUT_AUTOCAST):
        args, kwargs = policy(op, (args, kwargs))
        return op(*args, **kwargs)


@functools.cache
def _policies() -> Mapping[OpOverload, Policy]:
    """Which policy applies to which operator.

    Raises:
        CaptureError: if the header cannot be read, or has other lists.
    """
    try:
        header = _HEADER.read_text(encoding="utf-8").replace("\\\n", " ")
    except OSError as error:
        raise CaptureError(
            f"what autocast does on a GPU is read from {_HEADER}, which cannot be read: {error}."
            " Plan with dtype= in place of autocast=."
        ) from error
    policies: dict[OpOverload, Policy] = {}
    for name, policy in (
        ("LOWER_PRECISION_FP", _to_lower),
        ("FP32", _to_float32),
        ("FP32_SET_OPT_DTYPE", _returning_float32),
        ("PROMOTE", _to_widest),
    ):
        found = re.search(rf"#define AT_FORALL_{name}\(_\)(.*)", header)
        if found is None:
            raise CaptureError(
                f"PyTorch {torch.__version__} lists the operators of autocast in another way than"
                " dtrcompile knows. Plan with dtype= in place of autocast=, and please report it."
            )
        listed = re.findall(r"_\((\w+)(?:, (\w+))?\)", found[1])
        policies |= {op: policy for op in map(_overload, listed) if op is not None}
    policies |= {getattr(torch.ops.aten, name).default: _to_widest for name in _ALSO_PROMOTED}
    return policies


def _overload(listed: tuple[str, str]) -> OpOverload | None:
    packet = getattr(torch.ops.aten, listed[0], None)
    return getattr(packet, listed[1] or "default", None)


def _is_eligible(leaf: Any) -> bool:
    return (
        isinstance(leaf, torch.Tensor)
        and leaf.is_floating_point()
        and leaf.dtype is not torch.float64
        and leaf.device.type == "cuda"
    )


def _all_to(dtype: torch.dtype, arguments: Arguments) -> Arguments:
    def cast(leaf: Any) -> Any:
        return leaf.to(dtype) if _is_eligible(leaf) and leaf.dtype != dtype else leaf

    return pytree.tree_map(cast, arguments)  # type: ignore[no-any-return]


def _to_lower(_op: OpOverload, arguments: Arguments) -> Arguments:
    return _all_to(torch.get_autocast_dtype("cuda"), arguments)


def _to_float32(_op: OpOverload, arguments: Arguments) -> Arguments:
    return _all_to(torch.float32, arguments)


def _returning_float32(op: OpOverload, arguments: Arguments) -> Arguments:
    """Casts nothing, and asks for a result in float32 where the caller asks for nothing."""
    args, kwargs = arguments
    names = [argument.name for argument in op._schema.arguments]
    given: Sequence[str] = names[: len(args)]
    asked = args[given.index("dtype")] if "dtype" in given else kwargs.get("dtype")
    if asked is not None or not _is_eligible(args[0]):
        return arguments
    if "dtype" in given:
        at = given.index("dtype")
        return (*args[:at], torch.float32, *args[at + 1 :]), kwargs
    return args, {**kwargs, "dtype": torch.float32}


def _to_widest(_op: OpOverload, arguments: Arguments) -> Arguments:
    dtypes = [leaf.dtype for leaf in pytree.tree_leaves(arguments) if _is_eligible(leaf)]
    if not dtypes:
        return arguments
    return _all_to(functools.reduce(torch.promote_types, dtypes), arguments)
