"""Inductor's side: the memory model that lowers graphs, and compilation with the plan kept.

The configuration of `planned_config` applies to graphs that come from a plan, when they are
measured and when they are compiled; the default split's graphs get Inductor's defaults.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import fx
from torch.utils import _pytree as pytree

from dtrcompile.passes.device.workspaces import workspace_bytes
from dtrcompile.passes.errors import VerificationError
from dtrcompile.passes.fitting.fit import (
    MemoryModel,
    RefereeModel,
    constant_bytes,
    placeholders,
)
from dtrcompile.passes.fitting.measured import Measured, SizeModel
from dtrcompile.passes.fitting.peak_formula import StepFormulas, Term
from dtrcompile.passes.graphs.capture import Captured, output_arguments
from dtrcompile.passes.graphs.emit import Emitted, lower_frees
from dtrcompile.passes.inductor.formula_trace import FormulaLedger
from dtrcompile.passes.inductor.guards import noting_guards
from dtrcompile.passes.inductor.layouts import can_use_room
from dtrcompile.passes.inductor.plan_order import keep_plan_order
from dtrcompile.passes.inductor.trace import Ledger, Resident, Wrapper, lower, replay_schedule
from dtrcompile.passes.nodes import Role, hint, role, value
from dtrcompile.passes.program.program import StorageKind
from dtrcompile.passes.program.replay import PlanStats
from dtrcompile.passes.program.sizes import Sizes, at_sizes, present_sizes
from dtrcompile.passes.torch_private import (
    FakeTensor,
    InputMutationAOTOutput,
    IntermediateBaseAOTOutput,
    TangentAOTInput,
    TracingContext,
    collect_fw_donated_buffer_idxs,
    count_tangents,
    functorch_config,
    inductor_config,
)

log = logging.getLogger("dtrcompile")

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
    return any("dtr_group" in node.meta for node in gm.graph.nodes)


def resident_bytes(captured: Captured) -> Resident:
    """What is there before the graphs run, at the sizes that count here."""
    totals = constant_bytes(captured)
    input_bytes = totals[StorageKind.INPUT]
    if cuda_graphs_copy_inputs(captured):
        input_bytes *= 2
    return Resident(totals[StorageKind.PARAMETER], input_bytes, totals[StorageKind.TANGENT])


def cuda_graphs_copy_inputs(captured: Captured) -> bool:
    """Whether a CUDA graph reads copies of its inputs, at addresses that never change."""
    return bool(inductor_config.triton.cudagraphs) and device_of(captured).type == "cuda"


def schedule_of(
    captured: Captured,
    graphs: Sequence[fx.GraphModule],
    forward: Wrapper,
    backward: Callable[[Sequence[object]], Wrapper] | None,
) -> Measured:
    """Replay the wrappers of a step; ``graphs`` are the modules they were made from.

    Where a wrapper branches on a tensor (`torch.cond`), all conditions are taken to be true, then
    false; the higher peak counts.
    """
    resident = resident_bytes(captured)

    def replayed(condition: bool) -> tuple[Measured, bool]:
        ledger = Ledger(
            base_bytes=resident.parameters + resident.inputs,
            allocator=captured.allocator,
            condition=condition,
        )
        measured = _replay_with(ledger, captured, graphs, forward, backward, resident)
        return measured, ledger.has_conditions

    measured, has_conditions = replayed(True)
    if has_conditions:
        measured = max(measured, replayed(False)[0], key=lambda m: m.peak_bytes)
    return measured


def _replay_with(
    ledger: Ledger,
    captured: Captured,
    graphs: Sequence[fx.GraphModule],
    forward: Wrapper,
    backward: Callable[[Sequence[object]], Wrapper] | None,
    resident: Resident,
    shape_env: Any | None = None,
) -> Measured:
    return replay_schedule(
        ledger,
        forward,
        backward,
        forward_placeholders=placeholders(graphs[0]),
        backward_placeholders=placeholders(graphs[1]) if len(graphs) > 1 else [],
        num_fwd_outputs=captured.num_fwd_outputs,
        tangent_of=_tangent_of(graphs, captured.num_fwd_outputs),
        resident=resident,
        shape_env=shape_env,
        given_outputs=_given_outputs(captured),
        given_tangents=_given_tangents(captured, graphs),
    )


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


def _tangent_of(graphs: Sequence[fx.GraphModule], num_fwd_outputs: int) -> dict[int, int]:
    """Backward input -> the forward output that it is the gradient of, where both are described."""
    if len(graphs) < 2:
        return {}
    (out,) = graphs[0].graph.find_nodes(op="output")
    described = list(out.meta.get("desc") or ())[:num_fwd_outputs]
    tangents = {
        i: desc.output
        for i, node in enumerate(placeholders(graphs[1]))
        if isinstance(desc := node.meta.get("desc"), TangentAOTInput)
    }
    return {i: described.index(o) for i, o in tangents.items() if o in described}


def _is_symbolic(captured: Captured) -> bool:
    """Whether a size, or a number that the graph computes with, is known only at run time."""
    graphs = [g for g in (captured.forward, captured.backward) if g is not None]
    return any(
        isinstance(value, torch.types.py_sym_types)
        for graph in graphs
        for node in graph.graph.nodes
        for value in pytree.tree_leaves(node.meta.get("val"))
    )


def device_of(captured: Captured) -> torch.device:
    """The device that the graphs compute on: the first accelerator among their values, else CPU."""
    found = torch.device("cpu")
    for node in captured.storage_nodes:
        val = node.meta["val"]
        if val.device.type not in ("cpu", "meta"):
            return torch.device(val.device)
    return found


@dataclass(frozen=True)
class InductorModel(MemoryModel):
    """Lowers graphs as the compilation will, and replays the wrappers.

    Attributes:
        is_checked_later: what is compiled will be measured, so that a guess may do until then.
    """

    is_checked_later: bool = False

    def guess(self, captured: Captured, stats: PlanStats) -> Measured | None:
        # With symbolic sizes PyTorch compiles backward early and drops what the check raises.
        if not self.is_checked_later or _is_symbolic(captured):
            return None
        return RefereeModel().measure(captured, None, stats)

    def can_use_room(self, captured: Captured) -> bool:
        return can_use_room(g for g in (captured.forward, captured.backward) if g is not None)

    def workspaces(self, captured: Captured) -> dict[int, int]:
        found: dict[int, int] = {}
        for o, operator in enumerate(captured.operators):
            for node in operator.nodes:
                if role(node) is Role.KERNEL:
                    args, kwargs = fx.map_arg((node.args, node.kwargs), value)
                    held = workspace_bytes(node.target, args, kwargs, value(node))
                    found[o] = max(held, found.get(o, 0))
        return found

    def measure(
        self,
        captured: Captured,
        emitted: Emitted | None,
        stats: PlanStats,  # noqa: ARG002
    ) -> Measured:
        graphs: list[fx.GraphModule]
        if emitted is None:
            graphs = [g for g in (captured.forward, captured.backward) if g is not None]
            return self._schedule(captured, graphs)
        lower_frees(emitted.forward)
        graphs = [emitted.forward]
        if emitted.backward is not None:
            lower_frees(emitted.backward)
            graphs.append(emitted.backward)
        with planned_config():
            return self._schedule(captured, graphs)

    def _schedule(self, captured: Captured, graphs: Sequence[fx.GraphModule]) -> Measured:
        sizes = present_sizes()
        # Inductor lowers with the hints, whatever the sizes that are planned for.
        with at_sizes(None):
            by_sizes, measured = self._lowered(captured, graphs)
        if sizes is not None:
            measured = by_sizes.replayed(sizes)
        return replace(measured, by_sizes=by_sizes)

    def _lowered(
        self, captured: Captured, graphs: Sequence[fx.GraphModule]
    ) -> tuple[ScheduleSizeModel, Measured]:
        is_inference = captured.backward is None
        _mark_user_visible(graphs[0], captured.num_fwd_outputs, False, is_inference)
        forward = lower(
            graphs[0],
            [value(n) for n in placeholders(graphs[0])],
            static_input_indices=captured.static_input_indices,
            is_backward=False,
            is_inference=is_inference,
        )
        if is_inference:
            by_sizes = ScheduleSizeModel(captured, tuple(graphs), forward, None)
            return by_sizes, schedule_of(captured, graphs, forward, None)
        backward = graphs[1]
        _mark_user_visible(backward, captured.num_fwd_outputs, True, False)
        lowered: list[Wrapper] = []

        def lower_backward(from_forward: Sequence[object]) -> Wrapper:
            inputs = [value(n) for n in placeholders(backward)]
            for i, received in enumerate(from_forward):
                inputs[i] = _restrided(inputs[i], received)
            with _donating(_donated(graphs, captured.num_fwd_outputs)):
                lowered[:] = [
                    lower(
                        backward,
                        inputs,
                        static_input_indices=_static_in_backward(backward),
                        is_backward=True,
                        is_inference=False,
                    )
                ]
                return lowered[0]

        measured = schedule_of(captured, graphs, forward, lower_backward)
        return ScheduleSizeModel(captured, tuple(graphs), forward, lowered[0]), measured


@dataclass(frozen=True)
class ScheduleSizeModel(SizeModel):
    """Of the wrappers that Inductor wrote, which compute their sizes themselves.

    Attributes:
        graphs: what the wrappers were made from.
        backward: None for inference.
    """

    captured: Captured
    graphs: tuple[fx.GraphModule, ...]
    forward: Wrapper
    backward: Wrapper | None

    def at(self, sizes: Sizes) -> Measured:
        formulas = self.formulas
        if formulas is None or not formulas.hold_at(sizes):
            return self.replayed(sizes)
        return replace(formulas.at(sizes), by_sizes=self)

    def of(self, captured: Captured) -> Measured:
        return replace(self, captured=captured).replayed(None)

    def replayed(self, sizes: Sizes | None) -> Measured:
        """The same from a run at these sizes; None: at the hints."""
        backward = self.backward
        with at_sizes(sizes):
            measured = schedule_of(
                self.captured,
                self.graphs,
                self.forward,
                None if backward is None else lambda _: backward,
            )
        return replace(measured, by_sizes=self)

    @functools.cached_property
    def formulas(self) -> StepFormulas | None:
        """What is held, in the graphs' symbols; None where it cannot be written so."""
        start = time.perf_counter()
        symbols = self.captured.symbols
        if not symbols:
            return None
        backward, captured = self.backward, self.captured
        shape_env = next(iter(symbols.values())).node.shape_env
        with at_sizes(None), noting_guards(shape_env) as guards:
            resident = resident_bytes(captured)
            constants = _constant_terms(captured)
            ledger = FormulaLedger(
                base_bytes=resident.parameters + resident.inputs,
                allocator=captured.allocator,
                base=constants[StorageKind.PARAMETER] + constants[StorageKind.INPUT],
                tangents=constants[StorageKind.TANGENT],
            )
            try:
                _replay_with(
                    ledger,
                    captured,
                    self.graphs,
                    self.forward,
                    None if backward is None else lambda _: backward,
                    resident,
                    shape_env,
                )
            except VerificationError as error:
                log.debug("no formula of the peak: %s", error)
                return None
            least = captured.least_sizes
        if ledger.has_conditions:
            return None
        formulas = StepFormulas.of(ledger.moments, captured.allocator, least, guards)
        if not formulas.agrees_with(self.replayed(None), captured.hints):
            log.debug("no formula of the peak: the count at %s is another", captured.hints)
            return None
        log.debug("peak = %s (%.2f s)", formulas, time.perf_counter() - start)
        return formulas


