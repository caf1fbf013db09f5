"""Planning the graphs that PyTorch's default split gives, the same for both compilers."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import replace

from torch import fx

from dtrcompile.compilation.probing import ProbedPlan, is_probing, probed_budgets
from dtrcompile.compilation.session import Session, available_bytes, device_of_graph
from dtrcompile.passes.device.allocators import EXACT, allocator_of
from dtrcompile.passes.device.costs import make_cost_model
from dtrcompile.passes.errors import InfeasibleBudgetError
from dtrcompile.passes.fitting.fit import Fitter, MemoryModel, Outcome, RefereeModel
from dtrcompile.passes.fitting.inductor_model import InductorModel
from dtrcompile.passes.fitting.progress import CAPTURE
from dtrcompile.passes.graphs.capture import Captured, capture
from dtrcompile.passes.graphs.modules import output_arguments
from dtrcompile.passes.graphs.sources import places_of
from dtrcompile.passes.inductor.step import device_of
from dtrcompile.passes.planning.planners import make_planner
from dtrcompile.passes.program.sizes import at_sizes
from dtrcompile.passes.target.tracing import not_traced
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
    with at_sizes(session.assignment.sizes), not_traced():
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
    if is_probing():
        with showing("dtrcompile"):
            outcomes = _probed(session, captured)
            if not probed_budgets() and isinstance(outcomes[0], InfeasibleBudgetError):
                # Whoever compiles the graph may have something else to try.
                raise outcomes[0]
            raise ProbedPlan(
                outcomes,
                session.input_names,
                session.assignment.beside,
                session.around_bytes,
            )
    try:
        with showing(f"dtrcompile graph {session.graph}"):
            outcome = _fitted(session, captured)
        session.has_planned(outcome)
    except InfeasibleBudgetError as refusal:
        if session.kept is not None:
            session.kept.write_refusal(refusal, session.around_bytes)
        raise _located(refusal, captured, session) from None
    if not outcome.is_guess:
        session.note_baseline(outcome.baseline_measured)
        session.report()
    return outcome


def _probed(session: Session, captured: Captured) -> list[Outcome | InfeasibleBudgetError]:
    """What planning comes to, for each budget that is asked for."""
    fitter = _fitter(session, captured)
    found: list[Outcome | InfeasibleBudgetError] = []
    for budget in probed_budgets() or [session.options.budget]:
        session.options = replace(session.options, budget=budget)
        try:
            outcome = _fitted(session, captured, fitter)
            session.has_planned(outcome)
            found.append(outcome)
        except InfeasibleBudgetError as refusal:
            found.append(_located(refusal, captured, session))
    return found


def _located(
    refusal: InfeasibleBudgetError, captured: Captured, session: Session
) -> InfeasibleBudgetError:
    """The refusal in terms of the user's modules and lines.

    What is kept on disk does without them: lines move, and the graph stays the same.
    """
    if type(refusal) is not InfeasibleBudgetError:
        return refusal
    return refusal.with_places(places_of(captured, session.input_names))


def _fitter(session: Session, captured: Captured) -> Fitter:
    options = session.options
    is_inductor = options.compiler == "inductor"
    model: MemoryModel = (
        InductorModel(session.may_estimate, options.lowering_s) if is_inductor else RefereeModel()
    )
    planner = make_planner(options.planner, **options.planner_options())
    return Fitter(captured, planner, model, always_emit=not is_inductor)


def _fitted(session: Session, captured: Captured, fitter: Fitter | None = None) -> Outcome:
    """The cheapest graphs that keep to the session's limits.

    Args:
        fitter: of the same graphs, for other budgets.

    Raises:
        InfeasibleBudgetError: if there are none.
    """
    options = session.options
    try:
        return (fitter or _fitter(session, captured)).fit(
            session.limits, is_whole_peak=options.is_whole_peak
        )
    except InfeasibleBudgetError as refusal:
        if refusal.minimum_bytes is not None:  # of the two minima, the larger one
            session.check_optimizer_step(refusal.minimum_bytes)
        raise
