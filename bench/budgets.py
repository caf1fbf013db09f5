"""Does a step stay within its budget, and with the right gradients?

For each model and budget: compile with ``backend="dtr"``, run, and compare the allocator's peak
with the budget and with what the report promised, the gradients with those of the unbudgeted
compile from the same random state (dropout included), and the time of a step.  A budget below what
can be met must raise `InfeasibleBudgetError`, and the minimum that it names must then work.

    python -m bench.budgets                       # six models, Inductor: about an hour on two cores
    python -m bench.budgets --compiler eager      # bytes counted, gradients bitwise
    python -m bench.budgets --compiler eager --offload 25GB/s    # the same with copies to the host
    python -m bench.budgets --quick --models mlp16,unet --budgets 50%,min

Prints a table, appends JSON lines to ``--out``, and exits with 1 if a promise was broken.  Each
model runs in a process of its own.

With ``--compiler eager`` the reference is the same executor without a budget, the peak is what the
executor counted, and equal means bitwise, so that nothing is computed in chunks, which adds up in
another order.  Deterministic algorithms are then on: without them an
embedding's gradient differs from run to run, budget or not, because threads add in any order.
"""

from __future__ import annotations

import argparse
import json
import logging
import math
import os
import subprocess
import sys
import time
import traceback
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

import dtrcompile
from bench.measure import (
    Trainee,
    cause_of,
    format_table,
    interleaved_s,
    machine,
    say,
    step_peak_bytes,
    use_kernel_cache,
    write_json_line,
)
from dtrcompile.backend import dtr
from dtrcompile.demo.memory import static_bytes
from dtrcompile.passes.errors import InfeasibleBudgetError
from dtrcompile.passes.graphs.executor import clear_executor_log, executor_log
from workloads.models import MODELS
from workloads.training import relative_error

# Allowed relative error of the gradient under Inductor, from rounding that fusion changes.
GRADIENT_TOLERANCE = 1e-5
# The promise should not be far above what the allocator saw (DESIGN, invariant 4).
SLACK_TOLERANCE = 0.02
BUDGETS = ("100%", "70%", "50%", "40%", "30%", "min")
# One feed-forward, one with dropout, one recurrent; convolutions take minutes to compile here.
QUICK_MODELS, QUICK_BUDGETS = ("mlp16",), ("100%", "60%")
SEED = 1234
_MIB = 2**20

HEADER = (
    "model",
    "budget",
    "status",
    "budget MiB",
    "promised",
    "measured",
    "fill",
    "gradient error",
    "planned overhead",
    "step ratio",
    "extra runs",
    "compile s",
)


@dataclass
class Row:
    """One model at one budget.

    Attributes:
        status: "ok", "infeasible" (refused, as it should be where it cannot be met), "BROKEN" (a
            promise was broken: see ``broken``) or "ERROR" (an exception: see ``broken``).
        budget_bytes: as resolved; None for "min".
        baseline_bytes: peak without a budget, as the report has it.
        promised_bytes, planned_bytes: from the report.
        measured_bytes: what the allocator saw (Inductor) or the executor counted (eager).
        gradient_error: relative, against the unbudgeted compile; 0.0 means bitwise equal.
        overhead: planned cost / baseline cost.
        step_ratio: time of a step / time of an unbudgeted one.
        compile_s: first step less a usual one; kernels may come from the cache.
        minimum_bytes: what the infeasible error named.
        broken: what went wrong, in words.
        notes: what is worth a look, but breaks no promise.
    """

    model: str
    compiler: str
    budget: str
    status: str = "ok"
    budget_bytes: int | None = None
    baseline_bytes: int | None = None
    promised_bytes: int | None = None
    planned_bytes: int | None = None
    measured_bytes: int | None = None
    static_bytes: int | None = None
    gradient_error: float | None = None
    loss_error: float | None = None
    buffers_error: float | None = None
    overhead: float | None = None
    recomputed_runs: int | None = None
    offloaded_bytes: int | None = None
    step_s: float | None = None
    step_ratio: float | None = None
    compile_s: float | None = None
    planning_s: float | None = None
    lowering_s: float | None = None
    minimum_bytes: int | None = None
    broken: str = ""
    notes: str = ""

    def cells(self) -> tuple[str, ...]:
        """The row of the printed table."""

        def mib(size_bytes: int | None) -> str:
            return "-" if size_bytes is None else f"{size_bytes / _MIB:.1f}"

        def number(value: float | None, form: str) -> str:
            return "-" if value is None else format(value, form)

        fill = None
        if self.measured_bytes is not None and self.budget_bytes:
            fill = self.measured_bytes / self.budget_bytes
        return (
            self.model,
            self.budget,
            self.status,
            mib(self.budget_bytes),
            mib(self.promised_bytes),
            mib(self.measured_bytes),
            number(fill, ".3f"),
            number(self.gradient_error, ".1e"),
            number(self.overhead, ".3f"),
            number(self.step_ratio, ".2f"),
            number(self.recomputed_runs, "d"),
            number(self.compile_s, ".1f"),
        )


