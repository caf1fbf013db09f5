"""What a schedule holds: Inductor's own wrapper, run on fake tensors with empty kernels.

FX-level planning knows the graph before Inductor touched it; post-grad rewrites, fusion, in-place
reuse and layout copies then change what is live.  So the promise is not made from the plan: the
wrapper that Inductor wrote is *run* (`run_wrapper`), and a `Recorder` notes each storage that it
allocates, and when nobody holds it any more.  With symbols in place of sizes, the same run gives
the sizes as expressions.  The same is done with the wrapper of the finished compilation, so the
final schedule is checked too, cached or not.

What a library call takes and gives back inside is measured on the device (`device.workspaces`).
"""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import FrameType
from typing import Any
from unittest import mock

import sympy
import torch
from torch import fx
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from dtrcompile.passes.device.allocators import EXACT, Allocator
from dtrcompile.passes.device.host_copies import offload
from dtrcompile.passes.device.workspaces import may_hold_workspace, workspace_bytes
from dtrcompile.passes.errors import VerificationError
from dtrcompile.passes.inductor.dry_run import Wrapper
from dtrcompile.passes.inductor.lowering import NO_WRAPPER
from dtrcompile.passes.inductor.schedule_trace import Cause, Event, ScheduleTrace
from dtrcompile.passes.nodes import expression, hint, owned_bytes
from dtrcompile.passes.program.program import Phase
from dtrcompile.passes.program.sizes import Measurable, Sizes, Term, at_sizes
from dtrcompile.passes.torch_private import FakeTensorMode

_WRAPPER_FILE = "<inductor wrapper>"
# What wrappers check of their tensors, in C++, which has no symbols for sizes.
_CHECKS = (
    "assert_size_stride",
    "assert_size_stride_grouped",
    "assert_alignment",
    "assert_tensor_metadata",  # from PyTorch 2.14 on
)


@dataclass(frozen=True, slots=True)
class Resident:
    """A storage that is there before a graph runs.

    Attributes:
        cause: `Cause.PARAMETER`, `INPUT` or `TANGENT`.
        size: in the graphs' symbols, before the allocator rounds it up.
    """

    name: str
    cause: Cause
    size_bytes: int
    size: Term


@dataclass(frozen=True, slots=True)
class _Held:
    """A storage that was allocated, and the events that took it."""

    storage: StorageWeakRef
    taken: tuple[Event, ...]


