"""What does a step cost at which peak?  ``backend="dtr"`` against everything users have today.

For each model of `bench.zoo`: eager; plain ``torch.compile``; ``activation_memory_budget`` at 0.9
to 0.0, with each of its solvers if asked to; ``torch.utils.checkpoint`` around each block, under
compile; selective checkpointing that saves matrix products, convolutions and attention, under
compile, and by torchtitan's rule; Inductor's ``auto_chunker``; and dtr at shares of the unbudgeted
peak, at its minimum and at the blocks' measured peak.

    python -m bench.rivals --models gpt2 --out results.jsonl --plot pictures
    python -m bench.rivals --device cuda --dtype bf16-autocast --models gpt2,llama
    python -m bench.rivals --models gpt2 --solvers dp,greedy,ilp --shares 0.5,0.0
    python -m bench.rivals --quick
    python -m bench.rivals --rows results.jsonl --plot pictures     # draw again, measure nothing
    python -m bench.rivals --device cuda --largest-batch 16GB,24GB,40GB,80GB --models gpt2

One process a model.  All methods share the parameters, and their steps take turns; times are
medians.  The peak is parameters, buffers and inputs plus the most that the allocator handed out
above what was live when the step began.  What a method cannot do is a row that says why.  Exits
with 1 if a step of dtr was over its budget or failed (a refused budget is neither).

Kernels may come from the cache of an earlier run; ``--cold`` gives each method an empty one, for
compile times that can be compared.

The reference of the gradients is eager in float64 (where a model itself casts to float32 it stays
there), on CUDA with checkpointed blocks, so that it fits; with dropout, the unbudgeted compile from
the same seed.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import functools
import gc
import importlib.metadata
import json
import logging
import os
import secrets
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

import dtrcompile
from bench.measure import (
    Trainee,
    cause_of,
    device_turn,
    format_table,
    interleaved_s,
    machine,
    say,
    use_kernel_cache,
    write_json_line,
)
from bench.pictures import save
from bench.plain_models import PLAIN
from bench.rivals_rows import HEADER, Row, draw_all, read_rows, summarize, table
from bench.zoo import SCALES, ZOO, ZooModel
from dtrcompile.backend import dtr
from dtrcompile.demo.memory import static_bytes, trace_step
from dtrcompile.options import Budget, BudgetKind
from dtrcompile.passes.errors import InfeasibleBudgetError, OptionError, format_bytes
from dtrcompile.passes.torch_private import (
    compile_fx,
    fresh_cache,
    functorch_config,
    get_default_op_list,
)
from workloads.training import relative_error

# What can be trained; by default it is the zoo.
MODELS = {**ZOO, **PLAIN}
METHODS = (
    "eager",
    "compile",
    "memory_budget",
    "blocks",
    "selective",
    "torchtitan",
    "auto_chunker",
    "dtr",
)
# Of ``activation_memory_budget``; the first is PyTorch's default.
SOLVERS = ("dp", "greedy", "ilp", "dp_knapsack_sliding_hirschberg")
SHARES = tuple(f"{tenth / 10}" for tenth in range(9, -1, -1))
BUDGETS = ("90%", "80%", "70%", "60%", "50%", "40%", "30%", "20%", "min")
# The measured peak of another method as dtr's budget, such as "as blocks" or "as selective": the
# two at the same peak; or a share of it, such as "80% as blocks".
AS = "as "
AS_BLOCKS = f"{AS}blocks"
# A model of few kernels: on a CPU most of the time is a C++ compiler's.
QUICK_MODELS, QUICK_METHODS = ("mixture",), ("compile", "blocks", "dtr")
QUICK_SHARES, QUICK_BUDGETS = ("0.5",), (AS_BLOCKS,)
LARGEST_METHODS = ("compile", "blocks", "dtr")
# Each batch that is tried is a compile.
MOST_SAMPLES = {"quick": 4, "cpu": 1 << 10, "cuda": 1 << 16}
SEED = 1234
# The first compiles; a step of several graphs compiles again in the second, or the third.
_WARM_UPS = 3
_MEASURED_STEPS = 3  # of which the most counts
_PREFIX = "row "

_SAVED = (
    torch.ops.aten.mm.default,
    torch.ops.aten.addmm.default,
    torch.ops.aten.bmm.default,
    torch.ops.aten.baddbmm.default,
    torch.ops.aten.convolution.default,
    torch.ops.aten._scaled_dot_product_flash_attention.default,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
    torch.ops.aten._scaled_dot_product_efficient_attention.default,
    torch.ops.aten._scaled_dot_product_cudnn_attention.default,
)
_PRODUCTS = (torch.ops.aten.mm.default, torch.ops.aten.linear.default)


# --- the methods --------------------------------------------------------------------------------


class Checkpointed(nn.Module):
    """A module whose activations are computed again in backward.

    Args:
        context_fn: of `torch.utils.checkpoint.checkpoint`; None recomputes everything.
    """

    def __init__(self, inner: nn.Module, context_fn: Callable[[], Any] | None) -> None:
        super().__init__()
        self.inner = inner
        self.extra: dict[str, Any] = {} if context_fn is None else {"context_fn": context_fn}

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return checkpoint(self.inner, *args, use_reentrant=False, **self.extra, **kwargs)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("inner"), name)


def save_products() -> Any:
    """The contexts of a policy that saves what is expensive to compute."""
    return create_selective_checkpoint_contexts(list(_SAVED))


def save_every_other_product() -> Any:
    """The contexts of torchtitan's mode ``selective``, as in its release 0.3.0.

    Saved are the results of operators that PyTorch's partitioner takes for compute-intensive, of
    attention and of max and topk, but only of every other matrix product
    (torchtitan/distributed/activation_checkpoint.py).
    """
    saved = {operator.default for operator in get_default_op_list().compute_intensive_ops} | {
        torch.ops.aten._scaled_dot_product_cudnn_attention.default,
        torch.ops.aten._scaled_dot_product_attention_math.default,
        torch.ops.aten._scaled_dot_product_fused_attention_overrideable.default,
        torch.ops.aten.linear.default,
        torch.ops.aten.max.default,
        torch.ops.aten.topk.default,
    }
    products: Counter[bool] = Counter()  # seen in forward, and in the forward that is run again

    def policy(ctx: Any, operator: Any, *_: Any, **__: Any) -> CheckpointPolicy:
        if operator in _PRODUCTS:
            products[ctx.is_recompute] += 1
            is_saved = products[ctx.is_recompute] % 2 == 1
        else:
            is_saved = operator in saved
        return CheckpointPolicy.MUST_SAVE if is_saved else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)


# Methods that checkpoint each block, and their `context_fn`.
CHECKPOINTS: dict[str, Callable[[], Any] | None] = {
    "blocks": None,
    "selective": save_products,
    "torchtitan": save_every_other_product,
}


def sharing_copy(module: nn.Module) -> nn.Module:
    """A copy with the same parameters and buffers, not copies of them."""
    shared = (*module.parameters(), *module.buffers())
    return copy.deepcopy(module, {id(tensor): tensor for tensor in shared})


def checkpoint_blocks(
    module: nn.Module, model: ZooModel, context_fn: Callable[[], Any] | None = None
) -> nn.Module:
    """A copy that shares its parameters, and whose blocks are checkpointed."""
    wrapped = sharing_copy(module)
    for name in model.block_names(wrapped):
        parent, _, child = name.rpartition(".")
        owner = wrapped.get_submodule(parent)
        setattr(owner, child, Checkpointed(wrapped.get_submodule(name), context_fn))
    return wrapped


def inductor_with(memory_budget: float, solver: str) -> Callable[..., Any]:
    """Inductor under ``activation_memory_budget``; a backend of its own, or Dynamo would take the
    graphs of another budget for the same code."""

    def backend(gm: torch.fx.GraphModule, inputs: Sequence[Any]) -> Any:
        with functorch_config.patch(
            activation_memory_budget=memory_budget, activation_memory_budget_solver=solver
        ):
            return compile_fx(gm, inputs)

    return backend


def compiled_by(
    method: str, setting: str | int, model: ZooModel, module: nn.Module
) -> tuple[nn.Module, Callable[..., Tensor]]:
    """What a user would write: the module that runs, and the callable that runs it.

    Args:
        setting: a share of saved bytes and a solver, if it is not the default ("memory_budget"), a
            budget ("dtr"), or "".
    """
    if method == "eager":
        return module, module
    if method == "compile":
        return module, torch.compile(module, dynamic=False)
    if method == "memory_budget":
        share, _, solver = str(setting).partition(" ")
        backend = inductor_with(float(share), solver or SOLVERS[0])
        return module, torch.compile(module, backend=backend, dynamic=False)
    if method in CHECKPOINTS:
        wrapped = checkpoint_blocks(module, model, CHECKPOINTS[method])
        return wrapped, torch.compile(wrapped, dynamic=False)
    if method == "auto_chunker":
        chunks = {"auto_chunker.enable": True}
        return module, torch.compile(module, options=chunks, dynamic=False)
    if method == "dtr":
        options = {"budget": setting}
        return module, torch.compile(module, backend=dtr, options=options, dynamic=False)
    raise ValueError(f"unknown method {method!r}; allowed: {', '.join(METHODS)}")


def under(dtype: str, device: torch.device, call: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """``call``, inside of autocast where asked for."""
    if dtype == "float32":
        return call

    def run(*inputs: Tensor) -> Tensor:
        with torch.autocast(device.type, dtype=torch.bfloat16):
            return call(*inputs)

    return run


# --- measuring ----------------------------------------------------------------------------------


def gradients(module: nn.Module) -> dict[str, Tensor | None]:
    """Copies of the gradients on the CPU, by the parameters' places: wrappers change the names."""
    return {
        str(place): None if p.grad is None else p.grad.detach().to("cpu", copy=True)
        for place, p in enumerate(module.parameters())
    }


