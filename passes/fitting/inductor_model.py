"""What a plan's graphs hold under Inductor: a memory model that lowers them and reads the trace."""

from __future__ import annotations

import functools
import logging
import time
from dataclasses import dataclass, field, replace

import torch
from torch import fx
from torch.utils import _pytree as pytree

from dtrcompile.passes.device.workspaces import workspace_bytes
from dtrcompile.passes.errors import VerificationError
from dtrcompile.passes.fitting.fit import Limits, MemoryModel, RefereeModel
from dtrcompile.passes.fitting.measured import Measured, SizeModel
from dtrcompile.passes.fitting.peak_formula import StepFormulas, moments_of
from dtrcompile.passes.fitting.settings import NODES_LOWERED_PER_S
from dtrcompile.passes.graphs.capture import Captured
from dtrcompile.passes.graphs.emit import Emitted
from dtrcompile.passes.inductor import LoweredStep, disk_cache, keep, lower, trace, trace_in_symbols
from dtrcompile.passes.inductor.layouts import gains_from_workspace
from dtrcompile.passes.inductor.lowering import (
    CompileGraph,
    graph_text,
    has_text,
    without_device_index,
)
from dtrcompile.passes.nodes import Role, role, value
from dtrcompile.passes.planning.planners.base import Planner
from dtrcompile.passes.program.replay import PlanStats
from dtrcompile.passes.program.sizes import Sizes, at_sizes, present_sizes

log = logging.getLogger("dtrcompile")


@dataclass(frozen=True)
class InductorModel(MemoryModel):
    """Lowers graphs as the compilation will, and reads what their schedule holds.

    Attributes:
        is_checked_later: what is compiled will be measured, so that a guess may do until then.
        lowering_s: about how many seconds one search may lower plans; None: as long as it needs.
        strides_of_saved: name of a saved value -> the strides that Inductor last gave it.
        compile_graph: compiles a graph that is likely to be chosen; None where nothing is compiled.
    """

    is_checked_later: bool = False
    lowering_s: float | None = None
    strides_of_saved: dict[str, tuple[int, ...]] = field(
        default_factory=dict, repr=False, compare=False
    )
    compile_graph: CompileGraph | None = field(default=None, repr=False, compare=False)

    def guess(self, captured: Captured, stats: PlanStats) -> Measured | None:
        # With symbolic sizes PyTorch compiles backward early and drops what the check raises.
        if not self.is_checked_later or _is_symbolic(captured):
            return None
        return RefereeModel().measure(captured, None, stats)

    def key_of(self, captured: Captured, planner: Planner, limits: Limits) -> str | None:
        if not all(map(has_text, captured.graphs)):
            return None
        return disk_cache.key_of(
            "choice",
            *without_device_index([graph_text(graph) for graph in captured.graphs]),
            captured.num_fwd_outputs,
            captured.static_input_indices,
            captured.program.fingerprint,
            captured.handed_on,
            captured.allocator,
            captured.hints,
            captured.least_sizes,
            present_sizes(),
            planner,
            limits,
            self,
        )

    def keep(self, measured: Measured) -> None:
        if isinstance(measured.by_sizes, ScheduleSizeModel):
            keep(measured.by_sizes.lowered)

    def may_measure(self, n_measured: int) -> bool:
        return self.lowering_s is None or n_measured < self.lowering_s * NODES_LOWERED_PER_S

    def gains_from_workspace(self, captured: Captured) -> bool:
        return gains_from_workspace(captured.graphs)

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
        return self._lowered(captured, emitted, None)

    def measure_likely(
        self,
        captured: Captured,
        emitted: Emitted | None,
        stats: PlanStats,  # noqa: ARG002
    ) -> Measured:
        return self._lowered(captured, emitted, self.compile_graph)

    def _lowered(
        self, captured: Captured, emitted: Emitted | None, compile_graph: CompileGraph | None
    ) -> Measured:
        split = (captured.forward, captured.backward)
        graphs = split if emitted is None else (emitted.forward, emitted.backward)
        lowered = lower(
            captured,
            [gm for gm in graphs if gm is not None],
            self.strides_of_saved,
            compile_graph,
        )
        return ScheduleSizeModel(lowered).replayed(present_sizes())

    def give_up(self, measured: Measured) -> None:
        if isinstance(measured.by_sizes, ScheduleSizeModel):
            measured.by_sizes.lowered.stop_compiling()


@dataclass(frozen=True)
class ScheduleSizeModel(SizeModel):
    """Of wrappers that Inductor wrote, which compute their sizes themselves."""

    lowered: LoweredStep

    def at(self, sizes: Sizes) -> Measured:
        formulas = self.formulas
        if formulas is None or not formulas.hold_at(sizes):
            return self.replayed(sizes)
        return replace(formulas.at(sizes), by_sizes=self)

    def of(self, captured: Captured) -> Measured:
        return ScheduleSizeModel(self.lowered.of(captured)).replayed(None)

    def replayed(self, sizes: Sizes | None) -> Measured:
        """The same from a run at these sizes; None: at the hints."""
        with at_sizes(sizes):
            return replace(Measured.of(trace(self.lowered)), by_sizes=self)

    @functools.cached_property
    def formulas(self) -> StepFormulas | None:
        """What is held, in the graphs' symbols; None where it cannot be written so."""
        start = time.perf_counter()
        captured = self.lowered.captured
        if not captured.symbols:
            return None
        try:
            traced, guards = trace_in_symbols(self.lowered)
        except VerificationError as error:
            log.debug("no formula of the peak: %s", error)
            return None
        if traced.has_conditions:
            return None
        with at_sizes(None):
            least = captured.least_sizes
        formulas = StepFormulas.of(moments_of(traced), captured.allocator, least, guards)
        if not formulas.agrees_with(self.replayed(None), captured.hints):
            log.debug("no formula of the peak: the count at %s is another", captured.hints)
            return None
        log.debug("peak = %s (%.2f s)", formulas, time.perf_counter() - start)
        return formulas


def _is_symbolic(captured: Captured) -> bool:
    """Whether a size, or a number that the graph computes with, is known only at run time."""
    return any(
        isinstance(value, torch.types.py_sym_types)
        for graph in captured.graphs
        for node in graph.graph.nodes
        for value in pytree.tree_leaves(node.meta.get("val"))
    )
