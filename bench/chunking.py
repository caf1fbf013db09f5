"""What values in chunks save, and what they cost: language models with many words.

For each model: plain `torch.compile`, with and without PyTorch's own pass that computes scores in
chunks, then ``dtr`` at the smallest budget without chunks, and with them.

    python -m bench.chunking --out rows.jsonl
    python -m bench.chunking --quick

Exits with 1 if a step holds more than it was promised, or if a gradient's error is more than 1.5
times that of plain `torch.compile`.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

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
from dtrcompile.demo.gpt import GPT, GPTSizes
from dtrcompile.passes.errors import InfeasibleBudgetError, format_bytes
from workloads.training import relative_error

SEED = 5
_MOST_ERROR = 1.5

Built = tuple[nn.Module, tuple[Tensor, ...]]


class WordModel(nn.Module):
    """Words, one MLP, and the scores of the next words.

    Args:
        words: of the vocabulary.
    """

    def __init__(self, words: int, width: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(words, width)
        self.mlp = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )
        self.head = nn.Linear(width, words, bias=False)

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        """The loss."""
        h = self.embedding(tokens)
        scores = self.head(h + self.mlp(h))
        return F.cross_entropy(scores.flatten(0, 1), labels.flatten())


def _words(words: int, batch: int, length: int) -> Built:
    tokens = torch.randint(words, (batch, length))
    return WordModel(words, 64), (tokens, tokens.roll(-1, 1))


def _gpt(sizes: GPTSizes, batch: int) -> Built:
    tokens = torch.randint(sizes.vocabulary, (batch, sizes.context))
    return GPT(sizes), (tokens, tokens.roll(-1, 1))


MODELS: Mapping[str, Callable[[], Built]] = {
    "words": lambda: _words(32_000, 8, 256),
    "gpt": lambda: _gpt(
        GPTSizes(layers=4, width=128, heads=4, context=256, vocabulary=32_000, dropout=0.0), 8
    ),
    "quick": lambda: _words(4_000, 4, 128),
}


@dataclass(frozen=True)
class Method:
    """A way to compile a model.

    Attributes:
        budget: of ``dtr``; None: plain `torch.compile`.
        options: others.
    """

    name: str
    budget: str | None
    options: Mapping[str, Any]


METHODS = (
    Method("compile", None, {}),
    Method("auto_chunker", None, {"auto_chunker.enable": True}),
    Method("dtr, whole", "min", {"chunking": False}),
    Method("dtr", "60%", {}),
    Method("dtr", "40%", {}),
    Method("dtr", "20%", {}),
    Method("dtr", "min", {}),
)


def trainee(build: Callable[[], Built], method: Method) -> Trainee:
    """The model, compiled."""
    torch.manual_seed(SEED)
    module, inputs = build()
    torch._dynamo.reset()
    if method.budget is None:
        compiled = torch.compile(module, dynamic=False, options=dict(method.options))
    else:
        options = {"budget": method.budget, **method.options}
        compiled = torch.compile(module, backend=dtr, dynamic=False, options=options)
    return Trainee(module, inputs, compiled)


def exact_gradients(build: Callable[[], Built]) -> dict[str, Tensor | None]:
    """In float64, without a compiler."""
    torch.manual_seed(SEED)
    module, inputs = build()
    exact = Trainee(module.double(), inputs, module)
    exact.step()
    return exact.gradients()


def rows_of(
    name: str, methods: Sequence[Method], rounds: int
) -> tuple[list[dict[str, Any]], list[str]]:
    """A row for each method, and what is wrong."""
    build = MODELS[name]
    exact = exact_gradients(build)
    trained: dict[str, Trainee] = {}
    rows: list[dict[str, Any]] = []
    bad: list[str] = []
    for method in methods:
        what = f"{name}, {method.name} {method.budget or ''}".strip()
        say(what)
        found = trainee(build, method)
        dtrcompile.clear_reports()
        row: dict[str, Any] = {"model": name, "method": method.name, "budget": method.budget}
        rows.append(row)
        try:
            found.step()
        except Exception as error:
            refusal = cause_of(error)
            if not isinstance(refusal, InfeasibleBudgetError):
                raise
            row["refused_bytes"] = refusal.minimum_bytes
            continue
        row["error"] = relative_error(found.gradients(), exact)
        found.step()
        row["peak_bytes"] = step_peak_bytes(found)
        if method.budget is not None:
            (report,) = dtrcompile.reports()
            row["promised_bytes"] = report.promised_peak_bytes
            row["overhead"] = report.overhead
            row["chunks"] = [n for n in report.notes if n.startswith("computed in chunks")]
            if row["peak_bytes"] > report.promised_peak_bytes:
                bad.append(
                    f"{what}: {row['peak_bytes']} held, {report.promised_peak_bytes} promised"
                )
            if row["error"] > _MOST_ERROR * rows[0]["error"]:
                bad.append(f"{what}: error {row['error']:.1e}, compile's {rows[0]['error']:.1e}")
        trained[what] = found
        row["what"] = what
    calls = {what: found.step for what, found in trained.items()}
    times = interleaved_s(calls, rounds=rounds, device=torch.device("cpu"))
    for row in rows:
        row["step_s"] = times.get(row.pop("what", ""))
    return rows, bad


def main(argv: Sequence[str] | None = None) -> int:
    """Run, print the table, return the exit status."""
    assert __doc__ is not None
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--models", help=f"comma-separated, of: {', '.join(MODELS)}")
    parser.add_argument("--rounds", type=int, default=5, help="steps to time, of each in turn")
    parser.add_argument("--quick", action="store_true", help="one small model, two methods")
    parser.add_argument("--out", type=Path, help="append JSON lines to this file")
    arguments = parser.parse_args(argv)
    names = (arguments.models or ("quick" if arguments.quick else "words,gpt")).split(",")
    use_kernel_cache()
    description = machine(torch.device("cpu"))
    table: list[tuple[str, ...]] = []
    bad: list[str] = []
    for name in names:
        methods = (METHODS[0], METHODS[3]) if arguments.quick else METHODS
        rows, wrong = rows_of(name, methods, 1 if arguments.quick else arguments.rounds)
        bad += wrong
        for row in rows:
            write_json_line(arguments.out, {"bench": "chunking", **row, "machine": description})
            table.append(_cells(row, rows[0]))
    header = ("model", "method", "budget", "peak", "of compile's", "step", "error / compile's")
    print(format_table(header, table))
    print("\n".join(bad))
    return int(bool(bad))


def _cells(row: Mapping[str, Any], plain: Mapping[str, Any]) -> tuple[str, ...]:
    first = (row["model"], row["method"], row["budget"] or "-")
    if "refused_bytes" in row:
        return (*first, f"refused: {format_bytes(row['refused_bytes'])}", "-", "-", "-")
    return (
        *first,
        format_bytes(row["peak_bytes"]),
        f"{row['peak_bytes'] / plain['peak_bytes']:.0%}",
        f"{row['step_s'] / plain['step_s']:.2f}",
        f"{row['error'] / plain['error']:.2f}",
    )


if __name__ == "__main__":
    sys.exit(main())
