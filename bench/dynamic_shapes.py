"""Twenty batch sizes and twenty lengths in random order: does one budget hold in every call?

Four models (a transformer, a U-Net, a convolutional net with batch norm, an unrolled LSTM) are
called at twenty pairs of a batch size and a length (of a sequence, or the edge of an image), twice
each, with ``dynamic=True``, with the shapes that Dynamo makes dynamic by itself, and with
``mark_dynamic``.  The budget is a share of what the largest call holds without one.  Peaks are what
the eager executor counts, or the allocator's under Inductor, in calls that compile too.  Gradients
are compared with plain PyTorch's.  What it costs to find the plan of a call whose sizes were seen
before is timed.

    python -m bench.dynamic_shapes --out rows.jsonl
    python -m bench.dynamic_shapes --quick

Exits with 1 if a call held more than its budget, a gradient differs by more than 1e-4, or a graph
has more than four plans.
"""

from __future__ import annotations

import argparse
import collections
import copy
import itertools
import logging
import random
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.fx.experimental.symbolic_shapes import ConstraintViolationError

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
from dtrcompile.steps.shared_graph import SharedGraph
from workloads.changing_sizes import MODELS, Model, held_bytes, unbudgeted_bytes
from workloads.training import relative_error

CALLS, QUICK_CALLS = 20, 5
TOLERANCE = 1e-4
MOST_PLANS = 4
SEED = 11
MODES = ("dynamic", "automatic", "mark_dynamic")
# Lengths that Python code unrolls are a graph each; Dynamo stops at eight.
_MOST_GRAPHS = 64


def sizes_of(model: Model, calls: int) -> list[tuple[int, int]]:
    """Pairs of a batch size and a length, each once, in random order."""
    (batch, batch_step), (length, length_step) = model.batches, model.lengths
    batches = [batch - i * batch_step for i in range(calls)]
    lengths = [length - i * length_step for i in range(calls)]
    draw = random.Random(SEED)
    draw.shuffle(batches)
    draw.shuffle(lengths)
    return list(zip(batches, lengths, strict=True))


@contextmanager
def lookups() -> Iterator[list[float]]:
    """Seconds that each call takes to find its plan, where its sizes were seen before."""
    seconds: list[float] = []
    call = SharedGraph.__call__

    def timed(self: SharedGraph, *args: Any) -> Any:
        result = call(self, *args)
        if self.symbols and not self.family.loss:
            self.family.choose(self.symbols.values(args))  # sizes that were traced are not seen yet
            start = time.perf_counter()
            self.family.choose(self.symbols.values(args))
            seconds.append(time.perf_counter() - start)
        return result

    SharedGraph.__call__ = timed  # type: ignore[method-assign]
    try:
        yield seconds
    finally:
        SharedGraph.__call__ = call  # type: ignore[method-assign]


@dataclass
class Seen:
    """What twenty calls showed.

    Attributes:
        peaks: bytes, a call.
        refused: calls that no plan holds the budget for.
        error: the largest relative error of a call's gradients.
        plans: the most that a graph has.
        graphs: that Dynamo made.
        lookup_s: the median time to find a plan.
    """

    peaks: list[int]
    refused: int
    error: float
    plans: int
    graphs: int
    lookup_s: float


def largest_of(model: Model, calls: int) -> tuple[int, int]:
    """The sizes of the largest call."""
    return max(sizes_of(model, calls), key=lambda size: model.inputs(*size)[0].numel())


def mark_sizes(model: Model, inputs: Sequence[torch.Tensor]) -> None:
    """Have Dynamo take the sizes that vary for dynamic."""
    for dimension in model.dynamic_dims:
        torch._dynamo.mark_dynamic(inputs[0], dimension)
    if len(inputs) > 1:
        for dimension in range(inputs[1].dim()):
            torch._dynamo.mark_dynamic(inputs[1], dimension)


