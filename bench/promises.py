"""What is promised, planned and refused for the models of `bench.zoo`, without compiling a kernel.

Each model is traced and planned as `torch.compile` would, in float32 and under bfloat16 autocast,
at shares of its unbudgeted peak and at its minimum.  A row has the promise, the peak that the plan
itself has, its overhead and a hash of its text; a refusal has the minimum that it names.  Two such
files tell whether a change to the compiler changed what it promises:

    python -m bench.promises --out before.jsonl
    python -m bench.promises --out after.jsonl
    python -m bench.promises --compare before.jsonl after.jsonl

The comparison exits with 1 if a promise, a refusal or a plan differs.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

import dtrcompile
from bench.measure import format_table, machine, say, write_json_line
from bench.zoo import SCALES, ZOO, ZooModel
from dtrcompile.options import Options
from dtrcompile.passes.errors import InfeasibleBudgetError
from dtrcompile.probe import planned_outcome

DTYPES = ("float32", "bf16-autocast")
BUDGETS = ("100%", "70%", "50%", "40%", "30%", "min")
QUICK_MODELS, QUICK_DTYPES, QUICK_BUDGETS = ("mixture",), ("float32",), ("50%",)
# What identifies a row, and what a change to the compiler must leave as it is.
KEY = ("model", "dtype", "scale", "budget")
KEPT = (
    "baseline_bytes",
    "promised_bytes",
    "planned_bytes",
    "refused_bytes",
    "overhead",
    "plan",
)


def promise_of(model: ZooModel, scale: str, dtype: str, budget: str) -> dict[str, Any]:
    """The row of one model at one budget."""
    module, inputs = model.build(scale)
    torch._dynamo.reset()
    dtrcompile.clear_reports()
    start = time.perf_counter()
    found: dict[str, Any] = dict.fromkeys(KEPT)
    try:
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=dtype == "bf16-autocast"):
            outcome = planned_outcome(module, inputs, Options.parse({"budget": budget}))
    except InfeasibleBudgetError as refusal:
        found |= {"refused_bytes": refusal.minimum_bytes}
    else:
        plan = outcome.plan.to_text()
        found |= {
            "baseline_bytes": outcome.baseline_measured.peak_bytes,
            "promised_bytes": outcome.measured.peak_bytes,
            "planned_bytes": outcome.stats.peak_bytes,
            "overhead": round(outcome.stats.cost_ns / outcome.baseline[2].cost_ns, 6),
            "plan": hashlib.sha256(plan.encode()).hexdigest()[:12],
        }
    return {
        "bench": "promises",
        "model": model.name,
        "dtype": dtype,
        "scale": scale,
        "budget": budget,
        **found,
        "planning_and_lowering_s": time.perf_counter() - start,
        "machine": machine(torch.device("cpu")),
    }


def run(
    models: Sequence[str],
    dtypes: Sequence[str],
    budgets: Sequence[str],
    scale: str,
    out: Path | None,
) -> list[dict[str, Any]]:
    """Every combination, each written as soon as it is known."""
    rows = []
    for name in models:
        model = ZOO[name]
        if not model.is_there:
            say(f"{name}: skipped, {model.needs} is not installed")
            continue
        for dtype in dtypes:
            for budget in budgets:
                row = promise_of(model, scale, dtype, budget)
                say(f"{name} {dtype} {budget}: {row['promised_bytes'] or 'refused'}")
                write_json_line(out, row)
                rows.append(row)
    return rows


def read(path: Path) -> dict[tuple[str, ...], Mapping[str, Any]]:
    """Rows by what identifies them; the latest of each."""
    rows = map(json.loads, path.read_text(encoding="utf-8").splitlines())
    return {tuple(row[name] for name in KEY): row for row in rows if row["bench"] == "promises"}


def compare(before: Path, after: Path) -> int:
    """Print what differs between two files; 1 if anything does."""
    old, new = read(before), read(after)
    shared = [key for key in old if key in new]
    differing = [
        (*key, name, str(old[key][name]), str(new[key][name]))
        for key in shared
        for name in KEPT
        if old[key][name] != new[key][name]
    ]
    for key in old.keys() ^ new.keys():
        say(f"only in one file: {' '.join(key)}")
    if differing:
        print(format_table((*KEY, "what", "before", "after"), differing))
    print(f"{len(shared)} rows compared, {len({row[:4] for row in differing})} of them differ")
    return 1 if differing or not shared else 0


def show(rows: Sequence[Mapping[str, Any]]) -> None:
    """A table of the rows."""
    header = ("model", "dtype", "budget", "baseline", "promised", "refused: at least", "overhead")
    cells = [
        tuple(
            "" if row[name] is None else str(row[name])
            for name in (
                "model",
                "dtype",
                "budget",
                "baseline_bytes",
                "promised_bytes",
                "refused_bytes",
                "overhead",
            )
        )
        for row in rows
    ]
    print(format_table(header, cells))


def main(argv: Sequence[str] | None = None) -> int:
    assert __doc__ is not None
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--models", help="comma-separated; default: all of the zoo")
    parser.add_argument("--dtypes", help=f"comma-separated, of {', '.join(DTYPES)}")
    parser.add_argument("--budgets", help="comma-separated")
    parser.add_argument("--scale", choices=SCALES, default="quick")
    parser.add_argument("--quick", action="store_true", help="one model at one budget")
    parser.add_argument("--out", type=Path, help="append JSON lines to this file")
    parser.add_argument("--compare", type=Path, nargs=2, metavar="FILE", help="two such files")
    args = parser.parse_args(argv)
    if args.compare:
        return compare(*args.compare)
    chosen = (QUICK_MODELS, QUICK_DTYPES, QUICK_BUDGETS) if args.quick else (ZOO, DTYPES, BUDGETS)
    models, dtypes, budgets = (
        given.split(",") if given else list(usual)
        for given, usual in zip((args.models, args.dtypes, args.budgets), chosen, strict=True)
    )
    show(run(models, dtypes, budgets, args.scale, args.out))
    return 0


if __name__ == "__main__":
    sys.exit(main())
