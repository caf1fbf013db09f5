"""What Inductor will hold: the program's peak as its own generated wrapper allocates it.

FX-level planning knows the graph before Inductor touched it; post-grad rewrites, fusion, in-place
reuse and layout copies then change what is live.  So the promise is not made from the plan: the
emitted graphs are lowered by Inductor up to its Python wrapper, without compiling a kernel
(`lower`), and the wrapper is then *run on fake tensors with empty kernels* (`run_wrapper`), while a
`Ledger` counts every storage that it allocates until it dies.  The same replay is run on the
wrapper of the finished compilation, so the final schedule is checked too, cached or not.

What a library call takes and gives back inside is measured on the device (`workspaces`).
"""

from __future__ import annotations

import contextlib
import functools
import gc
import hashlib
import math
import re
import sys
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import FrameType, SimpleNamespace
from typing import Any
from unittest import mock

import sympy
import torch
from torch import fx
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from dtrcompile.passes.device.allocators import EXACT, Allocator
from dtrcompile.passes.device.workspaces import workspace_bytes
from dtrcompile.passes.errors import VerificationError
from dtrcompile.passes.fitting.measured import Measured
from dtrcompile.passes.inductor.bug_fixes import repaired
from dtrcompile.passes.inductor.layouts import ROOM
from dtrcompile.passes.nodes import draws_random_numbers, hint, owned_bytes
from dtrcompile.passes.torch_private import (
    BoxedBool,
    CppKernel,
    CppVecKernel,
    DebugContext,
    ExternKernel,
    FakeTensorMode,
    GraphLowering,
    InProcessFxCompile,
    SchedulerNode,
    TracingContext,
    V,
    cpp_codegen,
    get_input_idxs_to_check,
    inductor_config,
    select_decomp_table,
)


@dataclass(frozen=True)
class Wrapper:
    """The Python wrapper that Inductor wrote for one graph.

    Attributes:
        constants: what it refers to.
        steps: buffer -> the step of the plan that it belongs to; empty for a default split's.
        operators: buffer -> the operator of the program that it belongs to.
        written_over: operators whose result Inductor writes over an input.
        draws: operators that draw random numbers, as they follow each other.
    """

    source: str
    constants: Mapping[str, torch.Tensor]
    steps: Mapping[str, int] = field(default_factory=dict)
    operators: Mapping[str, int] = field(default_factory=dict)
    written_over: frozenset[int] = frozenset()
    draws: tuple[int, ...] = ()


class _Lowered(BaseException):
    """Thrown out of Inductor once the wrapper is written; not an error, so not wrapped as one."""

    def __init__(self, wrapper: Wrapper) -> None:
        super().__init__()
        self.wrapper = wrapper


