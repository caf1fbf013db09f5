"""Is the size that `dtrcompile.largest` names the largest that trains?

Three models, three budgets each, on the executor that counts bytes and under Inductor: that batch
takes two steps within the budget, compilation included, and the next is refused.

    python -m bench.largest --out rows.jsonl
    python -m bench.largest --quick

Exits with 1 if a batch that was named is refused or holds more than the budget, or the next is not
refused.
"""

from __future__ import annotations

import argparse
import itertools
import logging
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

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
from dtrcompile.demo.gpt import GPT, GPTSizes
from dtrcompile.demo.memory import static_bytes, trace_step
from dtrcompile.passes.errors import InfeasibleBudgetError, format_bytes
from dtrcompile.passes.graphs.executor import clear_executor_log, executor_log
from workloads.models import ResNet
from workloads.models import Sizes as ResNetSizes
from workloads.several_graphs import loss_of, trunk

SEED = 5
GIVEN = 3  # the batch that `largest` is shown
STEPS = 2

Inputs = tuple[Tensor, ...]


class Perceptron(nn.Module):
    """Blocks of a transformer without attention, and a mean square."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = trunk(32, 4)

    def forward(self, x: Tensor) -> Tensor:
        return loss_of(self.trunk(x))


def _tokens(batch: int) -> Inputs:
    return torch.randint(64, (batch, 32)), torch.randint(64, (batch, 32))


def _images(batch: int) -> Inputs:
    return torch.randn(batch, 3, 32, 32), torch.randint(10, (batch,))


@dataclass(frozen=True)
class Model:
    """A model, its inputs at a batch size, and budgets in bytes."""

    make: Callable[[], nn.Module]
    inputs: Callable[[int], Inputs]
    budgets: tuple[int, int, int]


_GPT = GPTSizes(layers=2, width=32, heads=2, context=32, vocabulary=64, dropout=0.0)
MODELS = {
    "transformer": Model(lambda: GPT(_GPT), _tokens, (500_000, 1_000_000, 2_500_000)),
    "convnet": Model(
        lambda: ResNet(ResNetSizes(depth=4, width=8, batch=1, length=32), classes=10),
        _images,
        (3_000_000, 6_000_000, 12_000_000),
    ),
    "perceptron": Model(
        Perceptron, lambda n: (torch.randn(n, 32),), (400_000, 1_000_000, 3_000_000)
    ),
}


def held_bytes(model: Model, batch: int, budget_bytes: int, compiler: str) -> int | None:
    """The most that the first steps hold at a batch size; None if it is refused."""
    torch._dynamo.reset()
    torch.manual_seed(SEED)
    module, inputs = model.make(), model.inputs(batch)
    options = {"budget": budget_bytes, "compiler": compiler}
    compiled = torch.compile(module, backend=dtr, dynamic=False, options=options)
    before_bytes = static_bytes(module, *inputs)
    most_bytes = 0

    def step() -> None:
        compiled(*inputs).backward()

    for _ in range(STEPS):
        module.zero_grad(set_to_none=True)
        clear_executor_log()
        try:
            peak_bytes = trace_step(step, before_bytes, torch.device("cpu")).peak_bytes
        except Exception as error:
            if not isinstance(cause_of(error), InfeasibleBudgetError):
                raise
            return None
        if compiler == "eager":
            peak_bytes = max(max(record.counted_bytes, default=0) for record in executor_log())
        most_bytes = max(most_bytes, peak_bytes)
    return most_bytes


def main(argv: Sequence[str] | None = None) -> int:
    """Run, print the table, return the exit status."""
    assert __doc__ is not None
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--models", help=f"comma-separated, of: {', '.join(MODELS)}")
    parser.add_argument("--compilers", default="eager,inductor", help="comma-separated")
    parser.add_argument("--quick", action="store_true", help="one model and budget, no kernels")
    parser.add_argument("--out", type=Path, help="append JSON lines to this file")
    arguments = parser.parse_args(argv)
    names = (arguments.models or ("perceptron" if arguments.quick else ",".join(MODELS))).split(",")
    compilers = ["eager"] if arguments.quick else arguments.compilers.split(",")
    use_kernel_cache()
    logging.getLogger("dtrcompile").setLevel(logging.ERROR)
    description = machine(torch.device("cpu"))
    rows: list[tuple[str, ...]] = []
    bad: list[str] = []
    for name, compiler in itertools.product(names, compilers):
        model = MODELS[name]
        for budget_bytes in model.budgets[: 1 if arguments.quick else None]:
            say(f"{name}, {compiler}, {format_bytes(budget_bytes)}")
            torch._dynamo.reset()
            torch.manual_seed(SEED)
            found = dtrcompile.largest(
                model.make(), *model.inputs(GIVEN), budget=budget_bytes, compiler=compiler
            )
            held = held_bytes(model, found.size, budget_bytes, compiler)
            is_next_refused = held_bytes(model, found.refused_size, budget_bytes, compiler) is None
            what = f"{name}, {compiler}, {budget_bytes} bytes: batch {found.size}"
            if held is None:
                bad.append(f"{what} is refused")
            elif held > budget_bytes:
                bad.append(f"{what} holds {held} bytes")
            if not is_next_refused:
                bad.append(f"{what} is named, and {found.refused_size} trains too")
            write_json_line(
                arguments.out,
                {
                    "bench": "largest",
                    "model": name,
                    "compiler": compiler,
                    "budget_bytes": budget_bytes,
                    "size": found.size,
                    "peak_bytes": held,
                    "is_next_refused": is_next_refused,
                    "points": [[p.size, p.overhead] for p in found.points],
                    "machine": description,
                },
            )
            rows.append(
                (
                    name,
                    compiler,
                    format_bytes(budget_bytes),
                    str(found.size),
                    "refused" if held is None else format_bytes(held),
                    "refused" if is_next_refused else "trains",
                    ", ".join(f"{p.size}: {p.overhead:.2f}" for p in found.points),
                )
            )
    header = ("model", "compiler", "budget", "largest", "held", "the next", "overhead by batch")
    print(format_table(header, rows))
    print("\n".join(bad))
    return int(bool(bad))


if __name__ == "__main__":
    sys.exit(main())
