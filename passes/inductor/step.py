"""The door to Inductor: `lower` takes a step's graphs to the wrappers that Inductor writes, `trace`
says what these take and give back.

The configuration of `planned_config` applies to graphs that come from a plan, when they are
measured and when they are compiled; the default split's graphs get Inductor's defaults.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, MutableMapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import sympy
import torch
from torch import fx

from dtrcompile.passes.graphs.capture import Captured
from dtrcompile.passes.graphs.emit import lower_frees
from dtrcompile.passes.graphs.modules import (
    copied_module,
    inputs_of_gradients,
    output_arguments,
    placeholders,
    tokens,
)
from dtrcompile.passes.inductor import disk_cache
from dtrcompile.passes.inductor.compiled_beside import CompiledBeside, begin_to_compile
from dtrcompile.passes.inductor.dry_run import Wrapper
from dtrcompile.passes.inductor.guards import noting_guards
from dtrcompile.passes.inductor.lowering import (
    CompileGraph,
    Request,
    lower_beside,
    lower_graph,
)
from dtrcompile.passes.inductor.patches import keep_plan_order
from dtrcompile.passes.inductor.schedule_trace import Cause, ScheduleTrace
from dtrcompile.passes.inductor.side_by_side import GraphBeside, may_fork
from dtrcompile.passes.inductor.wrapper_run import Recorder, Resident, Surroundings, run_step
from dtrcompile.passes.nodes import hint, mark_of, value
from dtrcompile.passes.program.program import Phase, StorageKind
from dtrcompile.passes.program.sizes import at_sizes
from dtrcompile.passes.target.devices import current_target
from dtrcompile.passes.torch_private import (
    FakeTensor,
    InputMutationAOTOutput,
    IntermediateBaseAOTOutput,
    TangentAOTInput,
    collect_fw_donated_buffer_idxs,
    count_tangents,
    functorch_config,
    inductor_config,
)

# Outputs that AOTAutograd adds to the user's; their strides are its own business.
_NOT_FROM_THE_USER = (InputMutationAOTOutput, IntermediateBaseAOTOutput)


# By what Inductor puts kernels into another order: for the peak, by an estimate of its own; for
# fewer or longer CUDA graphs, whatever the device; under communication; and for locality (in
# training, torch 2.14).  Not every release has all of them.
_REORDERS = tuple(
    name
    for name in (
        "reorder_for_peak_memory",
        "triton.reorder_for_reducing_graph_partitions",
        "reorder_for_compute_comm_overlap",
        "aten_distributed_optimizations.enable_simple_overlap",
        "reorder_for_locality_in_training",
    )
    if name in inductor_config.get_config_copy()
)


@contextlib.contextmanager
def planned_config() -> Iterator[None]:
    """Inductor's settings for graphs of a plan: keep its order."""
    with inductor_config.patch(dict.fromkeys(_REORDERS, False)), keep_plan_order():
        yield


def is_planned(gm: fx.GraphModule) -> bool:
    """Whether a graph was emitted from a plan."""
    return any(mark_of(node).group is not None for node in gm.graph.nodes)


@dataclass(frozen=True)
class LoweredStep:
    """A step's graphs as Inductor will run them.

    Attributes:
        captured: what the graphs compute.
        graphs: forward, and backward where there is one; what the wrappers were made from.
        forward, backward: the wrappers; backward's is None for inference.
        traced: what `trace` has to say of them, where lowering them has shown it: their sizes do
            not change.
        backward_request: what backward was lowered from, in the strides that forward gives to what
            it saves; None for inference, and for wrappers of compiled code.
        compiling: processes that compile the graphs while the step is looked at.
    """

    captured: Captured
    graphs: tuple[fx.GraphModule, ...]
    forward: Wrapper
    backward: Wrapper | None
    traced: ScheduleTrace | None = field(default=None, repr=False, compare=False)
    backward_request: Request | None = field(default=None, repr=False, compare=False)
    compiling: tuple[CompiledBeside | None, CompiledBeside | None] = field(
        default=(None, None), repr=False, compare=False
    )

    def of(self, captured: Captured) -> LoweredStep:
        """The same wrappers, where the same graphs hand on other outputs and tangents."""
        return replace(self, captured=captured, traced=None)

    def stop_compiling(self) -> None:
        """It is not needed."""
        for process in self.compiling:
            if process is not None:
                process.close()


