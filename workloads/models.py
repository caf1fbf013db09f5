"""The models that the promises are shown on: of every kind that matters, sized for two cores.

``MODELS[name].build(seed)`` gives a module and its inputs; ``module(*inputs)`` returns a scalar
loss, so that the loss is in the compiled graph.  Random weights, CPU; the same seed gives the same
weights and inputs.  ``quick=True`` gives a variant of the same kind that compiles in seconds.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dtrcompile.demo.gpt import GPT, GPTSizes


@dataclass(frozen=True, slots=True)
class Sizes:
    """How large a model is built; each model says what the numbers mean to it."""

    depth: int
    width: int
    batch: int
    length: int


Build = Callable[[Sizes], tuple[nn.Module, tuple[Tensor, ...]]]


@dataclass(frozen=True, slots=True)
class Model:
    """A model in two sizes.

    Attributes:
        make: builds it with torch's global random state, which `build` seeds and restores.
        full, quick: the sizes.
    """

    name: str
    make: Build
    full: Sizes
    quick: Sizes

    def build(self, seed: int = 0, *, quick: bool = False) -> tuple[nn.Module, tuple[Tensor, ...]]:
        """The module, in training mode, and its inputs."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return self.make(self.quick if quick else self.full)


class MLP(nn.Module):
    """``depth`` x (Linear, GELU) of ``width``; the loss is the mean square."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        layers = [
            layer
            for _ in range(sizes.depth)
            for layer in (nn.Linear(sizes.width, sizes.width), nn.GELU())
        ]
        self.layers = nn.Sequential(*layers)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layers(x)
        return y.square().mean()


def _mlp(sizes: Sizes) -> tuple[nn.Module, tuple[Tensor, ...]]:
    return MLP(sizes), (torch.randn(sizes.batch, sizes.width),)


def _gpt(sizes: Sizes) -> tuple[nn.Module, tuple[Tensor, ...]]:
    gpt_sizes = GPTSizes(
        layers=sizes.depth,
        width=sizes.width,
        heads=max(1, sizes.width // 64),
        context=sizes.length,
    )
    text = torch.randint(gpt_sizes.vocabulary, (sizes.batch, sizes.length + 1))
    return GPT(gpt_sizes), (text[:, :-1].contiguous(), text[:, 1:].contiguous())


class _CausalLMLoss(nn.Module):
    """A Hugging Face causal language model, reduced to its loss."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: Tensor) -> Tensor:
        loss: Tensor = self.model(input_ids=tokens, labels=tokens, use_cache=False).loss
        return loss


def _gpt2_hf(sizes: Sizes) -> tuple[nn.Module, tuple[Tensor, ...]]:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=2048,
        n_positions=sizes.length,
        n_embd=sizes.width,
        n_layer=sizes.depth,
        n_head=4,
    )
    model = GPT2LMHeadModel(config).train()
    # Not named, it is looked up with a logged warning, at which Dynamo breaks the graph.
    model.loss_type = "ForCausalLM"
    return _CausalLMLoss(model), (torch.randint(2048, (sizes.batch, sizes.length)),)


class Bottleneck(nn.Module):
    """ResNet-50's block (He et al., CVPR 2016, figure 5): 1x1, 3x3, 1x1, a shortcut."""

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        outputs = 4 * width
        self.conv1 = nn.Conv2d(inputs, width, 1, bias=False)
        self.norm1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, stride, 1, bias=False)
        self.norm2 = nn.BatchNorm2d(width)
        self.conv3 = nn.Conv2d(width, outputs, 1, bias=False)
        self.norm3 = nn.BatchNorm2d(outputs)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or inputs != outputs:
            self.shortcut = nn.Sequential(
                nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs)
            )

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.norm1(self.conv1(x)))
        y = F.relu(self.norm2(self.conv2(y)))
        return F.relu(self.norm3(self.conv3(y)) + self.shortcut(x))


