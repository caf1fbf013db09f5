"""What was done to each graph: `reports` returns one `CompileReport` for each compiled graph.

The report is also logged to the logger ``dtrcompile`` at level INFO, which
``TORCH_LOGS="dtrcompile"`` shows (``"+dtrcompile"``: DEBUG and above).  No torch is imported here.
"""

from __future__ import annotations

import json
import logging
import threading
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any

from dtrcompile.explain.explained import Explained
from dtrcompile.explain.explanation import Explanation
from dtrcompile.passes.errors import DTRError, format_bytes

logger = logging.getLogger("dtrcompile")

# A process that recompiles for ever must not grow for ever.
MOST_REPORTS = 1000
_MAX_NAMES = 5


@dataclass(frozen=True, slots=True)
class CompileReport:
    """The report of one compiled graph.  All peaks count what ``docs/memory-model.md`` defines.

    Attributes:
        graph: index of the graph in this process, in order of compilation.
        kind: ``"training"`` (forward and backward) or ``"inference"``.
        compiler: ``"inductor"`` or ``"eager"``.
        device: the device planned for, such as ``"cpu"`` or ``"cuda:0"``.
        budget: as the user gave it.
        budget_bytes: the budget in bytes, less the reserve; None for ``"min"``.
        baseline_peak_bytes: the peak without a budget.
        promised_peak_bytes: the most that the compiled code holds.
        planned_peak_bytes: the referee's peak of the plan, before the compiler changed anything.
        promised_split: bytes at the promised peak by what they are: parameters, inputs, saved,
            temporaries, gradients, outputs.
        saved_bytes: bytes that are held between forward and backward.
        overhead: planned cost / baseline cost; 1.0 means that nothing is computed twice, and that
            nothing waits for copies.
        operators: how many operators the program has.
        recomputed: operator name -> extra runs.
        offloaded_bytes: what is copied to the host in a step, in all.
        planner: the planner that made the plan.
        planning_s: seconds spent on planning.
        lowering_s: seconds spent on looking at the compiler's schedule for the plan.
        is_plan_from_disk: whether an earlier process made the plan and kept it in the cache folder.
        outside_bytes: what is held beside this graph: by other graphs of the step, and what
            ``beside`` lists.  The budget is that of the whole step; the peaks are this graph's.
        step_peak_bytes: the most that the graphs of the step and what is beside them hold while
            this graph runs or waits for its backward: the promised peak with what the others hold
            at each moment, gradients of later graphs included.
        beside: name -> bytes of what no graph holds: state of optimizers, present and to come,
            master weights, averages, kept gradients.
        optimizer_step_bytes: the most that is held inside of ``optimizer.step()``; 0 if no
            optimizer is counted.
        first_optimizer_step_bytes: the same for the next step alone, which may create the state.
        baseline_step_peak_bytes: what ``step_peak_bytes`` would be if this graph held what it does
            without a budget.
        verification: ``"verified"`` if the compiled code holds what is promised; otherwise why this
            was not checked, or not yet.
        notes: what else the user should know.
        plan: number of the plan among those of its graph, if sizes are symbolic.
        sizes: the values of symbolic sizes that the plan was made for, such as ``"s0 = 512"``.
        peak_formula: the promised peak in the graph's symbols, such as ``"1.2 MiB + 31.0 KiB·s0"``;
            empty if sizes are fixed.
        get_explained: returns what `explain` is made from, while the compiled model exists.
    """

    graph: int
    kind: str
    compiler: str
    device: str
    budget: str
    budget_bytes: int | None
    baseline_peak_bytes: int
    promised_peak_bytes: int
    planned_peak_bytes: int
    promised_split: Mapping[str, int] = field(default_factory=dict)
    saved_bytes: int = 0
    overhead: float = 1.0
    operators: int = 0
    recomputed: Mapping[str, int] = field(default_factory=dict)
    offloaded_bytes: int = 0
    planner: str = ""
    planning_s: float = 0.0
    lowering_s: float = 0.0
    is_plan_from_disk: bool = False
    outside_bytes: int = 0
    step_peak_bytes: int = 0
    beside: Mapping[str, int] = field(default_factory=dict)
    optimizer_step_bytes: int = 0
    first_optimizer_step_bytes: int = 0
    baseline_step_peak_bytes: int = 0
    verification: str = ""
    notes: tuple[str, ...] = ()
    plan: int = 0
    sizes: str = ""
    peak_formula: str = ""
    get_explained: Callable[[], Explained | None] | None = field(
        default=None, compare=False, repr=False
    )

    def __reduce__(self) -> tuple[Any, ...]:
        # What explains it is of this process alone.
        values = {f.name: getattr(self, f.name) for f in fields(self) if f.name != _OF_PROCESS}
        return _report_of, (values,)

    def explain(self) -> Explanation:
        """What the plan does with each tensor, and why.

        Raises:
            DTRError: if the model is gone.
        """
        found = None if self.get_explained is None else self.get_explained()
        if found is None:
            raise DTRError(
                f"graph {self.graph} cannot be explained any more, because the compiled model is"
                " gone. Call explain() while the model exists."
            )
        return Explanation(replace(found, title=self.title, facts=dict(self._rows())))

    @property
    def step_bytes(self) -> int:
        """The most that a step holds: with this graph, beside it, and in ``optimizer.step()``."""
        return max(
            self.step_peak_bytes,
            self.promised_peak_bytes + max(self.outside_bytes, sum(self.beside.values())),
            self.optimizer_step_bytes,
        )

    @property
    def recomputed_runs(self) -> int:
        """The number of extra runs of all operators together."""
        return sum(self.recomputed.values())

    def to_json(self) -> str:
        """One JSON object with a key for each field, without the explanation."""
        found = asdict(replace(self, get_explained=None))
        del found[_OF_PROCESS]
        found["promised_split"] = dict(self.promised_split)
        found["recomputed"] = dict(self.recomputed)
        found["beside"] = dict(self.beside)
        return json.dumps(found)

    @property
    def title(self) -> str:
        """A line that names the graph."""
        plan = f", plan {self.plan}" if self.sizes else ""
        return f"dtrcompile graph {self.graph}{plan}: {self.kind}, {self.compiler}, {self.device}"

    def __str__(self) -> str:
        rows = self._rows()
        width = max(len(name) for name, _ in rows)
        return "\n".join([self.title, *(f"  {name:<{width}}  {text}" for name, text in rows)])

    def _rows(self) -> list[tuple[str, str]]:
        rows = [("planned for", self.sizes)] if self.sizes else []
        rows += [
            ("budget", self._budget_text()),
            ("baseline peak", format_bytes(self.baseline_peak_bytes)),
            ("promised peak", self._share_text(self.promised_peak_bytes)),
        ]
        if self.peak_formula:
            rows.append(("at any sizes", self.peak_formula))
        rows += [
            (f"  {name}", format_bytes(size_bytes))
            for name, size_bytes in self.promised_split.items()
            if size_bytes
        ]
        rows += [
            ("planned peak", self._share_text(self.planned_peak_bytes)),
            ("saved for backward", format_bytes(self.saved_bytes)),
            ("overhead", f"{self.overhead:.3f} x the baseline's compute"),
            ("recomputed", self._recomputed_text()),
        ]
        if self.offloaded_bytes:
            rows.append(("copied to the host", format_bytes(self.offloaded_bytes)))
        rows.append(("planner", self._planner_text()))
        of_graphs = self.outside_bytes - sum(self.beside.values())
        if of_graphs > 0:
            rows.append(("other graphs hold", format_bytes(of_graphs)))
            rows.append(("peak of the step", format_bytes(self.step_bytes)))
        if self.beside:
            rows.append(("beside the graphs", format_bytes(sum(self.beside.values()))))
            rows += [(f"  {name}", format_bytes(size)) for name, size in self.beside.items()]
        if self.optimizer_step_bytes:
            rows.append(("optimizer.step()", format_bytes(self.optimizer_step_bytes)))
        if self.lowering_s:
            rows.append(("schedule check", f"{self.lowering_s:.2f} s"))
        if self.verification:
            rows.append(("compiled code", self.verification))
        rows += [("note", note) for note in self.notes]
        return rows

    def _budget_text(self) -> str:
        if self.budget_bytes is None:
            return self.budget
        size = f"{format_bytes(self.budget_bytes)} ({self.budget_bytes} bytes)"
        return f"{self.budget} = {size}"

    def _share_text(self, size_bytes: int) -> str:
        text = format_bytes(size_bytes)
        if self.baseline_peak_bytes:
            text += f" ({size_bytes / self.baseline_peak_bytes:.1%} of the baseline)"
        return text

    def _planner_text(self) -> str:
        name, seconds = self.planner or "-", f"{self.planning_s:.2f} s"
        return (
            f"{name}, read from disk in {seconds}"
            if self.is_plan_from_disk
            else f"{name}, {seconds}"
        )

    def _recomputed_text(self) -> str:
        if not self.recomputed:
            return f"none of {self.operators} operators"
        most = sorted(self.recomputed.items(), key=lambda item: (-item[1], item[0]))
        names = ", ".join(
            f"{name} x{runs}" if runs > 1 else name for name, runs in most[:_MAX_NAMES]
        )
        more = f", and {len(most) - _MAX_NAMES} more" if len(most) > _MAX_NAMES else ""
        return (
            f"{len(self.recomputed)} of {self.operators} operators, {self.recomputed_runs}"
            f" extra runs: {names}{more}"
        )