def lower(
    captured: Captured,
    graphs: Sequence[fx.GraphModule],
    expected_strides: MutableMapping[str, tuple[int, ...]] | None = None,
    compile_graph: CompileGraph | None = None,
) -> LoweredStep:
    """Take a step's graphs through Inductor up to its wrappers; this process compiles no kernel.

    Forward and backward are lowered at the same time if the strides of what forward saves, which
    Inductor chooses, are as expected.

    Args:
        graphs: of the default split, or emitted from a plan, which their nodes' marks say; they are
            left as they are.
        expected_strides: name of a saved value -> its strides, as earlier calls found them; what
            this call finds is added.
        compile_graph: given for graphs that are likely to be compiled.  Where other processes can
            do it, they go on to compile what they lower.
    """
    graphs = [copied_module(gm) for gm in graphs]
    for gm in graphs:
        lower_frees(gm)
    as_planned = planned_config() if is_planned(graphs[0]) else contextlib.nullcontext()
    # Inductor lowers with the hints, whatever the sizes that are planned for.
    with at_sizes(None), as_planned:
        strides = {} if expected_strides is None else expected_strides
        return _lowered(captured, graphs, strides, compile_graph)


def _lowered(
    captured: Captured,
    graphs: Sequence[fx.GraphModule],
    expected_strides: MutableMapping[str, tuple[int, ...]],
    compile_graph: CompileGraph | None,
) -> LoweredStep:
    request = _forward_request(captured, graphs[0])
    if captured.backward is None:
        return LoweredStep(captured, tuple(graphs), lower_graph(request), None)
    backward = graphs[1]
    inputs_of_backward = placeholders(backward)
    lowered: list[tuple[Request, Wrapper]] = []

    def lower_backward(from_forward: Sequence[object]) -> Wrapper:
        inputs = [value(n) for n in inputs_of_backward]
        for i, received in enumerate(from_forward):
            if isinstance(received, torch.Tensor):
                inputs[i] = _restrided(inputs[i], received.stride())
                expected_strides[inputs_of_backward[i].name] = received.stride()
        request = guess
        if request is None or not _have_same_strides(request.inputs, inputs):
            request = _backward_request(captured, graphs, inputs)
        lowered[:] = [(request, lower_graph(request, beside[1]))]
        return lowered[0][1]

    guess: Request | None = None
    beside: Beside = (None, None)
    if not captured.symbols and may_fork():
        given = {node.name for node in placeholders(graphs[0])}
        guessed = {n.name: _padded_strides(value(n)) for n in inputs_of_backward}
        strides = {**guessed, **dict.fromkeys(given), **expected_strides}
        inputs = [_restrided(value(n), strides[n.name]) for n in inputs_of_backward]
        guess = _backward_request(captured, graphs, inputs)
        beside = _begin(captured, request, guess, compile_graph)
    compiling: list[CompiledBeside | None] = [None, None]
    try:
        forward = lower_graph(request, beside[0])
        recorder = Recorder(captured.allocator)
        traced = run_step(recorder, forward, lower_backward, _surroundings(captured, graphs))
        ((backward_request, wrapper),) = lowered
        for i, lowered_from in enumerate((request, backward_request)):
            process = beside[i]
            if isinstance(process, CompiledBeside) and process.key == lowered_from.key:
                compiling[i] = process
    finally:
        for process in beside:
            if process is not None and process not in compiling:
                process.close()
    return LoweredStep(
        captured,
        tuple(graphs),
        forward,
        wrapper,
        # With symbols, other sizes may count than those that it was lowered with.
        None if captured.symbols else traced,
        backward_request,
        (compiling[0], compiling[1]),
    )


Beside = tuple[GraphBeside | None, GraphBeside | None]
"""Processes that lower forward and backward."""


