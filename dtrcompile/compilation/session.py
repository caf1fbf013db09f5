"""One compilation of a graph, from the partitioner to the last graph that is compiled.

A `Session` is always in one state:

==============  ==========================================================  ======================
state           meaning                                                     next
==============  ==========================================================  ======================
``UNPLANNED``   nothing was planned, or not yet                             ``ESTIMATED``,
                                                                            ``PLANNED``,
                                                                            ``COUNTED``,
                                                                            ``VERIFIED``,
                                                                            ``UNKNOWN``
``ESTIMATED``   the budget looked ample, so the default split is compiled   ``ESTIMATED`` (forward),
                as it is, and measured as it was compiled                   ``VERIFIED``,
                                                                            ``TOO_LARGE``,
                                                                            ``UNVERIFIED``
``TOO_LARGE``   it was measured, and holds more than the budget             as from ``ESTIMATED``
``PLANNED``     within the budget; the last graph is still to be compiled   ``VERIFIED``,
                                                                            ``UNVERIFIED``
``VERIFIED``    the compiled code was measured, and holds what is promised
``UNVERIFIED``  the compiled code cannot be measured, or is not to be
``COUNTED``     the eager executor counts every byte as it runs
``UNKNOWN``     PyTorch's cache loaded code of which nothing was kept
==============  ==========================================================  ======================

A graph in the state ``UNKNOWN``, or a forward in the state ``TOO_LARGE``, is compiled anew, in
another session.  ``TOO_LARGE`` is left again because a backward that was refused may be asked for
once more.  ``UNVERIFIED`` and ``VERIFIED`` change into each other if a later graph is compiled that
can, or cannot, be measured.
"""

from __future__ import annotations

import enum
import functools
import logging
import time
import weakref
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field, replace

import torch
from torch import fx

from dtrcompile.compilation.kept_code import TOO_LARGE, KeptCode
from dtrcompile.compilation.reporting import add_compile_report, explained, leave_artifacts
from dtrcompile.explain.explained import Explained
from dtrcompile.options import Options
from dtrcompile.outside.surroundings import SurroundingBytes
from dtrcompile.passes.errors import InfeasibleBudgetError, format_bytes
from dtrcompile.passes.fitting.fit import Limits, Outcome
from dtrcompile.passes.fitting.measured import Measured
from dtrcompile.passes.graphs.capture import Captured
from dtrcompile.passes.inductor import Wrapper
from dtrcompile.passes.inductor.compiled_beside import CompiledBeside
from dtrcompile.passes.program.program import Program, StorageKind
from dtrcompile.passes.target.devices import current_target
from dtrcompile.steps.planned import Assignment, Details, NextAssignment, Planned, around_bytes
from dtrcompile.steps.step_peak import StepPeak
from dtrcompile.steps.summary import GraphFacts, Summary

log = logging.getLogger("dtrcompile")

# What a report says of the compiled code.
VERIFIED = "verified: it holds what is promised"
NOT_YET = "not verified yet: the last graph of the step is still to be compiled"
UNVERIFIED = "not verified: "
COUNTED = "every byte is counted as it runs"


class SessionState(enum.Enum):
    """See the table above."""

    UNPLANNED = enum.auto()
    ESTIMATED = enum.auto()
    TOO_LARGE = enum.auto()
    PLANNED = enum.auto()
    VERIFIED = enum.auto()
    UNVERIFIED = enum.auto()
    COUNTED = enum.auto()
    UNKNOWN = enum.auto()


# Nothing is to be compiled any more.
_FINAL = (SessionState.VERIFIED, SessionState.UNVERIFIED, SessionState.COUNTED)