class _Bench:
    """All budgets of one model, in this process."""

    def __init__(self, name: str, arguments: argparse.Namespace) -> None:
        self.name, self.compiler, self.quick = name, arguments.compiler, arguments.quick
        self.offload: str | None = arguments.offload
        self.rounds = arguments.rounds
        self.device = torch.device(arguments.device)
        torch.use_deterministic_algorithms(self.compiler == "eager")
        # Each budget is a compile of its own of the same code.
        torch._dynamo.config.recompile_limit = 64
        self.reference = self.baseline()
        self.reference.step(SEED)
        start = time.perf_counter()
        self.reference.step(SEED)
        self.usual_s = time.perf_counter() - start
        self.reference.restore()
        self.loss = self.reference.step(SEED)
        self.gradients = self.reference.gradients()
        self.buffers = self.reference.buffers()

    def baseline(self) -> Trainee:
        """What the others are compared with: no budget, the same compiler."""
        if self.compiler == "eager":
            return self.trainee(1.0)
        module, inputs = self.build()
        return Trainee(module, inputs, torch.compile(module))

    def build(self) -> tuple[torch.nn.Module, tuple[torch.Tensor, ...]]:
        module, inputs = MODELS[self.name].build(0, quick=self.quick)
        return module.to(self.device), tuple(t.to(self.device) for t in inputs)

    def trainee(self, budget: str | int | float) -> Trainee:
        module, inputs = self.build()
        options: dict[str, Any] = {"budget": budget, "compiler": self.compiler}
        if self.compiler == "eager":
            options["chunking"] = False
        if self.offload is not None:
            options["offload"] = self.offload
        return Trainee(module, inputs, torch.compile(module, backend=dtr, options=options))

    def unbudgeted_row(self) -> Row:
        """The baseline's own peak and time, for scale."""
        row = Row(self.name, self.compiler, "none", step_s=self.usual_s)
        row.static_bytes = static_bytes(self.reference.module, *self.reference.inputs)
        if self.compiler == "inductor":
            row.measured_bytes = step_peak_bytes(self.reference, SEED)
        return row

    def row(self, budget: str | int) -> Row:
        """Compile, run and judge one budget."""
        row = Row(self.name, self.compiler, str(budget))
        try:
            self.fill(row, budget)
        except Exception as error:
            cause = cause_of(error)
            if isinstance(cause, InfeasibleBudgetError):
                row.status = "infeasible"
                row.budget_bytes, row.minimum_bytes = cause.budget_bytes, cause.minimum_bytes
                row.notes = str(cause)
                if budget == "min" or cause.minimum_bytes is None:
                    row.status, row.broken = "BROKEN", f"no minimum: {cause}"
            else:
                row.status = "ERROR"
                row.broken = "".join(traceback.format_exception(cause)[-3:]).strip()
        return row

    def fill(self, row: Row, budget: str | int) -> None:
        dtrcompile.clear_reports()
        trainee = self.trainee(budget)
        start = time.perf_counter()
        trainee.step(SEED)
        row.compile_s = max(0.0, time.perf_counter() - start - self.usual_s)
        trainee.restore()

        clear_executor_log()
        loss = trainee.step(SEED)
        row.gradient_error = relative_error(trainee.gradients(), self.gradients)
        row.buffers_error = relative_error(trainee.buffers(), self.buffers)
        row.loss_error = abs(loss - self.loss) / max(abs(self.loss), 1e-30)
        row.static_bytes = static_bytes(trainee.module, *trainee.inputs)

        broken: list[str] = []
        notes: list[str] = []
        if self.compiler == "eager":
            records = executor_log()
            row.measured_bytes = max((max(r.counted_bytes, default=0) for r in records), default=0)
            for record in records:
                for step, counted, predicted in zip(
                    record.steps, record.counted_bytes, record.predicted_bytes, strict=True
                ):
                    if counted != predicted:
                        broken.append(
                            f"{record.phase} step {step}: {counted} bytes counted,"
                            f" {predicted} predicted"
                        )
                        break
        else:
            row.measured_bytes = step_peak_bytes(trainee, SEED)

        reports = dtrcompile.reports()
        if len(reports) != 1:
            broken.append(f"{len(reports)} reports; expected one graph")
        if reports:
            report = reports[-1]
            row.budget_bytes = report.budget_bytes
            row.baseline_bytes = report.baseline_peak_bytes
            row.promised_bytes = report.promised_peak_bytes
            row.planned_bytes = report.planned_peak_bytes
            row.overhead = report.overhead
            row.recomputed_runs = report.recomputed_runs
            row.offloaded_bytes = report.offloaded_bytes
            row.planning_s, row.lowering_s = report.planning_s, report.lowering_s
            allowed = report.promised_peak_bytes
            if report.budget_bytes is not None:
                allowed = max(allowed, report.budget_bytes)
                if report.promised_peak_bytes > report.budget_bytes:
                    broken.append(f"promised {report.promised_peak_bytes} bytes, over the budget")
            if row.measured_bytes > allowed:
                broken.append(
                    f"measured {row.measured_bytes} bytes, {row.measured_bytes - allowed} over"
                )
            slack = abs(report.promised_peak_bytes - row.measured_bytes) / row.measured_bytes
            if slack > SLACK_TOLERANCE:
                notes.append(f"promise off by {slack:.1%}")
            if budget == "100%" and report.recomputed_runs:
                broken.append(f"{report.recomputed_runs} operators recomputed at an ample budget")

        tolerance = 0.0 if self.compiler == "eager" else GRADIENT_TOLERANCE
        for what, error in (
            ("gradient", row.gradient_error),
            ("loss", row.loss_error),
            ("buffers", row.buffers_error),
        ):
            if not error <= tolerance:
                broken.append(f"{what} off by {error:.1e} (allowed {tolerance:.0e})")

        if self.rounds:
            times = interleaved_s(
                {"dtr": trainee.step, "baseline": self.reference.step},
                rounds=self.rounds,
                device=self.device,
            )
            row.step_s = times["dtr"]
            row.step_ratio = times["dtr"] / times["baseline"]
        row.broken, row.notes = "; ".join(broken), "; ".join(notes)
        row.status = "BROKEN" if broken else "ok"