class ResNet(nn.Module):
    """ResNet-50-like with batch norm: ``depth`` 50 gives its (3, 4, 6, 3) blocks, else one each."""

    def __init__(self, sizes: Sizes, classes: int = 100) -> None:
        super().__init__()
        counts = (3, 4, 6, 3) if sizes.depth == 50 else (1, 1, 1, 1)
        self.stem = nn.Sequential(
            nn.Conv2d(3, sizes.width, 7, 2, 3, bias=False),
            nn.BatchNorm2d(sizes.width),
            nn.ReLU(),
            nn.MaxPool2d(3, 2, 1),
        )
        blocks: list[nn.Module] = []
        channels = sizes.width
        for stage, count in enumerate(counts):
            width = sizes.width << stage
            for index in range(count):
                blocks.append(Bottleneck(channels, width, 2 if stage and not index else 1))
                channels = 4 * width
        self.blocks = nn.Sequential(*blocks)
        self.head = nn.Linear(channels, classes)

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        features = self.blocks(self.stem(images)).mean((2, 3))
        return F.cross_entropy(self.head(features), labels)


def _resnet(sizes: Sizes) -> tuple[nn.Module, tuple[Tensor, ...]]:
    images = torch.randn(sizes.batch, 3, sizes.length, sizes.length)
    return ResNet(sizes), (images, torch.randint(100, (sizes.batch,)))


class _UNetBlock(nn.Sequential):
    """Twice (3x3 convolution, group norm, SiLU)."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(
            nn.Conv2d(inputs, outputs, 3, padding=1),
            nn.GroupNorm(8, outputs),
            nn.SiLU(),
            nn.Conv2d(outputs, outputs, 3, padding=1),
            nn.GroupNorm(8, outputs),
            nn.SiLU(),
        )


class UNet(nn.Module):
    """``depth`` levels, each with a long skip connection (Ronneberger et al., MICCAI 2015)."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        widths = [sizes.width << level for level in range(sizes.depth + 1)]
        self.down = nn.ModuleList(
            _UNetBlock(a, b) for a, b in zip([3, *widths], widths[:-1], strict=False)
        )
        self.middle = _UNetBlock(widths[-2], widths[-1])
        self.up = nn.ModuleList(
            _UNetBlock(a + b, b)
            for a, b in zip(reversed(widths[1:]), reversed(widths[:-1]), strict=True)
        )
        self.out = nn.Conv2d(widths[0], 3, 1)

    def forward(self, images: Tensor, targets: Tensor) -> Tensor:
        x = images
        skips = []
        for block in self.down:
            x = block(x)
            skips.append(x)
            x = F.max_pool2d(x, 2)
        x = self.middle(x)
        for block in self.up:
            x = F.interpolate(x, scale_factor=2.0, mode="nearest")
            x = block(torch.cat([x, skips.pop()], 1))
        return F.mse_loss(self.out(x), targets)


def _unet(sizes: Sizes) -> tuple[nn.Module, tuple[Tensor, ...]]:
    shape = (sizes.batch, 3, sizes.length, sizes.length)
    return UNet(sizes), (torch.randn(shape), torch.randn(shape))


class UnrolledLSTM(nn.Module):
    """An LSTM cell over every step of a sequence, one small operator after the other."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.cell = nn.LSTMCell(sizes.width, sizes.width)
        self.head = nn.Linear(sizes.width, sizes.width)

    def forward(self, sequence: Tensor, target: Tensor) -> Tensor:
        h = c = sequence.new_zeros(sequence.shape[1], sequence.shape[2])
        for x in sequence.unbind(0):
            h, c = self.cell(x, (h, c))
        return F.mse_loss(self.head(h), target)


def _lstm(sizes: Sizes) -> tuple[nn.Module, tuple[Tensor, ...]]:
    sequence = torch.randn(sizes.length, sizes.batch, sizes.width)
    return UnrolledLSTM(sizes), (sequence, torch.randn(sizes.batch, sizes.width))


MODELS: dict[str, Model] = {
    model.name: model
    for model in (
        Model("mlp16", _mlp, Sizes(16, 256, 4096, 1), Sizes(6, 64, 512, 1)),
        Model("gpt_demo", _gpt, Sizes(6, 256, 8, 256), Sizes(2, 64, 4, 64)),
        Model("gpt2_hf", _gpt2_hf, Sizes(6, 256, 8, 256), Sizes(2, 64, 4, 64)),
        Model("resnet", _resnet, Sizes(50, 32, 8, 96), Sizes(14, 8, 4, 64)),
        Model("unet", _unet, Sizes(3, 32, 4, 128), Sizes(2, 16, 2, 64)),
        Model("lstm64", _lstm, Sizes(1, 256, 64, 64), Sizes(1, 64, 32, 12)),
    )
}