def _begin(
    captured: Captured,
    forward: Request,
    backward: Request,
    compile_graph: CompileGraph | None,
) -> Beside:
    """Have other processes lower backward alone, or, where these can, compile both graphs."""
    is_on_cpu = device_of(captured).type == "cpu"
    if is_on_cpu and compile_graph is not None and forward.known() is None:
        begun = begin_to_compile([forward, backward], compile_graph)
        if begun is not None:
            return begun[0], begun[1]
    needs_no_device = is_on_cpu or current_target() is not None
    return None, lower_beside(backward) if needs_no_device else None


def begin_backward(
    captured: Captured, lowered: LoweredStep | None, compile_graph: CompileGraph
) -> CompiledBeside | None:
    """Have another process compile backward, while this process compiles forward and runs it.

    Args:
        lowered: None for the default split in the strides that were traced.
    """
    if captured.backward is None or captured.symbols or device_of(captured).type != "cpu":
        return None
    if lowered is not None:
        request = lowered.backward_request
    else:
        backward = copied_module(captured.backward)
        inputs = [value(n) for n in placeholders(backward)]
        request = _backward_request(captured, (captured.forward, backward), inputs)
    begun = None if request is None else begin_to_compile([request], compile_graph)
    return None if begun is None else begun[0]


def _forward_request(captured: Captured, forward: fx.GraphModule) -> Request:
    is_inference = captured.backward is None
    _mark_user_visible(forward, captured.num_fwd_outputs, False, is_inference)
    inputs = [value(n) for n in placeholders(forward)]
    static = tuple(captured.static_input_indices)
    return Request(forward, inputs, static, is_backward=False, is_inference=is_inference)


def _backward_request(
    captured: Captured, graphs: Sequence[fx.GraphModule], inputs: Sequence[object]
) -> Request:
    backward = graphs[1]
    _mark_user_visible(backward, captured.num_fwd_outputs, True, False)
    static = _static_in_backward(backward)
    donated = _donated(graphs, captured.num_fwd_outputs)
    return Request(backward, inputs, static, is_backward=True, is_inference=False, donated=donated)


def keep(lowered: LoweredStep) -> None:
    """Let later processes read the wrappers of these graphs from disk instead of making them."""
    for wrapper in (lowered.forward, lowered.backward):
        if wrapper is not None and wrapper.key is not None:
            disk_cache.write(wrapper.key, wrapper.entry())


def trace(lowered: LoweredStep) -> ScheduleTrace:
    """What the wrappers of a step take and give back, at the sizes that count here.

    Where a wrapper branches on a tensor (`torch.cond`), all conditions are taken to be true, then
    false; the higher peak counts.
    """
    traced = lowered.traced or _traced(lowered, Recorder(lowered.captured.allocator))
    if traced.has_conditions:
        other = _traced(lowered, Recorder(lowered.captured.allocator, condition=False))
        traced = max(traced, other, key=lambda t: max(m.live_bytes for m in t.moments()))
    return traced


def trace_in_symbols(lowered: LoweredStep) -> tuple[ScheduleTrace, tuple[sympy.Basic, ...]]:
    """As `trace`, with symbols in place of sizes; and the conditions under which it is right.

    Raises:
        VerificationError: if the wrappers cannot be run on symbols.
    """
    captured = lowered.captured
    shape_env = next(iter(captured.symbols.values())).node.shape_env
    with at_sizes(None), noting_guards(shape_env) as guards:
        recorder = Recorder(captured.allocator, is_symbolic=True)
        traced = _traced(lowered, recorder, shape_env)
    return traced, tuple(guards)


def _traced(
    lowered: LoweredStep, recorder: Recorder, shape_env: Any | None = None
) -> ScheduleTrace:
    backward = lowered.backward
    return run_step(
        recorder,
        lowered.forward,
        None if backward is None else lambda _: backward,
        _surroundings(lowered.captured, lowered.graphs, shape_env),
    )


def _surroundings(
    captured: Captured, graphs: Sequence[fx.GraphModule], shape_env: Any | None = None
) -> Surroundings:
    # AOTAutograd takes tokens out of the graphs that are compiled: the first inputs and outputs.
    gone = len(tokens(captured.forward)) - len(tokens(graphs[0]))
    return Surroundings(
        forward_placeholders=placeholders(graphs[0]),
        differentiated=inputs_of_gradients(graphs[0]),
        backward_placeholders=placeholders(graphs[1]) if len(graphs) > 1 else [],
        num_fwd_outputs=captured.num_fwd_outputs - gone,
        residents=residents(captured),
        tangent_of=_tangent_of(graphs, captured.num_fwd_outputs, gone),
        given_outputs=frozenset(i - gone for i in _given_outputs(captured) if i >= gone),
        given_tangents=_given_tangents(captured, graphs),
        shape_env=shape_env,
    )


