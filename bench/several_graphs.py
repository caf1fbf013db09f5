"""One budget over several graphs: what the steps hold, for the forms that a model can have.

The same blocks, compiled by Inductor as one graph, with graph breaks, one by one, as modules apart,
called several times.  Budgets are shares of the peak without one, given in bytes; the first steps,
which are compiled before all graphs are known, are held to them too.

    python -m bench.several_graphs --out rows.jsonl
    python -m bench.several_graphs --quick

Exits with 1 if a step held more than its budget, if a gradient differs from plain
`torch.compile`'s by more than 1e-5, if the promise of the last step is more than 2 % of the
unbudgeted peak above what that step held, or if a refusal names a minimum that differs by more than
5 % from what ``"min"`` holds.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

import dtrcompile
from bench.measure import (
    cause_of,
    format_table,
    machine,
    say,
    use_kernel_cache,
    write_json_line,
)
from dtrcompile.backend import dtr
from dtrcompile.passes.errors import InfeasibleBudgetError, format_bytes
from workloads.several_graphs import FORMS, train
from workloads.training import relative_error

TOLERANCE = 1e-5
# Parts of the unbudgeted peak, and of the smallest.
MOST_GAP, MOST_BESIDE_MINIMUM = 0.02, 0.05


def main(argv: Sequence[str] | None = None) -> int:
    """Run, print the table, return the exit status."""
    assert __doc__ is not None
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--forms", help=f"comma-separated, of: {', '.join(FORMS)}")
    parser.add_argument("--shares", help="of the peak without a budget, in percent; 0: the minimum")
    parser.add_argument("--quick", action="store_true", help="small, one form")
    parser.add_argument("--out", type=Path, help="append JSON lines to this file")
    arguments = parser.parse_args(argv)
    forms = arguments.forms or ("scores" if arguments.quick else ",".join(FORMS))
    shares = arguments.shares or ("50" if arguments.quick else "0,100,70,60,50,40,35")
    use_kernel_cache()
    description = machine(torch.device("cpu"))
    rows: list[tuple[str, ...]] = []
    bad: list[str] = []
    for name in forms.split(","):
        say(name)
        plain = train(name, torch.compile, quick=arguments.quick)
        plain_bytes, smallest_bytes = plain.peaks[-1], 0
        for share in map(int, shares.split(",")):
            budget_bytes = plain_bytes * share // 100
            options = {"budget": budget_bytes or "min"}
            row: dict[str, Any] = {
                "bench": "several_graphs",
                "quick": arguments.quick,
                "form": name,
                "share": share,
                "unbudgeted_bytes": plain_bytes,
                "budget_bytes": budget_bytes or None,
                "machine": description,
            }
            try:
                compile_ = partial(torch.compile, backend=dtr, options=options)
                seen = train(name, compile_, quick=arguments.quick)
            except Exception as error:
                refusal = cause_of(error)
                if not isinstance(refusal, InfeasibleBudgetError):
                    raise
                minimum_bytes = refusal.minimum_bytes
                write_json_line(
                    arguments.out, row | {"refused": str(refusal), "minimum_bytes": minimum_bytes}
                )
                refused = f"refused: {format_bytes(minimum_bytes or 0)}"
                rows.append((name, f"{share}%", format_bytes(budget_bytes), refused, *[""] * 4))
                beside_bytes = abs((minimum_bytes or 0) - smallest_bytes)
                if smallest_bytes and beside_bytes > MOST_BESIDE_MINIMUM * smallest_bytes:
                    bad.append(
                        f"{name} at {share}%: refused, naming {minimum_bytes} bytes where"
                        f' "min" holds {smallest_bytes}'
                    )
                continue
            if not budget_bytes:
                smallest_bytes = seen.peaks[-1]
            recomputed = sum(r.recomputed_runs for r in dtrcompile.reports())
            gradient_error = relative_error(seen.gradients, plain.gradients)
            gap = (seen.promised_bytes - seen.peaks[-1]) / plain_bytes
            if budget_bytes and max(seen.peaks) > budget_bytes:
                bad.append(f"{name} at {share}%: {max(seen.peaks)} bytes of {budget_bytes}")
            if not gradient_error <= TOLERANCE:
                bad.append(f"{name} at {share}%: gradients differ by {gradient_error:.1e}")
            if not 0 <= gap <= MOST_GAP:
                bad.append(f"{name} at {share}%: promised {gap:.1%} of the whole too much")
            measured = {
                "peak_bytes": seen.peaks,
                "promised_bytes": seen.promised_bytes,
                "recomputed_runs": recomputed,
                "gradient_error": str(gradient_error),
            }
            write_json_line(arguments.out, row | measured)
            rows.append(
                (
                    name,
                    f"{share}%" if share else "min",
                    format_bytes(budget_bytes) if share else "",
                    format_bytes(max(seen.peaks[:2])),
                    format_bytes(seen.peaks[-1]),
                    f"{gap:.2%}",
                    str(recomputed),
                    f"{gradient_error:.0e}",
                )
            )
    header = (
        "form",
        "budget",
        "bytes",
        "steps 1, 2",
        "step 4",
        "promised above",
        "recomputed",
        "gradient error",
    )
    print(format_table(header, rows))
    print("\n".join(bad))
    return int(bool(bad))


if __name__ == "__main__":
    sys.exit(main())
