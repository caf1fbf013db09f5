"""Every function of Inductor's that is replaced: by what, why, and what was read of each release.

`applied` replaces them for the compilation at hand: a *dispatcher* takes the place of each function
and calls the replacement where a compilation of ours asked for it, in this thread, and Inductor's
own function everywhere else.  So another thread that compiles with plain Inductor at the same time
runs what it would run alone.  Dispatchers are put in place under one lock when the first
compilation begins, and taken out again when the last one ends.

For each release the table has a hash of the source that was read when the replacement was written.
``python -m dtrcompile patches`` says of each whether the installed torch still has that source, and
a test fails where it has not; docs/releases.md says what to do then.
"""

from __future__ import annotations

import contextlib
import enum
import functools
import hashlib
import inspect
import textwrap
import threading
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch

from dtrcompile.passes.inductor.block_sizes import benchmark_without_buffer, copy_below_peak
from dtrcompile.passes.inductor.bug_fixes import recompute_and_rename
from dtrcompile.passes.inductor.dry_run import codegen_names_only, stop_before_compiling
from dtrcompile.passes.inductor.dtype_rules import make_rules_once
from dtrcompile.passes.inductor.kernels_together import collect, compile_collected
from dtrcompile.passes.inductor.layouts import images_channels_last, prefers_channels_last
from dtrcompile.passes.inductor.plan_order import (
    SameGroupOnly,
    flush_before_too_much_is_held,
    in_one_place,
    reuse_at_once,
    run_node_and_realize,
)
from dtrcompile.passes.inductor.strides import stride
from dtrcompile.passes.torch_private import (
    AllocateLine,
    AsyncCompile,
    CachingAutotuner,
    CppScheduling,
    DtypePropagationOpsHandler,
    GraphLowering,
    InductorBenchmarker,
    InductorChoices,
    SchedulerNode,
    V,
    cpp_codegen,
    pattern_matcher,
)


class Purpose(enum.Enum):
    """When a function is replaced.

    EVERY_COMPILATION: while any graph of ours is lowered or compiled, or its code loaded.  DRY_RUN:
    while a graph is lowered only to read its wrapper.  PLAN: while a plan's graph is lowered or
    compiled.  FIRST_RUN: while a compiled graph runs for the first time.
    """

    EVERY_COMPILATION = enum.auto()
    DRY_RUN = enum.auto()
    PLAN = enum.auto()
    FIRST_RUN = enum.auto()


@dataclass(frozen=True)
class Patch:
    """A function that is replaced.

    Attributes:
        owner: the class or module that has it.
        name: its name there.
        replacement: what is called in its place, with the same arguments.
        purpose: when.
        why: what would go wrong without.
        until: when it can go.
        link: to PyTorch's issue or pull request, "" where there is none.
        sources: release -> hash of the source that the replacement was written for.
    """

    owner: Any
    name: str
    replacement: Callable[..., Any]
    purpose: Purpose
    why: str
    until: str
    sources: Mapping[str, str]
    link: str = ""

    @property
    def target(self) -> str:
        """Its name, for people."""
        return f"{self.owner.__name__.rpartition('.')[2]}.{self.name}"

    @property
    def original(self) -> Any:
        """What the owner has, below our dispatcher if there is one."""
        found = inspect.getattr_static(self.owner, self.name)
        inner = found.__func__ if isinstance(found, staticmethod) else found
        return getattr(inner, "_dtr_original", found)


_KERNELS_UNTIL = "Inductor compiles the kernels of a wrapper in one run of the compiler"
_TUNING_UNTIL = "Inductor chooses block sizes without raising the peak of a step"
_PLAN_UNTIL = "Inductor takes an order of its kernels from outside (a schedule as an input)"

