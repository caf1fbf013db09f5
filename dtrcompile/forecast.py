"""What a training step holds and costs within a budget, before anything is compiled or run.

The model is traced and planned as in its first call (`probe`), so the peaks are those that the
compiled step will have.  `sweep` plans for many budgets: the model is traced only once, and what
was lowered for one budget is used for the others too.
"""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import torch

from dtrcompile.compilation.probing import ProbedPlan, StockSplit
from dtrcompile.compilation.reporting import explained
from dtrcompile.elsewhere import Elsewhere, elsewhere_of
from dtrcompile.explain.explained import Explained, format_ns
from dtrcompile.explain.explanation import Explanation
from dtrcompile.options import Budget, Options
from dtrcompile.passes.errors import (
    DTRError,
    InfeasibleBudgetError,
    MissingExtraError,
    OptionError,
    format_bytes,
)
from dtrcompile.passes.fitting.fit import Outcome
from dtrcompile.passes.target.tracing import not_traced
from dtrcompile.probe import planned_for
from dtrcompile.steps.planned import Details
from dtrcompile.text_table import text_table
from dtrcompile.whole_files import replacing

SWEPT = ("90%", "80%", "70%", "60%", "50%", "40%", "30%", "20%", "min")
"""The budgets of a `sweep` that names none."""

STOCK_SHARES = (0.8, 0.6, 0.4, 0.2, 0.0)
"""The settings of ``activation_memory_budget`` of a `sweep` with ``stock=True``."""


@dataclass(frozen=True)
class Forecast:
    """What a step holds and costs within a budget.  Bytes are those of a `CompileReport`.

    Attributes:
        budget: as it was given.
        budget_bytes: what the budget comes to in bytes; None for ``"min"``.
        fits: whether a plan stays within the budget.  If none does, what follows is about the step
            without a budget, except ``peak_bytes``, which is the smallest budget that can be met.
        peak_bytes: the most that the graphs hold, ``outside_bytes`` included.
        baseline_peak_bytes: the same without a budget.
        split: bytes at the peak: parameters, inputs, saved, temporaries, gradients, outputs.
        saved_bytes: bytes that are held between forward and backward.
        outside_bytes: the part of ``peak_bytes`` that no graph holds: the state of optimizers, for
            example.
        optimizer_step_bytes: the most that is held inside of ``optimizer.step()``; 0 if no
            optimizer is counted.
        cost_ns, baseline_cost_ns: time of a step's operators by the cost model, with and without
            the budget.
        device: the GPU that was planned for, although it may not be there; empty if there is none.
        reserved_bytes: what PyTorch's caching allocator takes from the GPU over several steps, the
            optimizer's included, which is what has to be free there; None on a CPU, and if no plan
            fits.
        chunks: what is computed in chunks, and in how many.
        refusal: why no plan fits; None if one does.
        loss_bytes: about what a loss would hold at most that is computed from what the model
            returns, outside of the graph; it is in none of the peaks.  0 if the model returns a
            loss.
    """

    budget: str
    budget_bytes: int | None
    fits: bool
    peak_bytes: int
    baseline_peak_bytes: int
    split: Mapping[str, int]
    saved_bytes: int
    outside_bytes: int
    optimizer_step_bytes: int
    cost_ns: int
    baseline_cost_ns: int
    device: str
    reserved_bytes: int | None
    chunks: tuple[str, ...] = ()
    refusal: InfeasibleBudgetError | None = field(default=None, compare=False)
    loss_bytes: int = 0
    get_explained: Callable[[], Explained] | None = field(default=None, compare=False, repr=False)

    @property
    def overhead(self) -> float:
        """Planned cost / baseline cost; 1.0 means that nothing is computed twice."""
        return self.cost_ns / self.baseline_cost_ns if self.baseline_cost_ns else 1.0

    def __reduce__(self) -> tuple[Any, ...]:
        # What explains it is of this process alone.
        return _forecast_of, (_values(self),)

    def to_json(self) -> str:
        """One JSON object with a key for each field."""
        return json.dumps(_plain(self))

    def explain(self) -> Explanation:
        """What the plan does with each tensor, and why.

        Raises:
            InfeasibleBudgetError: if there is no plan.
            DTRError: if another process made the forecast.
        """
        if self.refusal is not None:
            raise self.refusal
        if self.get_explained is None:
            raise DTRError("only the process that made a forecast can explain it.")
        facts = {name.strip(): text for name, text in self._rows()}
        title = f"a training step within {self.budget}"
        return Explanation(replace(self.get_explained(), title=title, facts=facts))

    def __str__(self) -> str:
        if self.refusal is not None:
            return str(self.refusal)
        rows = self._rows()
        width = max(len(name) for name, _ in rows)
        return "\n".join(f"{name:<{width}}  {text}" for name, text in rows)

    def _rows(self) -> list[tuple[str, str]]:
        rows = [("device", self.device)] if self.device else []
        rows += [
            ("budget", _budget_text(self)),
            ("peak", f"{format_bytes(self.peak_bytes)} ({self.peak_bytes} bytes)"),
            ("without a budget", format_bytes(self.baseline_peak_bytes)),
            *((f"  {name}", format_bytes(n)) for name, n in self.split.items() if n),
        ]
        if self.outside_bytes:
            rows.append(("  beside the graphs", format_bytes(self.outside_bytes)))
        rows.append(("saved for backward", format_bytes(self.saved_bytes)))
        if self.optimizer_step_bytes:
            rows.append(("optimizer.step()", format_bytes(self.optimizer_step_bytes)))
        if self.reserved_bytes is not None:
            rows.append(("allocator reserves", format_bytes(self.reserved_bytes)))
        rows.append(
            ("operators take", f"{format_ns(self.cost_ns)}, {self.overhead:.3f} x the baseline's")
        )
        rows += [("in chunks", text) for text in self.chunks]
        if self.loss_bytes:
            rows.append(("a loss outside", _loss_text(self.loss_bytes)))
        return rows


