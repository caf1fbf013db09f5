"""A graph taken through Inductor up to its Python wrapper, without compiling a kernel."""

from __future__ import annotations

import contextlib
import functools
import gc
import hashlib
import logging
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import fx

from dtrcompile.passes.errors import VerificationError
from dtrcompile.passes.graphs.modules import copied_module
from dtrcompile.passes.inductor import disk_cache
from dtrcompile.passes.inductor.dry_run import Lowered, Wrapper
from dtrcompile.passes.inductor.patches import Purpose, applied
from dtrcompile.passes.inductor.side_by_side import GraphBeside, LoweredBeside
from dtrcompile.passes.nodes import mark_of
from dtrcompile.passes.process_switches import process_switches
from dtrcompile.passes.remembered import Remembered
from dtrcompile.passes.target.devices import current_target
from dtrcompile.passes.torch_private import (
    BoxedBool,
    BoxedDeviceIndex,
    CompileFxKwargs,
    DebugContext,
    HigherOrderOperator,
    InProcessFxCompile,
    TracingContext,
    get_input_idxs_to_check,
    inductor_config,
    select_decomp_table,
)

log = logging.getLogger("dtrcompile")


WrapperKey = tuple[str, bytes, tuple[object, ...]]


@dataclass(frozen=True)
class Request:
    """A graph that Inductor is given, and what it is told beside.

    Lowering leaves the graph as it is, compiling does not.

    Attributes:
        inputs: fake tensors, one a placeholder.
        static_input_indices: inputs that stay where they are.
        donated: inputs of a backward graph whose memory it may write over.
    """

    graph: fx.GraphModule
    inputs: Sequence[object]
    static_input_indices: tuple[int, ...]
    is_backward: bool
    is_inference: bool
    donated: Sequence[int] = ()

    @functools.cached_property
    def identity(self) -> str:
        """Covers what a wrapper depends on beside the configuration."""
        with self._donating():
            return identity_of(
                self.graph,
                self.inputs,
                self.static_input_indices,
                is_backward=self.is_backward,
                is_inference=self.is_inference,
            )

    @functools.cached_property
    def key(self) -> WrapperKey:
        """Of its wrapper, among those that are remembered, under the configuration that is active
        when it is asked for first."""
        return self.identity, inductor_config.save_config(), process_switches()

    @functools.cached_property
    def disk_key(self) -> str | None:
        """Of its wrapper on disk, None where it is not kept."""
        return disk_cache.key_of("wrapper", self.identity) if has_text(self.graph) else None

    def known(self) -> Wrapper | None:
        """The wrapper, if this process or an earlier one wrote it."""
        wrapper = _LOWERED.get(self.key)
        if wrapper is None:
            entry = disk_cache.read(self.disk_key)
            if entry is None:
                return None
            wrapper = Wrapper.of_entry(entry)
            _LOWERED.put(self.key, wrapper)
        return wrapper

    def lowered(self) -> Wrapper:
        """The wrapper, written now."""
        with self._donating():
            return _lowered(self)

    def compiled(self, compile_graph: CompileGraph) -> object:
        """The graph compiled as PyTorch has it compiled; it is changed by that."""
        kind: dict[str, Any] = (
            {"is_backward": True} if self.is_backward else {"is_inference": self.is_inference}
        )
        # Releases that know it always say it, and the key of Inductor's cache covers it.
        if "get_decomp_fn" in CompileFxKwargs.__annotations__:
            kind["get_decomp_fn"] = select_decomp_table
        with self._donating(), torch.no_grad():
            return compile_graph(
                self.graph,
                self.inputs,
                static_input_idxs=list(self.static_input_indices),
                cudagraphs=BoxedBool(inductor_config.triton.cudagraphs),
                graph_id=None,
                boxed_forward_device_index=BoxedDeviceIndex(None),
                **kind,
            )

    @contextlib.contextmanager
    def _donating(self) -> Iterator[None]:
        """Let Inductor see the donated inputs that AOTAutograd sets only after the partitioner."""
        context = TracingContext.try_get()
        if context is None or not self.is_backward:
            yield
            return
        metadata = context.fw_metadata or SimpleNamespace()
        with (
            mock.patch.object(context, "fw_metadata", metadata),
            mock.patch.object(metadata, "bw_donated_idxs", list(self.donated), create=True),
        ):
            yield


CompileGraph = Callable[..., object]
"""As Inductor's ``compile_fx_inner``."""


def lower_graph(request: Request, beside: GraphBeside | None = None) -> Wrapper:
    """Take a graph through Inductor up to its wrapper.

    Runs under the configuration that is active, which must be the one of the real compilation.

    Args:
        beside: a process that writes the wrapper of this request, or of another.
    """
    wrapper = request.known()
    if wrapper is not None:
        return wrapper
    if beside is not None and beside.key == request.key:
        wrapper = beside.wrapper()
    if wrapper is None:
        wrapper = request.lowered()
    wrapper = replace(wrapper, key=None if wrapper.constants else request.disk_key)
    _LOWERED.put(request.key, wrapper)
    return wrapper