@dataclass(frozen=True, slots=True)
class Peak:
    """Bytes of a few steps, as the columns of the same names of a `Row`."""

    peak_bytes: int
    reserved_bytes: int | None = None
    requested_bytes: int | None = None
    beside_bytes: int | None = None


def measure_peak(trainee: Trainee) -> Peak:
    """The most that any of a few steps holds."""
    device = trainee.device
    trainee.module.zero_grad(set_to_none=True)
    before_bytes = static_bytes(trainee.module, *trainee.inputs)
    if device.type != "cuda":
        return Peak(trace_step(lambda: trainee.step(SEED), before_bytes, device).peak_bytes)
    gc.collect()
    torch.cuda.synchronize(device)
    # What else is live, such as constants of compiled graphs, is not the step's.
    beside_bytes = torch.cuda.memory_allocated(device) - before_bytes
    # First among the blocks that earlier steps left, some larger than what is asked for; then from
    # an empty cache, where the later steps find the fragments of the first.
    peaks = [_peak_of_steps(trainee)]
    torch.cuda.empty_cache()
    peaks.append(_peak_of_steps(trainee))
    return Peak(
        max(peak for peak, _ in peaks) - beside_bytes,
        torch.cuda.max_memory_reserved(device) - beside_bytes,
        max(requested for _, requested in peaks),
        beside_bytes,
    )


