"""Planning the graphs that PyTorch's default split gives, the same for both compilers."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from torch import fx

from dtrcompile.compilation.in_chunks import ChunkedSteps, Split
from dtrcompile.compilation.one_graph import compile_graph
from dtrcompile.compilation.probing import ProbedPlan, StockSplit, asked, is_probing
from dtrcompile.compilation.segments import fitted_in_segments
from dtrcompile.compilation.session import Session, available_bytes, device_of_graph
from dtrcompile.options import Budget
from dtrcompile.passes.device.allocators import EXACT, allocator_of
from dtrcompile.passes.device.costs import make_cost_model
from dtrcompile.passes.device.host_bandwidth import measured_bytes_per_ns
from dtrcompile.passes.errors import InfeasibleBudgetError
from dtrcompile.passes.fitting.fit import Fitter, MemoryModel, Outcome, RefereeModel
from dtrcompile.passes.fitting.inductor_model import InductorModel
from dtrcompile.passes.fitting.progress import CAPTURE
from dtrcompile.passes.graphs.capture import Captured, capture
from dtrcompile.passes.graphs.modules import copied_module, output_arguments
from dtrcompile.passes.graphs.one_graph import split_and_joined
from dtrcompile.passes.graphs.sources import places_of
from dtrcompile.passes.graphs.writes import with_early_writes
from dtrcompile.passes.inductor.step import device_of
from dtrcompile.passes.planning.planners import make_planner
from dtrcompile.passes.planning.settings import COPY_LATENCY_NS
from dtrcompile.passes.program.host_link import HostLink
from dtrcompile.passes.program.sizes import at_sizes
from dtrcompile.passes.target.devices import current_target
from dtrcompile.passes.target.tracing import not_traced
from dtrcompile.passes.torch_private import (
    TracingContext,
    dynamo_timed,
    functorch_config,
    min_cut_rematerialization_partition,
)
from dtrcompile.progress import showing
from dtrcompile.steps.planned import around_bytes


@dataclass(frozen=True)
class Joint:
    """Forward and backward as one graph.

    Attributes:
        split: PyTorch's default split of such a graph.
    """

    graph: fx.GraphModule
    split: Callable[[fx.GraphModule], Split]


def plan_step(
    session: Session,
    forward: fx.GraphModule,
    backward: fx.GraphModule | None,
    *,
    num_fwd_outputs: int,
    static_input_indices: Iterable[int],
    joint: Joint | None = None,
) -> Outcome:
    """Capture, plan, emit and report, at the sizes that the session is for.

    Args:
        joint: what was split into ``forward`` and ``backward``; None where it may not be changed.

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
            joint=joint,
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
    joint = None
    if session.options.whole_step:
        split = functools.partial(_split_whole_step, static=static)
        joint = Joint(gm, split)
        gm = split(gm)[0]
    outcome = plan_step(
        session,
        gm,
        None,
        num_fwd_outputs=len(output_arguments(gm)),
        static_input_indices=static,
        joint=joint,
    )
    return gm if outcome.chosen is None else outcome.chosen.emitted.forward


def _split_whole_step(gm: fx.GraphModule, static: Sequence[int]) -> Split:
    """What is compiled for a whole training step."""

    def partition(pure: fx.GraphModule, n_outputs: int) -> tuple[fx.GraphModule, fx.GraphModule]:
        found: tuple[fx.GraphModule, fx.GraphModule] = min_cut_rematerialization_partition(
            pure,
            None,
            num_fwd_outputs=n_outputs,
            static_lifetime_input_indices=list(static),
        )
        return found

    return with_early_writes(split_and_joined(gm, partition)), None


def _plan_at_sizes(
    session: Session,
    forward: fx.GraphModule,
    backward: fx.GraphModule | None,
    *,
    num_fwd_outputs: int,
    static_input_indices: Iterable[int],
    joint: Joint | None,
) -> Outcome:
    options = session.options
    is_inductor = options.compiler == "inductor"
    start = time.perf_counter()
    device = device_of_graph(forward)
    static = tuple(static_input_indices)

    def captured_of(forward: fx.GraphModule, backward: fx.GraphModule | None) -> Captured:
        with dynamo_timed(CAPTURE):
            captured = capture(
                forward,
                backward,
                num_fwd_outputs=num_fwd_outputs,
                static_input_indices=static,
                cost_model=make_cost_model(options.cost_model, device),
                # The eager executor counts what it asks for.
                allocator=allocator_of(device) if is_inductor else EXACT,
            )
        return captured.handing_on(session.assignment.handed_on)

    captured = captured_of(forward, backward)
    session.capture_s = time.perf_counter() - start
    session.available_bytes = available_bytes(
        captured.program, device_of(captured), session.assignment.beside
    )
    if backward is not None:
        session.around_bytes = around_bytes(captured.program)

    def chunked_steps() -> ChunkedSteps | None:
        if joint is None or not options.chunking:
            return None
        return ChunkedSteps(
            joint.graph,
            joint.split,
            captured_of,
            functools.partial(_fitter, session, always_emit=True),
            num_fwd_outputs,
        )

    if is_probing():
        with showing("dtrcompile"):
            outcomes = _probed(session, _fitter(session, captured), chunked_steps())
            stock = [
                _stock_split(session, joint, captured_of, share)
                for share in asked().shares
                if joint is not None
            ]
            if not asked().budgets and isinstance(outcomes[0], InfeasibleBudgetError):
                # Whoever compiles the graph may have something else to try.
                raise outcomes[0]
            raise ProbedPlan(
                outcomes,
                session.input_names,
                session.assignment.beside,
                session.around_bytes,
                stock,
            )
    while True:
        fitter = _fitter(session, captured.handing_on(session.assignment.handed_on))
        try:
            with showing(f"dtrcompile graph {session.graph}"):
                outcome = _planned(session, fitter, chunked_steps())
            session.has_planned(outcome)
            break
        except InfeasibleBudgetError as refusal:
            located = _located(refusal, captured, session)
            if session.kept is not None:
                session.kept.write_refusal(located, session.around_bytes)
            if not session.goes_on_after(located):
                raise located from None
    if not outcome.is_guess:
        session.note_baseline(outcome.baseline_measured)
        session.report()
    return outcome