def lower_beside(request: Request) -> LoweredBeside | None:
    """Begin to lower a graph in another process; None if there is no need, or no such process."""
    if request.known() is not None:
        return None
    try:
        return LoweredBeside(request.key, request.lowered)
    except OSError as error:
        log.debug("no process to lower a graph in: %s", error)
        return None


def _lowered(request: Request) -> Wrapper:
    copy = copied_module(request.graph)
    graph_kwargs: Any = {
        "cudagraphs": BoxedBool(False),
        "static_input_idxs": request.static_input_indices,
        "is_backward": request.is_backward,
        "graph_id": None,
        "cpp_wrapper": False,
        "fx_wrapper": False,
        "is_inference": request.is_inference,
        "boxed_forward_device_index": None,
        "layout_opt": None,
        "extern_node_serializer": None,
        "get_decomp_fn": select_decomp_table,
    }
    inputs: Any = request.inputs
    inputs_to_check = get_input_idxs_to_check(inputs, request.static_input_indices)
    with (
        torch.utils._python_dispatch._disable_current_modes(),
        DebugContext(),
        _without_collector(),
        applied(Purpose.EVERY_COMPILATION, Purpose.DRY_RUN),
    ):
        try:
            InProcessFxCompile().codegen_and_compile(copy, inputs, inputs_to_check, graph_kwargs)
        except Lowered as lowered:
            return lowered.wrapper
    raise VerificationError(NO_WRAPPER)


NO_WRAPPER = (
    "Inductor did not write the Python wrapper whose memory could be counted; its C++ wrapper and"
    " ahead-of-time compilation cannot be checked. Pass options={'verify': False} to go without the"
    " check."
)


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


# Wrappers by what they were made from: candidates of one plan often share a forward graph, and
# recompilations share the default split's.
_LOWERED = Remembered[WrapperKey, Wrapper](64)


def graph_text(gm: fx.GraphModule) -> str:
    """A graph's text, with shapes, strides and devices, and without places in the user's source.

    A line that is added above a model makes no other plan.
    """
    text = str(gm.print_readable(print_output=False, include_stride=True, include_device=True))
    return "\n".join(line for line in text.splitlines() if not line.lstrip().startswith("#"))


def without_device_index(texts: Sequence[str]) -> list[str]:
    """Texts of graphs as any rank of a job would have them, each of which has a device of its own.

    They are left as they are if they name more than one device.
    """
    found = {match.groups() for text in texts for match in _INDEXED_DEVICE.finditer(text)}
    if len(found) != 1:
        return list(texts)
    return [_INDEXED_DEVICE.sub(r"\1", text) for text in texts]


# In annotations of values (``cuda:1``) and among arguments (``device(type='cuda', index=1)``).
_INDEXED_DEVICE = re.compile(r"\b(cuda|xpu|hpu|mtia)(?::|', index=)(\d+)\b")


def marks_text(gm: fx.GraphModule) -> str:
    """What was decided about a graph's nodes, which `graph_text` does not say."""
    return "".join(str(mark_of(node)) for node in gm.graph.nodes)


def has_text(gm: fx.GraphModule) -> bool:
    """Whether `graph_text` tells all in every process: calls of Triton kernels of the user's name
    them by a number that this process gave them."""
    return not any(
        isinstance(node.target, HigherOrderOperator) and "triton" in str(node.target)
        for module in gm.modules()
        if isinstance(module, fx.GraphModule)
        for node in module.graph.nodes
    )


def identity_of(
    gm: fx.GraphModule,
    example_inputs: Sequence[object],
    static_input_indices: Sequence[int],
    *,
    is_backward: bool,
    is_inference: bool,
) -> str:
    """Covers what a wrapper depends on beside the configuration: graph, marks, inputs.

    The values that symbolic sizes were traced with are part of it: Inductor chooses by them, and
    may take a size for a constant.
    """
    digest = hashlib.sha256()
    digest.update(graph_text(gm).encode())
    digest.update(marks_text(gm).encode())
    for node in gm.graph.nodes:
        digest.update(f"{node.meta.get('user_visible_output_idxs')}".encode())
    for leaf in example_inputs:
        if isinstance(leaf, torch.Tensor):
            sizes = (*leaf.shape, *leaf.stride())
            digest.update(f"{leaf.shape} {leaf.stride()} {leaf.dtype} {leaf.device}".encode())
        else:
            sizes = (leaf,)
            digest.update(f"{type(leaf)} {leaf}".encode())
        traced_with = [size.node.hint for size in sizes if isinstance(size, torch.SymInt)]
        digest.update(f"{traced_with}".encode())
    kind = tuple(static_input_indices), is_backward, is_inference
    donated = donated_indices() if is_backward else None
    digest.update(f"{kind} {donated} {current_target()}".encode())
    return digest.hexdigest()


def donated_indices() -> list[int] | None:
    """Backward's inputs whose memory it may write over, of the step that is being compiled.

    AOTAutograd finds them with the step's graphs, and takes them back where backward first runs
    with ``retain_graph=True``; they are in none of the graphs.
    """
    context = TracingContext.try_get()
    metadata = context.fw_metadata if context is not None else None
    return metadata.bw_donated_idxs if metadata is not None else None