@dataclass
class Session:
    """What one compilation of a graph knows.

    Attributes:
        graph: its index, for the report.
        assignment: what to compile it for.
        step_peak: of the model that the graph belongs to.
        may_estimate: at an ample budget the default split need not be measured before it is
            compiled.
        graph_break: the message about the graph break that the graph ends in; empty for none.
        input_names: of the traced graph's inputs, as the user's program reads them.
        state: see the table above.
        unverified_because: why the compiled code is not verified, in the state ``UNVERIFIED``.
        is_replaced: the graph has been compiled again since, so its report is another session's.
        may_load: code that an earlier process compiled will do.
        kept: the place of the compilation among what is kept on disk; None where nothing is kept.
        capture_s: seconds spent on the capture.
        outcome: of planning; None where there was nothing to plan, or it was done earlier.
        known: what an earlier process knew of the code that PyTorch's cache loaded.
        plan_again: makes the outcome that ``known`` was written for.
        next_assignment: told a refusal, says what else to plan the traced graph for; None for
            nothing.
        available_bytes: what the device can give; None where it does not say.
        around_bytes: of a training step, what is there when an optimizer steps.
        graphs, wrappers: compiled so far, forward first.
        compiling: processes that compile forward and backward.
    """

    options: Options
    graph: int
    assignment: Assignment
    step_peak: StepPeak = field(default_factory=StepPeak)
    may_estimate: bool = False
    graph_break: str = ""
    input_names: Sequence[str] = ()
    state: SessionState = SessionState.UNPLANNED
    unverified_because: str = ""
    is_replaced: bool = False
    may_load: bool = True
    kept: KeptCode | None = None
    capture_s: float = 0.0
    outcome: Outcome | None = None
    known: Summary | None = None
    plan_again: Callable[[], Outcome] | None = None
    next_assignment: NextAssignment | None = None
    available_bytes: int | None = None
    around_bytes: int = 0
    graphs: list[fx.GraphModule] = field(default_factory=list)
    wrappers: list[Wrapper] = field(default_factory=list)
    compiling: tuple[CompiledBeside | None, CompiledBeside | None] = (None, None)
    _planned: tuple[Outcome | Summary, Planned] | None = None
    _facts: tuple[Captured, GraphFacts] | None = None

    # --- planning ---------------------------------------------------------------------------------

    def goes_on_after(self, refusal: InfeasibleBudgetError) -> bool:
        """Whether there is something else to plan for, which is the assignment from now on.

        Compiled code is kept under what it was to be planned for when it was traced.
        """
        if self.next_assignment is None or self.kept is not None:
            return False
        following = self.next_assignment(refusal)
        if following is None:
            return False
        own = self.assignment
        self.assignment = replace(following, sizes=own.sizes, number=own.number)
        return True

    def limits(self, baseline: Measured) -> Limits:
        """What the plan has to keep to, where the default split holds ``baseline``."""
        trains = baseline.backward_peak_bytes > 0 or self.options.whole_step
        waits = self.step_peak.has_to_wait(self.options, trains=trains)
        if trains:
            self.know_around(self.around_bytes)
        budget_bytes = self.step_peak.budget_bytes(
            self.options,
            baseline.peak_with(self.assignment.others),
            self.available_bytes,
            trains=trains,
            beside=self.assignment.beside,
        )
        limits = self.assignment.limits(
            baseline, budget_bytes, waits=waits and self.assignment.budget_bytes is None
        )
        if not trains or not self.holds_optimizer_step:
            return limits
        needed_bytes = self.assignment.beside.in_step_bytes(self.around_bytes)
        return replace(limits, needed_bytes=needed_bytes)

    @property
    def holds_optimizer_step(self) -> bool:
        """Whether what is there inside of ``optimizer.step()`` is held to the budget too."""
        return self.around_bytes > 0 and not self.options.is_whole_peak

    def know_around(self, around_bytes: int) -> None:
        """What is there when an optimizer steps, around a training step of this graph."""
        self.around_bytes = around_bytes
        self.step_peak.see(0, around_bytes)

    def check_optimizer_step(self, budget_bytes: int | None, graphs_need_bytes: int = 0) -> None:
        """Hold what is there inside of ``optimizer.step()`` to the budget too.

        Args:
            graphs_need_bytes: as of `SurroundingBytes.check`.

        Raises:
            InfeasibleBudgetError: if it is more; names what it needs.
        """
        if budget_bytes is None or not self.holds_optimizer_step:
            return
        self.assignment.beside.check(budget_bytes, self.around_bytes, graphs_need_bytes)

    def has_planned(self, outcome: Outcome) -> None:
        """Planning is done.  An estimate is reported later, when forward is compiled and measured.

        Raises:
            InfeasibleBudgetError: if the optimizer's step does not fit.
        """
        self.outcome = outcome
        self.check_optimizer_step(outcome.budget_bytes)
        if self.options.compiler == "eager":
            self.state = SessionState.COUNTED
        else:
            self.state = SessionState.ESTIMATED if outcome.is_guess else SessionState.PLANNED

    def planned(self) -> Planned | None:
        """What the ledger is to know of the graph; None where there was nothing to plan."""
        source = self.outcome or self.known
        if source is None:
            return None
        if self._planned is None or self._planned[0] is not source:
            summary = self.summary
            assert summary is not None
            memory = None if self.kept is None else self.kept.memory_of(summary)
            planned = Planned.of(
                summary, self.assignment, self.available_bytes, self._get_details(), memory
            )
            self._planned = source, planned.handing_on(self.assignment.handed_on)
        return self._planned[1]

    @property
    def summary(self) -> Summary | None:
        """What is known, as plain values; None where there was nothing to plan."""
        outcome = self.outcome
        if outcome is None:
            return self.known
        if self._facts is None or self._facts[0] is not outcome.captured:
            self._facts = outcome.captured, GraphFacts.of(outcome.captured)
        return Summary.of(outcome, self._facts[1], self.capture_s)

    def _get_details(self) -> Callable[[], Details]:
        outcome, plan_again = self.outcome, self.plan_again
        if outcome is not None:
            return lambda: Details.of(outcome)
        assert plan_again is not None
        return lambda: Details.of(plan_again())

    # --- code of an earlier process ---------------------------------------------------------------

    def take_up(self, sources: Sequence[str], started_s: float) -> None:
        """PyTorch's cache loaded code, and nothing was planned: go on from what was kept of it.

        Args:
            sources: of the wrappers that were loaded.
            started_s: when the compilation began, by `time.perf_counter`.
        """
        summary = None if self.kept is None else self.kept.summary_of(sources)
        if summary is None:
            self.state = SessionState.UNKNOWN
            return
        self.known = replace(summary, planning_s=time.perf_counter() - started_s)
        self.state = SessionState.VERIFIED
        device = torch.device(summary.graph.device)
        self.available_bytes = available_bytes(summary.program, device, self.assignment.beside)
        if summary.graph.trains:
            self.know_around(around_bytes(summary.program))
        self.note_baseline(summary.baseline)
        self.report()

    def _keep(self) -> None:
        """Let later processes take up the code, which is measured."""
        summary, outcome = self.summary, self.outcome
        if self.kept is None or summary is None or outcome is None:
            return
        if outcome.captured.symbols:  # of the graphs' own, though the inputs have none
            self.kept.write_off("its graphs have symbolic sizes")
        else:
            self.kept.write(summary, [wrapper.source for wrapper in self.wrappers])

    # --- after a graph was compiled ---------------------------------------------------------------

    def measured_estimate(self, baseline: Measured, *, backward_follows: bool) -> None:
        """The default split was compiled on an estimate, and is measured now.

        Args:
            backward_follows: backward's part of ``baseline`` is still an estimate.
        """
        assert self.outcome is not None
        others, budget_bytes = self.outcome.others, self.outcome.budget_bytes
        if self.options.is_whole_peak:
            budget_bytes = baseline.peak_bytes
        is_too_large = (
            budget_bytes is not None
            and baseline.peak_with(others) > budget_bytes - others.outside_bytes
        )
        if backward_follows and budget_bytes is not None and not self.options.is_whole_peak:
            # Of backward, there is no more than the estimate, and no way back once it has begun:
            # the budget must look ample beside what forward holds, too.
            is_too_large = not Limits(budget_bytes, others).are_ample(baseline)
        if is_too_large:
            self.state = SessionState.TOO_LARGE
            if self.kept is not None:
                self.kept.write_off(TOO_LARGE)
            return
        self.state = SessionState.ESTIMATED if backward_follows else SessionState.VERIFIED
        if not backward_follows:
            self.note_baseline(baseline)
        self.outcome = replace(
            self.outcome,
            baseline_measured=baseline,
            budget_bytes=budget_bytes,
            is_guess=backward_follows,
        )
        if not backward_follows:
            self._keep()
        self.report()

    def has_to_plan_after_all(self) -> bool:
        """Whether the estimate was wrong, or forward could not be measured to tell."""
        outcome = self.outcome
        is_unmeasured = outcome is not None and outcome.is_guess and not self.wrappers
        return self.state is SessionState.TOO_LARGE or is_unmeasured

    def verify(self, measured: Measured) -> None:
        """The compiled code was measured, and is within the budget: it is what is promised now."""
        assert self.outcome is not None
        is_other = measured.peak_bytes != self.outcome.measured.peak_bytes
        if is_other:
            log.info(
                "the final schedule holds %s, not %s",
                format_bytes(measured.peak_bytes),
                format_bytes(self.outcome.measured.peak_bytes),
            )
            self.outcome = self.outcome.holding(measured)
        self.state = SessionState.VERIFIED
        self._keep()
        self.report(is_logged=is_other)

    def leave_unverified(self, why: str) -> None:
        """The compiled code is not measured."""
        is_known = self.state is SessionState.UNVERIFIED and self.unverified_because == why
        if self.outcome is not None and not is_known:
            self.state, self.unverified_because = SessionState.UNVERIFIED, why
            if self.kept is not None:
                self.kept.write_off(f"it is not verified: {why}")
            self.report(is_logged=False)

    def keep_graph(self, measured: Measured) -> None:
        """The smallest peak was asked for, and a backward that keeps the graph holds more."""
        assert self.outcome is not None
        log.warning(
            "backward(retain_graph=True) holds %s, not %s: what forward saved must survive it. Set"
            " torch._functorch.config.donated_buffer = False before the model is compiled to have"
            " that planned.",
            format_bytes(measured.peak_bytes),
            format_bytes(self.outcome.measured.peak_bytes),
        )
        self.outcome = self.outcome.holding(measured)
        self.state = SessionState.VERIFIED
        self.report()

    def note_baseline(self, baseline: Measured) -> None:
        """What the default split holds is known: a share of it may be other graphs' budget."""
        if baseline.backward_peak_bytes and self.options.is_share:
            self.step_peak.see(baseline.peak_bytes)

    # --- the report -------------------------------------------------------------------------------

    @property
    def verification(self) -> str:
        """Whether the compiled code was held to the promise, for the report."""
        if self.state is SessionState.UNVERIFIED:
            return UNVERIFIED + self.unverified_because
        return {SessionState.VERIFIED: VERIFIED, SessionState.COUNTED: COUNTED}.get(
            self.state, NOT_YET
        )

    def change_assignment(self, assignment: Assignment) -> None:
        """The code was compiled for another assignment, and is right for this one too."""
        if self.summary is None or self.is_replaced:
            return
        own = self.assignment
        self.assignment = replace(assignment, sizes=own.sizes, number=own.number)
        others, budget_bytes = assignment.others, assignment.budget_bytes
        if self.outcome is not None:
            if budget_bytes is None:
                budget_bytes = self.outcome.budget_bytes
            self.outcome = replace(self.outcome, others=others, budget_bytes=budget_bytes)
        elif self.known is not None:
            self.known = self.known.holding_beside(others, budget_bytes)
        self.report()

    def report(self, *, is_logged: bool = True) -> None:
        """Publish the report of what is known by now, if it is the graph's current compilation."""
        if self.is_replaced:
            return
        summary, planned = self.summary, self.planned()
        assert summary is not None and planned is not None
        # Of the assignment, whose caller may hold what the code was compiled to see given up.
        summary = replace(summary, baseline=planned.baseline_measured, measured=planned.measured)
        add_compile_report(
            self.graph,
            self.options,
            self.assignment,
            summary,
            around_bytes=self.around_bytes,
            verification=self.verification,
            waits_for_step=self.step_peak.has_to_wait(self.options, trains=summary.graph.trains),
            graph_break=self.graph_break,
            get_explained=functools.partial(_explained, weakref.ref(self)),
            is_logged=is_logged,
        )
        if self.outcome is not None:
            is_final = self.state in _FINAL
            leave_artifacts(self.graph, self.assignment, self.outcome, is_final=is_final)


