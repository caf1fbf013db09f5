"""What `dtrcompile.train_step` saves: a training step in one graph, the update included.

For each model and optimizer: the usual loop with plain `torch.compile`, the usual loop with ``dtr``
at the smallest budget that covers the optimizer, and the step as one graph at its smallest budget.

    python -m bench.train_step --out rows.jsonl
    python -m bench.train_step --quick

Exits with 1 if a step holds more than it was promised, or if after a few steps losses or parameters
are others than those of the plain loop.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn, optim

import dtrcompile
from bench.measure import (
    format_table,
    interleaved_s,
    machine,
    say,
    use_kernel_cache,
    write_json_line,
)
from bench.zoo import SCALES, ZOO
from dtrcompile.backend import dtr
from dtrcompile.demo.memory import static_bytes, trace_step
from dtrcompile.passes.errors import format_bytes

SEED = 5
_STEPS = 3
_MOST_ERROR = 1e-5  # relative, in float32, of the losses and of all parameters together

OPTIMIZERS: Mapping[str, Callable[[list[nn.Parameter]], optim.Optimizer]] = {
    "sgd": lambda parameters: optim.SGD(parameters, lr=0.01, momentum=0.9, weight_decay=1e-4),
    "adamw": lambda parameters: optim.AdamW(parameters, lr=1e-4),
    "adafactor": lambda parameters: optim.Adafactor(parameters, lr=1e-3),
}
METHODS = ("compile", "dtr", "train_step")


@dataclass
class Training:
    """A model in training.

    Attributes:
        step: one step; returns its loss.
    """

    module: nn.Module
    inputs: tuple[Tensor, ...]
    optimizer: optim.Optimizer
    step: Callable[[], Tensor]

    def peak_bytes(self) -> int:
        """Of a whole step: parameters, state and inputs, and all that it allocates."""
        state = [v for s in self.optimizer.state.values() for v in s.values()]
        tensors = [v for v in state if isinstance(v, Tensor)]
        before_bytes = static_bytes(self.module, *self.inputs, *tensors)
        return trace_step(self.step, before_bytes, torch.device("cpu")).peak_bytes


def training(name: str, scale: str, optimizer_name: str, method: str) -> Training:
    """The model and how it is trained."""
    module, inputs = ZOO[name].build(scale, seed=SEED)
    optimizer = OPTIMIZERS[optimizer_name](list(module.parameters()))
    torch._dynamo.reset()
    if method == "train_step":
        step = dtrcompile.train_step(module, optimizer, budget="min")
        return Training(module, inputs, optimizer, lambda: step(*inputs))
    if method == "dtr":
        options = {"budget": "min", "optimizer": optimizer}
        compiled = torch.compile(module, backend=dtr, dynamic=False, options=options)
    else:
        compiled = torch.compile(module, dynamic=False)

    def loop() -> Tensor:
        loss: Tensor = compiled(*inputs)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return Training(module, inputs, optimizer, loop)


def rows_of(
    name: str, scale: str, optimizer_name: str, methods: Sequence[str], rounds: int
) -> tuple[list[dict[str, Any]], list[str]]:
    """A row for each method, and what is wrong."""
    rows: list[dict[str, Any]] = []
    bad: list[str] = []
    calls: dict[str, Callable[[], object]] = {}
    reference: list[Tensor] = []
    for method in methods:
        what = f"{name}, {optimizer_name}, {method}"
        say(what)
        found = training(name, scale, optimizer_name, method)
        dtrcompile.clear_reports()
        losses = []
        for i in range(_STEPS):
            torch.manual_seed(SEED + i)
            losses.append(found.step())
        parameters = torch.cat([p.detach().flatten() for p in found.module.parameters()])
        values = [torch.stack(losses), parameters]
        reference = reference or values
        error = max(
            ((a - b).norm() / b.norm()).item() for a, b in zip(values, reference, strict=True)
        )
        peak_bytes = found.peak_bytes()
        row: dict[str, Any] = {"model": name, "scale": scale, "optimizer": optimizer_name}
        row |= {"method": method, "peak_bytes": peak_bytes, "difference": error}
        if method != "compile":
            report = dtrcompile.reports()[-1]
            row["promised_bytes"] = report.step_bytes
            row["overhead"] = report.overhead
            if peak_bytes > report.step_bytes:
                bad.append(f"{what}: {peak_bytes} held, {report.step_bytes} promised")
        if error > _MOST_ERROR:
            bad.append(f"{what}: {error:.1e} from the plain loop after {_STEPS} steps")
        rows.append(row)
        calls[method] = found.step
    for call in calls.values():  # the reset before the next one was built has them compiled anew
        for _ in range(_STEPS):
            call()
    times = interleaved_s(calls, rounds=rounds, device=torch.device("cpu"))
    for row in rows:
        row["step_s"] = times[row["method"]]
    return rows, bad


def main(argv: Sequence[str] | None = None) -> int:
    """Run, print the table, return the exit status."""
    assert __doc__ is not None
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--models", default="resnet50,mixture,gpt2,convnext")
    parser.add_argument("--optimizers", help=f"comma-separated, of: {', '.join(OPTIMIZERS)}")
    parser.add_argument("--scale", choices=SCALES, default="cpu")
    parser.add_argument("--rounds", type=int, default=5, help="steps to time, of each in turn")
    parser.add_argument("--quick", action="store_true", help="one small model and optimizer")
    parser.add_argument("--out", type=Path, help="append JSON lines to this file")
    arguments = parser.parse_args(argv)
    names = ["mixture"] if arguments.quick else arguments.models.split(",")
    chosen = arguments.optimizers or ("sgd" if arguments.quick else "sgd,adamw")
    scale = "quick" if arguments.quick else arguments.scale
    methods = ("compile", "train_step") if arguments.quick else METHODS
    use_kernel_cache()
    description = machine(torch.device("cpu"))
    table: list[tuple[str, ...]] = []
    bad: list[str] = []
    for name in names:
        for optimizer_name in chosen.split(","):
            rounds = 1 if arguments.quick else arguments.rounds
            rows, wrong = rows_of(name, scale, optimizer_name, methods, rounds)
            bad += wrong
            for row in rows:
                write_json_line(
                    arguments.out, {"bench": "train_step", **row, "machine": description}
                )
                table.append(_cells(row, rows))
    header = ("model", "optimizer", "method", "peak", "of dtr's", "step", "difference")
    print(format_table(header, table))
    print("\n".join(bad))
    return int(bool(bad))


def _cells(row: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> tuple[str, ...]:
    loop = {r["method"]: r for r in rows}
    beside = loop.get("dtr", loop["compile"])
    return (
        row["model"],
        row["optimizer"],
        row["method"],
        format_bytes(row["peak_bytes"]),
        f"{row['peak_bytes'] / beside['peak_bytes']:.2f}",
        f"{row['step_s'] / loop['compile']['step_s']:.2f}",
        f"{row['difference']:.1e}",
    )


if __name__ == "__main__":
    sys.exit(main())