class Recorder:
    """Notes what runs of wrappers take and give back.

    Args:
        allocator: what it counts for a storage.
        condition: the value of all conditions that wrappers branch on.
        is_symbolic: sizes are symbols; they are noted as expressions too.

    Attributes:
        events: so far.
        live: address -> what is allocated there; addresses are used again, serial numbers are not.
        wrapper: the one that is being run.
        phase: of its graph.
        has_conditions: wrappers branched on some.
    """

    def __init__(
        self,
        allocator: Allocator = EXACT,
        *,
        condition: bool = True,
        is_symbolic: bool = False,
    ) -> None:
        self.allocator = allocator
        self.condition = condition
        self.is_symbolic = is_symbolic
        self.events: list[Event] = []
        self.live: dict[int, _Held] = {}
        self.wrapper = Wrapper("", {})
        self.phase = Phase.FORWARD
        self.has_conditions = False
        self._moment = -1
        self._serials = 0
        self._workspaces: dict[str, Measurable] = {}

    def begin(self, phase: Phase, residents: Iterable[Resident] = ()) -> None:
        """A graph is about to run: what is there from outside."""
        self.phase = phase
        self._next_moment()
        # (There is a moment before the first allocation, whether or not anything is there.)
        for resident in [*residents] or [Resident("", Cause.INPUT, 0, sympy.S.Zero)]:
            self._serials += 1
            self.events.append(
                Event(
                    resident.size_bytes,
                    resident.cause,
                    phase,
                    self._moment,
                    self._serials,
                    buffer=resident.name,
                    line="inputs",
                    size=resident.size if self.is_symbolic else None,
                )
            )

    def allocate(self, tensor: torch.Tensor, line: str, cause: Cause = Cause.STORAGE) -> None:
        """Note the tensor's storage, unless it is noted already."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self.live and not self.live[key].storage.expired():
            return
        size = expression(storage.nbytes()) if self.is_symbolic else None
        taken = self._take(hint(storage.nbytes()), cause, line, size)
        self.live[key] = _Held(StorageWeakRef(storage), taken)

    def use(
        self, size_bytes: int, line: str, cause: Cause = Cause.WORKSPACE, size: Term | None = None
    ) -> None:
        """Note bytes that are held at this moment only."""
        if self.is_symbolic and size is None:
            size = sympy.Integer(size_bytes)
        self._give(self._take(size_bytes, cause, line, size))

    def use_workspace(
        self,
        func: object,
        args: Sequence[object],
        kwargs: Mapping[str, object],
        result: object,
        line: str,
    ) -> None:
        """Note what a library call holds beside its arguments and its result."""
        if not self.is_symbolic:
            size_bytes = workspace_bytes(func, args, kwargs, result)
            if size_bytes:
                self.use(size_bytes, line)
        elif may_hold_workspace(func, args):
            form = pytree.tree_map(_form, (tuple(args), dict(kwargs), result))
            # Calls that are alike at any sizes share a term, which is then measured once.
            workspace = self._workspaces.setdefault(
                f"{func} {form}", _workspace_at_any_sizes(func, form)
            )
            with at_sizes(None):
                size_bytes = workspace.bytes_at(None)  # type: ignore[arg-type]
            self.use(size_bytes, line, size=workspace)

    def serials(self, values: Sequence[object]) -> frozenset[int]:
        """Serial numbers of the allocations that ``values`` live in."""
        return frozenset(self.live[k].taken[0].serial for k in _keys(values) if k in self.live)

    def drop_dead(self) -> None:
        """Give back what nobody holds."""
        for k in [k for k, held in self.live.items() if held.storage.expired()]:
            self._give(self.live.pop(k).taken)

    def _next_moment(self) -> None:
        self.drop_dead()
        self._moment += 1

    def _take(
        self, size_bytes: int, cause: Cause, line: str, size: Term | None
    ) -> tuple[Event, ...]:
        self._next_moment()
        self._serials += 1
        buffer = _buffer(line)
        counted_bytes = self.allocator.block_bytes(size_bytes)

        def event(event_bytes: int, why: Cause, term: Term | None) -> Event:
            return Event(
                event_bytes,
                why,
                self.phase,
                self._moment,
                self._serials,
                buffer,
                line,
                self.wrapper.operators.get(buffer),
                self.wrapper.makers.get(buffer),
                self.wrapper.steps.get(buffer),
                self.wrapper.late_bytes.get(buffer, 0),
                term,
            )

        taken = [event(size_bytes, cause, size)]
        if counted_bytes != size_bytes:
            taken.append(event(counted_bytes - size_bytes, Cause.ROUNDING, None))
        self.events += taken
        return tuple(taken)

    def _give(self, taken: Sequence[Event]) -> None:
        """From the next moment on it is not held."""
        self.events += [
            replace(
                event,
                size_bytes=-event.size_bytes,
                phase=self.phase,
                moment=self._moment + 1,
                is_given_back=True,
            )
            for event in taken
        ]


def _buffer(line: str) -> str:
    """What a line of the wrapper assigns to."""
    return line.partition(" = ")[0]


@dataclass(frozen=True)
class _TensorForm:
    """What a fake tensor is made again from, at any sizes."""

    shape: tuple[int | torch.SymInt, ...]
    stride: tuple[int | torch.SymInt, ...]
    dtype: torch.dtype
    device: torch.device


def _workspace_at_any_sizes(func: object, form: Any) -> Measurable:
    """What a library call holds inside.

    Args:
        form: its arguments and its result, each tensor as a `_TensorForm`.
    """

    def bytes_at(sizes: Sizes | None) -> int:
        with at_sizes(sizes), FakeTensorMode(allow_non_fake_inputs=True):
            fake_args, fake_kwargs, fake_result = pytree.tree_map(
                _made, form, is_leaf=lambda leaf: isinstance(leaf, _TensorForm)
            )
            return workspace_bytes(func, fake_args, fake_kwargs, fake_result)

    return Measurable(str(func), bytes_at)


def _form(leaf: Any) -> Any:
    if isinstance(leaf, torch.Tensor) and leaf.layout is torch.strided:
        return _TensorForm(tuple(leaf.shape), tuple(leaf.stride()), leaf.dtype, leaf.device)
    return leaf


def _made(leaf: Any) -> Any:
    if isinstance(leaf, _TensorForm):
        shape, stride = ([hint(size) for size in sizes] for sizes in (leaf.shape, leaf.stride))
        return torch.empty_strided(shape, stride, dtype=leaf.dtype, device=leaf.device)
    return hint(leaf) if isinstance(leaf, torch.SymInt) else leaf


class _Kernel:
    """Stands for whatever a wrapper compiles or launches: does nothing."""

    def __call__(self, *_args: object, **_kwargs: object) -> _Kernel:
        return self

    def __getattr__(self, name: str) -> _Kernel:
        if name.startswith("__"):
            raise AttributeError(name)
        return self


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
    """Tells the recorder about the storage of everything an operator returns.

    Attributes:
        inputs: addresses of storages that are not counted.
        on_host: what was copied to the host; kept here so that no address is used again.
    """

    supports_higher_order_operators = True

    def __init__(self, recorder: Recorder, inputs: set[int], lines: Sequence[str]) -> None:
        super().__init__()
        self.recorder = recorder
        self.inputs = inputs
        self.lines = lines
        self.conditions: set[str] = set()
        self.on_host: list[torch.Tensor] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default and args[0].dtype is torch.bool:
            return self._condition()
        result = func(*args, **(kwargs or {}))
        if func is offload:  # to memory that does not count
            self.on_host.append(result)
            self.inputs.add(result.untyped_storage()._cdata)
            return result
        if func in _COPY_THE_STORAGE:
            result = _in_copied_storage(args[0], result)
        for t in pytree.tree_leaves(result):
            if not isinstance(t, torch.Tensor) or t.layout is not torch.strided:
                continue
            if t.untyped_storage()._cdata not in self.inputs:
                self.recorder.allocate(t, self._line())
        self.recorder.use_workspace(func, args, kwargs or {}, result, self._line())
        return result

    def _condition(self) -> bool:
        """What the wrapper branches on; asked at one place again, it is the end of a loop."""
        line = self._line()
        if line.startswith("assert not "):
            return False  # of the setting ``nan_asserts``
        self.recorder.has_conditions = True
        is_first = line not in self.conditions
        self.conditions.add(line)
        return self.recorder.condition and is_first

    def use_workspace(
        self, name: str, args: Sequence[object], kwargs: Mapping[str, object], out: object
    ) -> None:
        """Count what a library call holds beside its arguments; ``out`` is one of them."""
        func = getattr(getattr(torch.ops.aten, name, None), "default", None)
        line = self._line()
        buffer = _OUT.search(line)
        label = f"{buffer[1]} = {line}" if buffer else line
        self.recorder.use_workspace(func, args, kwargs, out, label)

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
    wrapper: Wrapper, inputs: list[object], recorder: Recorder, mode: FakeTensorMode
) -> list[object]:
    """Run a wrapper with empty kernels; its allocations go into ``recorder``.

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
        raise VerificationError(NO_WRAPPER)
    namespace: dict[str, Any] = {"__name__": "dtr_wrapper", "_dtr_kernel": _Kernel()}
    source = wrapper.source.replace(start, "async_compile = _dtr_kernel")
    source = _TRITON_IMPORT.sub("", source)

    # Inputs from outside stay with their callers; kept here so that no address is used again.
    outside = [
        t
        for t in inputs
        if isinstance(t, torch.Tensor)
        and t.layout is torch.strided
        and t.untyped_storage()._cdata not in recorder.live
    ]
    counting = _Counting(recorder, _keys(outside), source.splitlines())
    recorder.wrapper = wrapper
    try:
        with torch.no_grad():
            exec(compile(source, _WRAPPER_FILE, "exec"), namespace)
            namespace.update(wrapper.constants)
            namespace.update(helpers())
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