@dataclass(frozen=True)
class StockPoint:
    """The step as PyTorch splits it at a setting of its own, without dtrcompile.

    Attributes:
        setting: such as ``"activation_memory_budget=0.5"``.
        peak_bytes: the most that the graphs hold, counted like that of a `Forecast`.
        baseline_peak_bytes: the same at PyTorch's default.
        cost_ns, baseline_cost_ns: time of the step's operators by the cost model, at the setting
            and at PyTorch's default.
    """

    setting: str
    peak_bytes: int
    baseline_peak_bytes: int
    cost_ns: int
    baseline_cost_ns: int

    @property
    def overhead(self) -> float:
        """Cost / cost at PyTorch's default."""
        return self.cost_ns / self.baseline_cost_ns if self.baseline_cost_ns else 1.0


@dataclass(frozen=True)
class Sweep:
    """The result of `sweep`.

    Attributes:
        points: one forecast for each budget, in the order in which the budgets were given.
        stock: one point for each setting of PyTorch's that was asked for.
    """

    points: tuple[Forecast, ...]
    stock: tuple[StockPoint, ...] = ()

    def __str__(self) -> str:
        header = ("budget", "bytes", "peak", "of the baseline", "overhead")
        rows = [*map(_cells, self.points), *map(_stock_cells, self.stock)]
        table = text_table(header, rows, is_right=True)
        loss_bytes = max((p.loss_bytes for p in self.points), default=0)
        return f"{table}\na loss outside: {_loss_text(loss_bytes)}" if loss_bytes else table

    def to_json(self) -> str:
        """A JSON list with one object for each budget, then one for each of PyTorch's settings."""
        return json.dumps([*map(_plain, self.points), *map(_plain_stock, self.stock)])

    def dataframe(self) -> Any:
        """A ``pandas.DataFrame`` with one row for each budget and each of PyTorch's settings.

        Raises:
            MissingExtraError: if pandas is not installed.
        """
        try:
            import pandas  # type: ignore[import-untyped]
        except ImportError as error:
            raise MissingExtraError("Sweep.dataframe", "pandas", "tables") from error
        return pandas.DataFrame([*map(_row, self.points), *map(_plain_stock, self.stock)])

    def plot(self, path: str | os.PathLike[str]) -> None:
        """Draw overhead against peak, into a file of any kind that matplotlib writes.

        Raises:
            MissingExtraError: if matplotlib is not installed.
        """
        try:
            from matplotlib.figure import Figure
        except ImportError as error:
            raise MissingExtraError("Sweep.plot", "matplotlib", "demo") from error
        points = sorted((p for p in self.points if p.fits), key=lambda p: p.peak_bytes)
        figure = Figure(figsize=(6, 4), layout="constrained")
        axes = figure.subplots()
        mib = [p.peak_bytes / 2**20 for p in points]
        axes.plot(mib, [p.overhead for p in points], marker="o", label="dtrcompile")
        if self.stock:
            stock = sorted(self.stock, key=lambda p: p.peak_bytes)
            axes.plot(
                [p.peak_bytes / 2**20 for p in stock],
                [p.overhead for p in stock],
                linestyle="none",
                marker="x",
                label="activation_memory_budget",
            )
            axes.legend()
        for x, point in zip(mib, points, strict=True):
            axes.annotate(
                point.budget, (x, point.overhead), xytext=(4, 4), textcoords="offset points"
            )
        axes.set_xlabel("peak (MiB)")
        axes.set_ylabel("operators' time / without a budget")
        axes.grid(alpha=0.3)
        with replacing(Path(path)) as unfinished:
            figure.savefig(unfinished)