_CAUSES = {
    StorageKind.PARAMETER: (Phase.FORWARD, Cause.PARAMETER),
    StorageKind.INPUT: (Phase.FORWARD, Cause.INPUT),
    StorageKind.TANGENT: (Phase.BACKWARD, Cause.TANGENT),
}


def residents(captured: Captured) -> dict[Phase, list[Resident]]:
    """What is there before forward and before backward, at the sizes that count here."""
    found: dict[Phase, list[Resident]] = {Phase.FORWARD: [], Phase.BACKWARD: []}
    twice = cuda_graphs_copy_inputs(captured)
    storages = captured.program.storages
    sizes = zip(captured.storage_bytes(), captured.storage_expressions(), strict=True)
    for storage, (size_bytes, size) in zip(storages, sizes, strict=True):
        if storage.kind in _CAUSES and not storage.is_handed_on:
            phase, cause = _CAUSES[storage.kind]
            resident = Resident(storage.name, cause, size_bytes, size)
            found[phase] += [resident] * (2 if twice and cause is Cause.INPUT else 1)
    return found


def cuda_graphs_copy_inputs(captured: Captured) -> bool:
    """Whether a CUDA graph reads copies of its inputs, at addresses that never change."""
    return bool(inductor_config.triton.cudagraphs) and device_of(captured).type == "cuda"


def _given_outputs(captured: Captured) -> frozenset[int]:
    """Forward outputs that nobody holds in backward."""
    results = output_arguments(captured.forward)[: captured.num_fwd_outputs]
    return frozenset(
        i
        for i, n in enumerate(results)
        if isinstance(n, fx.Node)
        and captured.storage_of.get(captured.owner(n)) in captured.program.handed_on
    )


def _given_tangents(captured: Captured, graphs: Sequence[fx.GraphModule]) -> frozenset[int]:
    """Backward inputs that are freed at their last use."""
    names = {
        captured.storage_nodes[s].name
        for s in captured.program.handed_on
        if captured.program.storages[s].is_constant
    }
    if len(graphs) < 2:
        return frozenset()
    return frozenset(i for i, n in enumerate(placeholders(graphs[1])) if n.name in names)


def _tangent_of(
    graphs: Sequence[fx.GraphModule], num_fwd_outputs: int, gone: int
) -> dict[int, int]:
    """Backward input -> the forward output that it is the gradient of, where both are described.

    Args:
        gone: outputs that are described, but are not there.
    """
    if len(graphs) < 2:
        return {}
    (out,) = graphs[0].graph.find_nodes(op="output")
    described = list(out.meta.get("desc") or ())[:num_fwd_outputs]
    tangents = {
        i: desc.output
        for i, node in enumerate(placeholders(graphs[1]))
        if isinstance(desc := node.meta.get("desc"), TangentAOTInput)
    }
    return {i: described.index(o) - gone for i, o in tangents.items() if o in described}


def device_of(captured: Captured) -> torch.device:
    """The device that the graphs compute on: the first accelerator among their values, else CPU."""
    found = torch.device("cpu")
    for node in captured.storage_nodes:
        val = node.meta["val"]
        if val.device.type not in ("cpu", "meta"):
            return torch.device(val.device)
    return found


def _static_in_backward(backward: fx.GraphModule) -> tuple[int, ...]:
    """Which backward inputs Inductor takes to stay where they are, as ``compile_fx`` will say.

    What forward saved; since torch 2.15 without the user's inputs among that, which the partitioner
    marks.
    """
    saved = placeholders(backward)[: count_tangents(backward)]
    return tuple(i for i, node in enumerate(saved) if node.meta.get("is_static_input", True))


