"""What the processes of `bench.gpu` do, beside training with a method of `bench.rivals`.

Each of them is called with what `bench.gpu_parts` gives it, and tells a row as soon as it is known.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import importlib.util
import json
import os
import statistics
import sys
import tempfile
import traceback
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import dtrcompile
from bench.compile_time import PLAIN as PLAIN_COMPILE
from bench.compile_time import Case, in_a_process
from bench.cost_model import measured_ns, modelled_ns
from bench.gpu_jobs import BEGIN, ROW
from bench.gpu_parts import ALL
from bench.measure import Trainee, cause_of, interleaved_s
from bench.plain_models import PLAIN
from bench.rivals import (
    adam_bytes,
    compiled_by,
    device_of_bytes,
    is_out_of_memory,
    measure_peak,
    under,
)
from dtrcompile.options import Budget
from dtrcompile.passes.errors import InfeasibleBudgetError, wrapped_error

Tell = Callable[..., None]
"""Tells a row: its name, and what was found."""


def work_as(what: str, given: str) -> int:
    """Be the process that is called so; returns its exit status.

    Args:
        given: what `bench.gpu_parts` gives it, as JSON.
    """
    with _own_output() as output:

        def tell(name: str, **found: Any) -> None:
            print(f"{ROW}{json.dumps({'name': name, **found})}", file=output, flush=True)

        def begin(name: str) -> None:
            print(f"{BEGIN}{name}", file=output, flush=True)

        _WORKERS[what](tell, begin, **json.loads(given))
    return 0


@contextlib.contextmanager
def _own_output() -> Iterator[Any]:
    """Standard output; what anybody else prints goes to standard error."""
    sys.stdout.flush()
    with os.fdopen(os.dup(1), "w", encoding="utf-8") as output:
        os.dup2(2, 1)
        yield output


def _failure(error: Exception) -> dict[str, Any]:
    """What a row says of it; the log has all of it."""
    traceback.print_exception(error)
    cause = wrapped_error(error) or cause_of(error)
    first_line = str(cause).strip().partition("\n")[0]
    return {"status": "failed", "reason": f"{type(cause).__name__}: {first_line}"[:300]}


# --- told beforehand ----------------------------------------------------------------------------


def forecast(
    tell: Tell,
    begin: Callable[[str], None],
    *,
    model: str,
    scale: str,
    dtype: str,
    budgets: Sequence[str],
    target: str,
) -> None:
    """What `dtrcompile.plan` says of the steps."""
    module, inputs = PLAIN[model].build(scale, device="meta")
    autocast = torch.bfloat16 if dtype == "bf16-autocast" else None
    for budget in budgets:
        name = f"forecast {budget}"
        begin(name)
        found: dict[str, Any] = {"method": "forecast", "setting": budget}
        try:
            told = dtrcompile.plan(module, *inputs, budget=budget, device=target, autocast=autocast)
        except Exception as error:
            tell(name, **found, **_failure(error))
            continue
        tell(
            name,
            **found,
            status="ok" if told.fits else "refused",
            told=json.loads(told.to_json()),
            budget_bytes=told.budget_bytes if told.fits else None,
            peak_bytes=told.peak_bytes,
        )


# --- the tests ----------------------------------------------------------------------------------

_NEEDED = ("pytest", "pytest_timeout", "hypothesis")


@dataclass(frozen=True)
class _Listener:
    """A plugin of pytest that tells what became of each test."""

    tell: Tell
    begin: Callable[[str], None]

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self.begin(nodeid)

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.when != "call" and report.passed:
            return
        status = "ok" if report.passed else "skipped" if report.skipped else "failed"
        found = {"method": "test", "status": status, "seconds": report.duration}
        if not report.passed:
            found["reason"] = _reason(report)
        self.tell(report.nodeid, **found)


def _reason(report: Any) -> str:
    if report.skipped:
        *_, reason = report.longrepr
        return str(reason)
    crash = getattr(report.longrepr, "reprcrash", None)
    text = str(report.longrepr) if crash is None else str(crash.message)
    return text[:300]


def tests(
    tell: Tell, begin: Callable[[str], None], *, file: str, measured: Collection[str]
) -> None:
    """The tests of a file, without those that ran before."""
    missing = [name for name in _NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        reason = f"not installed: {', '.join(missing)}"
        tell(ALL, status="skipped", reason=reason, is_final=False)
        return
    import pytest

    arguments = [file, "-m", "gpu", "-p", "no:cacheprovider", "-W", "default", "--tb=long"]
    arguments += [f"--deselect={name}" for name in measured]
    # Nothing is left to run where all tests but the last row were there.
    allowed = (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED, pytest.ExitCode.NO_TESTS_COLLECTED)
    status = pytest.main(arguments, plugins=[_Listener(tell, begin)])
    if status in allowed:
        tell(ALL, status="done")
    else:
        tell(ALL, status="failed", reason=f"pytest ended with {status!r}")


# --- the largest batch --------------------------------------------------------------------------

# Of the memory, for what fragments of the allocator and libraries take.
_ROOM = 0.97
_FIRST_BATCH = 2
_ROUNDS = 5


@dataclass(frozen=True)
class Line:
    """Bytes as a linear function of the batch, through two points."""

    batches: tuple[int, int]
    sizes_bytes: tuple[int, int]

    def largest(self, size_bytes: float) -> int:
        """The largest batch below a size; 0 if there is none."""
        (low, high), (low_bytes, high_bytes) = self.batches, self.sizes_bytes
        each_bytes = max(1.0, (high_bytes - low_bytes) / (high - low))
        return max(0, low + int((size_bytes - low_bytes) // each_bytes))


def largest_trained(guess: int, train: Callable[[int], float | None]) -> tuple[int, float] | None:
    """The largest batch that trains, down from a guess in steps of a sixteenth.

    Args:
        train: gives the seconds of a step, or None if it does not fit.

    Returns:
        The batch and its seconds; None if not even one sample trains.
    """
    batch = guess
    while batch > 0:
        step_s = train(batch)
        if step_s is not None:
            return batch, step_s
        batch -= max(1, batch // 16)
    return None


@dataclass(frozen=True)
class _Batches:
    """Steps of one model by one method, of any batch."""

    model: str
    scale: str
    dtype: str
    method: str
    device: torch.device

    def trainee(self, batch: int, budget_bytes: int | str) -> Trainee:
        model = PLAIN[self.model]
        module, inputs = model.build(self.scale, device=self.device, batch=batch)
        built, call = compiled_by(self.method, budget_bytes, model, module)
        trainee = Trainee(built, inputs, under(self.dtype, self.device, call))
        for _ in range(3):
            trainee.step()
        return trainee

    def line(self) -> Line:
        """What a step takes at least."""
        batches = (_FIRST_BATCH, 2 * _FIRST_BATCH)
        low, high = (self._least_bytes(batch) for batch in batches)
        return Line(batches, (low, high))

    def _least_bytes(self, batch: int) -> int:
        torch._dynamo.reset()
        if self.method != "dtr":
            return measure_peak(self.trainee(batch, "")).peak_bytes
        module, inputs = PLAIN[self.model].build(self.scale, device=self.device, batch=batch)
        autocast = torch.bfloat16 if self.dtype == "bf16-autocast" else None
        return dtrcompile.plan(module, *inputs, budget="min", autocast=autocast).peak_bytes

    def step_s(self, size_bytes: int, batch: int) -> float | None:
        """Seconds of a step beside Adam's moments in so many bytes; None if it does not fit."""
        torch._dynamo.reset()
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()  # what the allocator keeps is part of what it may take
        with device_of_bytes(self.device, size_bytes):
            try:
                module, _ = PLAIN[self.model].build(self.scale, device="meta")
                moments = torch.empty(adam_bytes(module), dtype=torch.uint8, device=self.device)
                budget_bytes = int(_ROOM * size_bytes) - moments.nbytes
                trainee = self.trainee(batch, budget_bytes)
                calls = {"step": trainee.step}
                return interleaved_s(calls, rounds=_ROUNDS, device=self.device)["step"]
            except Exception as error:
                cause = cause_of(error)
                if isinstance(cause, InfeasibleBudgetError) or is_out_of_memory(cause):
                    return None
                raise


