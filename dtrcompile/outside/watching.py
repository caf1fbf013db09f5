"""``dtrcompile.watch()``: what a step held, what was promised, and what held the difference.

This checks the promise.  What is observed comes from the allocator, through `torch.profiler`, which
notes each allocation and each free, and the line of code that asked for it.  What existed before
the step is found among Python's objects.  On CUDA the peak is the allocator's own figure.
"""

from __future__ import annotations

import bisect
import contextlib
import gc
import os
import sys
import threading
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Protocol

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from dtrcompile.outside.uncompiled import is_users_code, told
from dtrcompile.passes.errors import DTRError, format_bytes
from dtrcompile.passes.graphs.storage_sizes import viewed_storages
from dtrcompile.passes.torch_private import EventType, FakeTensor, callback_handler
from dtrcompile.report import compilations

_REGION = "dtrcompile graph "
_BACKWARD = "CompiledFunctionBackward"
_NO_LINES = "dtrcompile takes no more lines"
# Regions that hold operators, and are none.
_NO_OPERATORS = ("autograd::engine::", "Torch-Compiled Region", "ProfilerStep")
# Kinds of the profiler's events, as numbers: a step may have millions of events, and comparing the
# names of their kinds takes five times as long.
_ALLOCATION: int = EventType.Allocation.value
_OPERATOR: int = EventType.TorchOp.value
_PYTHON_CALL: int = EventType.PyCall.value
_MAX_LINES = 12
_KEPT = "gradients kept from before"
_REST = "the rest of tensors of which a graph reads a part"


class WatchedGraph(Protocol):
    """What `Watch` asks of a graph that ran while a step was watched."""

    serial: int

    def promised_bytes(self) -> int | None:
        """The most that the step holds while the graph runs; None if nothing was planned."""

    def counts_kept_gradients(self) -> bool:
        """Whether the promise includes gradients of an earlier backward."""

    def counts_optimizers(self) -> bool:
        """Whether the promise includes the state of optimizers."""


@dataclass(frozen=True, slots=True)
class Held:
    """Something that was live outside of the graphs.

    Attributes:
        what: the operator that allocated it, or what it is, if it existed before the step.
        where: ``file:line`` of the user's code; empty if that is not known.
        size_bytes: its size at the moment of the peak.
    """

    what: str
    where: str
    size_bytes: int

    def __str__(self) -> str:
        return (
            f"{format_bytes(self.size_bytes)}  {', '.join(filter(None, (self.what, self.where)))}"
        )


@dataclass(frozen=True)
class _Call:
    """A call of a graph, and the storages of its arguments: address -> bytes that it reads."""

    graph: WatchedGraph
    addresses: Mapping[int, int]


