"""Memory that a library call takes and gives back inside: measured once for each distinct call.

oneDNN's reordered copies, cuDNN's scratch space and sort buffers are in no graph.  A call's
workspace is what its allocator peak exceeds inputs and outputs by; it depends on the library, the
shapes and the layouts, so it is measured on the device with inputs of that form, and remembered for
the life of the process.  Calls that draw random numbers are not run; they count as having none.
Fused attention is run all the same, and the random state is as before.  On a device that is not
there nothing is run: `target.workspaces` gives bounds.

Operators of others than torch are run too, on zeros, unless what they hold was declared
(`passes.declared`).  Where one cannot be run, `unknown_workspaces` says so.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from dtrcompile.passes.declared import declaration
from dtrcompile.passes.nodes import extent_bytes, hint, is_custom, is_on_cpu, map_by_name
from dtrcompile.passes.process_switches import (
    has_float32_products_in_lower_precision,
    process_switches,
)
from dtrcompile.passes.target.devices import current_target
from dtrcompile.passes.target.workspaces import foreseen_bytes
from dtrcompile.passes.torch_private import (
    ExperimentalConfig,
    OpOverload,
    ProfilerConfig,
    ProfilerState,
    disable_modes,
    disable_profiler,
    enable_profiler,
)

log = logging.getLogger("dtrcompile.workspaces")

_CACHE: dict[object, int] = {}
# Custom operators that could not be run -> why.
_UNKNOWN: dict[str, str] = {}
_LOCK = threading.Lock()
_REFUSALS = (RuntimeError, NotImplementedError, TypeError, ValueError, IndexError)
_SETTINGS = ExperimentalConfig()

# These allocate exactly what they return.
_EXACT = frozenset(
    {
        "aten::empty",
        "aten::empty_strided",
        "aten::as_strided",
        "aten::full",
        "aten::zeros",
        "aten::detach",
        "aten::alias",
    }
)
# These too on a CPU, but for operands in a layout that BLAS does not take (rows on top of each
# other), which are copied, and for low precision, where oneDNN makes copies in a layout of its own.
# On CUDA cuBLASLt may take a workspace from the allocator for each call.
_PRODUCTS = frozenset({"aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm"})


def workspace_bytes(
    func: object, args: Sequence[object], kwargs: Mapping[str, object], result: object
) -> int:
    """Bytes that ``func`` holds only while it runs on (fake) arguments of this form.

    Args:
        result: what the fake kernel returned.  Where that is None and the real kernel returns a
            tensor all the same (a convolution's weight gradient, which on a CPU comes with the
            bias's), nobody will count it, so it is part of the workspace.
    """
    if not isinstance(func, OpOverload):
        return 0
    declared = declaration(func._schema.name)
    if declared is not None and declared.workspace_bytes is not None:
        size_bytes = declared.workspace_bytes
        return size_bytes if isinstance(size_bytes, int) else int(size_bytes(*args, **kwargs))
    if not _is_measurable(func, args):
        return 0
    return measured_workspace_bytes(func, args, kwargs, result)


def measured_workspace_bytes(
    func: OpOverload, args: Sequence[object], kwargs: Mapping[str, object], result: object
) -> int:
    """`workspace_bytes` of any operator: also of one that holds a few bytes at most."""
    signature = (
        current_target(),
        process_switches(),
        str(func),
        pytree.tree_map(_form, (tuple(args), tuple(sorted(kwargs.items())))),
    )
    key = repr(signature)
    with _LOCK:
        if key not in _CACHE:
            _CACHE[key] = _measure(func, args, kwargs, result)
        return _CACHE[key]


def unknown_workspaces(graphs: Iterable[fx.GraphModule]) -> dict[str, str]:
    """Operators in ``graphs`` of which it is not known what they hold inside, and why."""
    with _LOCK:
        names = {str(n.target) for g in graphs for n in g.graph.nodes if n.op == "call_function"}
        return {name: why for name, why in _UNKNOWN.items() if name in names}


def may_hold_workspace(func: object, args: Sequence[object]) -> bool:
    """Whether `workspace_bytes` can be other than 0 for arguments of some sizes."""
    if not isinstance(func, OpOverload):
        return False
    declared = declaration(func._schema.name)
    if declared is not None and declared.workspace_bytes is not None:
        return True
    return _is_measurable(func, args)


def _is_measurable(func: OpOverload, args: Sequence[object]) -> bool:
    if is_custom(func):
        # One that returns nothing is run for what it does.
        return bool(func._schema.returns) and not _is_random(func)
    if func.namespace != "aten" or func._schema.name in _EXACT:
        return False
    if func._schema.name in _PRODUCTS:
        return any(
            leaf.device.type != "cpu"
            or _is_multiplied_in_low_precision(leaf.dtype)
            or not _is_for_blas(leaf)
            for leaf in args
            if isinstance(leaf, torch.Tensor) and leaf.dim() >= 2
        )
    if torch.Tag.pointwise in func.tags or (_is_random(func) and not _is_attention(func)):
        return False
    is_view = any(a.alias_info and not a.alias_info.is_write for a in func._schema.arguments)
    return not is_view


def _is_multiplied_in_low_precision(dtype: torch.dtype) -> bool:
    """On a CPU."""
    if dtype == torch.float32:
        return has_float32_products_in_lower_precision("cpu")
    return dtype in (torch.bfloat16, torch.float16)


def _is_random(func: OpOverload) -> bool:
    return torch.Tag.nondeterministic_seeded in func.tags


def _is_attention(func: OpOverload) -> bool:
    """Backward sums up in float32, cuDNN has a workspace; both are tagged random, for dropout."""
    return "attention" in func._schema.name


def _is_for_blas(matrix: torch.Tensor) -> bool:
    """Whether rows or columns lie one after the other, each in one piece."""
    rows, columns = (hint(size) for size in matrix.shape[-2:])
    down, right = (hint(stride) for stride in matrix.stride()[-2:])
    return (right == 1 and down >= max(1, columns)) or (down == 1 and right >= max(1, rows))


def _form(leaf: object) -> object:
    if isinstance(leaf, torch.Tensor):
        return (tuple(leaf.shape), leaf.stride(), str(leaf.dtype), str(leaf.device))
    return leaf


def _real_arguments(
    func: OpOverload, args: Sequence[object], kwargs: Mapping[str, object]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Tensors of zeros in place of fake ones."""

    def real(name: str, argument: object) -> object:
        device = torch.device("cpu") if is_on_cpu(func, name) else None
        return pytree.tree_map_only(torch.Tensor, lambda fake: _zeros(fake, device), argument)

    return map_by_name(func, real, args, kwargs)


def _zeros(fake: torch.Tensor, device: torch.device | None) -> torch.Tensor:
    device = device or fake.device
    # Zeros are valid indices; what is computed does not matter.
    storage = torch.zeros(
        max(extent_bytes(fake), 1), dtype=torch.uint8, device=device
    ).untyped_storage()
    tensor = torch.empty(0, dtype=fake.dtype, device=device)
    return tensor.set_(storage, 0, fake.shape, fake.stride())


def without_unasked(result: object, traced: object) -> object:
    """A kernel's results without those that its trace says are None."""
    if (
        isinstance(result, (tuple, list))
        and isinstance(traced, (tuple, list))
        and len(result) == len(traced)
        and any(t is None for t in traced)
    ):
        return tuple(None if t is None else r for r, t in zip(result, traced, strict=True))
    return result


def _measure(
    func: OpOverload, args: Sequence[object], kwargs: Mapping[str, object], traced: object
) -> int:
    is_on_cuda = any(_is_tensor(t) and t.device.type == "cuda" for t in pytree.tree_leaves(args))
    target = current_target()
    if target is not None:
        foreseen = foreseen_bytes(target, func, args) if is_on_cuda else 0
        return _bound(args, traced) if foreseen is None else foreseen
    if not is_on_cuda and torch.autograd.profiler._is_profiler_enabled:
        # A thread has one profile at a time, and this one's is the user's.
        with ThreadPoolExecutor(1) as pool:
            return pool.submit(_measure_here, func, args, kwargs, traced, is_on_cuda).result()
    return _measure_here(func, args, kwargs, traced, is_on_cuda)


def _measure_here(
    func: OpOverload,
    args: Sequence[object],
    kwargs: Mapping[str, object],
    traced: object,
    is_on_cuda: bool,
) -> int:
    with disable_modes(), torch.no_grad(), _same_random_state(func, is_on_cuda):
        try:
            real_args, real_kwargs = _real_arguments(func, args, kwargs)

            def call() -> Any:
                return without_unasked(func(*real_args, **real_kwargs), traced)

            call()  # the first call may set up what later ones reuse
            size_bytes = _cuda_extra(call) if is_on_cuda else _cpu_extra(call)
        except Exception as error:
            if is_custom(func):  # whose code may raise anything
                _UNKNOWN[str(func)] = f"{type(error).__name__}: {error}"
                return 0
            if not isinstance(error, _REFUSALS):
                raise
            size_bytes = _bound(args, traced)
            log.warning("workspace of %s not measured (%s); assuming %d", func, error, size_bytes)
    log.debug("workspace of %s: %d bytes", func, size_bytes)
    return size_bytes


def _same_random_state(
    func: OpOverload, is_on_cuda: bool
) -> contextlib.AbstractContextManager[Any]:
    if not _is_random(func) and not is_custom(func):
        return contextlib.nullcontext()
    devices = [torch.cuda.current_device()] if is_on_cuda else []
    return torch.random.fork_rng(devices=devices)


def _is_tensor(leaf: object) -> bool:
    return isinstance(leaf, torch.Tensor)


def _bound(*values: object) -> int:
    """A copy of every argument and result: what a library that reorders all of them needs."""
    return sum(extent_bytes(t) for t in pytree.tree_leaves(values) if isinstance(t, torch.Tensor))


def _cpu_extra(call: Callable[[], Any]) -> int:
    # The older of PyTorch's two profilers: the newer writes two lines to stderr for each run.
    enable_profiler(ProfilerConfig(ProfilerState.CPU, False, True, False, False, False, _SETTINGS))
    try:
        result = call()
    finally:
        threads = disable_profiler()
    del result
    live = peak = 0
    # The result is freed outside the profile, so what is live at its end is the result.
    for event in itertools.chain.from_iterable(threads):
        if event.kind() == "memory_alloc":
            live += event.cpu_memory_usage()
            peak = max(peak, live)
    return max(0, peak - live)


def _cuda_extra(call: Callable[[], Any]) -> int:
    torch.cuda.synchronize()
    before = torch.cuda.memory_stats()["requested_bytes.all.current"]
    torch.cuda.reset_peak_memory_stats()
    result = call()
    torch.cuda.synchronize()
    stats = torch.cuda.memory_stats()
    del result
    assert before >= 0
    return max(0, stats["requested_bytes.all.peak"] - stats["requested_bytes.all.current"])
