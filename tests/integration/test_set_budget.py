"""The budget of a compiled model is changed while it trains."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import dtrcompile
from dtrcompile import InfeasibleBudgetError, OptionError, set_budget
from dtrcompile.options import Options
from dtrcompile.passes.graphs.executor import clear_executor_log, executor_log
from dtrcompile.report import compilations
from dtrcompile.steps import budgeted
from workloads.training import compile_dtr, gradients_of, live_peak_bytes, static_bytes

pytestmark = pytest.mark.usefixtures("nothing_compiled")

WIDTH, ROWS = 64, 512


class WithLoss(nn.Module):
    def __init__(self, n_layers: int = 8) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(n_layers))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = nn.functional.gelu(layer(x))
        return x.square().mean()


def model_and_rows() -> tuple[WithLoss, Tensor]:
    torch.manual_seed(0)
    return WithLoss(), torch.randn(ROWS, WIDTH)


def step(compiled: nn.Module, x: Tensor) -> tuple[int, dict[str, Tensor]]:
    """Bytes counted in a training step, and its gradients."""
    compiled.zero_grad()
    clear_executor_log()
    compiled(x).backward()
    counted = max(b for record in executor_log() for b in record.counted_bytes)
    return counted, {n: g.clone() for n, g in gradients_of(compiled).items()}


def test_each_step_has_the_budget_that_was_set_before_it() -> None:
    model, x = model_and_rows()
    compiled = compile_dtr(model, "100%")
    unbudgeted, expected = step(compiled, x)
    smallest = 0
    for budget in ("60%", "min", 3 * unbudgeted // 4, "60%"):
        set_budget(compiled, budget)
        counted, gradients = step(compiled, x)
        torch.testing.assert_close(gradients, expected, rtol=0, atol=0)
        if budget == "min":
            smallest = counted
        else:
            allowed = int(0.6 * unbudgeted) if budget == "60%" else int(budget)
            assert 0.8 * allowed < counted <= allowed
    assert smallest < unbudgeted / 2
    budgets = [report.budget for report in dtrcompile.reports()]
    assert budgets == ["100%", "60%", "min", str(3 * unbudgeted // 4)]


def test_a_budget_that_comes_back_compiles_nothing() -> None:
    model, x = model_and_rows()
    compiled = compile_dtr(model, "100%")
    counted = {"100%": step(compiled, x)[0]}
    for budget in ("70%", "min"):
        set_budget(compiled, budget)
        counted[budget] = step(compiled, x)[0]
    before = compilations()
    for budget in ("70%", "100%", "min", "70%"):
        set_budget(model, budget)  # of the module itself: the same graphs
        assert step(compiled, x)[0] == counted[budget]
    assert compilations() == before


def test_the_budget_that_was_left_longest_ago_is_forgotten(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(budgeted, "_MAX_BUDGETS", 2)
    model, x = model_and_rows()
    compiled = compile_dtr(model, "100%")
    step(compiled, x)
    compiled_for = []
    for budget in ("80%", "100%", "70%", "100%", "80%"):
        before = compilations()
        set_budget(compiled, budget)
        step(compiled, x)
        if compilations() > before:
            compiled_for.append(budget)
    assert compiled_for == ["80%", "70%", "80%"]


def test_cuda_graphs_of_other_budgets_are_not_kept() -> None:
    for inductor, may in (
        ({"mode": "reduce-overhead"}, True),
        ({"mode": "max-autotune"}, True),
        ({"triton.cudagraphs": True}, True),
        ({"mode": "max-autotune-no-cudagraphs"}, False),
        ({}, False),
    ):
        assert budgeted._may_hold_memory(Options.parse({"inductor": inductor})) is may


def test_a_model_whose_graphs_are_not_found_is_named(caplog: pytest.LogCaptureFixture) -> None:
    model, x = model_and_rows()
    set_budget(WithLoss(1), "60%")
    assert "found no compiled graph" not in caplog.text  # none was compiled yet
    step(compile_dtr(model, "100%"), x)
    set_budget(WithLoss(1), "60%")
    assert "set_budget found no compiled graph that reads a parameter of WithLoss" in caplog.text


def test_a_step_ends_under_the_budget_that_it_began_with() -> None:
    model, x = model_and_rows()
    compiled = compile_dtr(model, "100%")
    unbudgeted = step(compiled, x)[0]
    compiled.zero_grad()
    first = compiled(x)
    set_budget(compiled, "50%")
    second = compiled(x)  # a call of the same step
    assert [report.budget for report in dtrcompile.reports()] == ["100%"]
    (first + second).backward()
    del first, second
    assert step(compiled, x)[0] <= unbudgeted // 2
    assert [report.budget for report in dtrcompile.reports()] == ["100%", "50%"]


def test_graphs_that_are_compiled_later_have_the_budget_that_was_set() -> None:
    model, x = model_and_rows()
    compiled = compile_dtr(model, "100%")
    unbudgeted = step(compiled, x)[0]
    set_budget(compiled, "60%")
    compiled.eval()
    with torch.no_grad():
        compiled(x[:100])
    compiled.train()
    assert step(compiled, x)[0] <= 0.6 * unbudgeted
    assert {report.budget for report in dtrcompile.reports()} == {"100%", "60%"}


def test_set_before_the_first_call() -> None:
    model, x = model_and_rows()
    compiled = compile_dtr(model, "100%")
    set_budget(model, "min")
    counted = step(compiled, x)[0]
    (report,) = dtrcompile.reports()
    assert report.budget == "min"
    assert counted == report.promised_peak_bytes


def test_only_the_graphs_of_the_model_change() -> None:
    model, x = model_and_rows()
    other = WithLoss(4)
    compiled, apart = compile_dtr(model, "100%"), compile_dtr(other, "100%")
    step(compiled, x)
    unchanged = step(apart, x)[0]
    set_budget(compiled, "50%")
    step(compiled, x)
    assert step(apart, x)[0] == unchanged


def test_after_a_refusal_another_budget_can_be_set() -> None:
    model, x = model_and_rows()
    compiled = compile_dtr(model, "100%")
    expected = step(compiled, x)[1]
    set_budget(compiled, "1%")
    for _ in range(2):
        with pytest.raises(InfeasibleBudgetError) as refused:
            step(compiled, x)
    minimum = refused.value.minimum_bytes
    assert minimum is not None
    set_budget(compiled, minimum)
    counted, gradients = step(compiled, x)
    assert counted <= minimum
    torch.testing.assert_close(gradients, expected, rtol=0, atol=0)


def test_sizes_that_change_keep_the_new_budget() -> None:
    model, _ = model_and_rows()
    compiled = compile_dtr(model, "100%", dynamic=True)
    budget = step(compiled, torch.randn(ROWS, WIDTH))[0] // 2
    set_budget(compiled, budget)
    for rows in (ROWS // 2, ROWS, 100):
        assert step(compiled, torch.randn(rows, WIDTH))[0] <= budget


def test_what_set_budget_cannot_use() -> None:
    model, _ = model_and_rows()
    with pytest.raises(OptionError, match="budget"):
        set_budget(model, "12 parsecs")
    with pytest.raises(OptionError, match="GELU has none"):
        set_budget(nn.GELU(), "1GiB")
    with pytest.raises(OptionError, match="function has none"):
        set_budget(lambda x: x, "1GiB")  # type: ignore[arg-type]


@pytest.mark.slow
def test_under_inductor_the_allocator_sees_the_new_budget() -> None:
    model, x = model_and_rows()
    compiled = compile_dtr(model, "100%", compiler="inductor")
    static = static_bytes(model, x)

    def held() -> int:
        model.zero_grad()
        return static + live_peak_bytes(lambda: compiled(x).backward())

    held()
    unbudgeted = held()
    set_budget(compiled, unbudgeted // 2)
    compiled(x).backward()
    assert held() <= unbudgeted // 2
