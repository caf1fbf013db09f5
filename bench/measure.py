"""How the benchmarks measure: allocator peaks, gradients, times, and the machine.

A step is: seed, drop the gradients, forward, backward.  Its peak is the one of DESIGN's contract:
parameters, buffers and inputs, plus the most that the allocator handed out above what was live when
the step began (saved activations, temporaries, outputs, gradients).
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from dtrcompile.demo.memory import static_bytes, trace_step
from dtrcompile.passes.device.costs import device_key


class Trainee:
    """A compiled module with its inputs: runs steps, and starts again from where it was built.

    Args:
        module: called as ``module(*inputs)``, returns a scalar loss.
        inputs: its tensors.
        compiled: what `torch.compile` made of it.
    """

    def __init__(
        self, module: nn.Module, inputs: Sequence[Tensor], compiled: Callable[..., Tensor]
    ) -> None:
        self.module = module
        self.inputs = tuple(inputs)
        self.compiled = compiled
        self._buffers = {name: b.detach().clone() for name, b in module.named_buffers()}

    @property
    def device(self) -> torch.device:
        """Where the parameters are."""
        return next(self.module.parameters()).device

    def restore(self) -> None:
        """Drop the gradients and put the buffers back to what they were at first."""
        self.module.zero_grad(set_to_none=True)
        with torch.no_grad():
            for name, buffer in self.module.named_buffers():
                buffer.copy_(self._buffers[name])

    def step(self, seed: int = 0) -> float:
        """One step from the given random state; returns the loss."""
        torch.manual_seed(seed)
        self.module.zero_grad(set_to_none=True)
        loss = self.compiled(*self.inputs)
        loss.backward()  # type: ignore[no-untyped-call]
        return float(loss.detach())

    def gradients(self) -> dict[str, Tensor | None]:
        """Copies of the gradients of the last step."""
        return {
            name: None if p.grad is None else p.grad.detach().clone()
            for name, p in self.module.named_parameters()
        }

    def buffers(self) -> dict[str, Tensor]:
        """Copies of the buffers."""
        return {name: b.detach().clone() for name, b in self.module.named_buffers()}


def step_peak_bytes(trainee: Trainee, seed: int = 0) -> int:
    """Peak of one step: what was there before plus what was allocated.  Warm it up before."""
    trainee.module.zero_grad(set_to_none=True)
    before_bytes = static_bytes(trainee.module, *trainee.inputs)
    return trace_step(lambda: trainee.step(seed), before_bytes, trainee.device).peak_bytes


def interleaved_s(
    calls: Mapping[str, Callable[[], object]], *, rounds: int, device: torch.device
) -> dict[str, float]:
    """Median seconds of each call; the calls take turns, so that a busy machine hits all alike."""
    seconds_of = _seconds_on_cuda if device.type == "cuda" else _seconds_here
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name, call in calls.items():
            times[name].append(seconds_of(call))
    return {name: statistics.median(t) for name, t in times.items()}


TURNS = "DTR_BENCH_TURNS"
"""The variable that names the file by which processes take turns on a device; unset: no turns."""


@contextlib.contextmanager
def device_turn(*, alone: bool = False) -> Iterator[None]:
    """The device for the length of the block, beside others, or alone as soon as they let go."""
    path = os.environ.get(TURNS)
    if path is None:
        yield
        return
    with open(path, "ab") as file:  # the lock goes with the file, also where the process is killed
        fcntl.flock(file, fcntl.LOCK_EX if alone else fcntl.LOCK_SH)
        yield


def _seconds_here(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def _seconds_on_cuda(call: Callable[[], object]) -> float:
    """By the clock of the device, whose queue is empty before."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    start.record()
    call()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) / 1e3


def use_kernel_cache(environment: MutableMapping[str, str] = os.environ) -> None:
    """Keep Inductor's kernels from run to run: those that did not change are not compiled again."""
    folder = Path(tempfile.gettempdir()) / "dtrcompile-bench-inductor"
    environment.setdefault("TORCHINDUCTOR_CACHE_DIR", str(folder))


def machine(device: torch.device) -> dict[str, Any]:
    """What the numbers were taken on."""
    return {
        "device": device_key(device),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
    }


def write_json_line(path: Path | None, row: Mapping[str, Any]) -> None:
    """Append ``row`` to a file of JSON lines; nowhere if ``path`` is None."""
    if path is None:
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(row, sort_keys=True) + "\n")


def format_table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Columns aligned by spaces, the first to the left, the others to the right."""
    table = [tuple(header), *(tuple(row) for row in rows)]
    widths = [max(len(row[i]) for row in table) for i in range(len(header))]
    lines = []
    for row in table:
        cells = [f"{row[0]:<{widths[0]}}"]
        cells += [f"{cell:>{width}}" for cell, width in zip(row[1:], widths[1:], strict=True)]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)


def say(text: str) -> None:
    """Progress, on standard error, so that standard output holds the table alone."""
    print(text, file=sys.stderr, flush=True)


def cause_of(error: BaseException) -> BaseException:
    """What Dynamo and Inductor wrapped."""
    while True:
        inner = getattr(error, "inner_exception", None)
        if not isinstance(inner, BaseException):
            return error
        error = inner
