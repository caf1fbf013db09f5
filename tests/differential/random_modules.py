"""Random small models, from a seed, with the features that make liveness hard.

A model is a list of layers applied to a running value of shape (batch, tokens, width), with skip
connections to any earlier value, shared layers, views, in-place updates, dropout, buffers, and
extra outputs.  The same seed always makes the same model, budget and inputs.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

WIDTHS = (8, 12, 16)
HEADS = 2


@dataclass(frozen=True)
class Sample:
    """One random model with its input and budget.

    Attributes:
        module: maps a tensor to a tuple of tensors, the first of which is the main output.
        shape: of the input.
        input_requires_grad: whether the caller wants the input's gradient.
        budget: in any form that the option takes.
    """

    module: RandomModule
    shape: tuple[int, int, int]
    input_requires_grad: bool
    budget: float | str


class Mutating(nn.Module):
    """In-place updates of a fresh copy and of views of it."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x * 0.5
        y.add_(0.25)
        y[:, 0].mul_(2)
        y.transpose(1, 2)[:, 1:3].tanh_()
        return y


class Viewing(nn.Module):
    """Views of views, put together again."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        left, right = x.chunk(2, dim=2)
        rolled = torch.cat([x[:, 1:], x[:, :1]], dim=1)
        swapped = torch.cat([right, left], dim=2)
        return swapped.flatten(1).view_as(x) * torch.sigmoid(rolled.transpose(1, 2)).transpose(1, 2)


class Convolving(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.convolution = nn.Conv1d(width, width, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.relu(self.convolution(x.transpose(1, 2))).transpose(1, 2)


class BatchNormalizing(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(x.transpose(1, 2)).transpose(1, 2)


class Attending(nn.Module):
    def __init__(self, width: int, *, dropout: float, causal: bool) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.dropout, self.causal = dropout, causal

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (t.unflatten(2, (HEADS, -1)).transpose(1, 2) for t in self.qkv(x).chunk(3, dim=2))
        y = F.scaled_dot_product_attention(q, k, v, dropout_p=self.dropout, is_causal=self.causal)
        return self.out(y.transpose(1, 2).flatten(2))


class Sorting(nn.Module):
    """Several outputs of one operator, some unused, integers among them."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        values, order = x.sort(dim=2)
        largest, where = x.max(dim=1, keepdim=True)
        variance, mean = torch.var_mean(x, dim=2, keepdim=True)
        picked = x.gather(2, order)
        return torch.where(where == 0, values, picked - mean) * (1 + variance).rsqrt() + largest


class Averaging(nn.Module):
    """A buffer that each step updates and reads."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.register_buffer("average", torch.zeros(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.average.mul_(0.5).add_(x.detach().mean((0, 1)), alpha=0.5)
        return x - self.average


class Gating(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(2 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, value = self.up(x).chunk(2, dim=-1)
        return self.down(F.silu(gate) * value)


def _makers(width: int, choose: random.Random) -> list[Callable[[], nn.Module]]:
    dropout = choose.choice([0.0, 0.1, 0.5])
    return [
        lambda: nn.Linear(width, width, bias=choose.random() < 0.7),
        lambda: nn.Sequential(nn.Linear(width, width), nn.GELU()),
        lambda: nn.Sequential(nn.Linear(width, width), nn.ReLU(inplace=True)),
        lambda: nn.LayerNorm(width),
        lambda: BatchNormalizing(width),
        lambda: Convolving(width),
        lambda: Attending(width, dropout=dropout, causal=choose.random() < 0.5),
        lambda: nn.Dropout(choose.choice([0.1, 0.5])),
        lambda: Gating(width),
        lambda: Averaging(width),
        Mutating,
        Viewing,
        Sorting,
        nn.Tanh,
        lambda: nn.Softmax(dim=-1),
    ]


class RandomModule(nn.Module):
    """``layers[schedule[i]]`` applied in turn, with skips and branches; see `make`."""

    def __init__(self, choose: random.Random, width: int) -> None:
        super().__init__()
        makers = _makers(width, choose)
        self.layers = nn.ModuleList(choose.choice(makers)() for _ in range(choose.randint(2, 12)))
        count = len(self.layers)
        # Some layers run more than once, with the same weights.
        self.schedule = [
            choose.randrange(count) if choose.random() < 0.15 else i for i in range(count)
        ]
        self.skips = [
            choose.randrange(i + 1) if choose.random() < 0.3 else None for i in self.range
        ]
        self.branches = [
            choose.choice(["none", "add", "multiply", "concatenate"]) for _ in self.range
        ]
        self.checkpointed = [choose.random() < 0.1 for _ in self.range]
        self.returned = {i for i in self.range if choose.random() < 0.15}
        self.residual = choose.random() < 0.5
        for layer in self.layers:
            if choose.random() < 0.1:
                layer.requires_grad_(False)
        self.scale = nn.Parameter(torch.ones(width))  # so that something is always trained

    @property
    def range(self) -> range:
        return range(len(self.layers))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        x = x * self.scale
        values = [x]
        extra = []
        for i in self.range:
            layer = self.layers[self.schedule[i]]
            if self.checkpointed[i]:
                y = torch.utils.checkpoint.checkpoint(layer, x, use_reentrant=False)
            else:
                y = layer(x)
            skip = self.skips[i]
            if skip is not None:
                y = self._branch(y, values[skip], self.branches[i])
            x = x + y if self.residual else y
            values.append(x)
            if i in self.returned:
                extra.append(x[:, ::2] if i % 2 else x)
        return x, *extra

    @staticmethod
    def _branch(y: torch.Tensor, other: torch.Tensor, how: str) -> torch.Tensor:
        match how:
            case "add":
                return y + other
            case "multiply":
                return y * other.sigmoid()
            case "concatenate":
                both = torch.cat([y, other], dim=-1)
                return both.unflatten(-1, (2, -1)).mean(-2)
            case _:
                return y


def make(seed: int) -> Sample:
    """The model of ``seed``."""
    choose = random.Random(seed)
    torch.manual_seed(seed)
    width = choose.choice(WIDTHS)
    module = RandomModule(choose, width)
    shape = (choose.choice([2, 4, 8]), choose.choice([4, 8, 16]), width)
    input_requires_grad = choose.random() < 0.5
    budget: float | str = choose.choice(["min", round(choose.uniform(0.15, 1.0), 2)])
    return Sample(module, shape, input_requires_grad, budget)
