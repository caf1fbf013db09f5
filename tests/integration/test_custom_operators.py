"""Operators of the user's own: what they hold inside, and whether they may run again."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import dtrcompile
from dtrcompile.passes import declared
from dtrcompile.passes.device import workspaces
from dtrcompile.passes.device.workspaces import workspace_bytes
from dtrcompile.passes.errors import OptionError
from workloads.training import (
    Compile,
    Observed,
    assert_bitwise,
    compile_dtr,
    live_peak_bytes,
    observe,
    observe_dtr,
    state_of,
    static_bytes,
)

ROWS, WIDTH, COPIES = 64, 32, 16
RUNS: list[tuple[int, ...]] = []


@torch.library.custom_op("dtrcompile_tests::hungry", mutates_args=())
def hungry(x: Tensor) -> Tensor:
    RUNS.append(tuple(x.shape))
    torch.rand(2)  # the state of the generator is the user's
    return x.repeat(COPIES, 1)[: len(x)].sin()


@hungry.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


def _save(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:  # noqa: ARG001
    ctx.save_for_backward(inputs[0])


hungry.register_autograd(
    lambda ctx, gradient: gradient * ctx.saved_tensors[0].cos(), setup_context=_save
)


@torch.library.custom_op("dtrcompile_tests::positive", mutates_args=())
def positive(x: Tensor) -> Tensor:
    if not bool((x > 0).all()):
        raise KeyError("not for zeros")
    return x.clone()


@positive.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


OPERATOR = torch.ops.dtrcompile_tests.hungry.default


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    torch._dynamo.reset()
    dtrcompile.clear_reports()
    monkeypatch.setattr(workspaces, "_CACHE", {})
    monkeypatch.setattr(workspaces, "_UNKNOWN", {})
    monkeypatch.setattr(declared._declared, "by_name", {})
    RUNS.clear()
    yield


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(3):
            x = hungry(self.first(x))
        return self.second(x).square().mean()


def test_an_operator_is_measured_on_zeros() -> None:
    x = torch.randn(ROWS, WIDTH)
    state = torch.random.get_rng_state()
    # The repeated rows, float32; what it returns is counted as its output.
    expected = COPIES * ROWS * WIDTH * 4
    assert workspace_bytes(OPERATOR, (x,), {}, x) == expected
    assert torch.equal(torch.random.get_rng_state(), state)
    runs = len(RUNS)
    assert workspace_bytes(OPERATOR, (x,), {}, x) == expected
    assert len(RUNS) == runs > 0


def test_what_was_declared_is_not_run() -> None:
    x = torch.randn(ROWS, WIDTH)
    dtrcompile.declare_operator(hungry, workspace_bytes=77)
    assert workspace_bytes(OPERATOR, (x,), {}, x) == 77
    dtrcompile.declare_operator(
        torch.ops.dtrcompile_tests.hungry, workspace_bytes=lambda x: COPIES * x.nbytes
    )
    assert workspace_bytes(OPERATOR, (x,), {}, x) == COPIES * x.nbytes
    assert not RUNS


def test_what_cannot_be_run_is_in_the_report() -> None:
    def forward(x: Tensor) -> Tensor:
        return positive(x) * 2

    # Under the eager executor, which runs each operator as it is, no workspace counts.
    workspace_bytes(torch.ops.dtrcompile_tests.positive.default, (torch.ones(3),), {}, None)
    compile_dtr(forward, "100%")(torch.ones(3))
    (note,) = dtrcompile.reports()[0].notes
    assert "dtrcompile_tests.positive" in note
    assert "not for zeros" in note and "declare_operator" in note


def scenario(compile_: Compile) -> Observed:
    model = Model()
    loss = compile_(model)(torch.randn(ROWS, WIDTH))
    loss.backward()
    return {"loss": loss, **state_of(model)}


@pytest.mark.parametrize("name", [OPERATOR, "dtrcompile_tests::hungry", hungry])
def test_only_what_is_declared_pure_is_computed_again(name: object) -> None:
    expected = observe(scenario, lambda model: model)
    assert_bitwise(observe_dtr(scenario, "min"), expected)
    again = set(dtrcompile.reports()[0].recomputed)
    assert not any("hungry" in operator for operator in again)
    dtrcompile.declare_operator(name, pure=True)
    assert_bitwise(observe_dtr(scenario, "min"), expected)
    again = set(dtrcompile.reports()[0].recomputed)
    assert any("hungry" in operator for operator in again)


@pytest.mark.parametrize("operator", ["hungry", 3, torch.sin, "a::b::c"])
def test_what_is_no_operator_is_refused(operator: object) -> None:
    with pytest.raises(OptionError, match="not an operator"):
        dtrcompile.declare_operator(operator)


def test_negative_bytes_are_refused() -> None:
    with pytest.raises(OptionError, match="0 or more"):
        dtrcompile.declare_operator(hungry, workspace_bytes=-1)


@pytest.mark.slow
@pytest.mark.inductor
def test_the_promise_holds_under_inductor() -> None:
    model, x = Model(), torch.randn(ROWS, WIDTH)
    compiled = compile_dtr(model, "min", compiler="inductor")
    compiled(x).backward()
    model.zero_grad()
    held = static_bytes(model, x) + live_peak_bytes(lambda: compiled(x).backward())
    promised = dtrcompile.reports()[-1].promised_peak_bytes
    assert promised > COPIES * ROWS * WIDTH * 4
    assert held == promised
