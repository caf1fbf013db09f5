"""What `dtrcompile.plan` and `sweep` say of the models of `bench.zoo`, and how long they take.

For each model: the peaks of `plan` at a budget and at the minimum against the reports of a real
compilation, which have to be the same to the byte; and the seconds of a `sweep` of nine budgets
against those of one `plan`, with empty caches each, in this process, one after the other.  What one
plan takes is the mean over the nine budgets, each planned by itself: to name the smallest budget in
a refusal takes as long as to plan for it, and several times as long as to plan for one that fits.

    python -m bench.forecasts --out rows.jsonl
"""

from __future__ import annotations

import argparse
import functools
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import torch

import dtrcompile
from bench.measure import format_table, machine, say, write_json_line
from bench.zoo import SCALES, ZOO, ZooModel
from dtrcompile.forecast import SWEPT, Forecast
from dtrcompile.passes.errors import InfeasibleBudgetError, wrapped_error

QUICK_MODELS = ("mixture",)
BUDGETS = ("60%", "min")


def compiled_peaks(model: ZooModel, scale: str, budget: str) -> tuple[int, int] | int:
    """Promised peak and peak without a budget, of a real step; of a refusal, what it names."""
    module, inputs = model.build(scale)
    torch._dynamo.reset()
    dtrcompile.clear_reports()
    compiled = torch.compile(module, backend="dtr", options={"budget": budget})
    try:
        loss = compiled(*inputs)
        loss.backward()
    except Exception as error:
        refusal = wrapped_error(error)
        if not isinstance(refusal, InfeasibleBudgetError):
            raise
        return refusal.minimum_bytes or 0
    (report,) = dtrcompile.reports()
    return report.promised_peak_bytes, report.baseline_peak_bytes


def forecast_peaks(forecast: Forecast) -> tuple[int, int] | int:
    """The same, as it was told beforehand."""
    if not forecast.fits:
        return forecast.peak_bytes
    return forecast.peak_bytes, forecast.baseline_peak_bytes


def timed(function: Callable[[], Any]) -> tuple[float, Any]:
    """Seconds and result of something that finds empty caches."""
    torch._dynamo.reset()
    with (
        tempfile.TemporaryDirectory() as folder,
        mock.patch.dict(os.environ, {"TORCHINDUCTOR_CACHE_DIR": folder}),
    ):
        start = time.perf_counter()
        result = function()
        return time.perf_counter() - start, result


def row_of(model: ZooModel, scale: str, budgets: Sequence[str]) -> dict[str, Any]:
    """The row of one model."""
    module, inputs = model.build(scale)
    dtrcompile.plan(module, *inputs, budget="100%")  # (what is done once in a process)
    plans_s, told = {}, {}
    for budget in budgets:
        plans_s[budget], forecast = timed(
            functools.partial(dtrcompile.plan, module, *inputs, budget=budget)
        )
        told[budget] = forecast_peaks(forecast)
    sweep_s, swept = timed(lambda: dtrcompile.sweep(module, *inputs, budgets=budgets))
    agree = told == {p.budget: forecast_peaks(p) for p in swept.points}
    held = {budget: compiled_peaks(model, scale, budget) for budget in BUDGETS}
    return {
        "bench": "forecasts",
        "model": model.name,
        "scale": scale,
        "told": told,
        "compiled": held,
        "is_equal": agree and all(told[budget] == held[budget] for budget in BUDGETS),
        "plans_s": plans_s,
        "sweep_s": sweep_s,
        "overheads": {p.budget: round(p.overhead, 4) for p in swept.points if p.fits},
        "machine": machine(torch.device("cpu")),
    }


def show(rows: Sequence[dict[str, Any]]) -> None:
    """A table of the rows."""
    header = (
        "model",
        "peaks",
        *(f"plan at {budget} (s)" for budget in BUDGETS),
        "one plan (s)",
        "sweep (s)",
        "plans",
    )
    cells = [
        (
            row["model"],
            "equal" if row["is_equal"] else "DIFFER",
            *(f"{row['plans_s'][budget]:.1f}" for budget in BUDGETS),
            f"{statistics.mean(row['plans_s'].values()):.1f}",
            f"{row['sweep_s']:.1f}",
            f"{row['sweep_s'] / statistics.mean(row['plans_s'].values()):.2f}",
        )
        for row in rows
    ]
    print(format_table(header, cells))


def main(argv: Sequence[str] | None = None) -> int:
    assert __doc__ is not None
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--models", help="comma-separated; default: all of the zoo")
    parser.add_argument("--scale", choices=SCALES, default="quick")
    parser.add_argument("--quick", action="store_true", help="one model, two budgets")
    parser.add_argument("--out", type=Path, help="append JSON lines to this file")
    args = parser.parse_args(argv)
    usual = QUICK_MODELS if args.quick else tuple(ZOO)
    rows = []
    for name in args.models.split(",") if args.models else usual:
        if not ZOO[name].is_there:
            say(f"{name}: skipped, {ZOO[name].needs} is not installed")
            continue
        row = row_of(ZOO[name], args.scale, BUDGETS if args.quick else SWEPT)
        say(f"{name}: {row['told']} told, {row['compiled']} compiled")
        write_json_line(args.out, row)
        rows.append(row)
    show(rows)
    return 0 if all(row["is_equal"] for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
