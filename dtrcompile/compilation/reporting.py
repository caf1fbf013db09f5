"""The report of a compilation, and the files that it leaves for bug reports."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from dtrcompile import artifacts
from dtrcompile.explain.build import explain
from dtrcompile.explain.explained import Explained
from dtrcompile.options import Options
from dtrcompile.passes.fitting.fit import Outcome, as_it_is
from dtrcompile.passes.fitting.inductor_model import ScheduleSizeModel
from dtrcompile.passes.fitting.measured import Measured
from dtrcompile.passes.graphs.sources import sources_of
from dtrcompile.passes.inductor import schedule_trace, trace
from dtrcompile.passes.program import io
from dtrcompile.passes.program.plan import Plan
from dtrcompile.passes.program.sizes import Sizes, at_sizes
from dtrcompile.report import CompileReport, add_report, reports
from dtrcompile.steps.planned import Assignment, Details
from dtrcompile.steps.summary import Summary

_UNSPLIT = (
    "above 1 MiB, blocks may be up to 1 MiB larger than tensors, and each counts as that; with"
    " PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True they are not"
)

_MADE_FOR_LESS_ROOM = (
    "planned when there seemed to be less room: without recomputation the budget would be kept too,"
    " and the graph is compiled for that if calls come to lose the compute of four steps"
)


def add_compile_report(
    graph: int,
    options: Options,
    assignment: Assignment,
    summary: Summary,
    *,
    around_bytes: int,
    verification: str,
    waits_for_step: bool,
    graph_break: str,
    get_explained: Callable[[], Explained | None],
    is_logged: bool = True,
) -> None:
    """Add the report of one plan of a graph, in place of an earlier one.

    Args:
        graph: its index.
        around_bytes: of a training step, constants and results; 0 for inference.
        verification: whether the compiled code was held to the promise, as text.
        waits_for_step: the budget is a share of a training step that has not been seen yet.
        graph_break: the message about the graph break that the graph ends in; empty for none.
        get_explained: what the report explains; None once that is gone.
    """
    beside, others = assignment.beside, assignment.others
    measured, stats, operators = summary.measured, summary.stats, summary.program.operators
    baseline_step_peak_bytes = others.outside_bytes + summary.baseline.peak_with(others)
    has_room = baseline_step_peak_bytes <= (summary.budget_bytes or 0)
    notes: Sequence[str] = (
        assignment.note,
        f"{options.budget} is a share of a training step, and none was seen yet; until one is,"
        " this graph runs without a budget. To bound it all the same, give bytes"
        if waits_for_step
        else "",
        # (The plan of a graph whose sizes are fixed is made anew at once.)
        _MADE_FOR_LESS_ROOM
        if has_room and stats.overhead > 1 and assignment.sizes and not assignment.is_provisional
        else "",
        "ample budget: peaks are estimates until backward has run" if summary.is_guess else "",
        "the search for a plan ended after the time of option 'lowering_s'; with more time it may"
        " find a better one"
        if summary.is_cut_short
        else "",
        *(f"computed in chunks: {text}" for text in summary.chunks),
        f"sums made in place, of gradients of weights that are used twice: {summary.n_in_place}"
        if summary.n_in_place
        else "",
        "matrix products that run without the padding that Inductor adds for speed, because its"
        f" copies did not fit: {summary.n_unpadded}"
        if summary.n_unpadded
        else "",
        "" if summary.allocator.splits_all else _UNSPLIT,
        graph_break,
        *(
            f"what {name} holds while it runs is not known and does not count, because it could"
            f" not be run on zeros ({why}); dtrcompile.declare_operator can say it"
            for name, why in summary.graph.unknown_workspaces.items()
        ),
        *beside.notes,
    )
    add_report(
        CompileReport(
            graph=graph,
            kind="training" if summary.graph.trains else "inference",
            compiler=options.compiler,
            device=summary.graph.device,
            budget=str(options.budget),
            budget_bytes=summary.budget_bytes,
            baseline_peak_bytes=summary.baseline.peak_bytes,
            promised_peak_bytes=measured.peak_bytes,
            planned_peak_bytes=stats.peak_bytes,
            promised_split=measured.split,
            saved_bytes=measured.saved_bytes,
            overhead=stats.overhead,
            operators=len(operators),
            recomputed={operators[o].name: n for o, n in stats.recomputed.items()},
            offloaded_bytes=stats.offloaded_bytes,
            planner=summary.plan.planner,
            planning_s=summary.planning_s,
            lowering_s=summary.lowering_s,
            is_plan_from_disk=summary.is_kept,
            outside_bytes=summary.others.outside_bytes,
            step_peak_bytes=others.outside_bytes + measured.peak_with(others),
            baseline_step_peak_bytes=baseline_step_peak_bytes,
            verification=verification,
            beside=beside.resident,
            optimizer_step_bytes=beside.in_step_bytes(around_bytes) if around_bytes else 0,
            first_optimizer_step_bytes=(
                beside.in_first_step_bytes(around_bytes) if around_bytes else 0
            ),
            notes=tuple(note for note in notes if note),
            plan=assignment.number,
            sizes=str(assignment.sizes or ""),
            peak_formula=_formula_text(measured),
            get_explained=get_explained,
        ),
        is_logged=is_logged,
    )


def leave_artifacts(
    graph: int, assignment: Assignment, outcome: Outcome, *, is_final: bool
) -> None:
    """Write program, plan, schedule and report to files, if the user asked for them.

    Args:
        graph: its index.
        is_final: all graphs are compiled, so that the plan is explained too.
    """
    if not artifacts.are_wanted():
        return
    texts = {
        "program.json": io.to_json(outcome.captured.program),
        "plan.txt": outcome.plan.to_text(),
    }
    schedule = _schedule(outcome.measured, assignment.sizes)
    if schedule is not None:
        texts["schedule.json"] = schedule_trace.to_json(schedule)
    number = f"-plan{assignment.number}" if assignment.number else ""
    for report in reports():
        if (report.graph, report.plan) == (graph, assignment.number):
            texts["report.txt"] = f"{report}\n"
            if is_final:
                texts["explanation.json"] = report.explain().to_json()
    artifacts.leave(f"graph{graph}{number}", texts)


def explained(
    details: Details,
    plan: Plan,
    input_names: Sequence[str],
    *,
    scheduled: Plan | None = None,
    sizes: Sizes | None = None,
) -> Explained:
    """A plan, explained.

    Args:
        input_names: of the traced graph's inputs, as the user's program reads them.
        scheduled: the plan that was compiled, if its caller gave up something else.
        sizes: the values of symbolic sizes; None: those that it was traced with.
    """
    captured = details.captured
    with at_sizes(sizes):
        sources = sources_of(captured, input_names)
    return explain(
        captured.program,
        plan,
        as_it_is(captured.program),
        sources,
        _schedule(details.measured, sizes),
        scheduled=scheduled,
    )


def _schedule(measured: Measured, sizes: Sizes | None) -> schedule_trace.ScheduleTrace | None:
    by_sizes = measured.by_sizes
    if not isinstance(by_sizes, ScheduleSizeModel):
        return None
    with at_sizes(sizes):
        return trace(by_sizes.lowered)


def _formula_text(measured: Measured) -> str:
    """The peak as a formula in the graph's symbols; empty where there are none."""
    formulas = None if measured.by_sizes is None else measured.by_sizes.formulas
    return "" if formulas is None else str(formulas)
