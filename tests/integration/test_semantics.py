"""The eager executor does what the model says, whatever the budget.

The scenarios of `scenarios` run unbudgeted (``budget=1.0``), at the smallest budget, and at half of
the baseline peak (or at the minimum that the error names).  Everything that can be observed must
agree bit for bit between those, and with plain eager PyTorch up to rounding.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import dtrcompile
from dtrcompile.options import variable_of
from dtrcompile.passes.graphs import grouping
from tests.integration.scenarios import BATCH, SCENARIOS, WIDTH, Against, UNet, batch, layers
from workloads.training import (
    UNBUDGETED,
    Compile,
    Observed,
    assert_bitwise,
    assert_close,
    compile_dtr,
    executor_checked,
    gradients_of,
    observe,
    observe_dtr,
    recomputed_operators,
    smallest_that_works,
    unwrap,
)

# Dynamo looks at ``.grad`` of every input, a non-leaf's included.
pytestmark = pytest.mark.filterwarnings(
    "ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning",
    # Dynamo makes an instance of a custom autograd function while it traces it.
    "ignore:.*should not be instantiated:DeprecationWarning",
    "ignore:flex_attention called without torch.compile:UserWarning",
)


def with_others_as_sweep(first: Sequence[str]) -> list[Any]:
    """All scenarios; `make test` runs only the first."""
    return [
        name if name in first else pytest.param(name, marks=pytest.mark.sweep) for name in SCENARIOS
    ]


@functools.cache
def unbudgeted(name: str) -> Observed:
    return observe_dtr(SCENARIOS[name].run, UNBUDGETED)


# Of one scenario at a time (the scope), so that one process runs each without a budget, once.
@pytest.mark.parametrize("name", SCENARIOS, scope="module")
def test_the_smallest_budget_changes_no_bit(name: str) -> None:
    expected = unbudgeted(name)
    observed = observe_dtr(SCENARIOS[name].run, "min")
    assert_bitwise(observed, expected)
    if SCENARIOS[name].recomputes:
        assert recomputed_operators() > 0, "\n".join(map(str, dtrcompile.reports()))


# Those that compute most again, draw, or run several times before their backward.
_HALF_FIRST = (
    "attention",
    "batch_norm_running_statistics",
    "checkpoint_with_dropout_inside",
    "convolutions",
    "dropout",
    "dropout_variants",
    "mlp_trained_for_several_steps",
    "multi_output_operators",
    "several_forwards_with_dropout_before_backward",
    "views_and_slices",
)


@pytest.mark.slow
@pytest.mark.parametrize("name", with_others_as_sweep(_HALF_FIRST), scope="module")
def test_half_the_memory_changes_no_bit(name: str) -> None:
    expected = unbudgeted(name)
    _, observed = smallest_that_works(
        lambda budget: observe_dtr(SCENARIOS[name].run, budget), "50%"
    )
    assert_bitwise(observed, expected)


# Those that read cheap values in several loops, draw, or write.
_INSIDE_FIRST = (
    "attention_with_dropout",
    "bf16_autocast",
    "in_place_updates",
    "input_mutation_that_gradients_need",
    "language_model_loss",
    "normalizations",
    "regions_with_dropout",
    "unrolled_lstm",
)


@pytest.mark.slow
@pytest.mark.parametrize("name", with_others_as_sweep(_INSIDE_FIRST), scope="module")
def test_values_that_loops_compute_inside_change_no_bit(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a GPU; the executor runs the nodes of each loop one by one."""
    expected = unbudgeted(name)
    monkeypatch.setattr(grouping, "_loads_cost_most", lambda _node: True)
    assert_bitwise(observe_dtr(SCENARIOS[name].run, "min"), expected)


# Those that save the most, draw, write, or hand on what they save.
_COPIED_FIRST = (
    "attention_with_dropout",
    "convolutions",
    "input_mutation",
    "multi_output_operators",
    "several_forwards_with_dropout_before_backward",
    "views_and_slices",
)