class Watch:
    """What one step held; filled in at the end of the ``with``.

    Attributes:
        device: the device whose memory is watched.
        observed_bytes: the most that was live at one moment, whoever held it.
        promised_bytes: what the graphs that ran promise that the step holds at most; None if none
            ran.
        outside: what was live at that moment and is in no promise, largest first.
        was_compiling: whether graphs were compiled while the step was watched.  Compiling runs
            library calls of its own: watch a later step.
        messages: what was said of code outside of the graphs (also in the log).
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.observed_bytes = 0
        self.promised_bytes: int | None = None
        self.outside: tuple[Held, ...] = ()
        self.was_compiling = False
        self.messages: tuple[str, ...] = ()
        self.calls: list[_Call] = []
        self._before: dict[int, _There] = {}
        self._before_bytes = 0
        self._compilations = 0
        self._thread = 0
        self._has_lines = True
        self._profile = profile(
            activities=[ProfilerActivity.CPU],
            profile_memory=True,
            with_stack=True,
            record_shapes=True,
        )

    @property
    def outside_bytes(self) -> int:
        """The sum of `outside`."""
        return sum(held.size_bytes for held in self.outside)

    def __enter__(self) -> Watch:
        """Begin to watch.

        Raises:
            DTRError: if something is being watched or profiled already.
        """
        if _active.watch is not None or torch.autograd.profiler._is_profiler_enabled:
            raise DTRError(
                "dtrcompile.watch() takes a profile, and another one is being taken. Use one at a"
                " time."
            )
        self._before = {
            address: held
            for address, held in _tensors_there().items()
            if _is_on(held.device, self.device)
        }
        self._compilations = compilations()
        self._thread, self._has_lines = threading.get_ident(), True
        self._before_bytes = sum(held.size_bytes for held in self._before.values())
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
            self._before_bytes = torch.cuda.memory_allocated(self.device)
            torch.cuda.reset_peak_memory_stats(self.device)
        _active.watch = self
        if take_no_more_lines not in callback_handler.start_callbacks:
            callback_handler.register_start_callback(take_no_more_lines)
        self._profile.__enter__()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        self._profile.__exit__(kind, error, trace)
        _active.watch = None
        calls, self.calls = self.calls, []
        if error is not None:
            return
        graphs = list(dict.fromkeys(call.graph for call in calls))
        peak = _Peak(
            self._before,
            self._before_bytes,
            [call.addresses for call in calls],
            _promised_beside(graphs),
        )
        kineto = self._profile.profiler.kineto_results
        peak.follow(kineto.experimental_event_tree(), self.device)
        self.observed_bytes = peak.size_bytes
        if self.device.type == "cuda":
            self.observed_bytes = torch.cuda.max_memory_allocated(self.device)
        self.outside = peak.outside()
        self.was_compiling = compilations() != self._compilations
        self.messages = told()
        promised = [p for p in (graph.promised_bytes() for graph in graphs) if p is not None]
        self.promised_bytes = max(promised) if promised else None

    def take_no_more_lines(self) -> None:
        """From here on, the profile has no calls of Python functions, and so no lines of code.

        Compiling and planning make a million calls in a second, each of which would take a
        kilobyte or more when the profile ends: ten seconds took all the memory of a machine.
        """
        if not self._has_lines or self._thread != threading.get_ident():
            return
        self._has_lines = False
        sys.setprofile(None)
        with record_function(_NO_LINES):
            pass

    def __str__(self) -> str:
        promised = "nothing: no graph ran"
        if self.promised_bytes is not None:
            promised = format_bytes(self.promised_bytes)
        lines = [
            f"dtrcompile watched a step on {self.device}",
            f"  observed  {format_bytes(self.observed_bytes)}",
            f"  promised  {promised}",
            f"  outside   {format_bytes(self.outside_bytes)}",
        ]
        lines += [f"    {held}" for held in self.outside[:_MAX_LINES]]
        rest = self.outside[_MAX_LINES:]
        if rest:
            rest_bytes = sum(held.size_bytes for held in rest)
            lines.append(f"    {format_bytes(rest_bytes)}  {len(rest)} more")
        if self.was_compiling:
            lines.append("  graphs were compiled meanwhile: watch a later step")
        elif not self._has_lines:
            lines.append(
                "  graphs met new sizes meanwhile: what is allocated after that has no line"
            )
        lines += [f"  {message}" for message in self.messages]
        return "\n".join(lines)


def watch(device: torch.device | str | None = None) -> Watch:
    """Look at what a step holds::

        with dtrcompile.watch() as seen:
            model(x).backward()
        print(seen)

    prints what was promised, what the allocator saw, and what was live outside of the graphs at the
    moment of the peak, with the lines that asked for it.  The step runs slower, because a profile
    is taken; it is not changed otherwise.

    Args:
        device: the device whose memory is watched; by default the current CUDA device if CUDA is
            in use, else the CPU.

    Raises:
        DTRError: on entering, if a profile is being taken already.
    """
    if device is None:
        is_cuda = torch.cuda.is_available() and torch.cuda.is_initialized()
        device = torch.device("cuda", torch.cuda.current_device()) if is_cuda else "cpu"
    return Watch(torch.device(device))


class _Active:
    watch: Watch | None = None


_active = _Active()


def take_no_more_lines(_: object = None) -> None:
    """To be called before a graph is planned, compiled, or counted at other sizes.

    Dynamo calls it too.
    """
    if _active.watch is not None:
        _active.watch.take_no_more_lines()


@contextlib.contextmanager
def _region(graph: WatchedGraph, args: Sequence[Any]) -> Iterator[None]:
    assert _active.watch is not None
    tensors = (a for a in args if isinstance(a, torch.Tensor) and a.layout is torch.strided)
    addresses = viewed_storages(tensors, torch.UntypedStorage.data_ptr)
    _active.watch.calls.append(_Call(graph, addresses))
    with record_function(f"{_REGION}{graph.serial}"):
        yield


def running(graph: WatchedGraph, args: Sequence[Any]) -> contextlib.AbstractContextManager[None]:
    """A context around a call of a graph: what is allocated inside belongs to the graph."""
    return contextlib.nullcontext() if _active.watch is None else _region(graph, args)


# --- before the step ------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _There:
    what: str
    size_bytes: int
    device: torch.device


def _tensors_there() -> dict[int, _There]:
    """Address -> the storages that Python's tensors own at this moment."""
    tensors: list[torch.Tensor] = []
    optimizers: list[torch.optim.Optimizer] = []
    for thing in gc.get_objects():
        # (``isinstance`` would ask objects that pretend to be others.)
        if issubclass(type(thing), torch.Tensor):
            tensors.append(thing)
        elif issubclass(type(thing), torch.optim.Optimizer):
            optimizers.append(thing)
    found: dict[int, _There] = {}
    for optimizer in optimizers:
        states = [value for state in optimizer.state.values() for value in state.values()]
        _add(found, states, _state_of(optimizer))
    parameters = [t for t in tensors if issubclass(type(t), torch.nn.Parameter)]
    _add(found, (p.grad for p in parameters), _KEPT)
    _add(found, parameters, "parameters that no graph reads")
    _add(found, tensors, "other tensors")
    return found