def _explained(reference: weakref.ref[Session]) -> Explained | None:
    """For a report, which must not hold the graphs."""
    session = reference()
    if session is None:
        return None
    planned, summary = session.planned(), session.summary
    assert planned is not None and summary is not None
    return explained(
        planned.details,
        planned.plan,
        session.input_names,
        scheduled=summary.plan,
        sizes=session.assignment.sizes,
    )


def available_bytes(program: Program, device: torch.device, beside: SurroundingBytes) -> int | None:
    """What ``"auto"`` may take: free memory, this process's cache, and what the graphs hold.

    None where the device does not say.
    """
    if device.type != "cuda":
        return None
    target = current_target()
    if target is not None:
        return target.available_bytes
    free_bytes, _ = torch.cuda.mem_get_info(device)
    cached_bytes = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    held_bytes = sum(
        storage.size_bytes
        for storage in program.storages
        if storage.kind in (StorageKind.PARAMETER, StorageKind.INPUT)
    )
    return int(free_bytes + cached_bytes + held_bytes + beside.present_bytes)


def device_of_graph(gm: fx.GraphModule) -> torch.device:
    """The first accelerator that a value of a graph is on; otherwise the CPU."""
    for node in gm.graph.nodes:
        val = node.meta.get("val")
        if isinstance(val, torch.Tensor) and val.device.type not in ("cpu", "meta"):
            return torch.device(val.device)
    return torch.device("cpu")


# The compilation that runs, for the partitioner, which Inductor calls without it.
CURRENT: ContextVar[Session | None] = ContextVar("dtrcompile_session", default=None)