def _constant_terms(captured: Captured) -> dict[StorageKind, Counter[Term]]:
    """Of each kind of constant, the sizes of its storages."""
    terms: dict[StorageKind, Counter[Term]] = {
        kind: Counter() for kind in (StorageKind.PARAMETER, StorageKind.INPUT, StorageKind.TANGENT)
    }
    twice = cuda_graphs_copy_inputs(captured)
    for storage, term in zip(
        captured.program.storages, captured.storage_expressions(), strict=True
    ):
        if storage.kind in terms:
            terms[storage.kind][term] += 2 if twice and storage.kind is StorageKind.INPUT else 1
    return terms


def _static_in_backward(backward: fx.GraphModule) -> tuple[int, ...]:
    """Which backward inputs Inductor takes to stay where they are, as ``compile_fx`` will say.

    What forward saved; since torch 2.15 without the user's inputs among that, which the partitioner
    marks.
    """
    saved = placeholders(backward)[: count_tangents(backward)]
    return tuple(i for i, node in enumerate(saved) if node.meta.get("is_static_input", True))


def _restrided(expected: Any, received: object) -> Any:
    """The fake input with the strides that forward will return, as AOTAutograd sets them."""
    if not isinstance(expected, torch.Tensor) or not isinstance(received, torch.Tensor):
        return expected
    strides = [hint(s) for s in expected.stride()]
    if strides == list(received.stride()):
        return expected
    mode = expected.fake_mode if isinstance(expected, FakeTensor) else contextlib.nullcontext()
    with mode:
        return expected.as_strided(expected.shape, strides_like(expected.shape, received.stride()))


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


@contextlib.contextmanager
def _donating(indices: list[int]) -> Iterator[None]:
    """Let Inductor see the donated inputs that AOTAutograd sets only after the partitioner."""
    context = TracingContext.try_get()
    if context is None:
        yield
        return
    metadata = context.fw_metadata or SimpleNamespace()
    with (
        mock.patch.object(context, "fw_metadata", metadata),
        mock.patch.object(metadata, "bw_donated_idxs", indices, create=True),
    ):
        yield


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