def run_model(name: str, budgets: Sequence[str], arguments: argparse.Namespace) -> list[Row]:
    """All rows of one model; a row is also written to standard output as it is made."""
    bench = _Bench(name, arguments)
    rows: list[Row] = []

    def add(row: Row) -> None:
        rows.append(row)
        print(json.dumps(asdict(row)), flush=True)

    add(bench.unbudgeted_row())
    queue: list[str | int] = list(budgets)
    minimum_tried = False
    while queue:
        row = bench.row(queue.pop(0))
        add(row)
        if row.status == "infeasible" and not minimum_tried:
            # The minimum that the error names has to work.
            assert row.minimum_bytes is not None
            minimum_tried = True
            met = bench.row(row.minimum_bytes)
            if met.status == "infeasible":
                met.status, met.broken = "BROKEN", f"named as the minimum, but: {met.notes}"
            add(met)
    return rows


def run_in_process(name: str, arguments: argparse.Namespace, budgets: Sequence[str]) -> list[Row]:
    """Run a model's budgets in a fresh process; a crash becomes an ERROR row."""
    command = [sys.executable, "-m", "bench.budgets", "--models", name, "--worker"]
    command += ["--budgets", ",".join(budgets), "--compiler", arguments.compiler]
    command += ["--device", arguments.device, "--rounds", str(arguments.rounds)]
    command += ["--quick"] if arguments.quick else []
    command += [] if arguments.offload is None else ["--offload", arguments.offload]
    environment = dict(os.environ)
    use_kernel_cache(environment)
    rows: list[Row] = []
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if not line.startswith("{"):
                continue
            rows.append(Row(**json.loads(line)))
            say("  ".join(rows[-1].cells()))
            if rows[-1].broken:
                say(f"  {rows[-1].broken}")
    if process.returncode:
        message = f"the process ended with status {process.returncode}"
        rows.append(Row(name, arguments.compiler, "-", status="ERROR", broken=message))
    return rows


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line."""
    assert __doc__ is not None
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--models", help="comma-separated names; default: all, one when quick")
    parser.add_argument(
        "--budgets", help=f"comma-separated; default: {','.join(BUDGETS)}".replace("%", "%%")
    )
    parser.add_argument("--compiler", choices=("inductor", "eager"), default="inductor")
    parser.add_argument(
        "--offload", metavar="BANDWIDTH", help="of the link to the host, such as 25GB/s"
    )
    parser.add_argument("--device", default="cpu")
    parser.add_argument(
        "--rounds", type=int, default=5, help="steps of each to time; 0 on a machine that is busy"
    )
    parser.add_argument("--quick", action="store_true", help="tiny models of the same kinds")
    parser.add_argument("--out", type=Path, help="append JSON lines to this file")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args(argv)
    quick = arguments.quick
    arguments.models = arguments.models or ",".join(QUICK_MODELS if quick else MODELS)
    arguments.budgets = arguments.budgets or ",".join(QUICK_BUDGETS if quick else BUDGETS)
    for name in arguments.models.split(","):
        if name not in MODELS:
            parser.error(f"unknown model {name!r}; allowed: {', '.join(MODELS)}")
    return arguments


def main(argv: Sequence[str] | None = None) -> int:
    """Run, print the table, return the exit status."""
    arguments = parse(argv)
    models, budgets = arguments.models.split(","), arguments.budgets.split(",")
    if arguments.worker:
        logging.getLogger("dtrcompile").setLevel(logging.WARNING)
        (name,) = models
        run_model(name, budgets, arguments)
        return 0

    description = machine(torch.device(arguments.device))
    rows: list[Row] = []
    for name in models:
        for row in run_in_process(name, arguments, budgets):
            rows.append(row)
            finite = {
                key: str(value) if isinstance(value, float) and not math.isfinite(value) else value
                for key, value in asdict(row).items()
            }
            write_json_line(
                arguments.out,
                {"bench": "budgets", "quick": arguments.quick, **finite, "machine": description},
            )
    print(format_table(HEADER, [row.cells() for row in rows]))
    bad = [row for row in rows if row.broken]
    for row in bad:
        print(f"\n{row.model} at {row.budget} ({row.compiler}): {row.status}: {row.broken}")
    for row in rows:
        if row.notes and row.status == "ok":
            print(f"{row.model} at {row.budget}: {row.notes}")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
