"""Training steps whose largest values are computed in chunks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import dtrcompile
from dtrcompile import InfeasibleBudgetError
from dtrcompile.demo.memory import static_bytes, trace_step
from dtrcompile.passes.fitting import settings
from dtrcompile.passes.graphs.executor import clear_executor_log, executor_log
from workloads.training import assert_close, compile_dtr, gradients_of, unwrap

pytestmark = pytest.mark.usefixtures("nothing_compiled")

WORDS, WIDTH, TOKENS = 4096, 16, 288  # scores of 4.5 MiB


class Model(nn.Module):
    def __init__(self, loss: Callable[..., Tensor] = F.cross_entropy) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, WIDTH)
        self.hidden = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, WORDS)
        self.loss = loss

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        h = torch.tanh(self.hidden(F.dropout(self.embedding(tokens), 0.1, self.training)))
        return self.loss(self.head(h), labels)


def made(**given: Any) -> tuple[Model, tuple[Tensor, Tensor]]:
    torch.manual_seed(0)
    model = Model(**given)
    return model, (torch.randint(WORDS, (TOKENS,)), torch.randint(WORDS, (TOKENS,)))


def gradients(compiled: Any, inputs: tuple[Tensor, ...]) -> dict[str, Tensor | None]:
    torch.manual_seed(1)
    compiled.zero_grad(set_to_none=True)
    compiled(*inputs).backward()
    return {n: None if g is None else g.clone() for n, g in gradients_of(compiled).items()}


def smoothed(scores: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(scores, labels, label_smoothing=0.1)


@pytest.mark.parametrize("loss", [F.cross_entropy, smoothed])
def test_a_step_that_does_not_fit_whole_fits_in_chunks(loss: Callable[..., Tensor]) -> None:
    model, inputs = made(loss=loss)
    whole = compile_dtr(model, "min", chunking=False)
    expected = gradients(whole, inputs)
    smallest = dtrcompile.reports()[-1].promised_peak_bytes
    budget = smallest * 2 // 3

    with pytest.raises(Exception) as refused:
        gradients(compile_dtr(model, budget, chunking=False), inputs)
    assert isinstance(unwrap(refused.value), InfeasibleBudgetError)

    clear_executor_log()
    found = gradients(compile_dtr(model, budget), inputs)
    assert max(b for record in executor_log() for b in record.counted_bytes) <= budget
    assert_close(found, expected)  # the same dropout, too
    report = dtrcompile.reports()[-1]
    (note,) = [n for n in report.notes if n.startswith("computed in chunks")]
    assert "head" in note and "test_chunking.py" in note and "4.5 MiB" in note
    # A share is one of the step as it was.
    assert report.baseline_peak_bytes > 2 * WORDS * TOKENS * 4
    assert "head" in str(report.explain())


def test_a_step_that_fits_stays_whole() -> None:
    model, inputs = made()
    gradients(compile_dtr(model, "100%"), inputs)
    assert not any("chunks" in note for note in dtrcompile.reports()[-1].notes)


class Deep(Model):
    """Many values, of which much is computed again where the scores leave little room."""

    def __init__(self) -> None:
        super().__init__()
        self.widened = nn.Linear(WIDTH, 8 * WIDTH)
        self.layer = nn.Linear(8 * WIDTH, 8 * WIDTH)
        self.narrowed = nn.Linear(8 * WIDTH, WIDTH)

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        h = self.widened(self.embedding(tokens))
        for _ in range(25):
            h = torch.tanh(self.layer(h))
        return self.loss(self.head(self.narrowed(h)), labels)


@pytest.mark.slow
def test_a_step_that_fits_whole_is_computed_in_chunks_where_that_costs_less(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One plan tells; nothing searches for a smallest plan, which takes far longer."""

    def search(*_: Any) -> None:
        raise AssertionError("a search for the smallest plan")

    monkeypatch.setattr("dtrcompile.passes.fitting.fit.minimum_plan", search)
    model, inputs = Deep(), made()[1]
    whole, chunked = (
        dtrcompile.plan(model, *inputs, budget="75%", compiler="eager", chunking=chunking)
        for chunking in (False, True)
    )
    assert whole.fits and whole.overhead > 1.1
    assert chunked.chunks and chunked.overhead < whole.overhead
    monkeypatch.setattr("dtrcompile.compilation.in_chunks.CHUNKS", (32,))
    as_before = dtrcompile.plan(model, *inputs, budget="75%", compiler="eager")
    assert not as_before.chunks and as_before.overhead == whole.overhead


def test_small_values_stay_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dtrcompile.compilation.in_chunks.LEAST_CHUNKED_BYTES", 5 << 20)
    model, inputs = made()
    gradients(compile_dtr(model, "min"), inputs)
    assert not any("chunks" in note for note in dtrcompile.reports()[-1].notes)


def test_the_refusal_names_what_fits_in_chunks() -> None:
    model, inputs = made()
    with pytest.raises(Exception) as refused:
        gradients(compile_dtr(model, 100_000), inputs)
    refusal = unwrap(refused.value)
    assert isinstance(refusal, InfeasibleBudgetError) and refusal.minimum_bytes is not None
    gradients(compile_dtr(model, refusal.minimum_bytes), inputs)
    report = dtrcompile.reports()[-1]
    assert report.promised_peak_bytes <= refusal.minimum_bytes
    assert any("chunks" in note for note in report.notes)


