"""An ordinary training loop: the model is compiled, and the loss is computed outside of it."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import dtrcompile
from dtrcompile.passes.errors import InfeasibleBudgetError
from dtrcompile.passes.torch_private import counters
from workloads.training import RELEASE, compile_dtr, live_peak_bytes, static_bytes

pytestmark = pytest.mark.usefixtures("nothing_compiled")

ROWS, WIDTH, CLASSES, BLOCKS = 256, 32, 256, 6
TARGETS, LABELS = torch.rand(ROWS, CLASSES), torch.arange(ROWS) % CLASSES
# Scalars, and a value for each row.
SMALL_BYTES = 2048

LOSSES: dict[str, Callable[[Tensor], Tensor]] = {
    "cross-entropy": lambda y: F.cross_entropy(y, LABELS),
    "squared error": lambda y: F.mse_loss(y, TARGETS),
    "binary cross-entropy": lambda y: F.binary_cross_entropy_with_logits(y, TARGETS),
    "absolute error": lambda y: F.l1_loss(y, TARGETS),
    "mean and deviation": lambda y: y.mean() + y.std(),
}


def focal(y: Tensor) -> Tensor:
    """Holds more than is set aside before it is known."""
    crosses = F.binary_cross_entropy_with_logits(y, TARGETS, reduction="none")
    return ((1 - torch.sigmoid(y)) ** 2 * crosses).mean()


class Net(nn.Module):
    """Of operators that allocate what the executor counts: none of them is several in one."""

    def __init__(self) -> None:
        super().__init__()
        widths = [WIDTH, *(k * WIDTH for _ in range(BLOCKS) for k in (2, 1)), CLASSES]
        self.layers = nn.Sequential(*(nn.Linear(a, b) for a, b in itertools.pairwise(widths)))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)  # type: ignore[no-any-return]


class Loop:
    """A loop of training steps.

    Args:
        holds: the loop has the model's output in a variable until the step is over.
    """

    def __init__(
        self,
        loss: Callable[[Tensor], Tensor],
        budget: object | None,
        *,
        holds: bool = True,
        compiler: str = "eager",
        dynamic: bool | None = None,
    ) -> None:
        torch._dynamo.reset()
        dtrcompile.clear_reports()
        torch.manual_seed(0)
        self.model, self.x = Net(), torch.randn(ROWS, WIDTH)
        self.loss, self.holds = loss, holds
        self.called = (
            torch.compile(
                self.model,
                backend="aot_eager" if compiler == "eager" else compiler,
                dynamic=dynamic,
            )
            if budget is None
            else compile_dtr(self.model, budget, compiler=compiler, dynamic=dynamic)
        )

    def step_bytes_at(self, rows: int) -> int:
        """What a step of another batch holds at most."""
        self.x = torch.randn(rows, WIDTH)
        return self.step_bytes()

    def step_bytes(self) -> int:
        """What a step holds at most."""
        self.model.zero_grad(set_to_none=True)
        return static_bytes(self.model, self.x) + live_peak_bytes(self._step)

    def _step(self) -> None:
        y = self.called(self.x)
        loss = self.loss(y)
        if not self.holds:
            del y
        loss.backward()


# Before PyTorch 2.13, autograd holds what a backward is given until its end: steps were seen to
# hold 3 and 4 KiB more than their budget of 1.3 MiB.
holds_a_little_more = pytest.mark.xfail(RELEASE < (2, 13), reason="autograd holds gradients longer")
CASES = [
    pytest.param(
        name, holds, marks=holds_a_little_more if (name, holds) == ("squared error", True) else ()
    )
    for name in LOSSES
    for holds in (False, True)
]


@pytest.mark.parametrize(("name", "holds"), CASES)
def test_every_step_is_within_the_budget(name: str, holds: bool) -> None:
    plain = Loop(LOSSES[name], None, holds=holds)
    plain.step_bytes()
    budget = int(0.8 * plain.step_bytes())
    loop = Loop(LOSSES[name], budget, holds=holds)
    steps = [loop.step_bytes() for _ in range(4)]
    assert max(steps) <= budget + SMALL_BYTES
    (report,) = dtrcompile.reports()
    # What is counted for the loss is neither left out nor much too much.
    assert steps[-1] <= report.step_peak_bytes + SMALL_BYTES
    assert report.step_peak_bytes <= steps[-1] + 0.3 * TARGETS.nbytes
    assert report.recomputed_runs > 0


# Of a batch of any size.
LOSSES_OF_BATCHES: dict[str, Callable[[Tensor], Tensor]] = {
    "cross-entropy": lambda y: F.cross_entropy(y, LABELS[: len(y)]),
    "squared error": lambda y: F.mse_loss(y, TARGETS[: len(y)]),
}


@pytest.mark.parametrize(
    ("name", "compiler", "holds"),
    [
        ("cross-entropy", "eager", False),
        ("cross-entropy", "eager", True),
        ("squared error", "eager", False),
        pytest.param("squared error", "eager", True, marks=holds_a_little_more),
        *(
            pytest.param(
                "squared error", "inductor", holds, marks=(pytest.mark.inductor, pytest.mark.slow)
            )
            for holds in (False, True)
        ),
    ],
)
def test_every_batch_of_any_size_is_within_the_budget(
    name: str, compiler: str, holds: bool
) -> None:
    """The loss of a larger batch than those before is estimated before it runs."""
    loss = LOSSES_OF_BATCHES[name]
    plain = Loop(loss, None, holds=holds, compiler=compiler, dynamic=True)
    plain.step_bytes()
    budget = int(0.8 * plain.step_bytes())
    loop = Loop(loss, budget, holds=holds, compiler=compiler, dynamic=True)
    steps = [loop.step_bytes_at(rows) for rows in (200, ROWS, 100, ROWS, 230, ROWS)]
    assert max(steps) <= budget + SMALL_BYTES
    # What is set aside for the loss before it is known does not count later.
    assert steps[1] == steps[3] == steps[5] >= 0.75 * budget
    assert any(graph.recomputed_runs for graph in dtrcompile.reports())


def of_all_pairs(y: Tensor) -> Tensor:
    """Grows with the square of the batch."""
    similarities = F.normalize(y) @ F.normalize(y).T
    return F.cross_entropy(similarities, LABELS[: len(y)])


def test_only_the_size_whose_loss_has_no_room_is_refused() -> None:
    plain = Loop(of_all_pairs, None, dynamic=True)
    plain.step_bytes()
    budget = int(0.7 * plain.step_bytes())
    loop = Loop(of_all_pairs, budget, dynamic=True)
    small = [loop.step_bytes_at(rows) for rows in (50, 100)]
    for _ in range(2):
        with pytest.raises(InfeasibleBudgetError, match="smaller sizes still run") as refusal:
            loop.step_bytes_at(ROWS)
        named_bytes = refusal.value.minimum_bytes
        assert named_bytes is not None and named_bytes > budget
        small.append(loop.step_bytes_at(100))
    assert small[1] == small[2] == small[3]
    assert max(small) <= budget


def test_the_first_report_says_what_is_set_aside() -> None:
    loop = Loop(LOSSES["cross-entropy"], 10**8)
    loop.step_bytes()
    (report,) = dtrcompile.reports()
    assert any("1.0 MiB are set aside" in note for note in report.notes)
    assert report.recomputed_runs == 0


def test_a_plan_that_left_room_for_a_larger_loss_says_so_until_it_is_replaced() -> None:
    """A graph of any size is planned again when calls have lost enough compute by that."""
    loss = LOSSES["mean and deviation"]
    Loop(loss, 10**8).step_bytes()
    baseline = dtrcompile.reports()[-1].baseline_peak_bytes
    loop = Loop(loss, baseline + TARGETS.nbytes, dynamic=True)
    seen = []
    for _ in range(40):
        loop.step_bytes()
        cheapest = min(dtrcompile.reports(), key=lambda report: report.overhead)
        seen.append((cheapest.overhead, any("less room" in note for note in cheapest.notes)))
    assert seen[1][0] > 1 and seen[1][1]
    assert seen[-1] == (1.0, False)


def test_a_step_with_no_room_for_its_loss_is_refused_before_the_second() -> None:
    """The refusal names what the smallest budget holds."""
    smallest = Loop(focal, "min")
    least_bytes = [smallest.step_bytes() for _ in range(3)][-1]
    loop = Loop(focal, int(0.97 * least_bytes))
    loop.step_bytes()
    with pytest.raises(InfeasibleBudgetError, match="outside of the graphs") as refusal:
        loop.step_bytes()
    named_bytes = refusal.value.minimum_bytes
    assert named_bytes == pytest.approx(least_bytes, rel=0.05)
    again = Loop(focal, named_bytes)
    again.step_bytes()
    assert max(again.step_bytes() for _ in range(2)) <= named_bytes + SMALL_BYTES


def test_a_graph_is_traced_once_whatever_room_its_loss_may_need() -> None:
    """A loss like most others, one of an output that is given up, none: all are refused."""
    counters.clear()
    with pytest.raises(InfeasibleBudgetError) as refusal:
        Loop(focal, 400_000).step_bytes()
    assert counters["aot_autograd"]["total"] == 1
    smallest = Loop(focal, refusal.value.minimum_bytes)
    counters.clear()
    smallest.step_bytes()
    assert counters["aot_autograd"]["total"] == 1
    # The loss has been seen, and there is no room for it: that is one more.
    with pytest.raises(InfeasibleBudgetError, match="outside of the graphs"):
        smallest.step_bytes()
    assert counters["aot_autograd"]["total"] == 2


def test_where_only_the_model_fits_the_first_step_runs_with_a_warning(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """There may be no loss: a part of a model, whose gradient comes from elsewhere."""
    budget = 1_100_000
    with caplog.at_level(logging.WARNING, logger="dtrcompile"):
        loop = Loop(Tensor.sum, budget)
        steps = [loop.step_bytes() for _ in range(3)]
    assert max(steps) <= budget
    warned = [r for r in caplog.records if "leaves room for every loss" in r.getMessage()]
    assert len(warned) == 1
