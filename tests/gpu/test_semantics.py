"""On a device: a model does under dtr what it does under plain ``torch.compile``."""

from __future__ import annotations

import pytest
import torch

from tests.gpu.comparing import (
    DEVICE,
    assert_as_exact_as,
    compiled,
    exact_gradients,
    gradients,
    net_and_batch,
    peak_bytes,
    report,
)
from tests.integration.scenarios import SCENARIOS
from workloads.training import assert_close, check_reports, compile_dtr, observe

pytestmark = [pytest.mark.gpu, pytest.mark.inductor]

CHOSEN = (
    "dropout",
    "retain_graph_with_dropout",
    "several_forwards_with_dropout_before_backward",
    "batch_norm_running_statistics",
    "tied_weights",
    "in_place_updates",
    "input_mutation",
    "outputs_that_alias_inputs",
    "embeddings",
    "gradient_accumulation",
    "channels_last",
    "checkpoint_inside",
    "checkpointed_attention",
    "checkpoint_with_dropout_inside",
)


@pytest.mark.parametrize("name", CHOSEN)
def test_a_scenario_at_the_smallest_budget(name: str) -> None:
    scenario = SCENARIOS[name]
    with DEVICE:
        expected = observe(scenario.run, torch.compile)
        observed = observe(scenario.run, lambda f: compile_dtr(f, "min", compiler="inductor"))
    check_reports("min")
    assert_close(observed, expected, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("budget", ["100%", "60%", "40%", "min"])
def test_a_step_holds_what_it_may_and_computes_what_it_should(budget: str) -> None:
    module, x = net_and_batch()
    exact = exact_gradients(module, x)
    plain = gradients(module, torch.compile(module), x)
    call = compiled(module, budget)
    ours = gradients(module, call, x)
    assert_as_exact_as(ours, plain, exact)
    found = report()
    assert found.verification.startswith("verified"), found.verification
    held_bytes = peak_bytes(module, call, x)
    assert held_bytes <= found.promised_peak_bytes
    if found.budget_bytes is not None:
        assert held_bytes <= found.budget_bytes
    assert (found.recomputed_runs > 0) == (budget != "100%")