def lower(
    gm: fx.GraphModule,
    example_inputs: Sequence[object],
    *,
    static_input_indices: Sequence[int],
    is_backward: bool,
    is_inference: bool,
) -> Wrapper:
    """Take a graph through Inductor up to its wrapper; ``gm`` is left as it is.

    Runs under the configuration that is active, which must be the one of the real compilation.

    Args:
        example_inputs: fake tensors, one a placeholder.
    """

    def stop(graph: Any) -> Any:
        code, _ = graph.codegen()
        source = getattr(code, "value", code)
        steps, operators = (_marks_of_buffers(graph, m) for m in ("dtr_step", "dtr_operator"))
        written, draws = _written_over(graph), _draws(graph)
        raise _Lowered(Wrapper(source, dict(graph.constants), steps, operators, written, draws))

    key = _lowering_key(
        gm, example_inputs, (tuple(static_input_indices), is_backward, is_inference)
    )
    with _LOCK:
        if key in _LOWERED:
            _LOWERED.move_to_end(key)
            return _LOWERED[key]
    copy = copied_module(gm)
    graph_kwargs: Any = {
        "cudagraphs": BoxedBool(False),
        "static_input_idxs": tuple(static_input_indices),
        "is_backward": is_backward,
        "graph_id": None,
        "cpp_wrapper": False,
        "fx_wrapper": False,
        "is_inference": is_inference,
        "boxed_forward_device_index": None,
        "layout_opt": None,
        "extern_node_serializer": None,
        "get_decomp_fn": select_decomp_table,
    }
    inputs_to_check = get_input_idxs_to_check(example_inputs, static_input_indices)  # type: ignore[arg-type]
    with (
        torch.utils._python_dispatch._disable_current_modes(),
        DebugContext(),
        remembering_strides(),
        repaired(),
        _without_collector(),
        mock.patch.object(SchedulerNode, "codegen", _codegen_names_only),
        mock.patch.object(GraphLowering, "compile_to_module", stop),
    ):
        try:
            InProcessFxCompile().codegen_and_compile(
                copy,
                example_inputs,  # type: ignore[arg-type]
                inputs_to_check,
                graph_kwargs,
            )
        except _Lowered as lowered:
            with _LOCK:
                _LOWERED[key] = lowered.wrapper
                if len(_LOWERED) > _MOST_LOWERED:
                    _LOWERED.popitem(last=False)
            return lowered.wrapper
    raise VerificationError(_NO_WRAPPER)


_NO_WRAPPER = (
    "Inductor did not write the Python wrapper whose memory could be counted; its C++ wrapper and"
    " ahead-of-time compilation cannot be checked. Pass options={'verify': False} to go without the"
    " check."
)


def _marks_of_buffers(graph: Any, mark: str) -> dict[str, int]:
    """Which step or operator each buffer was lowered from: its latest origin's."""
    marks = {}
    for name, buffer in graph.name_to_buffer.items():
        of_origins = [n.meta[mark] for n in buffer.origins if mark in n.meta]
        if of_origins:
            marks[name] = max(of_origins)
    return marks


def _written_over(graph: Any) -> frozenset[int]:
    """Operators whose result takes the place of an input that is read for the last time."""
    makers = _marks_of_buffers(graph, "dtr_output")
    return frozenset(makers[name] for name in graph.wrapper_code.reuses if name in makers)


def _draws(graph: Any) -> tuple[int, ...]:
    """Operators that draw random numbers, in the order in which the scheduler put their calls."""
    scheduled = (snode for node in graph.scheduler.nodes for snode in node.get_nodes())
    calls = (snode.node for snode in scheduled if isinstance(snode.node, ExternKernel))
    drawn = (n for call in calls for n in call.get_origins() if draws_random_numbers(n))
    return tuple(dict.fromkeys(n.meta["dtr_operator"] for n in drawn if "dtr_operator" in n.meta))


def _codegen_names_only(node: Any, index_vars: Any) -> None:
    """Inductor's ``SchedulerNode.codegen`` as far as the wrapper depends on it.

    A C++ kernel's scalar form comes first and decides which buffers are needed and which are
    updated in place, by the names that it reads and writes: its indices are left as they are, and
    no bounds are looked for.  The vectorized forms change nothing of that, and stay empty.  (Their
    tiling is still searched: loops that share their outer level keep buffers local only if it
    agrees.)
    """
    if isinstance(V.kernel, CppVecKernel):
        return
    if not isinstance(V.kernel, CppKernel):
        _CODEGEN(node, index_vars)
        return
    body = node._body
    with (
        mock.patch.object(type(body), "bounds", lambda _: _NO_BOUNDS),
        V.kernel.set_current_node(node),
    ):
        body(*index_vars)


_CODEGEN = SchedulerNode.codegen
_NO_BOUNDS = SimpleNamespace(get_bounds=dict)


