"""``nn.LSTM``, ``nn.GRU`` and ``nn.RNN`` within a budget, with Dynamo's ``allow_rnn``."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from workloads.training import (
    Compile,
    Observed,
    assert_close,
    check_reports,
    compile_dtr,
    live_peak_bytes,
    observe,
    observe_dtr,
    recomputed_operators,
    state_of,
    static_bytes,
)


@pytest.fixture(autouse=True)
def allow_rnn() -> Iterator[None]:
    with torch._dynamo.config.patch(allow_rnn=True):
        yield


class Tagger(nn.Module):
    def __init__(self, recurrent: type[nn.RNNBase], **settings: Any) -> None:
        super().__init__()
        self.recurrent = recurrent(6, 8, batch_first=True, **settings)
        width = 8 * (2 if settings.get("bidirectional") else 1)
        self.head = nn.Linear(width, 4)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden, _ = self.recurrent(tokens)
        return self.head(hidden).square().mean()


@pytest.mark.parametrize(
    ("recurrent", "settings"),
    [
        (nn.LSTM, {}),
        (nn.LSTM, {"num_layers": 2, "bidirectional": True, "bias": False}),
        (nn.GRU, {}),
        (nn.RNN, {}),
    ],
    ids=str,
)
def test_trains_at_the_smallest_budget(
    recurrent: type[nn.RNNBase], settings: dict[str, Any]
) -> None:
    def scenario(compile_: Compile) -> Observed:
        model = Tagger(recurrent, **settings)
        loss = compile_(model)(torch.randn(2, 3, 6))
        loss.backward()
        return {"loss": loss, **state_of(model)}

    expected = observe(scenario, lambda model: model)
    # (In another order of first runs, the least memory takes no recomputation.)
    observed = observe_dtr(scenario, "min", fullgraph=True, planner="program-order")
    assert_close(observed, expected)
    assert recomputed_operators() > 0


def test_without_gradients() -> None:
    def scenario(compile_: Compile) -> Observed:
        model = Tagger(nn.LSTM)
        with torch.no_grad():
            return {"loss": compile_(model)(torch.randn(2, 3, 6))}

    assert_close(observe_dtr(scenario, "min"), observe(scenario, lambda model: model))


@pytest.mark.slow
@pytest.mark.inductor
def test_an_lstm_under_inductor() -> None:
    """Before it was unrolled, the process ended in ``free(): invalid pointer``."""
    torch._dynamo.reset()
    model, tokens = Tagger(nn.LSTM), torch.randn(4, 3, 6)
    model(tokens).backward()
    expected = [p.grad.clone() for p in model.parameters()]
    compiled = compile_dtr(model, "min", compiler="inductor")
    model.zero_grad()
    compiled(tokens).backward()
    assert_close([p.grad for p in model.parameters()], expected)
    check_reports("min")
    model.zero_grad()
    from dtrcompile import reports

    held = static_bytes(model, tokens) + live_peak_bytes(lambda: compiled(tokens).backward())
    assert held == reports()[-1].promised_peak_bytes