def plan(
    model: Callable[..., Any],
    *inputs: Any,
    budget: object = None,
    device: str | None = None,
    dtype: torch.dtype | None = None,
    autocast: torch.dtype | None = None,
    **options: Any,
) -> Forecast:
    """What a training step of ``model`` holds and costs within a budget; nothing is run.

    Args:
        model: what ``torch.compile`` would be given.  It has to compile as one graph.  A module
            that was built under ``torch.device("meta")`` is planned as if it were on the CPU.
        inputs: what the model would be called with.
        budget: as option ``budget``.
        device: the device to plan for: a GPU that need not be there, such as ``"cuda:H100-80GB"``
            (`dtrcompile.passes.target.devices.TARGETS`); without it, where the tensors are.
        dtype: of the model's floating-point parameters, buffers and inputs; without it, their own.
        autocast: plan as if the step ran under ``torch.autocast`` with this dtype.
        options: as for ``torch.compile(..., backend="dtr")``.

    Raises:
        CaptureError: if the model does not compile as one graph.
        OptionError: for an option that does not exist, or has no such value.
    """
    given = dict(options) if budget is None else {**options, "budget": budget}
    parsed = Options.parse(given)
    elsewhere = elsewhere_of(device, dtype, autocast)
    (point,) = _forecasts(model, inputs, parsed, [parsed.budget], elsewhere).points
    return point


def sweep(
    model: Callable[..., Any],
    *inputs: Any,
    budgets: Sequence[object] = SWEPT,
    device: str | None = None,
    dtype: torch.dtype | None = None,
    autocast: torch.dtype | None = None,
    stock: bool | Sequence[float] = False,
    **options: Any,
) -> Sweep:
    """The same as `plan` for many budgets: how much compute each of them costs.

    Args:
        budgets: each as option ``budget``.
        device: as for `plan`.
        dtype: as for `plan`.
        autocast: as for `plan`.
        stock: tell too what the step holds and costs where PyTorch splits it by its own
            ``torch._functorch.config.activation_memory_budget``, at these shares; True: at
            `STOCK_SHARES`.

    Raises:
        CaptureError: if the model does not compile as one graph.
        OptionError: for an option that does not exist, or has no such value.
    """
    if "budget" in options:
        raise OptionError("sweep is asked for several budgets; name them with budgets=[...].")
    parsed = [Budget.parse(budget, what="budgets") for budget in budgets]
    if not parsed:
        raise OptionError("sweep needs at least one budget in budgets=[...].")
    elsewhere = elsewhere_of(device, dtype, autocast)
    return _forecasts(
        model, inputs, Options.parse(options), parsed, elsewhere, _stock_shares(stock)
    )


def _stock_shares(stock: bool | Sequence[float]) -> tuple[float, ...]:
    if isinstance(stock, bool):
        return STOCK_SHARES if stock else ()
    for share in stock:
        if not isinstance(share, (int, float)) or not 0 <= share <= 1:
            raise OptionError(
                f"stock must be True or shares from 0 to 1 for activation_memory_budget, such as"
                f" stock=[0.5]; {share!r} is none."
            )
    return tuple(map(float, stock))


def _forecasts(
    model: Callable[..., Any],
    inputs: Sequence[Any],
    options: Options,
    budgets: Sequence[Budget],
    elsewhere: Elsewhere,
    shares: Sequence[float] = (),
) -> Sweep:
    """A point for each budget; a refusal is told by what the step holds without one."""
    asked = [*budgets, Budget.parse("100%")]
    # What is beside the graphs counts for every budget, as it does for the smallest.
    options = replace(options, budget=Budget.parse("min"))
    probed = planned_for(
        model,
        inputs,
        options,
        budgets=asked,
        elsewhere=elsewhere,
        n_reserved=len(budgets),
        stock=shares,
    )
    *outcomes, ample = probed.outcomes
    assert isinstance(ample, Outcome)
    points = [
        _forecast(budget, outcome, ample, probed, elsewhere, reserved_bytes)
        for budget, outcome, reserved_bytes in zip(
            budgets, outcomes, probed.reserved_bytes, strict=True
        )
    ]
    return Sweep(tuple(points), tuple(_stock_point(split, ample) for split in probed.stock))


