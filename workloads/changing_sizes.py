"""Models whose inputs come in many sizes, and what one call of theirs holds."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import dtrcompile
from dtrcompile.backend import dtr
from dtrcompile.demo.gpt import GPT, GPTSizes
from dtrcompile.demo.memory import static_bytes, trace_step
from dtrcompile.passes.graphs.executor import clear_executor_log, executor_log
from workloads.models import ResNet
from workloads.models import Sizes as ResNetSizes


class UNet(nn.Module):
    """Two levels of convolutions with group norm, joined by a skip connection; mean square."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, width, 3, padding=1)
        self.norms = nn.ModuleList(nn.GroupNorm(4, c) for c in (width, 2 * width, 2 * width))
        self.down = nn.Conv2d(width, 2 * width, 3, stride=2, padding=1)
        self.middle = nn.Conv2d(2 * width, 2 * width, 3, padding=1)
        self.up = nn.Conv2d(3 * width, width, 3, padding=1)
        self.out = nn.Conv2d(width, 3, 1)

    def forward(self, x: Tensor) -> Tensor:
        outer = F.silu(self.norms[0](self.stem(x)))
        inner = F.silu(self.norms[1](self.down(outer)))
        inner = inner + F.silu(self.norms[2](self.middle(inner)))
        inner = F.interpolate(inner, scale_factor=2.0)
        y: Tensor = self.out(F.silu(self.up(torch.cat([inner, outer], 1))))
        return (y - x).square().mean()


class ConvNet(nn.Module):
    """A small ResNet whose last features are averaged over the image, and a mean square."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.net = ResNet(ResNetSizes(depth=4, width=width, batch=1, length=32), classes=10)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        loss: Tensor = self.net(x, labels)
        return loss


class UnrolledLSTM(nn.Module):
    """An LSTM's cell, once for each token, and a mean square."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.cell, self.out = nn.LSTMCell(width, width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        h = c = torch.zeros_like(x[:, 0])
        losses = torch.zeros_like(x[:, 0, 0])
        for token in x.unbind(1):
            h, c = self.cell(token, (h, c))
            losses = losses + self.out(h).square().mean(-1)
        return losses.mean()


@dataclass(frozen=True)
class Model:
    """A model whose inputs come in many sizes.

    Attributes:
        make: builds the module.
        inputs: tensors of a batch size and a length.
        batches, lengths: the largest, and the steps between the sizes.
        dynamic_dims: of the first input, those that vary.
        share: percent of the largest call's unbudgeted peak that is the budget.
    """

    make: Callable[[], nn.Module]
    inputs: Callable[[int, int], tuple[Tensor, ...]]
    batches: tuple[int, int]
    lengths: tuple[int, int]
    dynamic_dims: tuple[int, ...]
    share: int = 60


def _text(batch: int, length: int) -> tuple[Tensor, ...]:
    return torch.randint(64, (batch, length)), torch.randint(64, (batch, length))


def _image(batch: int, edge: int) -> tuple[Tensor, ...]:
    return (torch.randn(batch, 3, edge, edge),)


def _labelled(batch: int, edge: int) -> tuple[Tensor, ...]:
    return torch.randn(batch, 3, edge, edge, dtype=torch.float64), torch.randint(10, (batch,))


def _sequence(batch: int, length: int) -> tuple[Tensor, ...]:
    return (torch.randn(batch, length, 16),)


_GPT = GPTSizes(layers=2, width=32, heads=2, context=64, vocabulary=64, dropout=0.0)


MODELS: dict[str, Model] = {
    "transformer": Model(lambda: GPT(_GPT), _text, (42, 2), (62, 3), (0, 1)),
    # The gradient of its concatenation holds two thirds of the whole peak.
    "unet": Model(lambda: UNet(8), _image, (42, 2), (84, 4), (0, 2, 3), 75),
    # In float32 the gradients of plain PyTorch are off by up to 1 %: maxima that are nearly equal.
    "convnet": Model(lambda: ConvNet(8).double(), _labelled, (42, 2), (152, 4), (0, 2, 3)),
    "lstm": Model(lambda: UnrolledLSTM(16), _sequence, (256, 12), (23, 1), (0,), 70),
}


def unbudgeted_bytes(model: Model, module: nn.Module, size: tuple[int, int], compiler: str) -> int:
    """What a call of these sizes holds without a budget."""
    torch._dynamo.reset()
    dtrcompile.clear_reports()
    options = {"budget": "100%", "compiler": compiler}
    compiled = torch.compile(copy.deepcopy(module), backend=dtr, dynamic=False, options=options)
    compiled(*model.inputs(*size)).backward()
    return dtrcompile.reports()[-1].baseline_peak_bytes


def held_bytes(
    module: nn.Module, compiled: Callable[..., Tensor], inputs: tuple[Tensor, ...], compiler: object
) -> int:
    """The peak of one step."""

    def step() -> None:
        compiled(*inputs).backward()  # type: ignore[no-untyped-call]

    if compiler != "eager":
        before_bytes = static_bytes(module, *inputs)
        return trace_step(step, before_bytes, torch.device("cpu")).peak_bytes
    clear_executor_log()
    step()
    return max(max(record.counted_bytes, default=0) for record in executor_log())