def _probed(
    session: Session, fitter: Fitter, chunked: ChunkedSteps | None
) -> list[Outcome | InfeasibleBudgetError]:
    """What planning comes to, for each budget that is asked for."""
    found: list[Outcome | InfeasibleBudgetError] = []
    available_bytes = session.available_bytes
    for budget in asked().budgets or [session.options.budget]:
        session.options = replace(session.options, budget=budget)
        session.available_bytes = available_bytes
        try:
            outcome = _planned(session, fitter, chunked)
            session.has_planned(outcome)
            found.append(outcome)
        except InfeasibleBudgetError as refusal:
            found.append(_located(refusal, fitter.captured, session))
    return found


def _stock_split(
    session: Session,
    joint: Joint,
    captured_of: Callable[[fx.GraphModule, fx.GraphModule | None], Captured],
    share: float,
) -> StockSplit:
    """What the step holds and costs as PyTorch splits it at a setting of its own."""
    with functorch_config.patch(activation_memory_budget=share):
        split = joint.split(copied_module(joint.graph))
    session.options = replace(session.options, budget=Budget.parse("100%"))
    outcome = _fitter(session, captured_of(*split)).fit(session.limits, is_whole_peak=True)
    return StockSplit(share, outcome.baseline_measured, outcome.baseline[2].cost_ns)


def _located(
    refusal: InfeasibleBudgetError, captured: Captured, session: Session
) -> InfeasibleBudgetError:
    """The refusal in terms of the user's modules and lines."""
    if type(refusal) is not InfeasibleBudgetError:
        return refusal
    return refusal.with_places(places_of(captured, session.input_names))


def _fitter(session: Session, captured: Captured, *, always_emit: bool = False) -> Fitter:
    """
    Args:
        always_emit: the default split is not what is compiled where a plan is not needed.
    """
    options = session.options
    is_inductor = options.compiler == "inductor"
    model: MemoryModel = RefereeModel()
    if is_inductor:
        may_compile = not is_probing() and current_target() is None
        model = InductorModel(
            session.may_estimate,
            options.lowering_s,
            compile_graph=compile_graph if may_compile else None,
        )
    planner = make_planner(options.planner, **options.planner_options())
    if options.offload is not None:
        bytes_per_ns = options.offload
        if isinstance(bytes_per_ns, str):
            bytes_per_ns = measured_bytes_per_ns(device_of(captured))
        link = HostLink(bytes_per_ns, COPY_LATENCY_NS)
        planner = make_planner("offload", host_link=link, base=planner)
    return Fitter(captured, planner, model, always_emit=always_emit or not is_inductor)


def _planned(session: Session, fitter: Fitter, chunked: ChunkedSteps | None) -> Outcome:
    """As `_fitted`, with room for the segments that the allocator takes."""
    return fitted_in_segments(session, functools.partial(_fitted, session, fitter, chunked))


def _fitted(session: Session, fitter: Fitter, chunked: ChunkedSteps | None) -> Outcome:
    """The cheapest graphs that keep to the session's limits.

    Args:
        chunked: other forms of the same graphs.

    Raises:
        InfeasibleBudgetError: if there are none.
    """
    found: Outcome | InfeasibleBudgetError
    try:
        found = fitter.fit(session.limits, is_whole_peak=session.options.is_whole_peak)
    except InfeasibleBudgetError as refusal:
        _blame_optimizer(refusal, session)  # which other forms of the graphs do not make smaller
        found = refusal
    if chunked is not None:
        found = chunked.better(found, fitter, session.limits)
    if isinstance(found, Outcome):
        return found
    _blame_optimizer(found, session)
    raise found


def _blame_optimizer(refusal: InfeasibleBudgetError, session: Session) -> None:
    """Of the two minima, the larger one is named.

    Raises:
        InfeasibleBudgetError: if the optimizer's step needs more than the graphs.
    """
    if refusal.minimum_bytes is not None:
        session.check_optimizer_step(refusal.budget_bytes, refusal.minimum_bytes)