def _peak_of_steps(trainee: Trainee) -> tuple[int, int]:
    """The most bytes that the allocator handed out, and the most that it was asked for.

    The peak is read after each step, because a step of dtr may begin it anew.
    """
    device = trainee.device
    torch.cuda.reset_peak_memory_stats(device)
    peak_bytes = requested_bytes = 0
    for _ in range(_MEASURED_STEPS):
        trainee.step(SEED)
        stats = torch.cuda.memory_stats(device)
        peak_bytes = max(peak_bytes, torch.cuda.max_memory_allocated(device))
        requested_bytes = max(requested_bytes, stats.get("requested_bytes.all.peak", 0))
        trainee.module.zero_grad(set_to_none=True)
    return peak_bytes, requested_bytes


def double_gradients(
    model: ZooModel, module: nn.Module, inputs: Sequence[Tensor]
) -> dict[str, Tensor | None]:
    """The gradients of eager in float64."""
    exact = copy.deepcopy(module).double()
    if next(exact.parameters()).device.type == "cuda":
        exact = checkpoint_blocks(exact, model)
    given = [t.double() if t.is_floating_point() else t for t in inputs]
    Trainee(exact, given, exact).step(SEED)
    return gradients(exact)


def is_out_of_memory(error: BaseException) -> bool:
    """CUDA's own, or the CPU allocator's, which has no type of its own."""
    return isinstance(error, torch.OutOfMemoryError) or "can't allocate memory" in str(error)


