"""A graph taken through Inductor up to its Python wrapper, without compiling a kernel."""

from __future__ import annotations

import contextlib
import gc
import hashlib
import logging
import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from dtrcompile.passes.errors import VerificationError
from dtrcompile.passes.graphs.modules import copied_module
from dtrcompile.passes.inductor import disk_cache
from dtrcompile.passes.inductor.dry_run import Lowered, Wrapper
from dtrcompile.passes.inductor.patches import Purpose, applied
from dtrcompile.passes.inductor.side_by_side import LoweredBeside
from dtrcompile.passes.nodes import mark_of
from dtrcompile.passes.remembered import Remembered
from dtrcompile.passes.target.devices import current_target
from dtrcompile.passes.torch_private import (
    BoxedBool,
    DebugContext,
    HigherOrderOperator,
    InProcessFxCompile,
    TracingContext,
    get_input_idxs_to_check,
    inductor_config,
    select_decomp_table,
)

log = logging.getLogger("dtrcompile")


def lower_graph(
    gm: fx.GraphModule,
    example_inputs: Sequence[object],
    *,
    static_input_indices: Sequence[int],
    is_backward: bool,
    is_inference: bool,
    beside: LoweredBeside | None = None,
) -> Wrapper:
    """Take a graph through Inductor up to its wrapper; ``gm`` is left as it is.

    Runs under the configuration that is active, which must be the one of the real compilation.

    Args:
        example_inputs: fake tensors, one a placeholder.
        beside: what `lower_beside` returned, perhaps for other inputs.
    """
    request = _Request(gm, example_inputs, static_input_indices, is_backward, is_inference)
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


def lower_beside(
    gm: fx.GraphModule,
    example_inputs: Sequence[object],
    *,
    static_input_indices: Sequence[int],
    is_backward: bool,
    is_inference: bool,
) -> LoweredBeside | None:
    """Begin to lower a graph in another process; None if there is no need, or no such process."""
    request = _Request(gm, example_inputs, static_input_indices, is_backward, is_inference)
    if request.known() is not None:
        return None
    try:
        return LoweredBeside(request.key, request.lowered)
    except OSError as error:
        log.debug("no process to lower a graph in: %s", error)
        return None


class _Request:
    """A graph that is to be lowered.

    Attributes:
        key: of its wrapper, among those that are remembered.
        disk_key: of its wrapper on disk, None where it is not kept.
    """

    def __init__(
        self,
        gm: fx.GraphModule,
        example_inputs: Sequence[object],
        static_input_indices: Sequence[int],
        is_backward: bool,
        is_inference: bool,
    ) -> None:
        self._what = gm, example_inputs, static_input_indices, is_backward, is_inference
        others = tuple(static_input_indices), is_backward, is_inference
        asked = _asked(gm, example_inputs, others)
        self.key = asked, inductor_config.save_config()
        self.disk_key = disk_cache.key_of("wrapper", asked) if has_text(gm) else None

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
        return _lowered(*self._what)


def _lowered(
    gm: fx.GraphModule,
    example_inputs: Sequence[object],
    static_input_indices: Sequence[int],
    is_backward: bool,
    is_inference: bool,
) -> Wrapper:
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
        _without_collector(),
        applied(Purpose.EVERY_COMPILATION, Purpose.DRY_RUN),
    ):
        try:
            InProcessFxCompile().codegen_and_compile(
                copy,
                example_inputs,  # type: ignore[arg-type]
                inputs_to_check,
                graph_kwargs,
            )
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
_LOWERED = Remembered[tuple[str, bytes], Wrapper](64)


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


def _asked(gm: fx.GraphModule, example_inputs: Sequence[object], others: object) -> str:
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
    digest.update(f"{others} {donated_indices()} {current_target()}".encode())
    return digest.hexdigest()


def donated_indices() -> list[int] | None:
    """Backward's inputs whose memory it may write over, of the step that is being compiled.

    AOTAutograd finds them with the step's graphs, and takes them back where backward first runs
    with ``retain_graph=True``; they are in none of the graphs.
    """
    context = TracingContext.try_get()
    metadata = context.fw_metadata if context is not None else None
    return metadata.bw_donated_idxs if metadata is not None else None
