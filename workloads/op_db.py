"""Every differentiable operator of PyTorch's own test database, as a small training step.

``torch.testing._internal.common_methods_invocations.op_db`` lists PyTorch's operators with sample
inputs.  For each that has a float32 derivative on the CPU, the first usable sample becomes a
function of its tensors alone, and `step` runs it twice in one graph:

* once so that its outputs leave the graph;
* once so that its outputs are needed only by backward, while something much larger is computed in
  between.  The smallest budget then has to evict them and to run the operator again.

Checked on torch 2.13; nothing else imports this private module.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any
from unittest import mock

import torch
from torch._dynamo.utils import counters
from torch.testing._internal import common_methods_invocations as invocations
from torch.testing._internal.opinfo.core import OpInfo
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

import dtrcompile
from workloads.training import (
    UNBUDGETED,
    assert_bitwise,
    assert_close,
    compile_dtr,
    executor_checked,
)

SEED = 190758
# A sample without a derivative is common among the first few; beyond this many it is not rare.
MOST_SAMPLES = 400

# Operators that plain ``aot_eager`` does not run either, and why: Dynamo compiles no graph.
NOT_COMPILED = {
    "sparse.sampled_addmm": "Dynamo does not trace sparse inputs",
    "sparse.mm.reduce": "Dynamo does not trace sparse inputs",
}


class NoSample(Exception):
    """The operator has no sample that fits the purpose; the text says why."""


@dataclass(frozen=True)
class Case:
    """One operator with one sample.

    Attributes:
        name: the operator's name, with its variant.
        operator: takes `inputs` and returns a tensor or a nest of them.
        inputs: every tensor of the sample.
        is_random: whether a seeded random operator runs; then eager PyTorch's numbers are drawn
            only with Inductor's ``fallback_random``.
    """

    name: str
    operator: Callable[..., Any]
    inputs: tuple[torch.Tensor, ...]
    is_random: bool


def operator_name(op: OpInfo) -> str:
    return f"{op.name}.{op.variant_test_name}" if op.variant_test_name else op.name


@cache
def operators() -> dict[str, OpInfo]:
    """Operators that say they have a float32 derivative on the CPU, by name."""
    return {
        operator_name(op): op
        for op in invocations.op_db
        if op.supports_autograd
        and torch.float32 in op.dtypes
        and torch.float32 in op.supported_backward_dtypes("cpu")
    }


def make_case(name: str) -> Case:
    """The first sample of operator ``name`` through which a gradient flows.

    Raises:
        NoSample: if there is none among the first `MOST_SAMPLES`.
    """
    op = operators()[name]
    seen = "no samples"
    torch.manual_seed(SEED)
    # Some samples are made from seeded numbers in a way that PyTorch warns of.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        samples = iter(op.sample_inputs("cpu", torch.float32, requires_grad=True))
    for _ in range(MOST_SAMPLES):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            sample = next(samples, None)
            if sample is None:
                break
            operator, inputs = _as_function_of_tensors(op, sample)
            if not any(t.requires_grad and t.numel() for t in inputs):
                seen = "no sample has a non-empty floating point input"
                continue
            with _SeesRandom() as random:
                torch.manual_seed(SEED)
                outputs = _tensors(operator(*(_copy(t) for t in inputs)))
        if any(t.requires_grad and t.numel() for t in outputs):
            return Case(name, operator, inputs, random.seen)
        seen = "no sample has an output with a gradient"
    raise NoSample(seen)


def _as_function_of_tensors(
    op: OpInfo, sample: Any
) -> tuple[Callable[..., Any], tuple[torch.Tensor, ...]]:
    leaves, spec = pytree.tree_flatten((sample.input, sample.args, sample.kwargs))
    positions = [i for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
    inputs = tuple(leaves[i] for i in positions)
    if not any(t.requires_grad for t in inputs):  # some sample functions forget it
        floats = (t.detach().requires_grad_() if t.is_floating_point() else t for t in inputs)
        inputs = tuple(floats)
    others = [None if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
    call = op.op

    def function(*tensors: torch.Tensor) -> Any:
        filled = list(others)
        for position, tensor in zip(positions, tensors, strict=True):
            filled[position] = tensor
        first, args, kwargs = pytree.tree_unflatten(filled, spec)
        # Fixes the phase of eigenvectors and the like, without which no gradient is defined.
        return sample.output_process_fn_grad(call(first, *args, **kwargs))

    return function, inputs


class _SeesRandom(TorchDispatchMode):
    """Notices whether an operator that draws from the generator runs."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        del types
        self.seen |= torch.Tag.nondeterministic_seeded in func.tags
        return func(*args, **(kwargs or {}))