def run(model: Model, module: nn.Module, calls: int, mode: str, options: dict[str, object]) -> Seen:
    """All sizes twice, at one budget."""
    torch._dynamo.reset()
    dtrcompile.clear_reports()
    seen = Seen([], 0, 0.0, 0, 0, 0.0)
    plain, trained = copy.deepcopy(module), copy.deepcopy(module)
    dynamic = True if mode == "dynamic" else None
    compiled = torch.compile(trained, backend=dtr, dynamic=dynamic, options=options)
    with lookups() as seconds:
        for batch, length in sizes_of(model, calls) * 2:
            inputs = model.inputs(batch, length)
            if mode == "mark_dynamic":
                mark_sizes(model, inputs)
            trained.zero_grad(set_to_none=True)
            try:
                seen.peaks.append(held_bytes(trained, compiled, inputs, options["compiler"]))
            except Exception as error:
                if not isinstance(cause_of(error), InfeasibleBudgetError):
                    raise
                seen.refused += 1
                continue
            plain.zero_grad(set_to_none=True)
            plain(*inputs).backward()
            wanted = {n: p.grad for n, p in plain.named_parameters()}
            found = {n: p.grad for n, p in trained.named_parameters()}
            seen.error = max(seen.error, relative_error(found, wanted))
    plans = collections.Counter(report.graph for report in dtrcompile.reports())
    seen.plans, seen.graphs = max(plans.values(), default=0), len(plans)
    seconds.sort()
    seen.lookup_s = seconds[len(seconds) // 2] if seconds else 0.0
    return seen


def plain_takes_marked_sizes(model: Model, module: nn.Module) -> bool:
    """Whether plain `torch.compile` trains the model with sizes that are marked as dynamic."""
    torch._dynamo.reset()
    inputs = model.inputs(4, 16)
    mark_sizes(model, inputs)
    try:
        torch.compile(copy.deepcopy(module))(*inputs).backward()
    except ConstraintViolationError:
        return False
    return True


def main(argv: Sequence[str] | None = None) -> int:
    """Run, print the table, return the exit status."""
    assert __doc__ is not None
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--models", help=f"comma-separated, of: {', '.join(MODELS)}")
    parser.add_argument("--modes", help=f"comma-separated, of: {', '.join(MODES)}")
    parser.add_argument("--compilers", default="eager,inductor", help="comma-separated")
    parser.add_argument("--calls", type=int, default=CALLS)
    parser.add_argument("--quick", action="store_true", help="one model, few calls, no kernels")
    parser.add_argument("--out", type=Path, help="append JSON lines to this file")
    arguments = parser.parse_args(argv)
    names = (arguments.models or ("transformer" if arguments.quick else ",".join(MODELS))).split(
        ","
    )
    modes = (arguments.modes or ("dynamic" if arguments.quick else ",".join(MODES))).split(",")
    compilers = ["eager"] if arguments.quick else arguments.compilers.split(",")
    calls = QUICK_CALLS if arguments.quick else arguments.calls
    use_kernel_cache()
    logging.getLogger("dtrcompile").setLevel(logging.ERROR)
    torch._dynamo.config.recompile_limit = _MOST_GRAPHS
    description = machine(torch.device("cpu"))
    rows: list[tuple[str, ...]] = []
    bad: list[str] = []
    for name, compiler, mode in itertools.product(names, compilers, modes):
        model = MODELS[name]
        torch.manual_seed(SEED)
        module = model.make()
        whole_bytes = unbudgeted_bytes(model, module, largest_of(model, calls), compiler)
        budget_bytes = whole_bytes * model.share // 100
        what = f"{name}, {compiler}, {mode}"
        try:
            seen = run(model, module, calls, mode, {"budget": budget_bytes, "compiler": compiler})
        except ConstraintViolationError:
            # Inductor takes what a convolution reads for constants; the same without a budget.
            if compiler != "inductor" or plain_takes_marked_sizes(model, module):
                raise
            say(f"{what}: Inductor makes constants of the sizes, and so refuses mark_dynamic")
            continue
        say(f"{what}: {seen.graphs} graph(s)")
        if max(seen.peaks, default=0) > budget_bytes:
            bad.append(f"{what}: {max(seen.peaks)} bytes of {budget_bytes}")
        if seen.refused:
            bad.append(f"{what}: {seen.refused} calls refused")
        if not seen.error <= TOLERANCE:
            bad.append(f"{what}: gradients differ by {seen.error:.1e}")
        if seen.plans > MOST_PLANS:
            bad.append(f"{what}: {seen.plans} plans")
        write_json_line(
            arguments.out,
            {
                "bench": "dynamic_shapes",
                "model": name,
                "compiler": compiler,
                "mode": mode,
                "unbudgeted_bytes": whole_bytes,
                "budget_bytes": budget_bytes,
                "peak_bytes": seen.peaks,
                "refused": seen.refused,
                "gradient_error": seen.error,
                "most_plans": seen.plans,
                "graphs": seen.graphs,
                "lookup_us": seen.lookup_s * 1e6,
                "machine": description,
            },
        )
        rows.append(
            (
                name,
                compiler,
                mode,
                format_bytes(budget_bytes),
                format_bytes(max(seen.peaks, default=0)),
                str(seen.graphs),
                str(seen.plans),
                f"{seen.error:.0e}",
                f"{seen.lookup_s * 1e6:.1f}",
            )
        )
    header = (
        "model",
        "compiler",
        "sizes",
        "budget",
        "largest peak",
        "graphs",
        "plans",
        "error",
        "lookup µs",
    )
    print(format_table(header, rows))
    print("\n".join(bad))
    return int(bool(bad))


if __name__ == "__main__":
    sys.exit(main())
