"""``dtrcompile.watch()``: what a step held, what was promised, and what was live outside."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import dtrcompile
from dtrcompile.passes.errors import DTRError
from tests.integration.test_outside import line_of
from workloads.training import compile_dtr

ROWS, WIDTH, CLASSES = 256, 64, 1024


@pytest.fixture(autouse=True)
def fresh() -> None:
    torch._dynamo.reset()
    dtrcompile.clear_reports()


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, CLASSES))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


def test_a_step_whose_loss_is_outside() -> None:
    model, x = Net(), torch.randn(ROWS, WIDTH)
    labels = torch.zeros(ROWS, dtype=torch.long)
    compiled = compile_dtr(model, "min")

    def step() -> None:
        scores = compiled(x)
        loss = F.cross_entropy(scores, labels)
        loss.backward()

    for _ in range(2):  # the second is planned for what the loss was seen to hold
        step()
        model.zero_grad()
    with dtrcompile.watch("cpu") as seen:
        step()
    assert not seen.was_compiling
    (report,) = dtrcompile.reports()
    assert seen.promised_bytes == report.step_peak_bytes
    assert seen.observed_bytes > 0
    lines = {held.where: held for held in seen.outside}
    # Log-probabilities: one for each score, float32.  They live until their gradient is there.
    held = lines[line_of(step, "cross_entropy")]
    assert ROWS * CLASSES * 4 <= held.size_bytes <= ROWS * CLASSES * 4 + 8
    assert "cross_entropy" in held.what
    labels_held = [held for held in seen.outside if held.what == "other tensors"]
    assert labels_held and labels_held[0].size_bytes >= labels.nbytes
    text = str(seen)
    assert "promised" in text and line_of(step, "loss.backward()") in text


@pytest.mark.inductor
def test_what_is_inside_is_as_promised() -> None:
    class WithLoss(Net):
        def forward(self, x: Tensor) -> Tensor:
            return self.layers(x).square().mean()

    model, x = WithLoss(), torch.randn(ROWS, WIDTH)
    compiled = compile_dtr(model, "min", compiler="inductor")
    compiled(x).backward()
    model.zero_grad()
    with dtrcompile.watch("cpu") as seen:
        compiled(x).backward()
    assert seen.observed_bytes - seen.outside_bytes == seen.promised_bytes
    # What other tests have left, but nothing of this step.
    assert {held.where for held in seen.outside} <= {"before the step"}


def test_what_was_there_before_the_step() -> None:
    model, x = Net(), torch.randn(ROWS, WIDTH)
    unread = nn.Linear(100, 100)
    optimizer = torch.optim.Adam(model.parameters())
    compiled = compile_dtr(model, "100%")
    unread.weight.grad = torch.zeros_like(unread.weight)
    for _ in range(2):
        compiled(x).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    with dtrcompile.watch("cpu") as seen:
        compiled(x).sum().backward()
    held = {h.what: h.size_bytes for h in seen.outside if h.where == "before the step"}
    parameter_bytes = sum(p.nbytes for p in model.parameters())
    # Other tests may have left something for the garbage collector.
    assert held["gradients kept from before"] >= unread.weight.nbytes
    assert held["optimizer state (Adam)"] >= 2 * parameter_bytes
    assert held["parameters that no graph reads"] >= sum(p.nbytes for p in unread.parameters())


def test_a_batch_that_is_a_part_of_a_data_set() -> None:
    data = torch.randn(64, 256, 64)  # 4 MiB, batches of 64 KiB
    model = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64))
    compiled = compile_dtr(model, "1MiB")
    for i in range(3):
        model.zero_grad()
        compiled(data[i]).square().mean().backward()
    model.zero_grad()
    with dtrcompile.watch() as seen:
        compiled(data[3]).square().mean().backward()
    assert seen.promised_bytes is not None
    assert seen.promised_bytes < 1 << 20
    assert seen.observed_bytes - seen.outside_bytes <= seen.promised_bytes
    (rest,) = [h for h in seen.outside if "reads a part" in h.what]
    assert rest.size_bytes == data.numel() * 4 - 256 * 64 * 4


def test_a_model_that_is_not_compiled() -> None:
    model, x = Net(), torch.randn(ROWS, WIDTH)
    with dtrcompile.watch("cpu") as seen:
        model(x).sum().backward()
    assert seen.promised_bytes is None
    assert "no graph ran" in str(seen)
    assert line_of(test_a_model_that_is_not_compiled, "model(x).sum()") in str(seen)


def test_a_step_that_compiles() -> None:
    with dtrcompile.watch("cpu") as seen:
        compile_dtr(Net(), "100%")(torch.randn(ROWS, WIDTH)).sum().backward()
    assert seen.was_compiling
    assert "watch a later step" in str(seen)


def n_events(seen: dtrcompile.Watch) -> int:
    pending = list(seen._profile.profiler.kineto_results.experimental_event_tree())
    n = 0
    while pending:
        n += 1
        pending.extend(pending.pop().children)
    return n


@pytest.mark.parametrize("compiler", ["Dynamo's", "the ledger's"])
def test_the_calls_of_a_compiler_are_not_profiled(compiler: str) -> None:
    model, x = Net(), torch.randn(ROWS, WIDTH)
    compiled = compile_dtr(model, "100%")

    def step() -> None:
        scores = compiled(x)
        F.cross_entropy(scores, torch.zeros(ROWS, dtype=torch.long)).backward()

    if compiler == "the ledger's":
        step()
        dtrcompile.set_budget(compiled, "min")
    with dtrcompile.watch("cpu") as seen:
        before = F.softmax(x, -1)
        step()
    assert seen.was_compiling
    # Compiling makes some hundred thousand calls of Python functions.
    assert n_events(seen) < 20_000
    # What is allocated before is known by its line, what is allocated afterwards by its operator.
    where = {held.what: held.where for held in seen.outside}
    assert before.nbytes == x.nbytes
    line = line_of(test_the_calls_of_a_compiler_are_not_profiled, "F.softmax")
    assert where["aten::softmax"] == line
    assert where["aten::cross_entropy_loss"] == ""
    model.zero_grad()
    with dtrcompile.watch("cpu") as seen:
        step()
    assert line_of(step, "F.cross_entropy") in str(seen)


def test_the_account_of_a_new_size_is_not_profiled() -> None:
    """What a graph of any size holds is counted before its first call at a size."""
    compiled = compile_dtr(Net(), "100%", dynamic=True)
    for rows in (ROWS, ROWS // 2):
        for _ in range(3):
            compiled(torch.randn(rows, WIDTH)).sum().backward()
    with dtrcompile.watch("cpu") as seen:
        compiled(torch.randn(ROWS // 4, WIDTH)).sum().backward()
    assert not seen.was_compiling
    assert n_events(seen) < 5_000
    assert "graphs met new sizes meanwhile" in str(seen)
    with dtrcompile.watch("cpu") as seen:
        compiled(torch.randn(ROWS // 4, WIDTH)).sum().backward()
    assert "graphs met new sizes meanwhile" not in str(seen)


def test_dynamo_may_be_reset_meanwhile() -> None:
    """Dynamo then forgets whom it tells that it compiles."""
    with dtrcompile.watch("cpu"):
        torch._dynamo.reset()
    with dtrcompile.watch("cpu") as seen:
        compile_dtr(Net(), "100%")(torch.randn(ROWS, WIDTH)).sum().backward()
    assert n_events(seen) < 20_000


def test_watching_twice_is_refused() -> None:
    with (
        dtrcompile.watch("cpu"),
        pytest.raises(DTRError, match="one at a time"),
        dtrcompile.watch("cpu"),
    ):
        pass
    with dtrcompile.watch("cpu"):
        pass


def test_an_error_in_the_step_is_the_users() -> None:
    with pytest.raises(KeyError), dtrcompile.watch("cpu"):
        raise KeyError("the user's")
    with dtrcompile.watch("cpu"):
        pass
