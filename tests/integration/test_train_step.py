"""`dtrcompile.train_step`: the usual loop's numbers, in fewer bytes."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn, optim

import dtrcompile
from dtrcompile import InfeasibleBudgetError, OptionError, UnsupportedOptimizerError
from dtrcompile.demo.memory import static_bytes, trace_step
from workloads.training import compile_dtr, unwrap

pytestmark = pytest.mark.usefixtures("nothing_compiled")

LOGGER = logging.getLogger(__name__)
Make = Callable[[Iterable[Any]], optim.Optimizer]

OPTIMIZERS: dict[str, Make] = {
    "SGD": lambda p: optim.SGD(p, lr=0.05),
    "SGD with momentum": lambda p: optim.SGD(
        p, lr=0.05, momentum=0.9, nesterov=True, weight_decay=0.1
    ),
    "Adam": lambda p: optim.Adam(p, lr=1e-2, amsgrad=True),
    "AdamW": lambda p: optim.AdamW(p, lr=1e-2, weight_decay=0.1),
    "Adafactor": lambda p: optim.Adafactor(p, lr=1e-2, weight_decay=0.1),
    "RAdam": lambda p: optim.RAdam(p, lr=1e-2),
}


class Net(nn.Module):
    def __init__(self, dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(12, 16, bias=False, dtype=dtype)
        self.norm = nn.BatchNorm1d(16, dtype=dtype)
        self.second = nn.Linear(16, 5, dtype=dtype)
        self.dropout = 0.2

    def forward(self, x: Tensor) -> Tensor:
        h = F.dropout(torch.tanh(self.norm(self.first(x))), self.dropout, self.training)
        return self.second(h)  # type: ignore[no-any-return]


def batch(i: int, rows: int = 8, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(i)
    return (
        torch.randn(rows, 12, generator=generator, dtype=dtype),
        torch.randint(5, (rows,), generator=generator),
    )


def groups(model: nn.Module) -> list[dict[str, Any]]:
    """Without weight decay for what has one dimension."""
    wide = [p for p in model.parameters() if p.dim() > 1]
    return [
        {"params": wide},
        {"params": [p for p in model.parameters() if p.dim() == 1], "weight_decay": 0.0},
    ]


class Pair:
    """A model trained by `train_step`, and a copy trained in the usual loop."""

    def __init__(self, make: Make, *, model: nn.Module | None = None, **given: Any) -> None:
        self.model = model or Net()
        self.other = copy.deepcopy(self.model)
        self.optimizer, self.usual = make(groups(self.model)), make(groups(self.other))
        self.step = dtrcompile.train_step(
            self.model, self.optimizer, F.cross_entropy, budget="min", compiler="eager", **given
        )
        self.compiled = compile_dtr(self.other, 1 << 30, compiler="eager")

    def loss(self, x: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(self.compiled(x), labels)

    def run(self, i: int, **given: Any) -> None:
        """One step of each, of equal loss."""
        x, labels = batch(i, **given)
        torch.manual_seed(i)
        found = self.step(x, labels)
        torch.manual_seed(i)
        self.usual.zero_grad()
        expected = self.backward(x, labels)
        self.usual.step()
        assert not found.requires_grad
        torch.testing.assert_close(found, expected.detach(), rtol=1e-6, atol=0)

    def backward(self, x: Tensor, labels: Tensor) -> Tensor:
        """The loss of the usual loop, whose gradients it leaves."""
        loss = self.loss(x, labels)
        loss.backward()
        return loss

    def check(self, tolerance: float = 1e-6) -> None:
        """All that is trained, and what the optimizer knows, is the same."""
        for name, value in self.model.state_dict().items():
            expected = self.other.state_dict()[name]
            torch.testing.assert_close(value, expected, rtol=tolerance, atol=1e-9)
        states = zip(
            *(o.state_dict()["state"].items() for o in (self.optimizer, self.usual)), strict=True
        )
        for (_, state), (_, expected) in states:
            for name, value in state.items():
                torch.testing.assert_close(value, expected[name], rtol=tolerance, atol=1e-9)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_losses_and_parameters_are_those_of_the_loop(name: str) -> None:
    pair = Pair(OPTIMIZERS[name])
    schedulers = [optim.lr_scheduler.CosineAnnealingLR(o, 20) for o in (pair.optimizer, pair.usual)]
    for i in range(20):
        pair.run(i)
        for scheduler in schedulers:
            scheduler.step()
    pair.check()
    # Another learning rate is no other graph.
    assert len(dtrcompile.reports()) == 2
    assert all(p.grad is None for p in pair.model.parameters())


def test_the_loop_can_be_taken_up_again_and_left() -> None:
    pair = Pair(OPTIMIZERS["AdamW"])
    for i in range(3):
        pair.run(i)
    x, labels = batch(3)
    for model, optimizer in ((pair.model, pair.optimizer), (pair.other, pair.usual)):
        optimizer.zero_grad()
        model.eval()
        F.cross_entropy(model(x), labels).backward()
        model.train()
        optimizer.step()
        saved = copy.deepcopy(optimizer.state_dict())
        optimizer.load_state_dict(saved)  # other tensors
        optimizer.zero_grad()
    pair.run(4)
    pair.check()


def test_gradients_are_clipped_to_a_norm() -> None:
    class Clipped(Pair):
        def backward(self, x: Tensor, labels: Tensor) -> Tensor:
            loss = super().backward(x, labels)
            assert nn.utils.clip_grad_norm_(self.other.parameters(), 0.05) > 0.05
            return loss

    pair = Clipped(OPTIMIZERS["SGD with momentum"], max_norm=0.05)
    for i in range(3):
        pair.run(i)
    pair.check()


def test_a_batch_is_computed_in_micro_batches() -> None:
    class InParts(Pair):
        def backward(self, x: Tensor, labels: Tensor) -> Tensor:
            losses = []
            for part, answers in zip(x.chunk(4), labels.chunk(4), strict=True):
                loss = self.loss(part, answers)
                (loss / 4).backward()
                losses.append(loss.detach())
            return torch.stack(losses).mean()

    model = Net()
    model.dropout = 0.0  # from one seed, a graph draws for all micro-batches at once
    pair = InParts(OPTIMIZERS["Adam"], model=model, accumulate=4)
    for i in range(3):
        pair.run(i)
    pair.check()
    with pytest.raises(OptionError, match=r"accumulate=4 cuts a batch .* have 7 samples"):
        pair.step(*batch(0, rows=7))


def test_batches_of_another_size() -> None:
    pair = Pair(OPTIMIZERS["SGD"])
    for i, rows in enumerate((8, 5, 8)):
        pair.run(i, rows=rows)
    pair.check()


def test_what_does_not_train_stays_as_it_is() -> None:
    model = Net()
    model.first.requires_grad_(False)
    before = model.first.weight.clone()
    pair = Pair(OPTIMIZERS["AdamW"], model=model)
    for i in range(2):
        pair.run(i)
    pair.check()
    assert torch.equal(model.first.weight, before)


def test_autocast_is_for_the_model_alone() -> None:
    model = Net(torch.float32)
    other = copy.deepcopy(model)
    first, second = (OPTIMIZERS["Adafactor"](m.parameters()) for m in (model, other))
    step = dtrcompile.train_step(model, first, F.cross_entropy, budget="min", compiler="eager")
    compiled = compile_dtr(other, 1 << 30, compiler="eager")
    for i in range(3):
        x, labels = batch(i, dtype=torch.float32)
        torch.manual_seed(i)
        with torch.autocast("cpu", torch.bfloat16):
            found = step(x, labels)
        torch.manual_seed(i)
        second.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            expected = F.cross_entropy(compiled(x), labels)
        expected.backward()
        second.step()
        torch.testing.assert_close(found, expected.detach(), rtol=1e-5, atol=0)
    for a, b in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


@dataclass
class Output:
    loss: Tensor


@pytest.mark.parametrize("form", ["a tensor", "a mapping", "an attribute"])
def test_a_model_that_returns_its_loss(form: str) -> None:
    class Whole(Net):
        def forward(self, x: Tensor, labels: Tensor) -> Any:  # type: ignore[override]
            loss = F.cross_entropy(super().forward(x), labels)
            match form:
                case "a tensor":
                    return loss
                case "a mapping":
                    return {"loss": loss, "other": x}
                case _:
                    return Output(loss)

    model, other = Whole(), compile_dtr(Net(), 1 << 30, compiler="eager")
    before = model.second.weight.clone()
    optimizer = OPTIMIZERS["SGD"](model.parameters())
    step = dtrcompile.train_step(model, optimizer, budget="min", compiler="eager")
    x, labels = batch(0)
    torch.manual_seed(0)
    found = step(x, labels=labels)
    torch.manual_seed(0)
    torch.testing.assert_close(found, F.cross_entropy(other(x), labels).detach())
    assert not torch.equal(model.second.weight, before)


def test_what_the_model_logs_ends_no_graph() -> None:
    class Talking(Net):
        def forward(self, x: Tensor) -> Tensor:
            LOGGER.warning("of some shape")
            return super().forward(x)

    pair = Pair(OPTIMIZERS["SGD"], model=Talking())
    pair.run(0)
    pair.check()


def layers() -> nn.Module:
    torch.manual_seed(0)
    found: list[nn.Module] = []
    for _ in range(8):
        found += [nn.Linear(256, 256), nn.Tanh()]
    return nn.Sequential(*found)


@pytest.mark.slow
def test_inductor_holds_little_more_than_the_state() -> None:
    """Weight decay too: Inductor takes a product and a scaled addition for one call, wrongly."""
    model, other = layers(), layers()
    make = OPTIMIZERS["SGD with momentum"]
    optimizer, usual = make(groups(model)), make(groups(other))
    step = dtrcompile.train_step(model, optimizer, F.mse_loss, budget="min")
    inputs = torch.randn(16, 256), torch.randn(16, 256)
    step(*inputs)
    momenta = [s["momentum_buffer"] for s in optimizer.state.values()]
    before_bytes = static_bytes(*model.parameters(), *momenta, *inputs)
    held = trace_step(lambda: step(*inputs), before_bytes, torch.device("cpu"))
    (report,) = dtrcompile.reports()
    assert held.peak_bytes == report.promised_peak_bytes
    assert report.promised_peak_bytes < before_bytes + 3 * 256 * 256 * 4
    for _ in range(2):
        usual.zero_grad()
        F.mse_loss(other(inputs[0]), inputs[1]).backward()
        usual.step()
    for a, b in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


# --- refusals -----------------------------------------------------------------------------------


def test_a_budget_that_cannot_be_kept() -> None:
    model = Net()
    optimizer = OPTIMIZERS["Adam"](model.parameters())
    step = dtrcompile.train_step(model, optimizer, F.cross_entropy, budget=1000, compiler="eager")
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(Exception) as caught:
        step(*batch(0))
    refusal = unwrap(caught.value)
    assert isinstance(refusal, InfeasibleBudgetError)
    assert refusal.minimum_bytes is not None and refusal.minimum_bytes > 1000
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name])


def test_optimizers_that_cannot_be_part_of_a_graph() -> None:
    model = Net()
    parameters = list(model.parameters())
    with pytest.raises(UnsupportedOptimizerError, match="LBFGS"):
        dtrcompile.train_step(model, optim.LBFGS(parameters), F.cross_entropy)
    with pytest.raises(UnsupportedOptimizerError, match="dampening"):
        dtrcompile.train_step(
            model, optim.SGD(parameters, lr=0.1, momentum=0.9, dampening=0.5), F.cross_entropy
        )
    with pytest.raises(UnsupportedOptimizerError, match="none of the model's"):
        other = optim.SGD([*parameters, nn.Parameter(torch.zeros(3))], lr=0.1)
        dtrcompile.train_step(model, other, F.cross_entropy)
    hooked = optim.SGD(parameters, lr=0.1)
    hooked.register_step_post_hook(lambda *_: None)
    with pytest.raises(UnsupportedOptimizerError, match="hooks"):
        dtrcompile.train_step(model, hooked, F.cross_entropy)


@pytest.mark.parametrize("given", [{"accumulate": 0}, {"max_norm": 0.0}, {"accumulate": True}])
def test_arguments_are_checked(given: dict[str, Any]) -> None:
    model = Net()
    with pytest.raises(OptionError, match=next(iter(given))):
        dtrcompile.train_step(model, optim.SGD(model.parameters(), lr=0.1), **given)


def test_options_are_checked_at_once() -> None:
    model = Net()
    with pytest.raises(OptionError, match="budgett"):
        dtrcompile.train_step(model, optim.SGD(model.parameters(), lr=0.1), budgett="1GiB")
