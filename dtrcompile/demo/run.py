"""Trains one GPT three times from one seed, and compares what was promised with what happened."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
)
from rich.table import Table
from torch import Tensor

from dtrcompile.demo.gpt import GPT, GPTSizes
from dtrcompile.demo.memory import LiveMemory, static_bytes, trace_step
from dtrcompile.demo.picture import draw
from dtrcompile.demo.text import Batches, standard_library_text
from dtrcompile.passes.errors import DTRError
from dtrcompile.report import CompileReport, clear_reports, reports

# The first steps compile, and fill the caches; they do not count for the step time.
_WARM_UP_STEPS = 2
_PICTURE = "live-memory.png"


@dataclass(frozen=True, slots=True)
class DemoSettings:
    """What the demo runs.

    Attributes:
        budgets: of the runs after the first, which has none.
        steps: optimizer steps a run.
        batch: sequences a step.
        seed: of the weights, the batches and the dropout.
        sizes: of the model.
        output: folder for the picture; made if need be.
    """

    budgets: tuple[str, ...] = ("40%", "min")
    steps: int = 10
    batch: int = 8
    seed: int = 0
    sizes: GPTSizes = field(default_factory=GPTSizes)
    output: Path = Path("demo-output")

    def small(self) -> DemoSettings:
        """For a smoke test: a model that compiles and trains in seconds."""
        return replace(
            self, batch=16, sizes=GPTSizes(layers=2, width=64, heads=2, context=128, dropout=0.1)
        )


@dataclass(frozen=True)
class RunResult:
    """One training run; the first step compiles, and is not part of the step time."""

    name: str
    budget: str | None
    losses: tuple[float, ...]
    compile_s: float
    step_s: float
    memory: LiveMemory
    report: CompileReport | None


def run_demo(settings: DemoSettings, console: Console | None = None) -> list[RunResult]:
    """Train, print the table, write the picture.

    Raises:
        DTRError: if a run's allocator peak is above its budget.
    """
    console = console or Console()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    settings.output.mkdir(parents=True, exist_ok=True)
    text = standard_library_text()
    model = GPT(settings.sizes)
    parameters = sum(p.numel() for p in model.parameters())
    del model
    console.print(
        f"GPT with {settings.sizes.layers} layers, width {settings.sizes.width},"
        f" {parameters / 1e6:.1f} million parameters; batch {settings.batch} x"
        f" {settings.sizes.context} bytes of Python's standard library; {device.type};"
        f" {settings.steps} steps a run."
    )
    start = time.perf_counter()
    results: list[RunResult] = []
    budgets: tuple[str | None, ...] = (None, *settings.budgets)
    with Progress(
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.fields[state]}"),
        console=console,
    ) as progress:
        for budget in budgets:
            name = "no budget" if budget is None else f"budget {budget}"
            task = progress.add_task(name, total=settings.steps, state="compiling")

            def advance(loss: float, task: Any = task) -> None:
                progress.update(task, advance=1, state=f"loss {loss:.4f}")

            results.append(_train(settings, name, budget, text, device, advance))
    console.print(_table(results))
    picture = settings.output / _PICTURE
    draw(
        {result.name: result.memory for result in results},
        picture,
        title="One training step of the demo's GPT",
    )
    console.print(f"Picture of live memory: {picture}")
    console.print(f"Total: {time.perf_counter() - start:.0f} s")
    _check(results)
    return results


def _train(
    settings: DemoSettings,
    name: str,
    budget: str | None,
    text: Tensor,
    device: torch.device,
    advance: Callable[[float], None],
) -> RunResult:
    torch._dynamo.reset()
    clear_reports()
    torch.manual_seed(settings.seed)
    model = GPT(settings.sizes).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    batches = Batches(
        text,
        batch=settings.batch,
        context=settings.sizes.context,
        seed=settings.seed,
        device=device,
    )
    if budget is None:
        compiled = torch.compile(model)
    else:
        compiled = torch.compile(model, backend="dtr", options={"budget": budget})

    losses, durations_s = [], []
    for _ in range(settings.steps):
        tokens, targets = batches.next()
        start = time.perf_counter()
        loss = compiled(tokens, targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(loss.item())  # waits for the device
        durations_s.append(time.perf_counter() - start)
        advance(losses[-1])
    del loss

    def step() -> None:
        compiled(tokens, targets).backward()

    memory = trace_step(step, static_bytes(model, tokens, targets), device)
    training = [report for report in reports() if report.kind == "training"]
    return RunResult(
        name=name,
        budget=budget,
        losses=tuple(losses),
        compile_s=durations_s[0],
        step_s=statistics.median(durations_s[_WARM_UP_STEPS:] or durations_s),
        memory=memory,
        report=training[-1] if training else None,
    )


def _table(results: list[RunResult]) -> Table:
    table = Table(
        title="One step, forward and backward; memory in MiB", box=SIMPLE_HEAD, padding=(0, 0, 0, 1)
    )
    for column in (
        "run",
        "budget",
        "promised\npeak",
        "allocator\npeak",
        "compile\ntime",
        "step\ntime",
        "planned\noverhead",
        "last\nloss",
        "loss\ndrift",
    ):
        table.add_column(column, justify="left" if column == "run" else "right", no_wrap=True)
    baseline = results[0]
    for result in results:
        report = result.report
        drift = max(abs(a - b) for a, b in zip(result.losses, baseline.losses, strict=True))
        table.add_row(
            result.budget or "none",
            _mib(report.budget_bytes) if report else "-",
            _mib(report.promised_peak_bytes) if report else "-",
            _mib(result.memory.peak_bytes),
            f"{result.compile_s:.0f} s",
            f"{result.step_s:.2f} s",
            f"x{report.overhead:.2f}" if report else "-",
            f"{result.losses[-1]:.4f}",
            f"{drift:.0e}" if result is not baseline else "-",
        )
    table.caption = (
        "Compile time: the first step. Step time: median after warm-up, optimizer included."
        " Loss drift: the largest difference of any step's loss from the run without a budget."
    )
    return table


def _mib(size_bytes: int | None) -> str:
    return "min" if size_bytes is None else f"{size_bytes / 2**20:.1f}"


def _check(results: list[RunResult]) -> None:
    for result in results:
        report = result.report
        if report is None:
            continue
        allowed = report.budget_bytes or report.promised_peak_bytes
        if result.memory.peak_bytes > allowed:
            raise DTRError(
                f"{result.name}: the allocator's peak of {result.memory.peak_bytes} bytes is above"
                f" the {allowed} promised. Please report this, with the printed table."
            )
