"""What goes through ``torch.compile`` shares: compiling, comparing, unwrapping errors.

A *scenario* is a training script in small: a function that is given ``compile`` (which wraps a
module or a function), trains with it, and returns everything that a user could observe: outputs,
gradients, buffers, mutated inputs.  Running one scenario with several values of ``compile`` and
comparing what was observed is how most tests work.
"""

from __future__ import annotations

import gc
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

import dtrcompile
from dtrcompile.demo.memory import static_bytes as static_bytes
from dtrcompile.demo.memory import trace_step
from dtrcompile.passes.errors import DTRError, InfeasibleBudgetError, wrapped_error

Compile = Callable[[Any], Any]
Observed = dict[str, Any]
Scenario = Callable[[Compile], Observed]

SEED = 20211
# Of PyTorch, as (2, 13).  Older ones do a few things otherwise.
RELEASE = tuple(int(part) for part in torch.__version__.split(".")[:2])
UNBUDGETED = 1.0


def compile_dtr(
    target: Any,
    budget: object = "min",
    *,
    compiler: str = "eager",
    dynamic: bool | None = None,
    fullgraph: bool = False,
    **options: object,
) -> Any:
    """``torch.compile(target, backend="dtr")``, without an installed entry point."""
    # Imported late: whoever only needs the others then runs without a backend.
    from dtrcompile.backend import dtr

    return torch.compile(
        target,
        backend=dtr,
        dynamic=dynamic,
        fullgraph=fullgraph,
        options={"budget": budget, "compiler": compiler, **options},
    )


@contextmanager
def executor_checked(*, may_be_unsized: bool = False) -> Iterator[None]:
    """Checks that every byte which the eager executor counts inside was predicted.

    Of at least one graph, unless that cannot be said of what runs: because a fake kernel in it is
    known to be wrong, or as the caller knows (``may_be_unsized``).
    """
    from dtrcompile.passes.graphs.executor import clear_executor_log, executor_log

    clear_executor_log()
    yield
    records = executor_log()
    assert records, "the eager executor ran no graph"
    # Others have sizes that their inputs do not tell, or a fake kernel that is known to be wrong.
    told = [record for record in records if record.is_sized and not record.mistraced]
    may_be_unsized |= any(record.mistraced for record in records)
    assert told or may_be_unsized, "of no graph that ran it could be said what it holds"
    for record in told:
        counted, predicted = tuple(record.counted_bytes), tuple(record.predicted_bytes)
        differing = [
            (step, c, p)
            for step, (c, p) in enumerate(zip(counted, predicted, strict=False))
            if c != p
        ]
        assert not differing, f"(step, counted, predicted): {differing[:10]}"
        assert len(counted) == len(predicted)


def observe(
    scenario: Scenario, compile_: Compile, *, seed: int = SEED, reset: bool = True
) -> Observed:
    """Runs ``scenario`` from ``seed`` with fresh compiler state; tensors come back detached."""
    if reset:
        torch._dynamo.reset()
        dtrcompile.clear_reports()
    torch.manual_seed(seed)
    return {name: _snapshot(value) for name, value in scenario(compile_).items()}


def observe_dtr(scenario: Scenario, budget: object, **options: Any) -> Observed:
    """`observe` on the eager executor: counted bytes and reports are checked too."""
    with executor_checked():
        observed = observe(scenario, lambda target: compile_dtr(target, budget, **options))
    check_reports(budget)
    return observed


def check_reports(budget: object) -> None:
    """What every report must say, whatever was compiled."""
    reports = dtrcompile.reports()
    assert reports, "nothing was compiled"
    for report in reports:
        # One of several graphs of a step that is not over: a share of its peak is not known yet.
        is_open = any("until all are known" in note for note in report.notes)
        assert (report.budget_bytes is None) == (budget == "min" or is_open), str(report)
        assert not (is_open and budget == UNBUDGETED), str(report)
        if report.budget_bytes is not None:
            assert report.promised_peak_bytes <= report.budget_bytes, str(report)
        # What is compiled before it is known what follows saves little, whatever room there is, and
        # may hold more in its own backward than the default split does.
        is_provisional = any("more graphs follow" in note for note in report.notes)
        # The plans of a graph of any size, made before its loss was seen, are used for a while.
        is_from_before = any("seemed to be less room" in note for note in report.notes)
        if not (is_provisional or is_from_before):
            # Only for a smaller step does a graph hold more by itself.
            ours = (report.step_peak_bytes, report.promised_peak_bytes)
            assert ours <= (report.baseline_step_peak_bytes, report.baseline_peak_bytes), str(
                report
            )
        assert sum(report.promised_split.values()) == report.promised_peak_bytes, str(report)
        assert report.overhead >= 1.0, str(report)
        needed = report.baseline_step_peak_bytes
        ample = needed <= (report.budget_bytes or 0) and not (is_provisional or is_from_before)
        if ample or budget == UNBUDGETED:
            assert not report.recomputed, str(report)
            assert report.overhead == 1.0, str(report)


def recomputed_operators() -> int:
    """How often operators ran again, over all graphs compiled since the last `observe`."""
    return sum(sum(report.recomputed.values()) for report in dtrcompile.reports())


def smallest_that_works(run: Callable[[object], Any], budget: object) -> tuple[object, Any]:
    """``run(budget)``, or with the minimum that the error named: that one must then work.

    A model of several graphs names one graph's minimum at a time, so the budget may have to be
    raised once for each graph; each time it must grow.
    """
    named: object = budget
    last = 0
    while True:
        try:
            return named, run(named)
        except Exception as error:
            infeasible = unwrap(error)
            if not isinstance(infeasible, InfeasibleBudgetError):
                raise
            assert infeasible.minimum_bytes is not None, str(infeasible)
            assert infeasible.minimum_bytes > last, "the named minimum did not work"
            named = last = infeasible.minimum_bytes


