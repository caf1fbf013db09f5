"""What backward may write over: of its own step, and only where nothing reads it again."""

from __future__ import annotations

import pytest
import torch
from torch._dynamo.utils import counters

from tests.integration.scenarios import SCENARIOS
from workloads.training import assert_close, check_reports, compile_dtr, observe

pytestmark = [pytest.mark.inductor, pytest.mark.usefixtures("planned_as_usual")]


@pytest.mark.slow
def test_two_plans_of_a_graph_wait_for_their_backwards() -> None:
    """Backward is compiled when it runs, then under what is known of its own forward."""
    scenario = SCENARIOS["several_forwards_with_dropout_before_backward"]
    expected = observe(scenario.run, torch.compile)
    observed = observe(scenario.run, lambda f: compile_dtr(f, "min", compiler="inductor"))
    check_reports("min")
    assert_close(observed, expected, rtol=1e-3, atol=1e-4)


@pytest.mark.slow
@pytest.mark.usefixtures("code_cache")
@pytest.mark.parametrize("budget", ["100%", "min"])
def test_a_cached_backward_that_writes_over_what_is_kept(budget: str) -> None:
    """Inductor's cache does not tell it from one that leaves everything as it is."""

    def model() -> torch.nn.Module:
        torch.manual_seed(0)
        layers = [m for _ in range(3) for m in (torch.nn.Linear(16, 16), torch.nn.GELU())]
        return torch.nn.Sequential(*layers)

    x = torch.randn(64, 16, requires_grad=True)
    compile_dtr(model(), budget, compiler="inductor")(x).sum().backward()
    torch._dynamo.reset()
    counters.clear()
    loss = compile_dtr(model(), budget, compiler="inductor")(x).sum()
    first, second = (torch.autograd.grad(loss, x, retain_graph=True)[0] for _ in range(2))
    assert counters["inductor"]["fxgraph_cache_hit"] == 1  # forward
    (expected,) = torch.autograd.grad(model()(x).sum(), x)
    torch.testing.assert_close(first, expected)
    torch.testing.assert_close(second, expected)
