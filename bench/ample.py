"""Is a budget that is large enough free?

``backend="dtr"`` at the whole unbudgeted peak against plain ``torch.compile``: the code that
Inductor wrote, the allocator's peak, the time of a step (the two take turns) and of a compile.

    python -m bench.ample
    python -m bench.ample --quick --models mlp16

Exits with 1 if an operator is recomputed, the code differs, the peak is higher, or the gradient is
off by more than 1e-6 (threads add an embedding's in any order, so that two runs of the same code
differ too).  Times are printed, not judged.
"""

from __future__ import annotations

import argparse
import re
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import torch

import dtrcompile
from bench.measure import (
    Trainee,
    format_table,
    interleaved_s,
    machine,
    say,
    step_peak_bytes,
    use_kernel_cache,
    write_json_line,
)
from dtrcompile.backend import dtr
from dtrcompile.passes.errors import format_bytes
from dtrcompile.passes.torch_private import GraphLowering, inductor_config
from workloads.models import MODELS
from workloads.training import relative_error

TOLERANCE = 1e-6
SEED = 1234


def compile_and_read_code(
    name: str, *, budgeted: bool, quick: bool
) -> tuple[Trainee, frozenset[str], float]:
    """A warmed-up trainee, the wrappers that Inductor wrote, and the seconds of the first step."""
    module, inputs = MODELS[name].build(0, quick=quick)
    keywords: dict[str, Any] = {}
    if budgeted:
        keywords = {"backend": dtr, "options": {"budget": 1.0}}
    made = Trainee(module, inputs, torch.compile(module, **keywords))
    sources: list[str] = []
    # Kernels still come from the cache of C++ sources; only graphs are lowered anew.
    with (
        inductor_config.patch(fx_graph_cache=False),
        mock.patch.object(GraphLowering, "save_output_code", sources.append),
    ):
        start = time.perf_counter()
        made.step(SEED)
        compile_s = time.perf_counter() - start
    made.restore()
    return made, frozenset(map(without_labels, sources)), compile_s


def without_labels(source: str) -> str:
    """The code without what counts graphs: comments and the name of the compilation."""
    source = re.sub(r"# AOT ID: .*", "", source)
    source = re.sub(r"\n\s*#.*", "", source)
    return re.sub(r"graph_\d+", "graph", source)


def main(argv: Sequence[str] | None = None) -> int:
    """Run, print the table, return the exit status."""
    assert __doc__ is not None
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--models", help="comma-separated names; default: all, one when quick")
    parser.add_argument("--rounds", type=int, default=9, help="steps of each to time")
    parser.add_argument("--quick", action="store_true", help="tiny models of the same kinds")
    parser.add_argument("--out", type=Path, help="append JSON lines to this file")
    arguments = parser.parse_args(argv)
    arguments.models = arguments.models or ("mlp16" if arguments.quick else ",".join(MODELS))
    use_kernel_cache()
    torch._dynamo.config.recompile_limit = 64
    description = machine(torch.device("cpu"))
    rows: list[tuple[str, ...]] = []
    bad: list[str] = []
    for name in arguments.models.split(","):
        say(name)
        dtrcompile.clear_reports()
        plain, plain_code, plain_s = compile_and_read_code(
            name, budgeted=False, quick=arguments.quick
        )
        ours, our_code, our_s = compile_and_read_code(name, budgeted=True, quick=arguments.quick)
        plain.step(SEED)
        ours.step(SEED)
        error = relative_error(ours.gradients(), plain.gradients())
        peaks = {"plain": step_peak_bytes(plain, SEED), "dtr": step_peak_bytes(ours, SEED)}
        times = interleaved_s(
            {"plain": plain.step, "dtr": ours.step}, rounds=arguments.rounds, device=ours.device
        )
        recomputed = sum(r.recomputed_runs for r in dtrcompile.reports())
        problems = {
            f"{recomputed} operators recomputed": recomputed > 0,
            "other code": our_code != plain_code,
            f"peak {peaks['dtr']} > {peaks['plain']}": peaks["dtr"] > peaks["plain"],
            f"gradients differ by {error:.1e}": not error <= TOLERANCE,
        }
        bad += [f"{name}: {problem}" for problem, is_so in problems.items() if is_so]
        rows.append(
            (
                name,
                "yes" if our_code == plain_code else "NO",
                format_bytes(peaks["plain"]),
                format_bytes(peaks["dtr"]),
                f"{times['dtr'] / times['plain']:.3f}",
                f"{plain_s:.1f}",
                f"{our_s:.1f}",
            )
        )
        write_json_line(
            arguments.out,
            {
                "bench": "ample",
                "quick": arguments.quick,
                "model": name,
                "same_code": our_code == plain_code,
                "peak_bytes": peaks,
                "step_s": times,
                "first_step_s": {"plain": plain_s, "dtr": our_s},
                "recomputed_runs": recomputed,
                "gradient_error": str(error),
                "machine": description,
            },
        )
    header = ("model", "same code", "plain peak", "dtr peak", "step ratio", "plain s", "dtr s")
    print(format_table(header, rows))
    print("\n".join(bad))
    return int(bool(bad))


if __name__ == "__main__":
    sys.exit(main())