def _stock_point(split: StockSplit, ample: Outcome) -> StockPoint:
    others = ample.others
    return StockPoint(
        f"activation_memory_budget={split.share:g}",
        others.outside_bytes + split.measured.peak_with(others),
        others.outside_bytes + ample.baseline_measured.peak_with(others),
        split.cost_ns,
        ample.baseline[2].cost_ns,
    )


def _budget_text(point: Forecast) -> str:
    if point.budget_bytes is None:
        return point.budget
    return f"{point.budget} = {format_bytes(point.budget_bytes)}"


def _loss_text(loss_bytes: int) -> str:
    """Where the model returns no loss."""
    return f"not counted; up to about {format_bytes(loss_bytes)} more"


def _cells(point: Forecast) -> tuple[str, ...]:
    budget = "" if point.budget_bytes is None else format_bytes(point.budget_bytes)
    share = f"{point.peak_bytes / max(1, point.baseline_peak_bytes):.1%}"
    if not point.fits:
        return point.budget, budget, f"needs {format_bytes(point.peak_bytes)}", share, "-"
    return point.budget, budget, format_bytes(point.peak_bytes), share, f"{point.overhead:.3f}"


def _stock_cells(point: StockPoint) -> tuple[str, ...]:
    share = f"{point.peak_bytes / max(1, point.baseline_peak_bytes):.1%}"
    return point.setting, "", format_bytes(point.peak_bytes), share, f"{point.overhead:.3f}"


def _plain_stock(point: StockPoint) -> dict[str, Any]:
    return {**asdict(point), "overhead": point.overhead}


def _forecast_of(values: dict[str, Any]) -> Forecast:
    return Forecast(**values)


def _values(point: Forecast) -> dict[str, Any]:
    return {f.name: getattr(point, f.name) for f in fields(point) if f.name != "get_explained"}


def _plain(point: Forecast) -> dict[str, Any]:
    """As JSON can hold it, with what follows from it."""
    refusal = "" if point.refusal is None else str(point.refusal)
    derived = {"split": dict(point.split), "overhead": point.overhead, "refusal": refusal}
    return {**_values(point), **derived}


def _row(point: Forecast) -> dict[str, Any]:
    row = _plain(point)
    return {**row, **{f"{name}_bytes": n for name, n in row.pop("split").items()}}


def _forecast(
    budget: Budget,
    found: Outcome | InfeasibleBudgetError,
    ample: Outcome,
    probed: ProbedPlan,
    elsewhere: Elsewhere,
    reserved_bytes: int | None,
) -> Forecast:
    outcome = ample if isinstance(found, InfeasibleBudgetError) else found
    others = outcome.others
    measured, baseline = outcome.measured, outcome.baseline_measured
    fits = outcome is found
    peak_bytes = others.outside_bytes + measured.peak_with(others)
    budget_bytes = outcome.budget_bytes
    refusal = None
    if isinstance(found, InfeasibleBudgetError):
        peak_bytes, budget_bytes, refusal = found.minimum_bytes or 0, found.budget_bytes, found
    return Forecast(
        str(budget),
        budget_bytes,
        fits,
        peak_bytes,
        others.outside_bytes + baseline.peak_with(others),
        dict(measured.split),
        measured.saved_bytes,
        others.outside_bytes,
        probed.beside.in_step_bytes(probed.around_bytes),
        outcome.stats.cost_ns,
        ample.baseline[2].cost_ns,
        "" if elsewhere.target is None else elsewhere.target.name,
        reserved_bytes,
        outcome.chunks,
        refusal,
        probed.loss_bytes,
        functools.partial(_explained, elsewhere, outcome, probed.input_names) if fits else None,
    )


def _explained(elsewhere: Elsewhere, outcome: Outcome, input_names: Sequence[str]) -> Explained:
    """What becomes of each tensor, for which the schedule is run again as on the device."""
    with elsewhere.entered(), not_traced():
        return explained(Details.of(outcome), outcome.plan, input_names)