def explain(error: BaseException, row: Row) -> None:
    """Make the row say what went wrong."""
    cause = cause_of(error)
    if isinstance(cause, InfeasibleBudgetError):
        row.status, row.minimum_bytes = "refused", cause.minimum_bytes
        row.budget_bytes = cause.budget_bytes
        least = "none" if cause.minimum_bytes is None else format_bytes(cause.minimum_bytes)
        row.reason = f"smallest budget: {least}"
    elif is_out_of_memory(cause):
        row.status, row.reason = "out of memory", str(cause).partition("\n")[0][:200]
    else:
        first_line = str(cause).strip().partition("\n")[0]
        row.status, row.reason = "failed", f"{type(cause).__name__}: {first_line}"[:300]


def read_reports(row: Row) -> None:
    """What dtr promised, of all graphs of the step."""
    found = dtrcompile.reports()
    row.graphs = len(found)
    if not found:
        return
    budgets = [r.budget_bytes for r in found if r.budget_bytes is not None]
    row.budget_bytes = min(budgets, default=None)
    row.promised_bytes = max(r.promised_peak_bytes + r.outside_bytes for r in found)
    row.baseline_bytes = max(r.baseline_peak_bytes for r in found)
    row.overhead = max(r.overhead for r in found)
    row.recomputed_runs = sum(r.recomputed_runs for r in found)
    row.planning_s = sum(r.planning_s for r in found)
    row.lowering_s = sum(r.lowering_s for r in found)


@dataclass
class _Bench:
    """All methods on one model, in this process."""

    model: ZooModel
    arguments: argparse.Namespace

    def __post_init__(self) -> None:
        self.device = torch.device(self.arguments.device)
        self.process = secrets.token_hex(4)
        # Each setting is a compile of its own of the same code.
        torch._dynamo.config.recompile_limit = 256
        self.module, self.inputs = self.model.build(self.arguments.scale, device=self.device)
        self.trained: dict[tuple[str, str, str], Trainee] = {}
        self.rows: list[Row] = []
        self.reference: Mapping[str, Tensor | None] | None = None
        if self.arguments.reference == "float64" and not self.model.dropout:
            try:
                self.reference = double_gradients(self.model, self.module, self.inputs)
            except Exception as error:
                say(f"{self.model.name}: no gradients in float64: {cause_of(error)}")
            self.module.zero_grad(set_to_none=True)

    def run(self, add: Callable[[Row], None]) -> None:
        """Measure all, then time all; ``add`` gets each row twice, the second time with times."""
        for method, setting in settings(self.arguments):
            with device_turn():
                row = self.measure(method, setting)
            self.rows.append(row)
            add(row)
        rounds = self.arguments.rounds
        if not rounds:
            return
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
        calls = {str(key): trainee.step for key, trainee in self.trained.items()}
        try:
            with device_turn(alone=True):
                times = interleaved_s(calls, rounds=rounds, device=self.device)
        except torch.OutOfMemoryError as error:
            say(f"{self.model.name}: no times: {error}")
            return
        for row in self.rows:
            row.step_s = times.get(str(row.key))
            add(row)

    def measure(self, method: str, setting: str) -> Row:
        """Compile and run one method at one setting."""
        arguments = self.arguments
        row = Row(
            self.model.name,
            method,
            setting,
            scale=arguments.scale,
            dtype=arguments.dtype,
            process=self.process,
        )
        dtrcompile.clear_reports()
        try:
            with fresh_cache() if arguments.cold else contextlib.nullcontext():
                self.fill(row)
        except Exception as error:
            explain(error, row)
            if row.status == "failed":
                logging.getLogger(__name__).warning("%s", row.key, exc_info=error)
        self.module.zero_grad(set_to_none=True)
        return row

    def fill(self, row: Row) -> None:
        setting: str | int = row.setting
        share, is_as, rival = row.setting.partition(AS)
        if is_as:
            setting = self.peak_of(rival) * int(share.rstrip(" %") or 100) // 100
        module, call = compiled_by(row.method, setting, self.model, self.module)
        trainee = Trainee(module, self.inputs, under(row.dtype, self.device, call))
        start = time.perf_counter()
        trainee.step(SEED)
        row.first_step_s = time.perf_counter() - start
        for _ in range(_WARM_UPS - 1):
            trainee.step(SEED)
        if row.method == "dtr":
            read_reports(row)
        trainee.restore()
        trainee.step(SEED)
        self.compare(row, trainee)
        row.static_bytes = static_bytes(trainee.module, *trainee.inputs)
        for name, value in asdict(measure_peak(trainee)).items():
            setattr(row, name, value)
        trainee.restore()
        self.trained[row.key] = trainee

    def peak_of(self, rival: str) -> int:
        """What a method, such as ``"memory_budget 0.5"``, was measured to hold."""
        for row in self.rows:
            if f"{row.method} {row.setting}".rstrip() == rival and row.peak_bytes is not None:
                return row.peak_bytes
        raise ValueError(f"the peak of {rival} was not measured")

    def compare(self, row: Row, trainee: Trainee) -> None:
        """The gradient's error; eager draws its dropout from other random numbers."""
        has_none = self.arguments.reference == "none"
        if has_none or (self.model.dropout and row.method == "eager"):
            return
        found = gradients(trainee.module)
        if self.model.dropout and row.method == "compile":
            self.reference = found
        if self.reference is not None:
            row.gradient_error = relative_error(found, self.reference)