def test_the_refusal_says_that_returned_values_stay_whole() -> None:
    class Both(Model):
        def forward(self, tokens: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
            scores = self.head(self.embedding(tokens))
            return self.loss(scores, labels), scores

    model, inputs = Both(), made()[1]
    with pytest.raises(Exception) as refused:
        compile_dtr(model, 5_000_000)(*inputs)[0].backward()
    refusal = unwrap(refused.value)
    assert isinstance(refusal, InfeasibleBudgetError)
    assert "The model returns 4.5 MiB of addmm (head, " in str(refusal)
    assert "computes the loss and returns nothing else" in str(refusal)


def test_a_forecast_counts_chunks_as_the_compilation_does() -> None:
    model, inputs = made()
    points = dtrcompile.sweep(model, *inputs, budgets=["100%", "min"], compiler="eager").points
    gradients(compile_dtr(model, "min"), inputs)
    assert points[1].peak_bytes == dtrcompile.reports()[-1].promised_peak_bytes
    assert points[1].peak_bytes < points[0].peak_bytes / 2
    (text,) = points[1].chunks
    assert "head" in text and text in str(points[1])
    assert points[1].overhead == dtrcompile.reports()[-1].overhead > 1
    assert points[1].baseline_cost_ns == points[0].cost_ns


def test_settings_are_in_order() -> None:
    assert list(settings.CHUNKS) == sorted(settings.CHUNKS)


def assert_held_as_promised(model: nn.Module, inputs: tuple[Tensor, ...], budget: str) -> None:
    """In chunks under Inductor: the gradients are those of plain `torch.compile`."""
    plain = gradients(torch.compile(model, dynamic=False), inputs)
    torch._dynamo.reset()
    compiled = compile_dtr(model, budget, compiler="inductor", dynamic=False)
    found = gradients(compiled, inputs)
    model.zero_grad(set_to_none=True)
    before_bytes = static_bytes(model, *inputs)
    traced = trace_step(lambda: compiled(*inputs).backward(), before_bytes, torch.device("cpu"))
    (report,) = dtrcompile.reports()
    assert any("computed in chunks" in note for note in report.notes)
    assert "verified" in report.verification and "not verified" not in report.verification
    assert traced.peak_bytes <= report.promised_peak_bytes <= report.budget_bytes
    assert_close(found, plain)


@pytest.mark.inductor
@pytest.mark.slow
def test_under_inductor_the_allocator_sees_what_is_promised() -> None:
    assert_held_as_promised(*made(), "40%")


class Images(nn.Module):
    """Two resolutions, each sample normalized by itself; the smaller one is not worth chunks."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 16, 3, padding=1)
        self.down = nn.Conv2d(16, 16, 3, padding=1)
        self.up = nn.Conv2d(16, 16, 3, padding=1)
        self.last = nn.Conv2d(16, 3, 3, padding=1)
        self.norms = nn.ModuleList([nn.GroupNorm(4, 16), nn.GroupNorm(4, 16)])

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        h = F.silu(self.norms[0](self.first(images)))
        small = self.down(F.avg_pool2d(h, 2))
        small = self.up(F.silu(self.norms[1](small)))
        return F.mse_loss(self.last(h + F.interpolate(small, scale_factor=2)), labels)


@pytest.mark.inductor
@pytest.mark.slow
def test_under_inductor_images_in_chunks_of_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    """The scale of the second norm is a buffer near convolutions, and `as_strided` reads it."""
    monkeypatch.setattr("dtrcompile.compilation.in_chunks.LEAST_CHUNKED_BYTES", 1 << 16)
    monkeypatch.setattr("dtrcompile.compilation.in_chunks.CHUNKED_PART_DIVISOR", 8)
    torch.manual_seed(0)
    images, labels = torch.randn(8, 3, 16, 16), torch.randn(8, 3, 16, 16)
    assert_held_as_promised(Images(), (images, labels), "60%")


class Tied(nn.Module):
    """A language model whose head is its embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(32 * WORDS, WIDTH)
        self.hidden = nn.Linear(WIDTH, WIDTH)

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        scores = F.linear(torch.tanh(self.hidden(self.embedding(tokens))), self.embedding.weight)
        return F.cross_entropy(scores, labels)


@pytest.mark.slow
@pytest.mark.inductor
def test_the_gradient_of_a_tied_weight_is_added_up_in_place() -> None:
    torch.manual_seed(0)
    model = Tied()
    inputs = torch.randint(32 * WORDS, (4,)), torch.randint(32 * WORDS, (4,))
    weight_bytes = model.embedding.weight.numel() * 4
    expected = gradients(torch.compile(model), inputs)
    peaks = {}
    for chunking in (False, True):
        compiled = compile_dtr(model, "min", compiler="inductor", chunking=chunking)
        assert_close(gradients(compiled, inputs), expected)
        compiled.zero_grad(set_to_none=True)
        report = dtrcompile.reports()[-1]
        step = trace_step(
            lambda c=compiled: c(*inputs).backward(),
            static_bytes(model, *inputs),
            torch.device("cpu"),
        )
        assert step.peak_bytes <= report.promised_peak_bytes
        is_told = any("made in place" in note for note in report.notes)
        assert is_told == chunking
        peaks[chunking] = report.promised_peak_bytes
    # The weight, and its gradient; without, also the one that is added to it.
    assert peaks[False] > 3 * weight_bytes
    assert peaks[True] < 2.5 * weight_bytes