def unwrap(error: BaseException) -> BaseException:
    """The `DTRError` inside ``error``, which Dynamo may have wrapped; or ``error`` itself."""
    return wrapped_error(error) or error


@contextmanager
def raises_dtr(error_type: type[DTRError], *words: str) -> Iterator[list[DTRError]]:
    """Expects ``error_type``, possibly wrapped, whose text holds every one of ``words``.

    The one element of the yielded list is the error, for more assertions afterwards.
    """
    caught: list[DTRError] = []
    try:
        yield caught
    except Exception as error:
        inner = unwrap(error)
        if not isinstance(inner, error_type):
            raise
        for word in words:
            assert word in str(inner), f"{word!r} is not in: {inner}"
        caught.append(inner)
    else:
        raise AssertionError(f"{error_type.__name__} was not raised")


def _snapshot(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.detach().clone(memory_format=torch.preserve_format)
    if isinstance(value, Mapping):
        return {k: _snapshot(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_snapshot(v) for v in value]
    return value


def flatten(value: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """The leaves of nested dicts and lists, with their paths."""
    if isinstance(value, Mapping):
        for k, v in value.items():
            yield from flatten(v, f"{name}.{k}" if name else str(k))
    elif isinstance(value, (list, tuple)):
        for i, v in enumerate(value):
            yield from flatten(v, f"{name}[{i}]")
    else:
        yield name, value


def assert_bitwise(actual: Any, expected: Any) -> None:
    """Same structure, types, shapes, strides and bits."""
    actual_leaves, expected_leaves = dict(flatten(actual)), dict(flatten(expected))
    assert actual_leaves.keys() == expected_leaves.keys()
    for name, want in expected_leaves.items():
        got = actual_leaves[name]
        if not isinstance(want, torch.Tensor):
            assert type(got) is type(want) and got == want, f"{name}: {got!r} is not {want!r}"
            continue
        assert isinstance(got, torch.Tensor), f"{name}: {got!r} is not a tensor"
        assert (got.dtype, got.shape) == (want.dtype, want.shape), name
        assert got.stride() == want.stride() or got.numel() < 2, (
            f"{name}: strides {got.stride()} are not {want.stride()}"
        )
        same = _bits(got) == _bits(want)
        assert bool(same.all()), (
            f"{name}: {int((~same).sum())} of {same.numel()} bytes differ, largest difference "
            f"{(got.double() - want.double()).abs().max() if not got.is_complex() else '?'}"
        )


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return (
        torch.view_as_real(tensor).contiguous().view(torch.uint8)
        if tensor.is_complex()
        else (tensor.contiguous().reshape(-1).view(torch.uint8))
    )


def assert_close(actual: Any, expected: Any, *, rtol: float = 1e-4, atol: float = 1e-5) -> None:
    """Same structure, types and shapes; floating point values within the tolerances."""
    actual_leaves, expected_leaves = dict(flatten(actual)), dict(flatten(expected))
    assert actual_leaves.keys() == expected_leaves.keys()
    for name, want in expected_leaves.items():
        got = actual_leaves[name]
        if not isinstance(want, torch.Tensor):
            assert type(got) is type(want), f"{name}: {got!r} is not {want!r}"
            if isinstance(want, float):
                assert math.isclose(got, want, rel_tol=rtol, abs_tol=atol), name
            else:
                assert got == want, f"{name}: {got!r} is not {want!r}"
            continue
        torch.testing.assert_close(
            got,
            want,
            rtol=rtol,
            atol=atol,
            equal_nan=True,
            msg=lambda text, name=name: f"{name}: {text}",
        )


def relative_error(
    given: Mapping[str, torch.Tensor | None], reference: Mapping[str, torch.Tensor | None]
) -> float:
    """||given - reference|| / ||reference||, all tensors as one vector; 0.0 means bitwise equal.

    A gradient that is None on one side only, or a value that is not finite on one side only, makes
    it infinite.
    """
    difference = norm = 0.0
    for name in reference.keys() | given.keys():
        a, b = given.get(name), reference.get(name)
        if a is None or b is None:
            if a is not b:
                return math.inf
            continue
        if torch.equal(a, b):
            norm += float(b.double().square().sum())
            continue
        difference += float((a.double() - b.double()).square().sum())
        norm += float(b.double().square().sum())
    if difference == 0.0:
        return 0.0
    error = math.sqrt(difference / norm) if norm else math.inf
    return math.inf if math.isnan(error) else error


def gradients_of(module: nn.Module) -> dict[str, torch.Tensor | None]:
    """Every parameter's gradient, None where there is none."""
    return {name: parameter.grad for name, parameter in module.named_parameters()}


def state_of(module: nn.Module) -> Observed:
    """Gradients and buffers of ``module``: what a step may change besides its outputs."""
    return {"gradients": gradients_of(module), "buffers": dict(module.named_buffers())}


def live_peak_bytes(step: Callable[[], Any]) -> int:
    """The most bytes that the CPU allocator held during ``step``, above what it held before."""
    # What is dead but not yet collected would be freed during the step, which would look lower.
    gc.collect()
    returned: list[Any] = []  # what the step returns counts as held
    traced = trace_step(lambda: returned.append(step()), 0, torch.device("cpu"))
    return traced.peak_bytes