_OF_PROCESS = "get_explained"


def _report_of(values: dict[str, Any]) -> CompileReport:
    return CompileReport(**values)


class _Store:
    """The reports of this process; graphs may compile in several threads."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.reports: deque[CompileReport] = deque(maxlen=MOST_REPORTS)
        self.next_graph = 0
        self.added = 0


_store = _Store()


def reports() -> tuple[CompileReport, ...]:
    """The reports of the graphs compiled so far, oldest first.

    A graph is compiled when the model first runs, or at its first call that needs a gradient.  Only
    the latest `MOST_REPORTS` reports are kept.
    """
    with _store.lock:
        return tuple(_store.reports)


def clear_reports() -> None:
    """Forget all reports, and count graphs from 0 again."""
    with _store.lock:
        _store.reports.clear()
        _store.next_graph = 0


def next_graph_index() -> int:
    """A number for the next graph; each call returns another number."""
    with _store.lock:
        index = _store.next_graph
        _store.next_graph += 1
        return index


def add_report(report: CompileReport, *, is_logged: bool = True) -> None:
    """Keep ``report`` for `reports`, in place of an earlier one of the same plan, and log it."""
    with _store.lock:
        earlier = [(r.graph, r.plan) for r in _store.reports]
        if (report.graph, report.plan) in earlier:
            _store.reports[earlier.index((report.graph, report.plan))] = report
        else:
            _store.reports.append(report)
        _store.added += 1
    logger.log(logging.INFO if is_logged else logging.DEBUG, "%s", report)


def compilations() -> int:
    """How often a report was added or replaced in this process: only compiling does that."""
    with _store.lock:
        return _store.added


def drop_report(graph: int, plan: int) -> None:
    """Forget the report of a plan that is no longer used."""
    with _store.lock:
        for report in [r for r in _store.reports if (r.graph, r.plan) == (graph, plan)]:
            _store.reports.remove(report)
