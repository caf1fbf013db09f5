"""One compilation of a graph, from the partitioner to the last graph that is compiled.

A `Session` is always in one state:

==============  ==========================================================  ======================
state           meaning                                                     next
==============  ==========================================================  ======================
``UNPLANNED``   nothing was planned, or not yet                             ``ESTIMATED``,
                                                                            ``PLANNED``, ``COUNTED``
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
==============  ==========================================================  ======================

``TOO_LARGE`` is left again because a backward that was refused may be asked for once more; a
forward in that state is planned and compiled anew, in another session.  ``UNVERIFIED`` and
``VERIFIED`` change into each other if a later graph is compiled that can, or cannot, be measured.
"""

from __future__ import annotations

import enum
import logging
from contextvars import ContextVar
from dataclasses import dataclass, field, replace

import torch
from torch import fx

from dtrcompile.compilation.reporting import add_compile_report
from dtrcompile.options import Options
from dtrcompile.passes.errors import format_bytes
from dtrcompile.passes.fitting.fit import Limits, Outcome
from dtrcompile.passes.fitting.measured import Measured
from dtrcompile.passes.inductor import Wrapper
from dtrcompile.steps.planned import Assignment, Planned
from dtrcompile.steps.step_peak import StepPeak

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
        state: see the table above.
        unverified_because: why the compiled code is not verified, in the state ``UNVERIFIED``.
        is_replaced: the graph has been compiled again since, so its report is another session's.
        capture_s: seconds spent on the capture.
        outcome: of planning; None where there was nothing to plan.
        available_bytes: what the device can give; None where it does not say.
        around_bytes: of a training step, what is there when an optimizer steps.
        graphs, wrappers: compiled so far, forward first.
    """

    options: Options
    graph: int
    assignment: Assignment
    step_peak: StepPeak = field(default_factory=StepPeak)
    may_estimate: bool = False
    graph_break: str = ""
    state: SessionState = SessionState.UNPLANNED
    unverified_because: str = ""
    is_replaced: bool = False
    capture_s: float = 0.0
    outcome: Outcome | None = None
    available_bytes: int | None = None
    around_bytes: int = 0
    graphs: list[fx.GraphModule] = field(default_factory=list)
    wrappers: list[Wrapper] = field(default_factory=list)
    _planned: tuple[Outcome, Planned] | None = None

    # --- planning ---------------------------------------------------------------------------------

    def limits(self, baseline: Measured) -> Limits:
        """What the plan has to keep to, where the default split holds ``baseline``."""
        trains = baseline.backward_peak_bytes > 0
        waits = self.step_peak.has_to_wait(self.options, trains=trains)
        if trains:
            self.step_peak.around_bytes = max(self.step_peak.around_bytes, self.around_bytes)
        budget_bytes = self.step_peak.budget_bytes(
            self.options,
            baseline.peak_bytes,
            self.available_bytes,
            trains=trains,
            beside=self.assignment.beside,
        )
        return self.assignment.limits(
            baseline, budget_bytes, waits=waits and self.assignment.budget_bytes is None
        )

    def check_optimizer_step(self, budget_bytes: int | None) -> None:
        """Hold what is there inside of ``optimizer.step()`` to the budget too.

        Raises:
            InfeasibleBudgetError: if it is more; names what it needs.
        """
        if budget_bytes is None or self.options.is_whole_peak or not self.around_bytes:
            return
        self.assignment.beside.check(budget_bytes, self.around_bytes)

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
        if self.outcome is None:
            return None
        if self._planned is None or self._planned[0] is not self.outcome:
            planned = Planned.of(self.outcome, self.assignment, self.available_bytes)
            planned = planned.handing_on(self.assignment.handed_on)
            self._planned = (self.outcome, planned)
        return self._planned[1]

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
        if (
            budget_bytes is not None
            and baseline.peak_with(others) > budget_bytes - others.outside_bytes
        ):
            self.state = SessionState.TOO_LARGE
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
        self.report(is_logged=is_other)

    def leave_unverified(self, why: str) -> None:
        """The compiled code is not measured."""
        is_known = self.state is SessionState.UNVERIFIED and self.unverified_because == why
        if self.outcome is not None and not is_known:
            self.state, self.unverified_because = SessionState.UNVERIFIED, why
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
        if self.outcome is None or self.is_replaced:
            return
        own = self.assignment
        self.assignment = replace(assignment, sizes=own.sizes, number=own.number)
        budget_bytes = assignment.budget_bytes
        if budget_bytes is None:
            budget_bytes = self.outcome.budget_bytes
        self.outcome = replace(self.outcome, others=assignment.others, budget_bytes=budget_bytes)
        self.report()

    def report(self, *, is_logged: bool = True) -> None:
        """Publish the report of what is known by now, if it is the graph's current compilation."""
        if self.is_replaced:
            return
        outcome = self.outcome
        assert outcome is not None
        add_compile_report(
            self.graph,
            self.options,
            self.assignment,
            outcome,
            device=device_of_graph(outcome.captured.forward),
            capture_s=self.capture_s,
            around_bytes=self.around_bytes,
            verification=self.verification,
            waits_for_step=self.step_peak.has_to_wait(
                self.options, trains=outcome.captured.backward is not None
            ),
            graph_break=self.graph_break,
            is_logged=is_logged,
        )


def device_of_graph(gm: fx.GraphModule) -> torch.device:
    """The first accelerator that a value of a graph is on; otherwise the CPU."""
    for node in gm.graph.nodes:
        val = node.meta.get("val")
        if isinstance(val, torch.Tensor) and val.device.type not in ("cpu", "meta"):
            return torch.device(val.device)
    return torch.device("cpu")


# The compilation that runs, for the partitioner, which Inductor calls without it.
CURRENT: ContextVar[Session | None] = ContextVar("dtrcompile_session", default=None)