def largest(
    tell: Tell,
    begin: Callable[[str], None],
    *,
    model: str,
    scale: str,
    dtype: str,
    method: str,
    memories: Sequence[str],
    device: str,
) -> None:
    """The largest batch in each amount of memory, and how fast it trains."""
    batches = _Batches(model, scale, dtype, method, torch.device(device))
    begin(memories[0])
    line = batches.line()
    module, _ = PLAIN[model].build(scale, device="meta")
    for memory in memories:
        begin(memory)
        size_bytes = Budget.parse(memory).resolve(0)
        assert size_bytes is not None
        guess = line.largest(_ROOM * size_bytes - adam_bytes(module))
        found = {"method": method, "guess": guess}

        def train(batch: int, memory: str = memory, size_bytes: int = size_bytes) -> float | None:
            begin(memory)
            return batches.step_s(size_bytes, batch)

        try:
            trained = largest_trained(guess, train)
        except Exception as error:
            tell(memory, **found, **_failure(error))
            continue
        batch, step_s = trained or (0, 0.0)
        speed = batch / step_s if step_s else 0.0
        tell(memory, **found, batch=batch, step_s=step_s, samples_per_s=speed)


# --- compile time -------------------------------------------------------------------------------


def compile_time(
    tell: Tell,
    begin: Callable[[str], None],
    *,
    model: str,
    scale: str,
    budget: str,
    device: str,
) -> None:
    """The first step with empty caches, and in the next process."""
    case = Case(model, scale, budget, device)
    method = "compile" if budget == PLAIN_COMPILE else "dtr"
    with tempfile.TemporaryDirectory() as cache:
        for name in ("cold", "warm"):
            begin(name)
            try:
                found = in_a_process(case, Path(cache))
            except RuntimeError as error:
                tell(name, method=method, status="failed", reason=str(error)[-300:])
                continue
            status = "ok" if found["refused_bytes"] is None else "refused"
            tell(name, method=method, status=status, **found)