def make_step(case: Case) -> Callable[..., tuple[Any, torch.Tensor]]:
    """The function to compile; it takes the sample's tensors twice (see the module docstring)."""
    operator, count = case.operator, len(case.inputs)

    def step(*tensors: torch.Tensor) -> tuple[Any, torch.Tensor]:
        returned = operator(*tensors[:count])
        hidden = _tensors(operator(*tensors[count:]))
        total = torch.zeros(())
        for t in hidden:
            if t.requires_grad:
                dense = t.to_dense() if t.layout is not torch.strided else t
                if dense.is_complex():
                    dense = torch.view_as_real(dense.resolve_conj())
                # An arc tangent needs its input for its gradient, and is at ease with infinity.
                total = total + dense.to(torch.float32).atan().mean()
        # Much larger than most samples' tensors; cumulative sums cannot be fused.
        ramp = torch.arange(8192, dtype=torch.float32) / 8192
        averages = (ramp * total).sin().cumsum(0) / 8192
        return returned, (averages.sin().cumsum(0) / 8192).mean()

    return step


@dataclass(frozen=True)
class Result:
    """What one step gave: everything that a user could observe."""

    outputs: list[torch.Tensor]
    gradients: list[torch.Tensor | None]
    inputs: list[torch.Tensor]

    def as_dict(self) -> dict[str, list[Any]]:
        return {"outputs": self.outputs, "gradients": self.gradients, "inputs": self.inputs}


def run(step: Callable[..., tuple[Any, torch.Tensor]], case: Case) -> Result:
    """Forward and backward from fixed random numbers, on fresh copies of the inputs."""
    torch.manual_seed(SEED)
    leaves = [_copy(t) for t in (*case.inputs, *case.inputs)]
    outputs = _tensors(step(*leaves))
    differentiable = [t for t in outputs if t.requires_grad]
    generator = torch.Generator().manual_seed(SEED)
    tangents = [torch.randn(t.shape, dtype=t.dtype, generator=generator) for t in differentiable]
    targets = [t for t in leaves if t.requires_grad]
    gradients = torch.autograd.grad(differentiable, targets, tangents, allow_unused=True)
    return Result([t.detach() for t in outputs], list(gradients), [t.detach() for t in leaves])


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    strided = tensor.layout is torch.strided
    copy = tensor.detach()
    copy = copy.clone(memory_format=torch.preserve_format) if strided else copy.clone()
    return copy.requires_grad_(tensor.requires_grad)


def _tensors(value: Any) -> list[torch.Tensor]:
    return [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, torch.Tensor)]


def _without_fixing_the_seed(op: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """PyTorch's samples of random operators fix the seed inside, which breaks the graph."""
    return op(*args, **kwargs)


@dataclass(frozen=True)
class Outcome:
    """What `check` found out about an operator that agreed.

    Attributes:
        breaks: how often Dynamo broke the graph; then parts of the step ran uncompiled.
        recomputed: extra runs of the operators in them.
    """

    breaks: int
    recomputed: int


def check(
    name: str, *, rtol: float = 1e-4, atol: float = 1e-4, draws_as_eager: bool = True
) -> Outcome:
    """Runs operator ``name`` at the smallest budget and compares it with eager PyTorch.

    A random operator is compared with Inductor's ``fallback_random`` on, if that draws what eager
    PyTorch draws (``draws_as_eager``); and, without it, bit for bit with the unbudgeted run.

    Raises:
        AssertionError: if anything that can be observed differs, or if the eager executor counted
            other bytes than were predicted.
        NoSample: see `make_case`.
    """
    torch._dynamo.reset()
    counters.clear()
    dtrcompile.clear_reports()
    with mock.patch.object(invocations, "wrapper_set_seed", _without_fixing_the_seed):
        case = make_case(name)
        step = make_step(case)
        expected = run(step, case).as_dict()
        options: dict[str, Any] = {"inductor": {"fallback_random": True}} if case.is_random else {}
        # Where an operator breaks the graph, its inputs need not tell the sizes after it.
        with executor_checked(may_be_unsized=True):
            observed = run(compile_dtr(step, "min", **options), case).as_dict()
        if draws_as_eager:
            assert_close(observed, expected, rtol=rtol, atol=atol)
        reports = dtrcompile.reports()
        if case.is_random:
            with executor_checked(may_be_unsized=True):
                unbudgeted = run(compile_dtr(step, UNBUDGETED), case).as_dict()
                observed = run(compile_dtr(step, "min"), case).as_dict()
            assert_bitwise(observed, unbudgeted)
        breaks = counters["graph_break"].total()
    return Outcome(breaks, sum(report.recomputed_runs for report in reports))