def settings(arguments: argparse.Namespace) -> list[tuple[str, str]]:
    """(method, setting), in the order in which they run."""
    chosen: list[tuple[str, str]] = []
    for method in arguments.methods:
        if method == "memory_budget":
            chosen += [
                (method, share if solver == SOLVERS[0] else f"{share} {solver}")
                for solver in arguments.solvers
                for share in arguments.shares
            ]
        elif method == "dtr":
            budgets = list(arguments.budgets)
            if "blocks" in arguments.methods and AS_BLOCKS not in budgets:
                budgets.append(AS_BLOCKS)
            chosen += [(method, budget) for budget in budgets]
        else:
            chosen.append((method, ""))
    return chosen


# --- the largest batch --------------------------------------------------------------------------


@contextlib.contextmanager
def device_of_bytes(device: torch.device, size_bytes: int) -> Iterator[None]:
    """A CUDA allocator that has no more than so much; nothing on a CPU."""
    if device.type != "cuda":
        yield
        return
    _, total_bytes = torch.cuda.mem_get_info(device)
    torch.cuda.set_per_process_memory_fraction(min(1.0, size_bytes / total_bytes), device)
    try:
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0, device)


def adam_bytes(module: nn.Module) -> int:
    """Two moments of every parameter."""
    return sum(2 * p.numel() * p.element_size() for p in module.parameters())


def fits(
    model: ZooModel, method: str, size_bytes: int, batch: int, arguments: argparse.Namespace
) -> bool:
    """Whether steps of so many samples train beside Adam's moments in so many bytes.

    On CUDA the allocator is given no more than the size, so that its fragments count too.
    """
    device = torch.device(arguments.device)
    torch._dynamo.reset()
    gc.collect()
    with device_of_bytes(device, size_bytes):
        try:
            if device.type == "cuda":
                torch.cuda.empty_cache()
            module, inputs = model.build(arguments.scale, device=device, batch=batch)
            state = torch.empty(adam_bytes(module), dtype=torch.uint8, device=device)
            budget_bytes = size_bytes - state.nbytes
            if budget_bytes <= 0:
                return False
            built, call = compiled_by(method, budget_bytes, model, module)
            trainee = Trainee(built, inputs, under(arguments.dtype, device, call))
            for _ in range(_WARM_UPS):
                trainee.step(SEED)
            return measure_peak(trainee).peak_bytes <= budget_bytes
        except Exception as error:
            cause = cause_of(error)
            if isinstance(cause, InfeasibleBudgetError) or is_out_of_memory(cause):
                return False
            raise


