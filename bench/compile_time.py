"""How long does the first step take, with empty caches and in the next process?

Each model trains one step in a process of its own: with plain ``torch.compile``, and with
``backend="dtr"`` at some budgets; first with an empty cache folder, then, in a second process, with
the folder that the first left.  The first table has the seconds of the first step, and the ratio to
plain ``torch.compile`` with the same caches; the second says where the time went, by PyTorch's own
compile-time events.  ``--traces`` writes these events as flame charts.

    python -m bench.compile_time --models mixture,vit --out rows.jsonl
    python -m bench.compile_time --models gpt2 --budgets 50% --traces folder
    python -m bench.compile_time --models gpt2 --depths 6,12,24,48
    python -m bench.compile_time --quick

A ratio means something only on a machine that does nothing else.  Exits with 1 if a second process
planned anew.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import astuple, dataclass, fields
from pathlib import Path
from typing import Any

import torch

import dtrcompile
from bench.compile_phases import PHASES, CompileEvents
from bench.measure import format_table, machine, say, write_json_line
from bench.rivals import MODELS, under
from bench.zoo import SCALES, ZOO
from dtrcompile.backend import dtr
from dtrcompile.passes.errors import InfeasibleBudgetError, wrapped_error

PLAIN = "plain"
BUDGETS = ("50%", "min")
QUICK_MODELS, QUICK_BUDGETS = ("mixture",), ("min",)


@dataclass(frozen=True, slots=True)
class Case:
    """What a process trains: on CUDA in bfloat16 autocast, else in float32.

    Attributes:
        depth: layers of the model, as a number; empty: those of the scale.
    """

    name: str
    scale: str
    budget: str
    device: str = "cpu"
    depth: str = ""


def first_step(case: Case, trace: Path | None = None) -> dict[str, Any]:
    """Train one step in this process, and say how long it took.

    Args:
        trace: a file for the flame chart.
    """
    events = CompileEvents.recorded()
    device = torch.device(case.device)
    module, inputs = MODELS[case.name].build(
        case.scale, device=device, depth=int(case.depth) if case.depth else None
    )
    keywords: dict[str, Any] = {}
    if case.budget != PLAIN:
        keywords = {"backend": dtr, "options": {"budget": case.budget}}
    dtype = "bf16-autocast" if device.type == "cuda" else "float32"
    compiled = under(dtype, device, torch.compile(module, **keywords))
    found: dict[str, Any] = {"refused_bytes": None, "planning_s": 0.0, "lowering_s": 0.0}
    start = time.perf_counter()
    try:
        compiled(*inputs).backward()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
    except Exception as error:
        refusal = wrapped_error(error)
        if not isinstance(refusal, InfeasibleBudgetError):
            raise
        found["refused_bytes"] = refusal.minimum_bytes
    found["first_step_s"] = time.perf_counter() - start
    found["phases_s"] = events.seconds()
    if trace is not None:
        events.write_chrome_trace(trace)
    reports = dtrcompile.reports()
    if reports:
        found["planning_s"] = sum(r.planning_s for r in reports)
        found["lowering_s"] = sum(r.lowering_s for r in reports)
        found["promised_bytes"] = max(r.promised_peak_bytes for r in reports)
        found["is_plan_from_disk"] = all(r.is_plan_from_disk for r in reports)
    return found


def in_a_process(case: Case, cache: Path, trace: Path | None = None) -> dict[str, Any]:
    """`first_step` in a process of its own, with its caches in a folder."""
    command = [sys.executable, "-m", "bench.compile_time", "--worker", *astuple(case)]
    if trace is not None:
        command.append(str(trace))
    environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(cache)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{case.name} at {case.budget} failed:\n{done.stderr[-4000:]}")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def measure(
    name: str, depth: str, scale: str, budgets: Sequence[str], traces: Path | None
) -> list[dict[str, Any]]:
    """Both processes of each way to compile a model."""
    rows = []
    label = f"{name}-{depth}" if depth else name
    for budget in (PLAIN, *budgets):
        with tempfile.TemporaryDirectory() as cache:
            for process in (1, 2):
                file_name = f"{label}-{budget.rstrip('%')}-{process}.json"
                trace = None if traces is None else traces.resolve() / file_name
                case = Case(name, scale, budget, depth=depth)
                found = in_a_process(case, Path(cache), trace)
                say(f"{label} {budget}, process {process}: {found['first_step_s']:.1f} s")
                rows.append({"model": label, "budget": budget, "process": process, **found})
    return rows


def main(argv: Sequence[str] | None = None) -> int:
    assert __doc__ is not None
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--models", help="comma-separated; default: all of the zoo")
    parser.add_argument(
        "--budgets", help=f"comma-separated; default: {','.join(BUDGETS)}".replace("%", "%%")
    )
    parser.add_argument("--scale", choices=SCALES, default="quick")
    parser.add_argument(
        "--depths", default="", help="numbers of layers, comma-separated; default: the scale's own"
    )
    parser.add_argument("--quick", action="store_true", help="one model at one budget")
    parser.add_argument("--out", type=Path, help="append JSON lines to this file")
    parser.add_argument("--traces", type=Path, help="write flame charts into this folder")
    parser.add_argument("--worker", nargs="+", help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.worker:
        *case, trace = args.worker if len(args.worker) > len(fields(Case)) else [*args.worker, None]
        print(json.dumps(first_step(Case(*case), Path(trace) if trace else None)))
        return 0
    if args.traces is not None:
        args.traces.mkdir(parents=True, exist_ok=True)
    models = args.models.split(",") if args.models else list(QUICK_MODELS if args.quick else ZOO)
    budgets = args.budgets.split(",") if args.budgets else QUICK_BUDGETS if args.quick else BUDGETS
    table, phases, bad = [], [], []
    for name, depth in itertools.product(models, args.depths.split(",")):
        if not ZOO[name].is_there:
            say(f"{name}: skipped, {ZOO[name].needs} is not installed")
            continue
        rows = measure(name, depth, args.scale, budgets, args.traces)
        plain = {row["process"]: row["first_step_s"] for row in rows if row["budget"] == PLAIN}
        for row in rows:
            ratio = row["first_step_s"] / plain[row["process"]]
            write_json_line(
                args.out,
                {
                    "bench": "compile_time",
                    "scale": args.scale,
                    **row,
                    "ratio": ratio,
                    "machine": machine(torch.device("cpu")),
                },
            )
            is_refused = row["refused_bytes"] is not None
            table.append(
                (
                    row["model"],
                    row["budget"],
                    str(row["process"]),
                    f"{row['first_step_s']:.1f}",
                    "refused" if is_refused else f"{ratio:.2f}",
                )
            )
            seconds = [f"{row['phases_s'][phase]:.1f}" for phase in PHASES]
            phases.append((row["model"], row["budget"], str(row["process"]), *seconds))
            planned_again = row["budget"] != PLAIN and not row.get("is_plan_from_disk")
            if row["process"] == 2 and planned_again and not is_refused:
                bad.append(f"{row['model']} at {row['budget']}: the second process planned anew")
    print(format_table(("model", "budget", "process", "first step s", "ratio"), table))
    print("\nSeconds of each phase:\n")
    print(format_table(("model", "budget", "process", *PHASES), phases))
    print("\n".join(bad))
    return int(bool(bad))


if __name__ == "__main__":
    sys.exit(main())
