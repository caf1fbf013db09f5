"""Are the gradients right when random operators are computed twice?

Compares, from one random state, the gradient of the unbudgeted compile with those of

* ``backend="dtr"`` at several budgets (a share of the unbudgeted peak), and
* the stock partitioner's ``activation_memory_budget`` at the same numbers (there a share of the
  *saved* bytes), which computes dropout's seeds again in backward (pytorch#190758).

    python -m bench.gradients
    python -m bench.gradients --quick

Errors are relative, ||a - b|| / ||b|| over all parameters as one vector.  Exits with 1 if dtr's is
above 1e-5 anywhere; the stock partitioner's rows are for comparison.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from bench.measure import (
    Trainee,
    cause_of,
    format_table,
    machine,
    say,
    step_peak_bytes,
    use_kernel_cache,
    write_json_line,
)
from dtrcompile.backend import dtr
from dtrcompile.passes.errors import InfeasibleBudgetError, format_bytes
from dtrcompile.passes.torch_private import functorch_config
from workloads.models import MODELS
from workloads.training import relative_error

TOLERANCE = 1e-5
SEED = 1234


def trainee(name: str, method: str, share: float, *, quick: bool) -> Trainee:
    """The model compiled by a method, warmed up by one step."""
    module, inputs = MODELS[name].build(0, quick=quick)
    if method == "dtr":
        compiled = torch.compile(module, backend=dtr, options={"budget": f"{share:.0%}"})
    else:
        compiled = torch.compile(module)
    made = Trainee(module, inputs, compiled)
    # Without the reset, the same code and the same backend would be served the graphs of another
    # activation_memory_budget.
    torch._dynamo.reset()
    with functorch_config.patch(activation_memory_budget=share if method == "stock" else 1.0):
        made.step(SEED)
    made.restore()
    return made


def main(argv: Sequence[str] | None = None) -> int:
    """Run, print the table, return the exit status."""
    assert __doc__ is not None
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--models", help="comma-separated names; default: the GPTs; quick: mlp16")
    parser.add_argument("--shares", help="comma-separated; default: 0.7,0.5,0.4")
    parser.add_argument("--quick", action="store_true", help="tiny models of the same kinds")
    parser.add_argument("--out", type=Path, help="append JSON lines to this file")
    arguments = parser.parse_args(argv)
    quick = arguments.quick
    arguments.models = arguments.models or ("mlp16" if quick else "gpt_demo,gpt2_hf")
    arguments.shares = arguments.shares or ("0.5" if quick else "0.7,0.5,0.4")
    use_kernel_cache()
    description = machine(torch.device("cpu"))
    rows: list[tuple[str, ...]] = []
    worst = 0.0
    for name in arguments.models.split(","):
        reference = trainee(name, "none", 1.0, quick=arguments.quick)
        reference.step(SEED)
        gradients = reference.gradients()
        cases = [("none", 1.0)]
        for share in map(float, arguments.shares.split(",")):
            cases += [("dtr", share), ("stock", share)]
        for method, share in cases:
            say(f"{name}: {method} at {share}")
            try:
                made = trainee(name, method, share, quick=arguments.quick)
            except Exception as error:
                refusal = cause_of(error)
                if not isinstance(refusal, InfeasibleBudgetError):
                    raise
                rows.append((name, method, str(share), "infeasible", "-"))
                continue
            made.step(SEED)
            off = relative_error(made.gradients(), gradients)
            peak_bytes = step_peak_bytes(made, SEED)
            if method == "dtr":
                worst = max(worst, off)
            rows.append((name, method, str(share), format_bytes(peak_bytes), f"{off:.1e}"))
            write_json_line(
                arguments.out,
                {
                    "bench": "gradients",
                    "quick": arguments.quick,
                    "model": name,
                    "method": method,
                    "share": share,
                    "peak_bytes": peak_bytes,
                    "gradient_error": str(off),
                    "machine": description,
                },
            )
    print(format_table(("model", "method", "budget", "peak", "gradient error"), rows))
    return int(worst > TOLERANCE)


if __name__ == "__main__":
    sys.exit(main())