def helpers() -> dict[str, Any]:
    """What stands in for functions of PyTorch's C++, by the names that wrappers have for them.

    Such a function ends the process if it is given symbols.  A test looks for more of them in the
    source of the Inductor that is installed.
    """

    def empty(device: str) -> Any:
        def allocate(size: Any, stride: Any, dtype: Any) -> torch.Tensor:
            return torch.empty_strided(size, stride, dtype=dtype, device=device)

        return allocate

    def reinterpret(t: torch.Tensor, size: Any, stride: Any, offset: int = 0) -> torch.Tensor:
        return torch.as_strided(t, size, stride, t.storage_offset() + offset)

    stand_ins: dict[str, Any] = {"reinterpret_tensor": reinterpret}
    for name in ("empty_strided_cpu", "empty_strided_cpu_pinned"):
        stand_ins[name] = empty("cpu")
    for device in ("cuda", "xpu", "mtia"):
        stand_ins[f"empty_strided_{device}"] = empty(device)
    for name in _CHECKS:
        stand_ins[name] = _Kernel()
    # Inputs are taken to be aligned: what PyTorch allocates is.
    for name in ("copy_if_misaligned", "copy_misaligned"):
        stand_ins[name] = lambda tensor: tensor
    return stand_ins


# What only kernels need, and what is not installed everywhere.
_TRITON_IMPORT = re.compile(r"^import triton\b.*", re.MULTILINE)
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
class Surroundings:
    """What a step's graphs are given, and what is known of what they return.

    Attributes:
        forward_placeholders, backward_placeholders: of the graphs.
        differentiated: of forward's, those that backward returns a gradient for, in its order.
        num_fwd_outputs: results of forward that are the user's; the others are saved.
        residents: what is there before forward, and before backward.
        tangent_of: backward input -> the forward output that it is the gradient of.
        given_outputs: forward outputs that nobody holds when backward begins.
        given_tangents: backward inputs that are freed at their last use; not among ``residents``.
        shape_env: of the graphs' symbols, where sizes are to stay symbols.
    """

    forward_placeholders: Sequence[fx.Node]
    differentiated: Sequence[fx.Node]
    backward_placeholders: Sequence[fx.Node]
    num_fwd_outputs: int
    residents: Mapping[Phase, Sequence[Resident]]
    tangent_of: Mapping[int, int]
    given_outputs: frozenset[int] = frozenset()
    given_tangents: frozenset[int] = frozenset()
    shape_env: Any | None = None