def _promised_beside(graphs: Iterable[WatchedGraph]) -> frozenset[str]:
    """What the promise of these graphs holds beside them, by its name here."""
    promised: set[str] = set()
    for graph in graphs:
        if graph.counts_kept_gradients():
            promised.add(_KEPT)
        if graph.counts_optimizers():
            promised.update(
                _state_of(thing)
                for thing in gc.get_objects()
                if issubclass(type(thing), torch.optim.Optimizer)
            )
    return frozenset(promised)


def _state_of(optimizer: torch.optim.Optimizer) -> str:
    return f"optimizer state ({type(optimizer).__name__})"


def _add(found: dict[int, _There], values: Iterable[Any], what: str) -> None:
    for value in values:
        is_plain = (
            isinstance(value, torch.Tensor)
            and not isinstance(value, FakeTensor)
            and value.layout is torch.strided
            and value.device.type != "meta"
        )
        if not is_plain:
            continue
        try:
            storage = value.untyped_storage()
            address, size_bytes = storage.data_ptr(), storage.nbytes()
        except RuntimeError:  # a subclass without a storage of its own
            continue
        if address:
            found.setdefault(address, _There(what, size_bytes, value.device))


# --- during the step ------------------------------------------------------------------------------


class _Peak:
    """Follows the events of a step, and keeps what was live when the most was."""

    def __init__(
        self,
        before: Mapping[int, _There],
        before_bytes: int,
        calls: Sequence[Mapping[int, int]],
        promised: frozenset[str],
    ) -> None:
        self.promised = promised
        self.before = dict(before)
        self.unknown_bytes = before_bytes - sum(held.size_bytes for held in before.values())
        self.counted: dict[int, int] = {}
        for addresses in calls:
            for address, size_bytes in addresses.items():
                if address in before:
                    self.counted[address] = max(size_bytes, self.counted.get(address, 0))
        self.calls = iter(calls)
        self.live: dict[int, tuple[Held, bool]] = {}
        self.regions: list[tuple[int, int]] = []
        # Later, the profiler nests what happens under the calls that were under way by then.
        self.lines_until_ns = sys.maxsize
        self.live_bytes = before_bytes
        self.size_bytes = before_bytes
        self.at_peak: tuple[dict[int, _There], dict[int, tuple[Held, bool]]] = (dict(before), {})

    def follow(self, tree: Iterable[Any], device: torch.device) -> None:
        """All events, in order of time."""
        events: list[tuple[int, int, bool, Any]] = []
        # The regions hold what was allocated while they lasted; the profiler nests them elsewhere,
        # because what opens them returns before they end.
        regions: list[tuple[int, int]] = []
        pending = list(tree)
        while pending:
            event = pending.pop()
            pending.extend(event.children)
            kind = int(event.tag)
            if kind == _ALLOCATION:
                is_read = _is_on(event.extra_fields.device, device)
            elif kind == _OPERATOR:
                name = event.name
                is_read = name.startswith((_REGION, _BACKWARD))
                if name.startswith(_REGION):
                    regions.append((event.start_time_ns, event.end_time_ns))
                elif name == _NO_LINES:
                    self.lines_until_ns = event.start_time_ns
            else:
                continue  # (Names of Python's functions may hold bytes that are no text.)
            if is_read:
                events.append((event.start_time_ns, len(events), kind == _ALLOCATION, event))
        self.regions = sorted(regions)
        for _, _, is_allocation, event in sorted(events):
            if is_allocation:
                self.allocate(event)
            else:
                self.count_inputs(event)

    def count_inputs(self, event: Any) -> None:
        """A graph begins: its arguments, or the gradients that it is given, count from here on."""
        if event.name.startswith(_REGION):
            addresses: Iterable[int] = next(self.calls, {})
        else:
            inputs = event.extra_fields.inputs or ()
            addresses = [getattr(i, "storage_data_ptr", 0) for i in inputs]
        for address in addresses:
            if address in self.live:
                self.live[address] = (self.live[address][0], True)

    def allocate(self, event: Any) -> None:
        """An allocation, or a free."""
        fields = event.extra_fields
        if fields.alloc_size < 0:
            if (
                self.live.pop(fields.ptr, None) is None
                and self.before.pop(fields.ptr, None) is None
            ):
                return  # of something that was there before and that nobody knew of
        else:
            self.live[fields.ptr] = self.origin(event, fields.alloc_size)
        self.live_bytes += fields.alloc_size
        if self.live_bytes > self.size_bytes:
            self.size_bytes = self.live_bytes
            self.at_peak = (dict(self.before), dict(self.live))

    def origin(self, event: Any, size_bytes: int) -> tuple[Held, bool]:
        """What an allocation was for, and whether a graph made it."""
        operator = where = ""
        latest = bisect.bisect_right(self.regions, (event.start_time_ns, sys.maxsize)) - 1
        is_inside = latest >= 0 and event.start_time_ns <= self.regions[latest][1]
        has_lines = event.start_time_ns < self.lines_until_ns
        outer = event.parent
        while outer is not None:
            kind = int(outer.tag)
            if kind == _OPERATOR:
                name = outer.name
                is_inside = is_inside or name.startswith(_BACKWARD)
                operator = operator if name.startswith(_NO_OPERATORS) else name
            elif kind == _PYTHON_CALL and has_lines and not where:
                where = _users_line(outer)
            outer = outer.parent
        return Held(operator or "an allocation", where, size_bytes), is_inside

    def outside(self) -> tuple[Held, ...]:
        """What no graph counts of what was live at the peak."""
        before, live = self.at_peak
        sizes: Counter[tuple[str, str]] = Counter()
        for address, there in before.items():
            if there.what in self.promised:
                continue
            counted_bytes = self.counted.get(address)
            if counted_bytes is None:
                sizes[there.what, "before the step"] += there.size_bytes
            else:
                sizes[_REST, "before the step"] += max(there.size_bytes - counted_bytes, 0)
        for held, is_inside in live.values():
            if not is_inside:
                sizes[held.what, held.where] += held.size_bytes
        if self.unknown_bytes > 0:
            sizes["what no Python object owns", "before the step"] += self.unknown_bytes
        found = [Held(what, where, size) for (what, where), size in sizes.items() if size]
        return tuple(sorted(found, key=lambda h: (-h.size_bytes, h.what, h.where)))


def _users_line(call: Any) -> str:
    """``file:line`` that a call comes from; empty if it is not the user's code."""
    caller = call.extra_fields.caller
    try:
        path = _path(caller.file_name)
    except UnicodeDecodeError:
        # The profiler points to a name whose code object no longer exists.
        return ""
    return f"{path}:{caller.line_number}" if is_users_code(path) else ""


def _path(name: str) -> str:
    """A file's path: the profiler leaves out what ``sys.path`` says."""
    if os.path.isabs(name):
        return name
    paths = (os.path.join(folder or os.getcwd(), name) for folder in sys.path)
    return next(filter(os.path.exists, paths), name)


def _is_on(place: torch.device, device: torch.device) -> bool:
    return place.type == device.type and (device.index is None or place.index == device.index)