@contextlib.contextmanager
def _without_collector() -> Iterator[None]:
    """Python's cycle collector off: it looks at Inductor's objects again and again, a fifth of a
    lowering's time, and finds nothing to free while they are in use."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def remembering_strides() -> contextlib.AbstractContextManager[Any]:
    """Inductor's analysis of C++ loops, with a short cut and a memory that is large enough.

    How far apart a vector's elements lie is found by simplifying expressions, nearly half of a
    lowering's time.  Nearly all of them are sums in which the variable stands alone.  Inductor
    remembers 128, a graph has thousands, and the same ones come back with every candidate and with
    the final compilation.
    """
    return mock.patch.object(cpp_codegen, "stride_at_vec_range", _stride)


@functools.lru_cache(maxsize=1 << 16)
def _stride(index: sympy.Expr, var: sympy.Symbol, vec_length: int | None = None) -> sympy.Expr:
    """Inductor's ``stride_at_vec_range``."""
    coefficient = _coefficient(index, var)
    return _STRIDE(index, var, vec_length) if coefficient is None else coefficient


_STRIDE = cpp_codegen.stride_at_vec_range


def _coefficient(index: sympy.Expr, var: sympy.Symbol) -> sympy.Integer | None:
    """The integer that ``var`` is multiplied by, where it appears in no other way."""
    total = sympy.S.Zero
    for term in sympy.Add.make_args(index):
        if var in term.free_symbols:
            factor, rest = term.as_coeff_Mul()
            if rest != var or not factor.is_Integer:
                return None
            total += factor
    return total


# Wrappers by what they were made from: candidates of one plan often share a forward graph, and
# recompilations share the default split's.
_LOWERED: OrderedDict[str, Wrapper] = OrderedDict()
_MOST_LOWERED = 64
_LOCK = threading.Lock()


_MARKS = ("dtr_step", "dtr_operator", "dtr_output", "dtr_group", "dtr_realize", ROOM)


def _lowering_key(gm: fx.GraphModule, example_inputs: Sequence[object], rest: object) -> str:
    """Covers all that the wrapper depends on: graph, marks of the plan, inputs, configuration."""
    digest = hashlib.sha256()
    text = gm.print_readable(print_output=False, include_stride=True, include_device=True)
    digest.update(text.encode())
    for node in gm.graph.nodes:
        marks = [node.meta.get(mark) for mark in _MARKS]
        digest.update(f"{marks}{node.meta.get('user_visible_output_idxs')}".encode())
    for leaf in example_inputs:
        if isinstance(leaf, torch.Tensor):
            digest.update(f"{leaf.shape} {leaf.stride()} {leaf.dtype} {leaf.device}".encode())
        else:
            digest.update(f"{type(leaf)} {leaf}".encode())
    context = TracingContext.try_get()
    metadata = context.fw_metadata if context is not None else None
    donated = metadata.bw_donated_idxs if metadata is not None else None
    digest.update(f"{rest} {donated}".encode())
    digest.update(inductor_config.save_config())
    return digest.hexdigest()


def copied_module(gm: fx.GraphModule) -> fx.GraphModule:
    """A copy whose graph may be changed; tensors that the module holds are shared."""
    graph = fx.Graph()
    env: dict[fx.Node, fx.Node] = {}
    result = graph.graph_copy(gm.graph, env)
    (old,) = gm.graph.find_nodes(op="output")
    out = graph.output(result)
    out.meta = dict(old.meta)
    for node in gm.graph.find_nodes(op="placeholder"):
        if hasattr(node, "_dynamo_source"):
            env[node]._dynamo_source = node._dynamo_source
    copy = fx.GraphModule(gm, graph)
    copy.meta = dict(gm.meta)
    # What AOTAutograd looks for: symbolic sizes, and that the graph came from Dynamo.
    for name in ("shape_env", "_param_name_to_source"):
        if hasattr(gm, name):
            setattr(copy, name, getattr(gm, name))
    return copy


# --- running a wrapper on fake tensors ------------------------------------------------------------


_WRAPPER_FILE = "<inductor wrapper>"


