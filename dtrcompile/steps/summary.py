"""What compiling a graph came to, as plain values: for its report, the ledger, and the disk.

A `Summary` holds no graph of PyTorch's, so that a later process can read it from disk when PyTorch
hands out the compiled code without asking for a plan.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import fx

from dtrcompile.passes.device.allocators import Allocator, allocator_of
from dtrcompile.passes.device.workspaces import unknown_workspaces
from dtrcompile.passes.errors import PlanError, ProgramError
from dtrcompile.passes.fitting.fit import Outcome
from dtrcompile.passes.fitting.measured import Measured
from dtrcompile.passes.fitting.sharing import OtherGraphs
from dtrcompile.passes.graphs.capture import Captured, HandedOn
from dtrcompile.passes.graphs.modules import inputs_of_gradients, output_arguments
from dtrcompile.passes.inductor.step import device_of
from dtrcompile.passes.nodes import value
from dtrcompile.passes.program import io
from dtrcompile.passes.program.plan import Plan
from dtrcompile.passes.program.program import Program, StorageKind
from dtrcompile.passes.program.replay import PlanStats, replay


@dataclass(frozen=True)
class GraphFacts:
    """What a graph is, whatever its plan.

    Attributes:
        trains: it has a backward.
        device: that it computes on, such as ``"cuda:0"``.
        can_run_again: what a call saved can be had by another call.  Not where tensors belong to
            the graph itself, which may then be among what it saves.
        draws: it draws random numbers.
        returned: of each of forward's outputs its storage, and its index among what the user gets.
        parameter_gradient_bytes: of the gradients that stay after backward.
        unknown_workspaces: operators of which it is not known what they hold inside -> why.
    """

    trains: bool
    device: str
    can_run_again: bool
    draws: bool
    returned: tuple[tuple[int, int | None], ...]
    parameter_gradient_bytes: int
    unknown_workspaces: Mapping[str, str]

    @staticmethod
    def of(captured: Captured) -> GraphFacts:
        """Of the graphs that were captured."""
        trains = captured.backward is not None
        attributes = captured.forward.graph.find_nodes(op="get_attr")
        has_tensors = any(isinstance(value(n), torch.Tensor) for n in attributes)
        return GraphFacts(
            trains,
            str(device_of(captured)),
            trains and not has_tensors,
            bool(captured.draws),
            tuple(captured.returned),
            _parameter_gradient_bytes(captured),
            unknown_workspaces(captured.graphs),
        )


@dataclass(frozen=True)
class Summary:
    """What was compiled, and what it holds.

    Attributes:
        graph, program: what was planned.
        plan, stats: what was compiled, and what it costs.
        allocator: what it counts for the storages.
        handed_on: what the caller gives up.
        baseline, measured: what the default split holds, and what was compiled.
        others: the other graphs of the step, as the plan sees them.
        budget_bytes: the resolved budget; None for the smallest.
        is_default: the default split was compiled.
        saves_least: as in `Outcome`.
        is_guess: ``baseline`` is.
        is_kept: an earlier process made the plan.
        is_cut_short, chunks, n_in_place, n_unpadded: as in `Outcome`.
        planning_s, lowering_s: seconds spent on capture and planning, and on measuring.
    """

    graph: GraphFacts
    program: Program
    plan: Plan
    stats: PlanStats
    allocator: Allocator
    handed_on: HandedOn
    baseline: Measured
    measured: Measured
    others: OtherGraphs
    budget_bytes: int | None
    is_default: bool
    saves_least: bool
    is_guess: bool = False
    is_kept: bool = False
    is_cut_short: bool = False
    chunks: tuple[str, ...] = ()
    n_in_place: int = 0
    n_unpadded: int = 0
    planning_s: float = 0.0
    lowering_s: float = 0.0

    @staticmethod
    def of(outcome: Outcome, graph: GraphFacts, capture_s: float) -> Summary:
        """Of what planning came to."""
        captured = outcome.captured
        return Summary(
            graph,
            captured.program,
            outcome.plan,
            outcome.stats,
            captured.allocator,
            captured.handed_on,
            outcome.baseline_measured,
            outcome.measured,
            outcome.others,
            outcome.budget_bytes,
            outcome.chosen is None,
            outcome.saves_least,
            outcome.is_guess,
            outcome.is_kept,
            outcome.is_cut_short,
            outcome.chunks,
            outcome.n_in_place,
            outcome.n_unpadded,
            capture_s + outcome.planning_s,
            outcome.lowering_s,
        )

    def measured_entries(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """``baseline`` and ``measured``, as JSON can hold them."""
        return measured_entry(self.baseline), measured_entry(self.measured)

    def entry(self) -> dict[str, Any]:
        """As JSON can hold it."""
        baseline, measured = self.measured_entries()
        return {
            "graph": asdict(self.graph),
            "program": io.to_json(self.program),
            "plan": self.plan.to_text(),
            "planned_peak_bytes": self.stats.peak_bytes,
            "baseline_cost_ns": self.stats.baseline_cost_ns,
            "handed_on": handed_on_entry(self.handed_on),
            "baseline": baseline,
            "measured": measured,
            "others": asdict(self.others),
            "budget_bytes": self.budget_bytes,
            "is_default": self.is_default,
            "saves_least": self.saves_least,
            "is_cut_short": self.is_cut_short,
            "chunks": self.chunks,
            "n_in_place": self.n_in_place,
            "n_unpadded": self.n_unpadded,
        }

    @staticmethod
    def of_entry(entry: Mapping[str, Any]) -> Summary | None:
        """What `entry` gave; None where it is something else."""
        try:
            returned = tuple((s, i) for s, i in entry["graph"]["returned"])
            graph = GraphFacts(**{**entry["graph"], "returned": returned})
            program, plan = io.from_json(entry["program"]), Plan.from_text(entry["plan"])
            stats = replace(
                replay(program, plan)[1],
                # Of a split that was not measured beforehand, library calls' workspace is in it.
                peak_bytes=int(entry["planned_peak_bytes"]),
                # A graph with values in chunks is compared with the graph as it was.
                baseline_cost_ns=int(entry["baseline_cost_ns"]),
            )
            outputs = entry["handed_on"]["outputs"]
            return Summary(
                graph,
                program,
                plan,
                stats,
                allocator_of(torch.device(graph.device)),
                HandedOn(
                    None if outputs is None else frozenset(outputs), entry["handed_on"]["tangents"]
                ),
                Measured(**entry["baseline"]),
                Measured(**entry["measured"]),
                OtherGraphs(**entry["others"]),
                entry["budget_bytes"],
                entry["is_default"],
                entry["saves_least"],
                is_kept=True,
                is_cut_short=entry["is_cut_short"],
                chunks=_texts(entry["chunks"]),
                n_in_place=int(entry["n_in_place"]),
                n_unpadded=int(entry["n_unpadded"]),
            )
        except (KeyError, TypeError, ValueError, AttributeError, ProgramError, PlanError):
            return None

    def holding_beside(self, others: OtherGraphs, budget_bytes: int | None) -> Summary:
        """The same beside other graphs; a budget of None leaves it as it is."""
        return replace(
            self,
            others=others,
            budget_bytes=self.budget_bytes if budget_bytes is None else budget_bytes,
        )


def _texts(found: Any) -> tuple[str, ...]:
    if not isinstance(found, (list, tuple)):
        raise TypeError(f"not a list of texts: {found!r}")
    return tuple(found)


def handed_on_entry(handed_on: HandedOn) -> dict[str, Any]:
    """As JSON can hold it, the same for equal values."""
    outputs = None if handed_on.outputs is None else sorted(handed_on.outputs)
    return {"outputs": outputs, "tangents": handed_on.tangents}


def measured_entry(measured: Measured) -> dict[str, Any]:
    """As JSON can hold it: what reports and the account of a step need."""
    return {name: getattr(measured, name) for name in _PLAIN}


_PLAIN = (
    "peak_bytes",
    "peak_at",
    "split",
    "forward_peak_bytes",
    "backward_peak_bytes",
    "boundary_bytes",
    "saved_bytes",
)


def _parameter_gradient_bytes(captured: Captured) -> int:
    """Bytes of the gradients that stay after backward: those of parameters."""
    if captured.backward is None:
        return 0
    program = captured.program
    storages = {
        captured.storage_of.get(captured.owner(gradient))
        for primal, gradient in zip(
            inputs_of_gradients(captured.forward), output_arguments(captured.backward), strict=False
        )
        if isinstance(gradient, fx.Node)
        and (s := captured.storage_of.get(primal)) is not None
        and program.storages[s].kind is StorageKind.PARAMETER
    }
    return sum(program.storages[s].size_bytes for s in storages if s is not None)