def largest(fitting: Callable[[int], bool], most: int = 1 << 16) -> int:
    """The largest number that fits, found by doubling and halving to a sixteenth of itself.

    Args:
        most: a power of two; larger ones are not tried.

    Returns:
        0 if not even 1 fits.
    """
    low, high = 0, 1
    while fitting(high):
        low, high = high, 2 * high
        if high > most:
            return low
    while high - low > max(1, low // 16):
        middle = (low + high) // 2
        if fitting(middle):
            low = middle
        else:
            high = middle
    return low


def largest_batches(model: ZooModel, arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """For each size and method, the largest batch; a failure is named."""
    found: list[dict[str, Any]] = []
    for size in arguments.largest_batch:
        size_bytes = Budget.parse(size).resolve(0)
        assert size_bytes is not None
        for method in (m for m in LARGEST_METHODS if m in arguments.methods):
            row: dict[str, Any] = {"model": model.name, "size": size, "method": method}
            try:
                row["batch"] = largest(
                    functools.partial(_fits_and_says, model, method, size_bytes, arguments),
                    most=MOST_SAMPLES.get(arguments.scale, 1 << 16),
                )
            except Exception as error:
                cause = cause_of(error)
                row["failed"] = f"{type(cause).__name__}: {cause}".partition("\n")[0]
            found.append(row)
    return found


def _fits_and_says(
    model: ZooModel, method: str, size_bytes: int, arguments: argparse.Namespace, batch: int
) -> bool:
    is_fitting = fits(model, method, size_bytes, batch, arguments)
    outcome = "fits" if is_fitting else "does not fit"
    say(f"{model.name}: {method}: a batch of {batch} {outcome} into {format_bytes(size_bytes)}")
    return is_fitting


# --- command line -------------------------------------------------------------------------------


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line; lists come apart."""
    assert __doc__ is not None
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0].replace("%", "%%"))

    def listed(flag: str, text: str) -> None:
        parser.add_argument(flag, help=f"comma-separated; {text}".replace("%", "%%"))

    listed("--models", f"default: all ({','.join(ZOO)}), two when quick")
    listed("--methods", f"default: {','.join(METHODS)}; fewer when quick")
    listed("--shares", f"of activation_memory_budget; default: {','.join(SHARES)}")
    listed("--solvers", f"of activation_memory_budget: {', '.join(SOLVERS)}; default: {SOLVERS[0]}")
    listed("--budgets", f"of dtr; default: {','.join(BUDGETS)}")
    listed("--largest-batch", "sizes (16GB,24GB): find the largest batch that trains with Adam")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", choices=("float32", "bf16-autocast"), default="float32")
    parser.add_argument(
        "--scale",
        help=f"{', '.join(SCALES)}, or another of the models; default: quick, or the device's",
    )
    parser.add_argument(
        "--reference",
        choices=("float64", "none"),
        default="float64",
        help="what the gradients are compared with",
    )
    parser.add_argument("--rounds", type=int, default=7, help="steps of each to time")
    parser.add_argument("--cold", action="store_true", help="each compiles with an empty cache")
    parser.add_argument("--quick", action="store_true", help="tiny models, few settings")
    parser.add_argument("--out", type=Path, help="append JSON lines to this file")
    parser.add_argument("--plot", type=Path, help="draw into this folder (needs matplotlib)")
    parser.add_argument("--rows", type=Path, help="read the rows of --out, measure nothing")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args(argv)
    quick = arguments.quick
    defaults: dict[str, Sequence[str]] = {
        "models": QUICK_MODELS if quick else tuple(ZOO),
        "methods": QUICK_METHODS if quick else METHODS,
        "shares": QUICK_SHARES if quick else SHARES,
        "solvers": SOLVERS[:1],
        "budgets": QUICK_BUDGETS if quick else BUDGETS,
        "largest_batch": (),
    }
    for name, default in defaults.items():
        given = getattr(arguments, name)
        setattr(arguments, name, given.split(",") if given else list(default))
    if arguments.scale is None:
        on_device = "cuda" if torch.device(arguments.device).type == "cuda" else "cpu"
        arguments.scale = "quick" if quick else on_device
    for given, allowed in (
        (arguments.models, MODELS),
        (arguments.methods, METHODS),
        (arguments.solvers, SOLVERS),
    ):
        for name in given:
            if name not in allowed:
                parser.error(f"unknown name {name!r}; allowed: {', '.join(allowed)}")
    for name in arguments.models:
        if arguments.scale not in MODELS[name].sizes:
            scales = ", ".join(MODELS[name].sizes)
            parser.error(f"{name} has no scale {arguments.scale!r}; allowed: {scales}")
    try:
        sizes = [Budget.parse(size, what="a size") for size in arguments.largest_batch]
    except OptionError as error:
        parser.error(str(error))
    if any(size.kind is not BudgetKind.BYTES for size in sizes):
        parser.error("--largest-batch takes sizes in bytes, such as 16GB or 512MiB")
    return arguments


def work(arguments: argparse.Namespace) -> None:
    """Run one model, and print each row as a line of JSON."""
    logging.getLogger("dtrcompile").setLevel(logging.WARNING)
    (name,) = arguments.models

    def tell(record: Mapping[str, Any]) -> None:
        print(_PREFIX + json.dumps(record), flush=True)

    if arguments.largest_batch:
        for found in largest_batches(MODELS[name], arguments):
            tell(found)
    else:
        _Bench(MODELS[name], arguments).run(lambda row: tell(row.to_json()))


def in_process(name: str, arguments: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Run a model in a fresh process; yield what it tells.

    Raises:
        subprocess.CalledProcessError: if the process crashed, after what it told before.
    """
    command = [sys.executable, "-m", "bench.rivals", "--worker", "--models", name]
    for flag in ("methods", "shares", "solvers", "budgets", "largest_batch"):
        if given := getattr(arguments, flag):
            command += [f"--{flag.replace('_', '-')}", ",".join(given)]
    for flag in ("device", "dtype", "scale", "rounds", "reference"):
        command += [f"--{flag}", str(getattr(arguments, flag))]
    command += ["--cold"] if arguments.cold else []
    environment = dict(os.environ)
    use_kernel_cache(environment)
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith(_PREFIX):
                yield json.loads(line.removeprefix(_PREFIX))
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, command)


def run_model(name: str, arguments: argparse.Namespace, keep: Callable[[Row], None]) -> list[Row]:
    """The rows of one model; a crash is one more.

    Args:
        keep: is handed each row as it comes, and again when its step has been timed, so that a run
            that is stopped loses nothing.
    """
    rows: dict[tuple[str, str, str], Row] = {}

    def tell(row: Row) -> None:
        rows[row.key] = row
        keep(row)

    try:
        for record in in_process(name, arguments):
            row = Row.from_json(record)
            if row.key not in rows:
                say("  ".join(row.cells(None)) + (f"  {row.reason}" if row.reason else ""))
            tell(row)
    except subprocess.CalledProcessError as error:
        reason = f"the process ended with status {error.returncode}"
        tell(Row(name, "process", status="failed", reason=reason))
    return list(rows.values())


def models_there(arguments: argparse.Namespace) -> list[str]:
    """The models that can be built here; says which cannot."""
    there = []
    for name in arguments.models:
        if MODELS[name].is_there:
            there.append(name)
        else:
            print(f"{name}: skipped, {MODELS[name].needs} is not installed (dtrcompile[bench])")
    return there


def description(device: torch.device) -> dict[str, Any]:
    """The machine, and the versions of the packages whose models are trained."""
    described = machine(device)
    for package in ("transformers", "diffusers"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            described[package] = importlib.metadata.version(package)
    return described


def main(argv: Sequence[str] | None = None) -> int:
    """Run, print the table and the summary, return the exit status."""
    arguments = parse(argv)
    if arguments.worker:
        work(arguments)
        return 0
    if arguments.largest_batch:
        return main_largest(arguments)
    if arguments.rows is not None:
        rows = read_rows(arguments.rows)
    else:
        rows = []
        described = description(torch.device(arguments.device))

        def keep(row: Row) -> None:
            record = {"bench": "rivals", **row.to_json(), "cold": arguments.cold}
            write_json_line(arguments.out, {**record, "machine": described})

        for name in models_there(arguments):
            say(name)
            rows += run_model(name, arguments, keep)
    print(format_table(HEADER, table(rows)))
    for row in rows:
        if row.reason:
            print(f"{row.model}, {row.method} {row.setting}: {row.status}: {row.reason}")
    summaries = summarize(rows)
    for summary in summaries:
        print("\n".join(summary.lines()))
    if arguments.plot is not None:
        draw_all(arguments.plot, rows, save)
    crashed = any(row.method == "process" for row in rows)
    return int(crashed or any(summary.broken for summary in summaries))


def main_largest(arguments: argparse.Namespace) -> int:
    """`--largest-batch`: a table of batches."""
    described = description(torch.device(arguments.device))
    found: list[dict[str, Any]] = []
    for name in models_there(arguments):
        try:
            for row in in_process(name, arguments):
                found.append(row)
                kept = {"scale": arguments.scale, "dtype": arguments.dtype, **row}
                write_json_line(
                    arguments.out,
                    {"bench": "rivals-largest-batch", **kept, "machine": described},
                )
        except subprocess.CalledProcessError as error:
            status = f"the process ended with status {error.returncode}"
            found.append({"model": name, "size": "-", "method": "process", "failed": status})
    cells = [
        (row["model"], row["size"], row["method"], str(row.get("batch", row.get("failed"))))
        for row in found
    ]
    print(format_table(("model", "memory", "method", "largest batch"), cells))
    return int(any("failed" in row for row in found))


if __name__ == "__main__":
    sys.exit(main())