class _Kernel:
    """Stands for whatever a wrapper compiles or launches: does nothing."""

    def __call__(self, *_args: object, **_kwargs: object) -> _Kernel:
        return self

    def __getattr__(self, name: str) -> _Kernel:
        if name.startswith("__"):
            raise AttributeError(name)
        return self


@dataclass(frozen=True, slots=True)
class Allocation:
    """A storage that a wrapper allocated; ``serial`` numbers them, ``label`` is the line."""

    serial: int
    storage: StorageWeakRef
    size_bytes: int
    label: str


@dataclass
class Ledger:
    """Live bytes over a run of wrappers, one storage after another.

    Attributes:
        base_bytes: resident throughout, not allocated by the wrappers (parameters, inputs).
        allocator: what it counts for a storage.
        events: (bytes live, label) after each allocation.
        live: address -> what stands there; addresses are used again, serial numbers are not.
        peak_bytes: largest so far.
        peak_label: what was allocated then.
        peak_live: what was live at the peak.
        wrapper: the one that is being run.
        step_bytes: step of the plan -> the most that was live when it allocated.
        workspace_bytes: operator -> the most that one of its calls held beside what it returned.
        condition: the value of all conditions that wrappers branch on; ``has_conditions`` tells
            whether there were any.
    """

    base_bytes: int = 0
    allocator: Allocator = EXACT
    events: list[tuple[int, str]] = field(default_factory=list)
    live: dict[int, Allocation] = field(default_factory=dict)
    peak_bytes: int = 0
    peak_label: str = ""
    peak_live: tuple[Allocation, ...] = ()
    wrapper: Wrapper = field(default_factory=lambda: Wrapper("", {}))
    step_bytes: dict[int, int] = field(default_factory=dict)
    workspace_bytes: dict[int, int] = field(default_factory=dict)
    condition: bool = True
    has_conditions: bool = False

    def __post_init__(self) -> None:
        self.peak_bytes = self.base_bytes
        self.live_bytes = 0
        self.allocations = 0

    def add_base(self, size_bytes: int) -> None:
        """Something from outside becomes resident (tangents)."""
        self.base_bytes += size_bytes
        self.drop_dead()
        self._record("inputs")

    def use_workspace(
        self,
        func: object,
        args: Sequence[object],
        kwargs: Mapping[str, object],
        result: object,
        label: str,
    ) -> None:
        """Count what a library call holds beside its arguments and its result."""
        size_bytes = workspace_bytes(func, args, kwargs, result)
        if size_bytes:
            self.use(size_bytes, label)

    def allocate(self, tensor: torch.Tensor, label: str) -> None:
        """Count the tensor's storage, unless it is counted already."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self.live and not self.live[key].storage.expired():
            return
        size_bytes = self.allocator.block_bytes(hint(storage.nbytes()))
        self.drop_dead()
        self.allocations += 1
        allocation = Allocation(self.allocations, StorageWeakRef(storage), size_bytes, label)
        self.live[key] = allocation
        self.live_bytes += size_bytes
        self._took(allocation, storage)
        self._record(label)

    def use(self, size_bytes: int, label: str) -> None:
        """Count bytes that are held only now."""
        size_bytes = self.allocator.block_bytes(size_bytes)
        operator = self.wrapper.operators.get(_buffer(label))
        if operator is not None:
            most = max(size_bytes, self.workspace_bytes.get(operator, 0))
            self.workspace_bytes[operator] = most
        self.drop_dead()
        self.live_bytes += size_bytes
        self._record(label)
        self.live_bytes -= size_bytes

    def serials(self, values: Sequence[object]) -> set[int]:
        """Serial numbers of the allocations that ``values`` live in."""
        return {self.live[k].serial for k in _keys(values) if k in self.live}

    def end_forward(self, saved: set[int]) -> None:
        """Forward has returned; ``saved`` are the serial numbers of what it saved."""

    def drop_dead(self) -> None:
        """Count no longer what nobody holds."""
        for k in [k for k, a in self.live.items() if a.storage.expired()]:
            allocation = self.live.pop(k)
            self.live_bytes -= allocation.size_bytes
            self._gave(allocation)

    def _took(self, allocation: Allocation, storage: torch.UntypedStorage) -> None:
        """For ledgers that keep more than bytes."""

    def _gave(self, allocation: Allocation) -> None:
        """The same, when nobody holds it any more."""

    def _record(self, label: str) -> None:
        total = self.base_bytes + self.live_bytes
        self.events.append((total, label))
        step = self.wrapper.steps.get(_buffer(label))
        if step is not None:
            self.step_bytes[step] = max(total, self.step_bytes.get(step, 0))
        if total > self.peak_bytes:
            self.peak_bytes, self.peak_label = total, label
            self.peak_live = tuple(self.live.values())


def _buffer(label: str) -> str:
    """What a line of the wrapper assigns to."""
    return label.partition(" = ")[0]


# Their results lie in a copy of the storage that their first argument is a view of; their fake
# kernels know only the part that the view covers.
_COPY_THE_STORAGE = frozenset(
    packet.default
    for packet in (
        torch.ops.aten.slice_scatter,
        torch.ops.aten.select_scatter,
        torch.ops.aten.diagonal_scatter,
    )
)


def _in_copied_storage(source: torch.Tensor, result: torch.Tensor) -> torch.Tensor:
    """A fake result as large as it will be."""
    size_bytes = source.untyped_storage().nbytes()
    if source.stride() != result.stride() or size_bytes <= owned_bytes(result):
        return result  # (what overlaps itself is copied element by element)
    numel = size_bytes // source.element_size()
    storage = torch.empty(numel, dtype=source.dtype, device=source.device)
    return storage.as_strided(source.shape, source.stride(), source.storage_offset())


class _Counting(TorchDispatchMode):
    """Tells the ledger about the storage of everything an operator returns."""

    supports_higher_order_operators = True

    def __init__(self, ledger: Ledger, inputs: set[int], lines: Sequence[str]) -> None:
        super().__init__()
        self.ledger = ledger
        self.inputs = inputs
        self.lines = lines
        self.conditions: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default and args[0].dtype is torch.bool:
            return self._condition()
        result = func(*args, **(kwargs or {}))
        if func in _COPY_THE_STORAGE:
            result = _in_copied_storage(args[0], result)
        for t in pytree.tree_leaves(result):
            if not isinstance(t, torch.Tensor) or t.layout is not torch.strided:
                continue
            if t.untyped_storage()._cdata not in self.inputs:
                self.ledger.allocate(t, self._line())
        self.ledger.use_workspace(func, args, kwargs or {}, result, self._line())
        return result

    def _condition(self) -> bool:
        """What the wrapper branches on; asked at one place again, it is the end of a loop."""
        line = self._line()
        if line.startswith("assert not "):
            return False  # of the setting ``nan_asserts``
        self.ledger.has_conditions = True
        is_first = line not in self.conditions
        self.conditions.add(line)
        return self.ledger.condition and is_first

    def use_workspace(
        self, name: str, args: Sequence[object], kwargs: Mapping[str, object], out: object
    ) -> None:
        """Count what a library call holds beside its arguments; ``out`` is one of them."""
        func = getattr(getattr(torch.ops.aten, name, None), "default", None)
        line = self._line()
        buffer = _OUT.search(line)
        label = f"{buffer[1]} = {line}" if buffer else line
        self.ledger.use_workspace(func, args, kwargs, out, label)

    def _line(self) -> str:
        """The line of the wrapper that is being run."""
        frame: FrameType | None = sys._getframe(1)
        while frame is not None and frame.f_code.co_filename != _WRAPPER_FILE:
            frame = frame.f_back
        return "" if frame is None else self.lines[frame.f_lineno - 1].strip()


def fake_inputs(
    mode: FakeTensorMode, placeholders: Sequence[fx.Node], *, is_symbolic: bool = False
) -> list[object]:
    """Fresh fake inputs for a graph.

    Args:
        is_symbolic: sizes stay symbols; else they are numbers, at the sizes that count here.
    """

    def size_of(size: int | torch.SymInt) -> int | torch.SymInt:
        return size if is_symbolic else hint(size)

    inputs: list[object] = []
    with mode:
        for node in placeholders:
            val = node.meta.get("val")
            if isinstance(val, torch.Tensor):
                inputs.append(
                    torch.empty_strided(
                        [size_of(s) for s in val.shape],
                        [size_of(s) for s in val.stride()],
                        dtype=val.dtype,
                        device=val.device,
                    )
                )
            elif isinstance(val, torch.SymInt):
                inputs.append(size_of(val))
            else:
                inputs.append(val)
    return inputs


def run_wrapper(
    wrapper: Wrapper, inputs: list[object], ledger: Ledger, mode: FakeTensorMode
) -> list[object]:
    """Run a wrapper with empty kernels; its allocations go into ``ledger``.

    Args:
        inputs: fake tensors and numbers; the list is emptied, as Inductor's callers do, so that a
            tensor that nobody else holds dies at its last use.

    Returns:
        What the graph returns.

    Raises:
        VerificationError: if the wrapper cannot be run this way.
    """
    start = "async_compile = AsyncCompile()"
    if start not in wrapper.source:
        raise VerificationError(_NO_WRAPPER)
    namespace: dict[str, Any] = {"__name__": "dtr_wrapper", "_dtr_kernel": _Kernel()}
    source = wrapper.source.replace(start, "async_compile = _dtr_kernel")

    def empty(device: str) -> Any:
        def allocate(size: Any, stride: Any, dtype: Any) -> torch.Tensor:
            return torch.empty_strided(size, stride, dtype=dtype, device=device)

        return allocate

    def reinterpret(t: torch.Tensor, size: Any, stride: Any, offset: int = 0) -> torch.Tensor:
        return torch.as_strided(t, size, stride, t.storage_offset() + offset)

    # Inputs from outside stay with their callers; kept here so that no address is used again.
    outside = [
        t
        for t in inputs
        if isinstance(t, torch.Tensor)
        and t.layout is torch.strided
        and t.untyped_storage()._cdata not in ledger.live
    ]
    counting = _Counting(ledger, _keys(outside), source.splitlines())
    ledger.wrapper = wrapper
    try:
        with torch.no_grad():
            exec(compile(source, _WRAPPER_FILE, "exec"), namespace)
            namespace.update(wrapper.constants)
            for name in ("empty_strided_cpu", "empty_strided_cpu_pinned"):
                namespace[name] = empty("cpu")
            for device in ("cuda", "xpu", "mtia"):
                namespace[f"empty_strided_{device}"] = empty(device)
            namespace["reinterpret_tensor"] = reinterpret
            for name in ("assert_size_stride", "assert_size_stride_grouped", "assert_alignment"):
                namespace[name] = _Kernel()
            namespace["extern_kernels"] = _ExternKernels(counting)
            # What the mode remembers of a call is its result's form without its storage's size.
            with mock.patch.object(mode, "cache_enabled", False), mode, counting:
                outputs = namespace["call"](inputs)
    except Exception as error:
        raise VerificationError(
            f"Inductor's wrapper could not be replayed ({type(error).__name__}: {error})"
        ) from error
    del outside
    return list(outputs)


# Library calls whose operator has another name.
_ATEN = {"bias_addmm": "addmm"}
_OUT = re.compile(r"\bout=(?:reinterpret_tensor\()?(\w+)")


class _ExternKernels:
    """Inductor's library calls: with ``out=`` they allocate workspace alone."""

    def __init__(self, counting: _Counting) -> None:
        self.counting = counting

    def __getattr__(self, name: str) -> Any:
        from torch._inductor.select_algorithm import extern_kernels

        real = getattr(extern_kernels, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            if "out" not in kwargs:
                return real(*args, **kwargs)
            out = kwargs.pop("out")
            self.counting.use_workspace(_ATEN.get(name, name), args, kwargs, out)
            return out

        return call


@dataclass(frozen=True)
class Resident:
    """Bytes that are there before the graphs run: the program's constants.

    Attributes:
        parameters, inputs: resident in forward and backward.
        tangents: resident in backward.
    """

    parameters: int
    inputs: int
    tangents: int


def replay_schedule(
    ledger: Ledger,
    forward: Wrapper,
    backward: Callable[[Sequence[object]], Wrapper] | None,
    *,
    forward_placeholders: Sequence[fx.Node],
    backward_placeholders: Sequence[fx.Node],
    num_fwd_outputs: int,
    tangent_of: Mapping[int, int],
    resident: Resident,
    shape_env: Any | None = None,
    given_outputs: frozenset[int] = frozenset(),
    given_tangents: frozenset[int] = frozenset(),
) -> Measured:
    """Replay a training step's (or an inference pass's) wrappers and read the peak.

    Saved tensors go from forward's outputs to backward's inputs as the partitioner's contract says:
    forward returns tensors then symbols, backward takes symbols then tensors.

    Args:
        ledger: a fresh one, whose base is what is resident in forward.
        backward: gives the backward's wrapper, told what it receives from forward, in the order of
            its inputs: the strides are those that Inductor chose.
        tangent_of: backward input -> the forward output that it is the gradient of.
        shape_env: of the graphs' symbols, where sizes are to stay symbols.
        given_outputs: forward outputs that nobody holds when backward begins.
        given_tangents: backward inputs that are freed at their last use; not among ``resident``.
    """
    is_symbolic = shape_env is not None
    mode = FakeTensorMode(allow_non_fake_inputs=True, shape_env=shape_env)
    inputs = fake_inputs(mode, forward_placeholders, is_symbolic=is_symbolic)
    outputs = run_wrapper(forward, inputs, ledger, mode)
    forward_peak_bytes = ledger.peak_bytes
    user_outputs, saved = outputs[:num_fwd_outputs], outputs[num_fwd_outputs:]
    del outputs
    are_outputs, are_saved = ledger.serials(user_outputs), ledger.serials(saved)
    are_saved -= are_outputs
    saved_bytes = sum(a.size_bytes for a in ledger.live.values() if a.serial in are_saved)
    ledger.drop_dead()
    boundary_bytes = ledger.base_bytes + ledger.live_bytes
    ledger.end_forward(are_saved)
    are_gradients: set[int] = set()
    written_over, draws = forward.written_over, forward.draws
    backward_peak_bytes = 0
    in_forward_peak, forward_label = ledger.peak_live, ledger.peak_label
    if backward is not None:
        ledger.peak_bytes, ledger.peak_live = 0, ()
        strides = [o.stride() if isinstance(o, torch.Tensor) else None for o in user_outputs]
        for i in given_outputs:
            user_outputs[i] = None
        ledger.add_base(resident.tangents)
        numbers = [v for v in saved if not isinstance(v, torch.Tensor)]
        tensors = [v for v in saved if isinstance(v, torch.Tensor)]
        from_forward = [*numbers, *tensors]
        rest = fake_inputs(
            mode, backward_placeholders[len(from_forward) :], is_symbolic=is_symbolic
        )
        wrapper = backward(from_forward)
        written_over |= wrapper.written_over
        draws += wrapper.draws
        inputs = [*from_forward, *rest]
        del saved, tensors, from_forward, rest
        for i in sorted(given_tangents):
            tangent = inputs[i]
            assert isinstance(tangent, torch.Tensor)
            ledger.allocate(tangent, "inputs")
            del tangent
        for i, o in tangent_of.items():
            count_coercion(ledger, strides[o], inputs[i], is_given=i in given_tangents)
        gradients = run_wrapper(wrapper, inputs, ledger, mode)
        count_accumulation(ledger, forward_placeholders, gradients)
        are_gradients = ledger.serials(gradients)
        backward_peak_bytes = ledger.peak_bytes
    in_backward = backward_peak_bytes > forward_peak_bytes
    live = ledger.peak_live if in_backward else in_forward_peak
    split = {
        "parameters": resident.parameters,
        "inputs": resident.inputs + (resident.tangents if in_backward else 0),
        "saved": 0,
        "temporaries": 0,
        "gradients": 0,
        "outputs": 0,
    }
    for allocation in live:
        if allocation.serial in are_outputs:
            line = "outputs"
        elif allocation.serial in are_saved:
            line = "saved"
        elif allocation.serial in are_gradients:
            line = "gradients"
        else:
            line = "temporaries"
        split[line] += allocation.size_bytes
    return Measured(
        peak_bytes=max(forward_peak_bytes, backward_peak_bytes),
        peak_at=ledger.peak_label if in_backward else forward_label,
        split=split,
        forward_peak_bytes=forward_peak_bytes,
        backward_peak_bytes=backward_peak_bytes,
        boundary_bytes=boundary_bytes,
        saved_bytes=saved_bytes,
        step_bytes=ledger.step_bytes,
        workspace_bytes=ledger.workspace_bytes,
        written_over=written_over,
        draws=draws,
    )


def count_coercion(
    ledger: Ledger, output_strides: Sequence[int] | None, tangent: object, *, is_given: bool
) -> None:
    """AOTAutograd copies a tangent that comes in another layout than was traced.

    It is taken to come in the layout of its output, which need not be the traced one either: the
    compiler's decompositions may give a result other strides than eager PyTorch does.  The copy is
    freed after its last use, the tangent stays with its caller.
    """
    if (
        output_strides is not None
        and isinstance(tangent, torch.Tensor)
        and tuple(output_strides) != tangent.stride()
    ):
        label = "a tangent's copy in the layout that was traced"
        if is_given:  # then the copy takes its place
            ledger.use(hint(tangent.untyped_storage().nbytes()), label)
        else:
            ledger.allocate(tangent, label)


def count_accumulation(
    ledger: Ledger, placeholders: Sequence[fx.Node], gradients: Sequence[object]
) -> None:
    """Autograd keeps a gradient as it is, or copies it, one at a time, into its input's layout.

    The rule is `obeys_layout_contract` of PyTorch's ``AccumulateGrad``.
    """
    copied_bytes = 0
    for node, gradient in zip(placeholders, gradients, strict=False):
        val = node.meta.get("val")
        if isinstance(val, torch.Tensor) and isinstance(gradient, torch.Tensor):
            strides = _dense_strides(val)
            expected = [s for s, n in zip(strides, val.shape, strict=True) if hint(n) != 1]
            found = [s for s, n in zip(gradient.stride(), val.shape, strict=True) if hint(n) != 1]
            if found != expected:
                copied_bytes = max(copied_bytes, hint(val.numel()) * val.element_size())
    if copied_bytes:
        ledger.use(copied_bytes, "a gradient's copy in its parameter's layout")


def _dense_strides(val: torch.Tensor) -> list[int]:
    """An input's own strides where it fills its storage without overlap, else row-major ones."""
    strides, sizes = [hint(s) for s in val.stride()], [hint(n) for n in val.shape]
    expected = 1
    for stride, size in sorted(zip(strides, sizes, strict=True)):
        if size != 1 and stride != expected:
            return [math.prod(sizes[i + 1 :]) for i in range(len(sizes))]
        expected *= size
    return strides


def _keys(values: Sequence[object]) -> set[int]:
    return {
        v.untyped_storage()._cdata
        for v in values
        if isinstance(v, torch.Tensor) and v.layout is torch.strided
    }