PATCHES: tuple[Patch, ...] = (
    Patch(
        SchedulerNode,
        "recompute_size_and_body",
        recompute_and_rename,
        Purpose.EVERY_COMPILATION,
        "it forgets that a loop reads what a scatter wrote, and gradients are wrong",
        "2.13 is no longer supported",
        {
            "2.11": "4de8849d060d",
            "2.12": "fe1e8f9e59bd",
            "2.13": "fe1e8f9e59bd",
            "2.14": "af867c48f548",
            "2.15": "af867c48f548",
        },
        link="https://github.com/pytorch/pytorch/pull/185873",
    ),
    Patch(
        cpp_codegen,
        "stride_at_vec_range",
        stride,
        Purpose.EVERY_COMPILATION,
        "nearly half of a lowering's time; the result is the same",
        "Inductor remembers more than 128 of them",
        {
            "2.11": "5e1dea4ed050",
            "2.12": "c4232f5f736a",
            "2.13": "c4232f5f736a",
            "2.14": "c4232f5f736a",
            "2.15": "c4232f5f736a",
        },
    ),
    Patch(
        DtypePropagationOpsHandler,
        "__init__",
        make_rules_once,
        Purpose.EVERY_COMPILATION,
        "a twentieth of a lowering's time; the rules are the same",
        "2.14 is no longer supported",
        {
            "2.11": "e7a8f572182b",
            "2.12": "e7a8f572182b",
            "2.13": "e7a8f572182b",
            "2.14": "e7a8f572182b",
            "2.15": "4f1dfb91356c",
        },
    ),
    Patch(
        AsyncCompile,
        "cpp_pybinding",
        collect,
        Purpose.EVERY_COMPILATION,
        "each C++ kernel would be compiled by itself, a second of headers and linking each",
        _KERNELS_UNTIL,
        {
            "2.11": "adfc5d58fbfc",
            "2.12": "adfc5d58fbfc",
            "2.13": "adfc5d58fbfc",
            "2.14": "adfc5d58fbfc",
            "2.15": "adfc5d58fbfc",
        },
    ),
    Patch(
        AsyncCompile,
        "wait",
        compile_collected,
        Purpose.EVERY_COMPILATION,
        "what was collected is compiled before the wrapper's module runs",
        _KERNELS_UNTIL,
        {
            "2.11": "ff438904c663",
            "2.12": "6c00a87786a8",
            "2.13": "6c00a87786a8",
            "2.14": "6c00a87786a8",
            "2.15": "6c00a87786a8",
        },
    ),
    Patch(
        SchedulerNode,
        "codegen",
        codegen_names_only,
        Purpose.DRY_RUN,
        "indices and bounds of loops take time and do not appear in a wrapper",
        "Inductor can write a wrapper without its kernels",
        {
            "2.11": "c644987851bc",
            "2.12": "c644987851bc",
            "2.13": "c644987851bc",
            "2.14": "c644987851bc",
            "2.15": "c644987851bc",
        },
    ),
    Patch(
        GraphLowering,
        "compile_to_module",
        stop_before_compiling,
        Purpose.DRY_RUN,
        "the wrapper is read, no kernel is compiled",
        "Inductor can write a wrapper without its kernels",
        {
            "2.11": "6b1a7c85bb3a",
            "2.12": "6b1a7c85bb3a",
            "2.13": "6b1a7c85bb3a",
            "2.14": "6b1a7c85bb3a",
            "2.15": "6b1a7c85bb3a",
        },
    ),
    Patch(
        pattern_matcher,
        "is_match",
        in_one_place,
        Purpose.PLAN,
        "a pattern that spans steps moves a kernel, and keeps its operands alive until there",
        _PLAN_UNTIL,
        {
            "2.11": "26b85bec34e9",
            "2.12": "26b85bec34e9",
            "2.13": "26b85bec34e9",
            "2.14": "26b85bec34e9",
            "2.15": "26b85bec34e9",
        },
    ),
    Patch(
        GraphLowering,
        "run_node",
        run_node_and_realize,
        Purpose.PLAN,
        "what the plan keeps would be computed inside of its readers, which keeps more alive",
        _PLAN_UNTIL,
        {
            "2.11": "0dc7ff30af72",
            "2.12": "17222e29bba2",
            "2.13": "47ecc10e58fd",
            "2.14": "052e4e829c39",
            "2.15": "052e4e829c39",
        },
    ),
    Patch(
        GraphLowering,
        "decide_layout_opt",
        prefers_channels_last,
        Purpose.PLAN,
        "gradients of grouped convolutions on a CPU are slow unless they are channels-last",
        "Inductor counts them when it decides",
        {
            "2.11": "9da3a043f7db",
            "2.12": "9da3a043f7db",
            "2.13": "9da3a043f7db",
            "2.14": "46f94d8d5371",
            "2.15": "60d20e028b9f",
        },
    ),
    Patch(
        GraphLowering,
        "find_nodes_prefer_channels_last",
        images_channels_last,
        Purpose.PLAN,
        "channels-last copies of weights would be saved beside the weights",
        _PLAN_UNTIL,
        {
            "2.11": "a9ed9bd52a39",
            "2.12": "a9ed9bd52a39",
            "2.13": "ced73306ff4a",
            "2.14": "eb766f5d6bdc",
            "2.15": "eb766f5d6bdc",
        },
    ),
    Patch(
        AllocateLine,
        "should_reuse_buffer",
        reuse_at_once,
        Purpose.PLAN,
        "dead buffers are kept for later, though the plan counts them as free",
        _PLAN_UNTIL,
        {
            "2.11": "44bdf608fc89",
            "2.12": "44bdf608fc89",
            "2.13": "44bdf608fc89",
            "2.14": "44bdf608fc89",
            "2.15": "b889b47c8eb2",
        },
    ),
    Patch(
        CppScheduling,
        "ready_to_flush",
        flush_before_too_much_is_held,
        Purpose.PLAN,
        "a C++ function holds all loops between two library calls, and frees at its end",
        _PLAN_UNTIL,
        {
            "2.11": "7d0b6a908cee",
            "2.12": "7d0b6a908cee",
            "2.13": "7d0b6a908cee",
            "2.14": "7d0b6a908cee",
            "2.15": "7d0b6a908cee",
        },
    ),
    Patch(
        InductorBenchmarker,
        "benchmark_gpu",
        benchmark_without_buffer,
        Purpose.FIRST_RUN,
        "a buffer of the size of the L2 cache would be allocated beside what the first step holds",
        _TUNING_UNTIL,
        {
            "2.11": "abfef43b3de7",
            "2.12": "abfef43b3de7",
            "2.13": "8b7a84380570",
            "2.14": "c446a662ccbc",
            "2.15": "c446a662ccbc",
        },
    ),
    Patch(
        CachingAutotuner,
        "copy_args_to_cpu_if_needed",
        copy_below_peak,
        Purpose.FIRST_RUN,
        "what a kernel of forward writes over would be copied beside what the first step holds",
        _TUNING_UNTIL,
        {
            "2.11": "5dc2b92f5e8f",
            "2.12": "b9ddd1a033d5",
            "2.13": "14a0e341b4fc",
            "2.14": "e4f86c91a543",
            "2.15": "e4f86c91a543",
        },
    ),
)

