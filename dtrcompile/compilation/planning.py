"""Planning the graphs that PyTorch's default split gives, the same for both compilers."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence

from torch import fx

from dtrcompile.compilation.probing import ProbedPlan, is_probing
from dtrcompile.compilation.session import Session, available_bytes, device_of_graph
from dtrcompile.passes.device.allocators import EXACT, allocator_of
from dtrcompile.passes.device.costs import make_cost_model
from dtrcompile.passes.errors import InfeasibleBudgetError
from dtrcompile.passes.fitting.fit import (
    MemoryModel,
    Outcome,
    RefereeModel,
    fit,
)
from dtrcompile.passes.fitting.inductor_model import InductorModel
from dtrcompile.passes.fitting.progress import CAPTURE
from dtrcompile.passes.graphs.capture import Captured, capture
from dtrcompile.passes.graphs.modules import output_arguments
from dtrcompile.passes.inductor.step import device_of
from dtrcompile.passes.planning.planners import make_planner
from dtrcompile.passes.program.sizes import at_sizes
from dtrcompile.passes.torch_private import TracingContext, dynamo_timed
from dtrcompile.progress import showing
from dtrcompile.steps.planned import around_bytes


def plan_step(
    session: Session,
    forward: fx.GraphModule,
    backward: fx.GraphModule | None,
    *,
    num_fwd_outputs: int,
    static_input_indices: Iterable[int],
) -> Outcome:
    """Capture, plan, emit and report, at the sizes that the session is for.

    Raises:
        InfeasibleBudgetError: if no plan stays within the budget.
    """
    with at_sizes(session.assignment.sizes):
        return _plan_at_sizes(
            session,
            forward,
            backward,
            num_fwd_outputs=num_fwd_outputs,
            static_input_indices=static_input_indices,
        )


def plan_inference(session: Session, gm: fx.GraphModule) -> fx.GraphModule:
    """As `plan_step`, for a graph without a backward.

    Returns:
        The graph to compile.
    """
    context = TracingContext.try_get()
    static: Sequence[int] = ()
    if context is not None and context.fw_metadata is not None:
        static = context.fw_metadata.static_input_indices or ()
    outcome = plan_step(
        session,
        gm,
        None,
        num_fwd_outputs=len(output_arguments(gm)),
        static_input_indices=static,
    )
    return gm if outcome.chosen is None else outcome.chosen.emitted.forward


def _plan_at_sizes(
    session: Session,
    forward: fx.GraphModule,
    backward: fx.GraphModule | None,
    *,
    num_fwd_outputs: int,
    static_input_indices: Iterable[int],
) -> Outcome:
    options = session.options
    is_inductor = options.compiler == "inductor"
    start = time.perf_counter()
    device = device_of_graph(forward)
    with dynamo_timed(CAPTURE):
        captured = capture(
            forward,
            backward,
            num_fwd_outputs=num_fwd_outputs,
            static_input_indices=static_input_indices,
            cost_model=make_cost_model(options.cost_model, device),
            # The eager executor counts what it asks for.
            allocator=allocator_of(device) if is_inductor else EXACT,
        )
    captured = captured.handing_on(session.assignment.handed_on)
    session.capture_s = time.perf_counter() - start
    session.available_bytes = available_bytes(
        captured.program, device_of(captured), session.assignment.beside
    )
    if backward is not None:
        session.around_bytes = around_bytes(captured.program)
    try:
        with showing(f"dtrcompile graph {session.graph}"):
            outcome = _fitted(session, captured)
        session.has_planned(outcome)
    except InfeasibleBudgetError as refusal:
        if session.kept is not None:
            session.kept.write_refusal(refusal, session.around_bytes)
        raise
    if is_probing():
        raise ProbedPlan(outcome)
    if not outcome.is_guess:
        session.note_baseline(outcome.baseline_measured)
        session.report()
    return outcome


def _fitted(session: Session, captured: Captured) -> Outcome:
    """The cheapest graphs that keep to the session's limits.

    Raises:
        InfeasibleBudgetError: if there are none.
    """
    options = session.options
    is_inductor = options.compiler == "inductor"
    model: MemoryModel = (
        InductorModel(session.may_estimate, options.lowering_s) if is_inductor else RefereeModel()
    )
    try:
        return fit(
            captured,
            make_planner(options.planner, **options.planner_options()),
            session.limits,
            model,
            is_whole_peak=options.is_whole_peak,
            always_emit=not is_inductor,
        )
    except InfeasibleBudgetError as refusal:
        if refusal.minimum_bytes is not None:  # of the two minima, the larger one
            session.check_optimizer_step(refusal.minimum_bytes)
        raise