def run_step(
    recorder: Recorder,
    forward: Wrapper,
    backward: Callable[[Sequence[object]], Wrapper] | None,
    around: Surroundings,
) -> ScheduleTrace:
    """Run a training step's (or an inference pass's) wrappers.

    Saved tensors go from forward's outputs to backward's inputs as the partitioner's contract says:
    forward returns tensors then symbols, backward takes symbols then tensors.

    Args:
        recorder: a fresh one.
        backward: gives the backward's wrapper, told what it receives from forward, in the order of
            its inputs: the strides are those that Inductor chose.
    """
    is_symbolic = around.shape_env is not None
    mode = FakeTensorMode(allow_non_fake_inputs=True, shape_env=around.shape_env)
    recorder.begin(Phase.FORWARD, around.residents[Phase.FORWARD])
    inputs = fake_inputs(mode, around.forward_placeholders, is_symbolic=is_symbolic)
    outputs = run_wrapper(forward, inputs, recorder, mode)
    user_outputs = outputs[: around.num_fwd_outputs]
    saved = outputs[around.num_fwd_outputs :]
    del outputs
    are_outputs = recorder.serials(user_outputs)
    are_saved = recorder.serials(saved) - are_outputs
    recorder.drop_dead()
    are_gradients: frozenset[int] = frozenset()
    written_over, draws = forward.written_over, forward.draws
    if backward is not None:
        strides = [o.stride() if isinstance(o, torch.Tensor) else None for o in user_outputs]
        for i in around.given_outputs:
            user_outputs[i] = None
        recorder.begin(Phase.BACKWARD, around.residents[Phase.BACKWARD])
        numbers = [v for v in saved if not isinstance(v, torch.Tensor)]
        tensors = [v for v in saved if isinstance(v, torch.Tensor)]
        from_forward = [*numbers, *tensors]
        rest = fake_inputs(
            mode, around.backward_placeholders[len(from_forward) :], is_symbolic=is_symbolic
        )
        wrapper = backward(from_forward)
        written_over |= wrapper.written_over
        draws += wrapper.draws
        inputs = [*from_forward, *rest]
        del saved, tensors, from_forward, rest
        for i in sorted(around.given_tangents):
            tangent = inputs[i]
            assert isinstance(tangent, torch.Tensor)
            recorder.allocate(tangent, "inputs", Cause.TANGENT)
            del tangent
        for i, o in around.tangent_of.items():
            count_coercion(recorder, strides[o], inputs[i], is_given=i in around.given_tangents)
        gradients = run_wrapper(wrapper, inputs, recorder, mode)
        count_accumulation(recorder, around.differentiated, gradients)
        are_gradients = recorder.serials(gradients)
    return ScheduleTrace(
        tuple(recorder.events),
        outputs=are_outputs,
        saved=are_saved,
        gradients=are_gradients,
        written_over=written_over,
        draws=draws,
        has_conditions=recorder.has_conditions,
    )


def count_coercion(
    recorder: Recorder, output_strides: Sequence[int] | None, tangent: object, *, is_given: bool
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
        line = "a tangent's copy in the layout that was traced"
        if is_given:  # then the copy takes its place
            recorder.use(hint(tangent.untyped_storage().nbytes()), line, Cause.TANGENT_COPY)
        else:
            recorder.allocate(tangent, line, Cause.TANGENT_COPY)


def count_accumulation(
    recorder: Recorder, differentiated: Sequence[fx.Node], gradients: Sequence[object]
) -> None:
    """Autograd keeps a gradient as it is, or copies it, one at a time, into its input's layout.

    The rule is `obeys_layout_contract` of PyTorch's ``AccumulateGrad``.
    """
    copied_bytes = 0
    for node, gradient in zip(differentiated, gradients, strict=False):
        val = node.meta.get("val")
        if isinstance(val, torch.Tensor) and isinstance(gradient, torch.Tensor):
            strides = _dense_strides(val)
            expected = [s for s, n in zip(strides, val.shape, strict=True) if hint(n) != 1]
            found = [s for s, n in zip(gradient.stride(), val.shape, strict=True) if hint(n) != 1]
            if found != expected:
                copied_bytes = max(copied_bytes, hint(val.numel()) * val.element_size())
    if copied_bytes:
        recorder.use(
            copied_bytes, "a gradient's copy in its parameter's layout", Cause.GRADIENT_COPY
        )


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