_ACTIVE: ContextVar[frozenset[Purpose]] = ContextVar("dtrcompile_patches", default=frozenset())
_LOCK = threading.Lock()
_users = 0


@contextlib.contextmanager
def applied(*purposes: Purpose) -> Iterator[None]:
    """Inductor with the functions of these purposes replaced, in this thread."""
    global _users
    with _LOCK:
        if not _users:
            _put_in_place()
        _users += 1
    token = _ACTIVE.set(_ACTIVE.get() | {*purposes})
    try:
        yield
    finally:
        _ACTIVE.reset(token)
        with _LOCK:
            _users -= 1
            if not _users:
                _take_out()


@contextlib.contextmanager
def keep_plan_order() -> Iterator[None]:
    """Within it, Inductor lowers a plan's graphs as the plan says.

    Kernels are fused, and patterns rewritten, only inside a group; storages become buffers.
    """
    base = type(V.choices)
    if issubclass(base, SameGroupOnly):
        yield
        return
    veto: Any = (
        SameGroupOnly
        if base is InductorChoices
        else type("PlannedChoices", (SameGroupOnly, base), {})
    )
    with V.set_choices_handler(veto()), applied(Purpose.PLAN):
        yield


def _put_in_place() -> None:
    for patch in PATCHES:
        setattr(patch.owner, patch.name, _dispatcher(patch))


def _take_out() -> None:
    for patch in PATCHES:
        setattr(patch.owner, patch.name, patch.original)


def _dispatcher(patch: Patch) -> Any:
    found = patch.original
    is_static = isinstance(found, staticmethod)
    original: Callable[..., Any] = found.__func__ if is_static else found

    @functools.wraps(original)
    def dispatch(*args: Any, **kwargs: Any) -> Any:
        function = patch.replacement if patch.purpose in _ACTIVE.get() else original
        return function(*args, **kwargs)

    dispatch._dtr_original = found  # type: ignore[attr-defined]
    return staticmethod(dispatch) if is_static else dispatch


# --- what was read ------------------------------------------------------------------------------


class State(enum.Enum):
    """Of a replaced function in the installed torch, compared with what was read."""

    SAME = "same"
    CHANGED = "changed"
    GONE = "gone"
    NOT_READ = "not read"


def release() -> str:
    """Of the installed torch, such as ``2.13``."""
    return ".".join(torch.__version__.split(".")[:2])


def source_hash(function: Any) -> str:
    """Of a function's source text, its indentation left out."""
    inner = function.__func__ if isinstance(function, staticmethod) else function
    text = textwrap.dedent(inspect.getsource(inspect.unwrap(inner)))
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def state_of(patch: Patch) -> State:
    """Whether the source behind a patch is the one that was read."""
    try:
        function = patch.original
    except AttributeError:
        return State.GONE
    read = patch.sources.get(release(), "")
    if not read:
        return State.NOT_READ
    return State.SAME if source_hash(function) == read else State.CHANGED
