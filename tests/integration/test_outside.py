"""What runs outside of the graphs is said: once, with file and line, and what to do about it."""

from __future__ import annotations

import gc
import inspect
import logging
import traceback
import weakref
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import dtrcompile
from dtrcompile.outside.uncompiled import forget, graph_break, told
from dtrcompile.passes.torch_private import counters
from workloads.training import compile_dtr

WIDTH = 32
LOGGER = logging.getLogger("a model's")


@pytest.fixture(autouse=True)
def fresh(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    torch._dynamo.reset()
    forget()
    dtrcompile.clear_reports()
    caplog.set_level(logging.WARNING, logger="dtrcompile")
    yield
    dtrcompile.reset_defaults()


def batch(rows: int = 4) -> torch.Tensor:
    return torch.randn(rows, WIDTH)


def line_of(function: Callable[..., Any], text: str) -> str:
    """``file:line`` of the first line of ``function`` that holds ``text``."""
    lines, first = inspect.getsourcelines(function)
    found = next(i for i, line in enumerate(lines) if text in line)
    return f"{inspect.getsourcefile(function)}:{first + found}"


class TwoLayers(nn.Module):
    """`between` runs between the layers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.between(self.first(x))).square().mean()

    def between(self, x: torch.Tensor) -> torch.Tensor:
        return x.relu()


class Prints(TwoLayers):
    def between(self, x: torch.Tensor) -> torch.Tensor:
        print("between")
        return x


class Logs(TwoLayers):
    def between(self, x: torch.Tensor) -> torch.Tensor:
        LOGGER.error("between")
        return x


class Disables(TwoLayers):
    def between(self, x: torch.Tensor) -> torch.Tensor:
        return disabled(x)


@torch._dynamo.disable
def disabled(x: torch.Tensor) -> torch.Tensor:
    return x.sin()


class Branches(TwoLayers):
    def between(self, x: torch.Tensor) -> torch.Tensor:
        if x.sum() > 0:
            return x * 2
        return x


class ReadsAValue(TwoLayers):
    def between(self, x: torch.Tensor) -> torch.Tensor:
        return x * x.sum().item()


class Recurs(TwoLayers):
    def __init__(self) -> None:
        super().__init__()
        self.recurrent = nn.LSTM(WIDTH, WIDTH)

    def between(self, x: torch.Tensor) -> torch.Tensor:
        return self.recurrent(x)[0]


@pytest.mark.parametrize(
    ("model", "text", "remedy"),
    [
        (Prints, "print(", "reorderable_logging_functions"),
        (Logs, "LOGGER.error", "ignore_logging_functions"),
        (Disables, "disabled(x)", "Take torch.compiler.disable off"),
        (Branches, "if x.sum()", "torch.where or torch.cond"),
        (ReadsAValue, "item()", "Keep the value a tensor"),
        (Recurs, "self.recurrent(x)", "allow_rnn = True"),
    ],
)
def test_graph_breaks_and_functions_left_to_eager(
    model: type[TwoLayers], text: str, remedy: str
) -> None:
    compiled = compile_dtr(model(), "100%")
    for _ in range(3):
        compiled(batch()).backward()
    (message,) = told()
    assert message.startswith(line_of(model.between, text) + ": "), message
    assert remedy in message
    if dtrcompile.reports():
        assert message in dtrcompile.reports()[0].notes


def test_the_remedy_for_a_logger() -> None:
    compile_dtr(Logs(), "100%")(batch()).backward()
    (message,) = told()
    assert "ignore_logging_functions.add(logging.Logger.error) before" in message
    torch._dynamo.reset()
    with torch._dynamo.config.patch(ignore_logging_functions={logging.Logger.error}):
        compile_dtr(Logs(), "100%", fullgraph=True)(batch()).backward()
    assert not told()


def test_a_break_inside_of_what_a_line_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    """Dynamo then tells the backend no reason (the loss function of transformers' models)."""
    gm = torch.fx.symbolic_trace(TwoLayers())
    line = traceback.FrameSummary(__file__, 3, "forward")
    gm.compile_subgraph_reason = SimpleNamespace(
        reason="step_unsupported", user_stack=[line], graph_break=True
    )
    reason = (
        "a reason\n  Explanation: loggers.\n  method: <Logger x (INFO)>.info_once, logging.Logger"
    )
    monkeypatch.setitem(counters, "graph_break", {"an earlier one": 1, reason: 1})
    message = graph_break(gm)
    assert message.startswith(f"{__file__}:3: ")
    assert "Dynamo says: loggers. Run" in message and "logging.Logger.info_once" in message


def test_a_model_that_runs_inside(caplog: pytest.LogCaptureFixture) -> None:
    model = TwoLayers()
    compiled = compile_dtr(model, "100%")
    for _ in range(3):
        compiled(batch()).backward()
        model.zero_grad()
    with torch.no_grad():
        compiled(batch(7))
    outputs = compile_dtr(nn.Linear(WIDTH, WIDTH), "100%")(batch())
    outputs.sum().backward()  # which holds nothing
    assert not told()
    assert not caplog.records


def test_it_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    for _ in range(2):
        compile_dtr(Prints(), "100%")(batch()).backward()
    assert [record.getMessage() for record in caplog.records] == list(told())
    assert len(caplog.records) == 1


def test_errors_that_are_suppressed() -> None:
    with torch._dynamo.config.patch(suppress_errors=True):
        compile_dtr(TwoLayers(), 100)(batch()).backward()
    (message,) = told()
    assert message.startswith(line_of(TwoLayers.forward, "def forward")), message
    assert "InfeasibleBudgetError" in message and "without a budget" in message
    assert not dtrcompile.reports()


def test_the_recompile_limit() -> None:
    compiled = compile_dtr(TwoLayers(), "100%", dynamic=False)
    with torch._dynamo.config.patch(recompile_limit=2):
        for rows in (2, 3):
            compiled(batch(rows)).backward()
        assert not told()
        for rows in (4, 5, 6):
            loss = compiled(batch(rows))
            loss.backward()
    (message,) = told()
    assert message.startswith(line_of(TwoLayers.forward, "def forward")), message
    assert "compiled 2 times" in message and "mark_dynamic" in message
    assert f"(called at {line_of(test_the_recompile_limit, 'loss = ')})" in message


def test_the_recompile_limit_of_another_backend() -> None:
    compiled = torch.compile(TwoLayers(), backend="eager", dynamic=False)
    with torch._dynamo.config.patch(recompile_limit=2):
        for rows in (2, 3, 4):
            compiled(batch(rows)).backward()
    torch.compile(Recurs(), backend="eager")(batch()).backward()
    assert not told()


def test_gradients_taken_by_torch_func() -> None:
    model = compile_dtr(TwoLayers(), "100%")
    parameters = dict(model.named_parameters())

    def loss(values: dict[str, torch.Tensor]) -> torch.Tensor:
        return torch.func.functional_call(model, values, (batch(),))

    torch.func.grad(loss)(parameters)
    (message,) = told()
    assert "torch.compile(step" in message
    assert str(inspect.getsourcefile(test_gradients_taken_by_torch_func)) in message


def test_a_compiled_function_that_trains() -> None:
    """It breaks at ``backward()``; what autograd and the optimizer call of this package's is no
    part of it."""
    modules = [nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(8))) for _ in range(2)]
    modules[1].load_state_dict(modules[0].state_dict())

    def step_of(module: nn.Module) -> Callable[[torch.Tensor], torch.Tensor]:
        optimizer = torch.optim.SGD(module.parameters(), 0.1, momentum=0.9)

        def step(x: torch.Tensor) -> torch.Tensor:
            loss = module(x).square().mean()
            loss.backward()
            nn.utils.clip_grad_norm_(module.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()
            return loss.detach()

        return step

    step, plain = map(step_of, modules)
    compiled = compile_dtr(step, "80%", compiler="eager")
    x = batch(256)
    for _ in range(4):
        torch.testing.assert_close(compiled(x), plain(x))
    (message,) = told()
    assert message.startswith(line_of(step, "loss.backward()"))
    assert "dtrcompile.train_step" in message
    training, *others = dtrcompile.reports()
    assert training.kind == "training"
    # Of the optimizer, and of what reads no parameter: each may hold a share of the training step.
    budgets = [r.budget_bytes for r in others if r.budget_bytes is not None]
    assert len(budgets) >= 2
    assert min(budgets) >= int(0.8 * training.baseline_peak_bytes)


def test_a_loss_outside() -> None:
    compiled = compile_dtr(nn.Linear(WIDTH, 64), "100%")
    for _ in range(2):
        loss = F.cross_entropy(compiled(batch()), torch.zeros(4, dtype=torch.long))
        loss.backward()
    (message,) = told()
    assert message.startswith(line_of(test_a_loss_outside, "loss.backward()")), message
    # 4 x 64 probabilities in float32, and one loss.
    assert "LogSoftmax" in message and "1.0 KiB" in message
    assert f"at {line_of(test_a_loss_outside, 'cross_entropy')}" in message


def test_a_gradient_that_is_given_by_hand() -> None:
    compiled = compile_dtr(nn.Linear(WIDTH, 64), "100%")
    for _ in range(2):
        y = compiled(batch())
        given = y.detach().requires_grad_()
        F.cross_entropy(given, torch.zeros(4, dtype=torch.long)).backward()
        y.backward(given.grad)
    (message,) = told()
    where = line_of(test_a_gradient_that_is_given_by_hand, "y.backward(given.grad)")
    assert message.startswith(where), message
    assert "a gradient of 1.0 KiB" in message and "'reserve'" in message
    called_at = line_of(test_a_gradient_that_is_given_by_hand, "y = compiled(batch())")
    assert f"at {called_at}" in message


def test_a_gradient_of_nothing_but_ones_is_no_news() -> None:
    y = compile_dtr(nn.Linear(WIDTH, 64), "100%")(batch())
    y.backward(torch.ones(()).expand_as(y))
    assert not told()


def test_a_gradient_that_autograd_gives_inside_of_a_checkpoint() -> None:
    compiled = compile_dtr(nn.Linear(WIDTH, WIDTH), "100%")
    x = batch().requires_grad_()
    checkpoint(compiled, x, use_reentrant=True).mul(2).sum().backward()
    assert not told()


def test_nothing_waits_for_a_backward_that_never_comes() -> None:
    compiled = compile_dtr(TwoLayers(), "100%")
    gc.collect()
    gc.disable()
    try:
        loss = compiled(batch())
        node = weakref.ref(loss.grad_fn)
        del loss
        assert node() is None
    finally:
        gc.enable()


def test_under_fullgraph_the_user_sees_the_exception() -> None:
    with pytest.raises(torch._dynamo.exc.Unsupported):
        compile_dtr(Prints(), "100%", fullgraph=True)(batch())
    assert not told()


def test_defaults_that_come_too_late(caplog: pytest.LogCaptureFixture) -> None:
    from dtrcompile.backend import dtr

    dtrcompile.set_defaults(budget="100%", compiler="eager")
    compiled = torch.compile(TwoLayers(), backend=dtr)
    dtrcompile.set_defaults(budget="1MiB")  # nothing is compiled yet
    compiled(batch()).backward()
    assert dtrcompile.reports()[0].budget == "1MiB"
    dtrcompile.set_defaults(budget="1MiB")  # says nothing new
    assert not caplog.records
    dtrcompile.set_defaults(budget="min")
    (record,) = caplog.records
    assert "budget='min'" in record.getMessage() and "graph 0 " in record.getMessage()
    torch._dynamo.reset()
    dtrcompile.clear_reports()
    compiled(batch()).backward()
    assert dtrcompile.reports()[0].budget == "min"


def test_defaults_do_not_concern_graphs_with_options(caplog: pytest.LogCaptureFixture) -> None:
    compile_dtr(TwoLayers(), "100%")(batch()).backward()
    dtrcompile.set_defaults(budget="min")
    assert not caplog.records
