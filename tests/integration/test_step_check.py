"""A step that the allocator saw above the budget is said; with an allocator that is none."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import pytest
import torch
from torch import nn

import dtrcompile
from dtrcompile.outside.step_check import Expected, StepCheck
from dtrcompile.outside.uncompiled import forget, told
from dtrcompile.steps import shared_graph
from tests.integration.test_outside import line_of
from workloads.training import compile_dtr

MIB = 2**20


@dataclass
class Statistics:
    """Says what it was told to."""

    allocated: int = 0
    peak: int = 0

    def allocated_bytes(self) -> int:
        return self.allocated

    def peak_bytes(self) -> int:
        return self.peak

    def reset_peak(self) -> None:
        self.peak = self.allocated


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    torch._dynamo.reset()
    forget()
    dtrcompile.clear_reports()
    yield


EXPECTED = Expected(
    allowed_bytes=10 * MIB, promised_bytes=8 * MIB, constant_bytes=2 * MIB, called_at="train.py:7"
)


def begun() -> tuple[Statistics, StepCheck]:
    """The second step begins; in the first, backward was compiled."""
    statistics = Statistics(allocated=5 * MIB)
    check = StepCheck("cuda:0", statistics)
    check.begin(EXPECTED)
    statistics.peak = 100 * MIB
    check.begin(EXPECTED)
    return statistics, check


def test_the_difference_is_named() -> None:
    statistics, check = begun()
    statistics.peak = 13 * MIB
    check.begin(EXPECTED)
    (message,) = told()
    assert message.startswith("train.py:7: ")
    assert "saw 13.0 MiB" in message and "3.0 MiB above the budget of 10.0 MiB" in message
    assert "promise 8.0 MiB" in message
    # 5 were allocated, of which the graphs count 2; 3 + 8 are 11, of the 13 seen.
    assert "3.0 MiB were there before" in message and "at least 2.0 MiB came" in message
    statistics.peak = 14 * MIB
    check.begin(EXPECTED)
    assert len(told()) == 1


def test_a_step_within_the_budget() -> None:
    statistics, check = begun()
    for peak in (8, 9, 10):
        check.begin(EXPECTED)
        statistics.peak = peak * MIB
    check.begin(EXPECTED)
    assert not told()


def test_a_peak_from_before_the_step_is_not_the_steps() -> None:
    statistics, check = begun()
    statistics.peak = 20 * MIB
    check.begin(EXPECTED)  # told
    forget()
    check.begin(EXPECTED)  # the peak has not risen since
    statistics.peak = 3 * MIB  # the user has reset it
    check.begin(EXPECTED)
    assert not told()


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(32, 32), nn.GELU(), nn.Linear(32, 32))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x).square().mean()


@pytest.mark.parametrize(("reserve", "is_told"), [(0, True), ("3MiB", False)])
def test_steps_of_a_model(monkeypatch: pytest.MonkeyPatch, reserve: object, is_told: bool) -> None:
    statistics = Statistics()
    monkeypatch.setattr(shared_graph, "check_of", lambda _: StepCheck("cuda:0", statistics))
    model = Net()
    compiled = compile_dtr(model, "8MiB" if is_told else "11MiB", reserve=reserve)

    def step() -> None:
        compiled(torch.randn(4, 32)).backward()
        model.zero_grad()

    step()
    statistics.peak = 30 * MIB  # while it compiled
    step()
    statistics.peak = 2 * MIB
    step()
    assert not told()
    statistics.peak = 10 * MIB
    step()
    assert len(told()) == is_told
    if is_told:
        assert told()[0].startswith(line_of(step, "compiled(") + ": the allocator of cuda:0 saw")
        assert "2.0 MiB above the budget of 8.0 MiB" in told()[0]


@pytest.mark.parametrize("budget", ["min", "100%", "60%"])
def test_budgets_that_say_nothing_of_the_device(
    monkeypatch: pytest.MonkeyPatch, budget: str
) -> None:
    statistics = Statistics()
    monkeypatch.setattr(shared_graph, "check_of", lambda _: StepCheck("cuda:0", statistics))
    compiled = compile_dtr(nn.Sequential(*(Net().layers for _ in range(4))), budget)
    for _ in range(3):
        compiled(torch.randn(512, 32)).sum().backward()
        statistics.peak += 30 * MIB
    assert not told()