# --- costs --------------------------------------------------------------------------------------

_Operator = Callable[..., Tensor]


def operators(
    rows: int, width: int, device: torch.device
) -> dict[str, tuple[_Operator, list[Any]]]:
    """Operators of training, each with what it is called with, in bfloat16.

    Args:
        rows: of an activation, such as tokens.
        width: its features.
    """

    def made(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        return torch.randn(shape, device=device, dtype=dtype)

    x, wide = made(rows, width), made(rows, 4 * width)
    square, up = made(width, width), made(width, 4 * width)
    heads = [made(max(1, rows // 1024), width // 64, min(rows, 1024), 64) for _ in range(3)]
    side = 56
    pixels = made(max(1, rows // side**2), max(1, width // 8), side, side)
    kernel = made(pixels.shape[1], pixels.shape[1], 3, 3)
    logits, labels = made(rows, 8 * width), torch.zeros(rows, dtype=torch.long, device=device)
    table = made(32_000, width)
    return {
        "square product": (torch.mm, [x, square]),
        "wide product": (torch.mm, [x, up]),
        "narrow product": (lambda a, b: a @ b.t(), [wide, up]),
        "gradient of a weight": (lambda a, b: a.t() @ b, [x, wide]),
        "float32 product": (torch.mm, [x.float(), square.float()]),
        "product of odd width": (torch.mm, [x, made(width, width + 1)]),
        "product of even width": (torch.mm, [x, made(width, width + 2)]),
        "causal attention": (
            functools.partial(F.scaled_dot_product_attention, is_causal=True),
            heads,
        ),
        "attention": (F.scaled_dot_product_attention, heads),
        "convolution 3x3": (functools.partial(F.conv2d, padding=1), [pixels, kernel]),
        "convolution 1x1": (F.conv2d, [pixels, kernel[:, :, :1, :1].contiguous()]),
        "copy": (lambda a: a + 1, [x]),
        "copy of float32": (lambda a: a + 1, [x.float()]),
        "cast": (lambda a: a.float(), [x]),
        "sum of two": (torch.add, [x, x.clone()]),
        "gelu": (F.gelu, [wide]),
        "silu and product": (lambda a, b: F.silu(a) * b, [wide, wide.clone()]),
        "transpose": (lambda a: a.t().contiguous(), [x]),
        "softmax": (lambda a: a.softmax(-1), [x]),
        "layer norm": (lambda a: F.layer_norm(a, a.shape[-1:]), [x]),
        "rms norm": (lambda a: F.rms_norm(a, a.shape[-1:], eps=1e-5), [x]),
        "group norm": (lambda a: F.group_norm(a, min(32, a.shape[1])), [pixels]),
        "row sums": (lambda a: a.sum(-1), [x]),
        "column sums": (lambda a: a.sum(0), [x]),
        "dropout mask": (lambda a: torch.rand_like(a, dtype=torch.float32) > 0.1, [x]),
        "embedding": (lambda a, b: F.embedding(a, b), [labels, table]),
        "cross entropy": (lambda a, b: F.cross_entropy(a, b), [logits, labels]),
        "max pool": (lambda a: F.max_pool2d(a, 2), [pixels]),
    }


def costs(
    tell: Tell, begin: Callable[[str], None], *, device: str, measured: Collection[str]
) -> None:
    """What each operator costs by the roofline, and what it takes."""
    place = torch.device(device)
    shape = (1 << 15, 4096) if place.type == "cuda" else (256, 128)
    for name, (function, inputs) in operators(*shape, place).items():
        if name in measured:
            continue
        begin(name)
        torch._dynamo.reset()
        try:
            modelled = modelled_ns(function, *inputs)
            taken = statistics.median(measured_ns(function, *inputs) for _ in range(3))
        except Exception as error:
            tell(name, method="operator", **_failure(error))
            continue
        tell(name, method="operator", modelled_ns=modelled, measured_ns=round(taken))
    tell(ALL, status="done")


_WORKERS: Mapping[str, Callable[..., None]] = {
    "forecast": forecast,
    "tests": tests,
    "largest": largest,
    "compile": compile_time,
    "costs": costs,
}