@pytest.mark.slow
@pytest.mark.parametrize("name", with_others_as_sweep(_COPIED_FIRST), scope="module")
def test_copies_to_the_host_change_no_bit(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = unbudgeted(name)
    monkeypatch.setenv(variable_of("offload"), "100GB/s")
    assert_bitwise(observe_dtr(SCENARIOS[name].run, "min"), expected)
    if name in _COPIED_FIRST:
        assert any(report.offloaded_bytes for report in dtrcompile.reports())


TOLERANCE = {Against.CLOSE: (1e-4, 1e-4), Against.LOOSE: (5e-2, 5e-2)}


@pytest.mark.parametrize(
    "name",
    [s.name for s in SCENARIOS.values() if s.against is not Against.RANDOM],
    scope="module",
)
def test_unbudgeted_agrees_with_eager_pytorch(name: str) -> None:
    expected = observe(SCENARIOS[name].run, lambda target: target)
    rtol, atol = TOLERANCE[SCENARIOS[name].against]
    assert_close(unbudgeted(name), expected, rtol=rtol, atol=atol)


# ------------------------------------------------------------------ random numbers


def dropout_stack() -> nn.Sequential:
    return nn.Sequential(
        *(m for _ in range(5) for m in (nn.Linear(WIDTH, WIDTH), nn.Dropout(0.3), nn.GELU())),
        nn.Dropout(0.5),
        nn.Dropout(0.5),
    )


def train_dropout_stack(compile_: Compile) -> Observed:
    module = dropout_stack()
    x = batch(4 * BATCH, WIDTH, grad=True)
    out = compile_(module)(x)
    out.square().sum().backward()
    return {"out": out, "gradient": x.grad, "gradients": gradients_of(module)}


@pytest.mark.parametrize("budget", ["90%", "80%", "70%", "60%", "50%", "40%", "30%", "min"])
def test_dropout_draws_the_same_masks_at_every_budget(budget: str) -> None:
    expected = observe_dtr(train_dropout_stack, UNBUDGETED)
    _, observed = smallest_that_works(lambda b: observe_dtr(train_dropout_stack, b), budget)
    assert_bitwise(observed, expected)


@pytest.mark.parametrize("budget", [UNBUDGETED, "min"])
def test_backward_uses_the_mask_of_forward(budget: object) -> None:
    """d dropout(x) / dx is the mask: the output where x is one.  No second run is compared."""

    def function(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        first = F.dropout(x, 0.5)
        second = F.dropout(first.exp().log(), 0.25)  # evictable values around it
        return first, second

    x = torch.ones(BATCH, WIDTH, requires_grad=True)
    with executor_checked():
        first, second = compile_dtr(function, budget)(x)
        (gradient_first,) = torch.autograd.grad(first.sum(), x, retain_graph=True)
        (gradient_second,) = torch.autograd.grad(second.sum(), x)
    torch.testing.assert_close(gradient_first, first.detach(), rtol=1e-6, atol=0)
    torch.testing.assert_close(gradient_second != 0, second.detach() != 0)
    assert 0 < int((second == 0).sum()) < second.numel()


@pytest.mark.parametrize("budget", [UNBUDGETED, "min"])
def test_two_calls_draw_different_masks(budget: object) -> None:
    compiled = compile_dtr(lambda x: F.dropout(x.sin().exp(), 0.5), budget)
    x = batch(grad=True)
    assert not torch.equal(compiled(x), compiled(x))
    torch.manual_seed(3)
    first = compiled(x)
    torch.manual_seed(3)
    assert torch.equal(first, compiled(x))


def test_fallback_random_gives_the_masks_of_eager_pytorch() -> None:
    expected = observe(train_dropout_stack, lambda target: target)
    observed = observe_dtr(train_dropout_stack, "min", inductor={"fallback_random": True})
    assert_close(observed, expected)


# ------------------------------------------------------------------ batch norm, once more


@pytest.mark.parametrize("budget", [UNBUDGETED, "min"])
def test_batch_norm_statistics_move_once_a_step(budget: object) -> None:
    """By hand: after one step from (mean 0, var 1) with momentum 0.1."""
    norm = nn.BatchNorm1d(WIDTH)
    module = nn.Sequential(*layers(2), norm, *layers(2))
    x = batch()
    with torch.no_grad():
        h = module[:4](x)
    with executor_checked():
        compile_dtr(module, budget)(x).sum().backward()
    assert int(norm.num_batches_tracked) == 1
    torch.testing.assert_close(norm.running_mean, 0.1 * h.mean(0))
    torch.testing.assert_close(norm.running_var, 0.9 + 0.1 * h.var(0))


# ------------------------------------------------------------------ inference


def test_an_inference_graph_with_skip_connections_is_planned() -> None:
    """Autodiff has no part in it: a skip is evicted on the way down and computed on the way up."""

    class Skips(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.down = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(6))
            self.up = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(6))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            skips = []
            for down in self.down:
                x = down(x).tanh()
                skips.append(x)
            for up, skip in zip(self.up, reversed(skips), strict=True):
                x = up(x).tanh() + skip
            return x

    def infer(compile_: Compile) -> Observed:
        module = Skips()
        with torch.no_grad():
            return {"out": compile_(module)(batch(16 * BATCH, WIDTH))}

    expected = observe_dtr(infer, UNBUDGETED)
    (unlimited,) = dtrcompile.reports()
    observed = observe_dtr(infer, "min")
    (smallest,) = dtrcompile.reports()
    assert_bitwise(observed, expected)
    assert smallest.promised_peak_bytes < unlimited.baseline_peak_bytes
    assert recomputed_operators() > 0


def test_inference_unet_never_promises_more_than_its_baseline() -> None:
    def infer(compile_: Compile) -> Observed:
        module = UNet()
        with torch.no_grad():
            return {"out": compile_(module)(batch(2, 3, 16, 16))}

    assert_bitwise(observe_dtr(infer, "min"), observe_dtr(infer, UNBUDGETED))


# ------------------------------------------------------------------ several budgets, several models


def test_two_models_with_their_own_budgets() -> None:
    def train_both(first_budget: object, second_budget: object) -> Observed:
        torch._dynamo.reset()
        dtrcompile.clear_reports()
        torch.manual_seed(5)
        first, second = layers(5), layers(4)
        x = batch(grad=True)
        with executor_checked():
            hidden = compile_dtr(first, first_budget)(x)
            out = compile_dtr(second, second_budget)(hidden)
            out.square().sum().backward()
        return {
            "out": out.detach(),
            "gradient": x.grad,
            "first": gradients_of(first),
            "second": gradients_of(second),
        }

    expected = train_both(UNBUDGETED, UNBUDGETED)
    assert recomputed_operators() == 0
    assert_bitwise(train_both("min", UNBUDGETED), expected)
    assert recomputed_operators() > 0
    assert_bitwise(train_both(UNBUDGETED, "min"), expected)
    assert recomputed_operators() > 0


def test_another_budget_for_the_same_module_is_another_compilation() -> None:
    """Without a reset in between: Dynamo keeps both, and neither serves the other."""
    module = layers(6)
    x = batch()
    for budget in (UNBUDGETED, "min", UNBUDGETED):
        compile_dtr(module, budget)(x).sum().backward()
    budgets = [bool(report.recomputed) for report in dtrcompile.reports()]
    assert budgets[:2] == [False, True]


def test_the_same_program_gives_the_same_plan() -> None:
    def plans() -> list[object]:
        observe_dtr(SCENARIOS["attention_with_dropout"].run, "min")
        return [
            (r.promised_peak_bytes, r.overhead, dict(r.recomputed)) for r in dtrcompile.reports()
        ]

    assert plans() == plans()


@pytest.mark.parametrize("share", [0.9, 0.7, 0.5, 0.3])
def test_budgets_in_bytes_strings_and_shares_agree(share: float) -> None:
    """The same budget in its four forms gives the same promise."""

    def step(compile_: Compile) -> Observed:
        module = layers(8)
        # A share is one of the step: what the report says of the graph is all of it.
        loss = compile_(lambda x: module(x).square().sum())
        loss(batch(16 * BATCH, WIDTH, grad=True)).backward()
        return gradients_of(module)

    observe_dtr(step, UNBUDGETED)
    (unlimited,) = dtrcompile.reports()
    budget_bytes = int(unlimited.baseline_peak_bytes * share)
    promises = []
    for budget in (share, f"{share:.0%}", budget_bytes, f"{budget_bytes}B"):
        try:
            observe_dtr(step, budget)
        except Exception as error:
            promises.append(getattr(unwrap(error), "minimum_bytes", error))
        else:
            (report,) = dtrcompile.reports()
            assert report.promised_peak_bytes <= math.ceil(unlimited.baseline_peak_bytes * share)
            promises.append(report.promised_peak_bytes)
    assert len(set(promises)) == 1, promises


def test_a_budget_of_the_baseline_peak_in_bytes_recomputes_nothing() -> None:
    # (The loss is in the graph: outside of it, the step holds more than the graph.)
    def run(compile_: Compile) -> Observed:
        module, x = layers(3), batch()
        loss = compile_(lambda x: module(x).square().mean())(x)
        loss.backward()
        return {"loss": loss}

    observe_dtr(run, UNBUDGETED)
    (unlimited,) = dtrcompile.reports()
    observe_dtr(run, unlimited.baseline_peak_bytes)
    assert recomputed_operators() == 0
    observe_dtr(run, unlimited.baseline_peak_bytes * 3 // 4)
    assert recomputed_operators() > 0


# ------------------------------------------------------------------ limits shared with AOTAutograd


def test_double_backward_raises_what_aot_autograd_raises() -> None:
    def double_backward(compile_: Compile) -> str:
        torch._dynamo.reset()
        module = layers(3)
        x = batch(grad=True)
        (gradient,) = torch.autograd.grad(compile_(module)(x).square().sum(), x, create_graph=True)
        with pytest.raises(RuntimeError) as caught:
            gradient.square().sum().backward()
        return str(caught.value)

    expected = double_backward(lambda target: torch.compile(target, backend="aot_eager"))
    assert double_backward(lambda target: compile_dtr(target, "min")) == expected
    assert "double backward" in expected


def test_backward_twice_without_retain_graph_raises() -> None:
    out = compile_dtr(layers(3), "min")(batch()).sum()
    out.backward()
    with pytest.raises(RuntimeError, match="second time"):
        out.backward()


def test_an_input_mutated_before_backward_raises_as_in_eager() -> None:
    """Saved inputs keep their version check."""
    x, w = batch(), batch(grad=True)
    out = compile_dtr(lambda x, w: (x * w).sin(), "min")(x, w)
    x.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


@pytest.mark.parametrize("dynamic", [True, False])
def test_dynamic_shapes_asked_for(dynamic: bool) -> None:
    module = layers(4)
    compiled = compile_dtr(module, "min", dynamic=dynamic)
    with executor_checked():
        for size in (6, 9, 17):
            x = batch(size, WIDTH)
            module.zero_grad(set_to_none=True)
            compiled(x).square().sum().backward()
            observed = {n: g.clone() for n, g in gradients_of(module).items()}
            module.zero_grad(set_to_none=True)
            module(x).square().sum().backward()
            assert_close(observed, gradients_of(module))


def test_fullgraph() -> None:
    module = layers(3)
    with executor_checked():
        compile_dtr(module, "min", fullgraph=True)(batch()).sum().backward()


def test_the_model_is_left_alone_by_a_failed_compilation() -> None:
    """After an infeasible budget the module still runs, and can be compiled with another."""
    module = layers(4)
    x = batch()
    with pytest.raises(Exception) as caught:
        compile_dtr(module, 1)(x)
    assert isinstance(unwrap(caught.value), dtrcompile.passes.errors.InfeasibleBudgetError)
    torch._dynamo.reset()
    compile_dtr(module, "min")(x).sum().backward()
    assert all(p.grad is not None for p in module.parameters())


def test_an_output_that_is_a_view_inside_can_be_updated() -> None:
    """The last operator of a graph may be a view; to autograd its result is none."""

    def train(compile_: Compile) -> Observed:
        x = torch.randn(2, 4, 6, 6, requires_grad=True)
        out = compile_(lambda t: F.pixel_shuffle(F.pixel_unshuffle(2 * t, 2).tanh(), 2))(x)
        out.add_(0.25).square().sum().backward()
        return {"output": out, "gradient": x.grad}

    assert_close(observe_dtr(train, UNBUDGETED), observe(train, lambda target: target))
