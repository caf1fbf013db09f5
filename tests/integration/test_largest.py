"""`dtrcompile.largest`: its size trains within the budget, the next is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import dtrcompile
from dtrcompile.demo.gpt import GPT, GPTSizes
from dtrcompile.passes.errors import InfeasibleBudgetError, OptionError, VerificationError
from dtrcompile.passes.fitting.fit import PlanSizeModel
from dtrcompile.passes.fitting.measured import Measured
from dtrcompile.passes.graphs.executor import clear_executor_log, executor_log
from dtrcompile.passes.program.sizes import Sizes
from dtrcompile.probe import planned_for
from workloads.training import compile_dtr, unwrap


def _gpt() -> tuple[nn.Module, Callable[[int], tuple[Tensor, ...]]]:
    model = GPT(GPTSizes(layers=2, width=32, heads=2, context=16, vocabulary=64))
    return model, lambda n: (torch.randint(64, (n, 16)), torch.randint(64, (n, 16)))


def _convolutions() -> tuple[nn.Module, Callable[[int], tuple[Tensor, ...]]]:
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(512, 4)
    )
    return model, lambda n: (torch.randn(n, 3, 8, 8),)


def _perceptron() -> tuple[nn.Module, Callable[[int], tuple[Tensor, ...]]]:
    layers = [m for _ in range(4) for m in (nn.Linear(32, 32), nn.GELU())]
    return nn.Sequential(*layers), lambda n: (torch.randn(n, 32),)


def _trains(model: nn.Module, inputs: tuple[Tensor, ...], budget: int) -> bool:
    torch._dynamo.reset()
    clear_executor_log()
    try:
        compile_dtr(model, budget, dynamic=False)(*inputs).mean().backward()
    except Exception as error:
        assert isinstance(unwrap(error), InfeasibleBudgetError)
        return False
    held = max(b for record in executor_log() for b in record.counted_bytes)
    assert held <= budget
    return True


@pytest.mark.parametrize(
    ("make", "budget"),
    [
        pytest.param(_gpt, 300_000, marks=pytest.mark.sweep),
        pytest.param(_gpt, 500_000, marks=pytest.mark.sweep),
        (_convolutions, 200_000),
        pytest.param(_convolutions, 450_000, marks=pytest.mark.sweep),
        pytest.param(_perceptron, 45_000, marks=pytest.mark.slow),
        pytest.param(_perceptron, 100_000, marks=pytest.mark.sweep),
    ],
)
def test_the_next_size_is_refused(
    make: Callable[[], tuple[nn.Module, Callable[[int], tuple[Tensor, ...]]]], budget: int
) -> None:
    model, inputs_of = make()
    dtrcompile.clear_reports()
    found = dtrcompile.largest(model, *inputs_of(3), budget=budget, compiler="eager")
    assert not dtrcompile.reports()  # nothing was compiled
    assert found.points[-1].size == found.size > 3
    assert found.points[-1].overhead > 1
    assert found.points[-1].promised_peak_bytes <= budget
    assert str(found.size) in str(found)
    assert _trains(model, inputs_of(found.size), budget)
    assert not _trains(model, inputs_of(found.refused_size), budget)


@pytest.mark.slow
def test_the_longest_sequence() -> None:
    model = GPT(GPTSizes(layers=1, width=32, heads=2, context=256, vocabulary=64))
    tokens = torch.randint(64, (2, 8))
    found = dtrcompile.largest(
        model, tokens, tokens, symbol="length", budget=200_000, compiler="eager", most=200
    )
    assert 8 < found.size < 200
    longer = torch.randint(64, (2, found.refused_size))
    assert not _trains(model, (longer, longer), 200_000)


@pytest.mark.slow
def test_sizes_far_above_the_answer_are_not_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a library call holds inside is measured on tensors of the size that is asked about: a
    million times the given batch took all of the machine's memory."""
    asked: list[int] = []
    peak_at = PlanSizeModel.at

    def at(self: PlanSizeModel, sizes: Sizes) -> Measured:
        asked.extend(sizes.by_symbol.values())
        return peak_at(self, sizes)

    monkeypatch.setattr(PlanSizeModel, "at", at)
    model, inputs_of = _perceptron()
    found = dtrcompile.largest(model, *inputs_of(3), budget=100_000, compiler="eager")
    assert max(asked) <= 4 * found.size


@pytest.mark.slow
def test_a_size_that_cannot_be_a_symbol(monkeypatch: pytest.MonkeyPatch) -> None:
    def planned(*args: Any, **how: Any) -> Any:
        if how.get("dynamic_dimensions"):
            raise VerificationError("Inductor's wrapper could not be replayed")
        return planned_for(*args, **how)

    model, inputs_of = _perceptron()
    expected = dtrcompile.largest(model, *inputs_of(3), budget=100_000, compiler="eager")
    monkeypatch.setattr("dtrcompile.largest_size.planned_for", planned)
    assert dtrcompile.largest(model, *inputs_of(3), budget=100_000, compiler="eager") == expected


def test_a_budget_that_nothing_fits() -> None:
    model, inputs_of = _perceptron()
    with pytest.raises(InfeasibleBudgetError):
        dtrcompile.largest(model, *inputs_of(4), budget=10_000, compiler="eager")


def test_what_cannot_be_asked() -> None:
    model, inputs_of = _perceptron()
    with pytest.raises(OptionError, match="bytes"):
        dtrcompile.largest(model, *inputs_of(4), budget="50%")
    with pytest.raises(OptionError, match="batch"):
        dtrcompile.largest(model, *inputs_of(4), budget="1MiB", symbol="batches")
    with pytest.raises(OptionError, match="dimension 3"):
        dtrcompile.largest(model, *inputs_of(4), budget="1MiB", symbol=3)