def _restrided(expected: Any, received: Sequence[int] | None) -> Any:
    """The fake input with the strides that forward will return, as AOTAutograd sets them.

    Args:
        received: the strides; None: they are not known.
    """
    if not isinstance(expected, torch.Tensor) or received is None:
        return expected
    strides = [hint(s) for s in expected.stride()]
    if strides == list(received):
        return expected
    mode = expected.fake_mode if isinstance(expected, FakeTensor) else contextlib.nullcontext()
    with mode:
        return expected.as_strided(expected.shape, strides_like(expected.shape, received))


def _padded_strides(expected: Any) -> tuple[int, ...] | None:
    """The strides that Inductor is likely to give a saved value; None if those it was traced with.

    On a GPU it pads the rows of large values to whole lines of the cache (`ir.Layout` there).
    """
    if (
        not isinstance(expected, torch.Tensor)
        or expected.device.type == "cpu"
        or not inductor_config.comprehensive_padding
        or not expected.is_contiguous()
    ):
        return None
    alignment = max(1, inductor_config.padding_alignment_bytes // expected.element_size())
    strides: list[int] = []
    stride = 1
    is_padded = False
    for size in reversed(expected.shape):
        if strides and stride > inductor_config.padding_stride_threshold and stride % alignment:
            stride += alignment - stride % alignment
            is_padded = True
        strides.insert(0, stride)
        stride *= size
    return tuple(strides) if is_padded else None


def _have_same_strides(expected: Sequence[Any], received: Sequence[Any]) -> bool:
    """Whether inputs without symbols are equal but for their strides, and these too."""
    return all(
        not isinstance(a, torch.Tensor) or a.stride() == b.stride()
        for a, b in zip(expected, received, strict=True)
    )


def strides_like(shape: Sequence[Any], strides: Sequence[int]) -> list[Any]:
    """Strides for a shape of symbols that lay its dimensions out as numbers do at the hints.

    A number among the strides of symbolic sizes would have PyTorch settle the sizes when it asks
    for the tensor's layout.  Where the numbers leave gaps or overlap, they are returned.
    """
    symbolic: list[Any] = list(strides)
    numel: Any = 1
    for i in sorted(range(len(shape)), key=lambda i: (strides[i], hint(shape[i]))):
        if hint(shape[i]) != 1 and strides[i] != hint(numel):
            return list(strides)
        if strides[i] == hint(numel):
            symbolic[i] = numel
        numel = numel * shape[i]
    return symbolic


def _donated(graphs: Sequence[fx.GraphModule], num_fwd_outputs: int) -> list[int]:
    """Backward inputs whose memory Inductor may write into, as AOTAutograd will find them."""
    if not functorch_config.donated_buffer:
        return []
    forward, backward = graphs
    forward_outputs = [_val(a) for a in output_arguments(forward)]
    saved = forward_outputs[num_fwd_outputs:]
    tensors = [v for v in saved if isinstance(v, torch.Tensor)]
    found = collect_fw_donated_buffer_idxs(
        [value(n) for n in placeholders(forward)],
        forward_outputs[:num_fwd_outputs],
        [_val(a) for a in output_arguments(backward)],
        tensors,
    )
    num_symbols = sum(isinstance(v, torch.types.py_sym_types) for v in saved)
    return [num_symbols + i for i in found]


def _val(argument: object) -> Any:
    return value(argument) if isinstance(argument, fx.Node) else None


def _mark_user_visible(
    gm: fx.GraphModule, num_fwd_outputs: int, is_backward: bool, is_inference: bool
) -> None:
    """Tell Inductor which outputs must keep their strides, as ``compile_fx`` will."""
    (out,) = gm.graph.find_nodes(op="output")
    results = output_arguments(gm)
    visible = [i for i, r in enumerate(results) if isinstance(r, fx.Node)]
    if is_backward:
        if not inductor_config.bw_outputs_user_visible:
            visible = []
    elif not inductor_config.keep_output_stride:
        visible = []
    elif not is_inference:
        kinds = out.meta.get("desc")
        visible = [
            i
            for i in visible
            if i < num_fwd_outputs
            and (kinds is None or not isinstance(kinds[i], _NOT_FROM_THE_USER))
        ]
    out.meta["user_visible_output_idxs"] = visible
