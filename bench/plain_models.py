"""The models of `bench.gpu`, which need nothing but PyTorch: a machine that is lent for an hour may
have nothing else.

``PLAIN[name]`` is a model of `bench.zoo` in further scales: ``quick`` (plans in seconds),
``few-gb`` (a step takes a few GB), ``2k`` and ``8k`` (the context of a language model) and
``large``.  GPT-2 XL, Llama 3.2 1B and ViT-L have their widths, heads and vocabularies, and a part
of their layers, because all layers are alike and each is compiled.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.zoo import ZOO, Built, Sizes, ZooModel
from dtrcompile.demo.gpt import GPT, GPTSizes

_CLASSES = 100
_GROUPS = 32  # of channels, of group norms


def _text(sizes: Sizes) -> tuple[Tensor, Tensor]:
    """Tokens and the next tokens."""
    text = torch.randint(sizes.vocabulary, (sizes.batch, sizes.length + 1))
    return text[:, :-1].contiguous(), text[:, 1:].contiguous()


def _gpt(sizes: Sizes) -> Built:
    model = GPT(
        GPTSizes(sizes.depth, sizes.width, sizes.heads, sizes.length, sizes.vocabulary, dropout=0.0)
    )
    return model, _text(sizes)


# --- Llama --------------------------------------------------------------------------------------


class _GroupedAttention(nn.Module):
    """Causal attention with rotary positions, in which four heads share a key and a value."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads, self.head_width = heads, width // heads
        self.shared = max(1, heads // 4)
        self.query = nn.Linear(width, width, bias=False)
        self.key_value = nn.Linear(width, 2 * self.shared * self.head_width, bias=False)
        self.out = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
        query = self.query(x).unflatten(-1, (self.heads, -1)).transpose(1, 2)
        key, value = (
            part.unflatten(-1, (self.shared, -1)).transpose(1, 2)
            for part in self.key_value(x).chunk(2, -1)
        )
        key, value = (t.repeat_interleave(self.heads // self.shared, 1) for t in (key, value))
        query, key = (_rotated(t, cosine, sine).to(value.dtype) for t in (query, key))
        y = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.out(y.transpose(1, 2).flatten(2))


def _rotated(x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    """Pairs of features turned by their position (Su et al., 2021, section 3.4.2)."""
    first, second = x.chunk(2, -1)
    return x * cosine + torch.cat((-second, first), -1) * sine


class _LlamaBlock(nn.Module):
    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        width = sizes.width
        self.attention_norm, self.mlp_norm = (nn.RMSNorm(width, eps=1e-5) for _ in range(2))
        self.attention = _GroupedAttention(width, sizes.heads)
        self.gate = nn.Linear(width, 4 * width, bias=False)
        self.up = nn.Linear(width, 4 * width, bias=False)
        self.down = nn.Linear(4 * width, width, bias=False)

    def forward(self, x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x), cosine, sine)
        y = self.mlp_norm(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


class Llama(nn.Module):
    """A language model in the form of Llama (Touvron et al., 2023), with a tied head."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.token = nn.Embedding(sizes.vocabulary, sizes.width)
        self.blocks = nn.ModuleList(_LlamaBlock(sizes) for _ in range(sizes.depth))
        self.norm = nn.RMSNorm(sizes.width, eps=1e-5)
        self.head = nn.Linear(sizes.width, sizes.vocabulary, bias=False)
        self.head.weight = self.token.weight
        nn.init.normal_(self.token.weight, std=0.02)
        half = sizes.width // sizes.heads // 2
        turns = torch.outer(torch.arange(sizes.length), 10_000.0 ** -(torch.arange(half) / half))
        self.register_buffer("cosine", torch.cat((turns, turns), -1).cos())
        self.register_buffer("sine", torch.cat((turns, turns), -1).sin())

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        x = self.token(tokens)
        for block in self.blocks:
            x = block(x, self.cosine, self.sine)
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def _llama(sizes: Sizes) -> Built:
    return Llama(sizes), _text(sizes)


# --- ViT ----------------------------------------------------------------------------------------


class _ViTBlock(nn.Module):
    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        width = sizes.width
        self.heads = sizes.heads
        self.attention_norm, self.mlp_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.query_key_value = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = (
            part.unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for part in self.query_key_value(self.attention_norm(x)).chunk(3, -1)
        )
        y = F.scaled_dot_product_attention(query, key, value)
        x = x + self.out(y.transpose(1, 2).flatten(2))
        return x + self.mlp(self.mlp_norm(x))


class ViT(nn.Module):
    """A vision transformer that reads patches of 16 x 16 (Dosovitskiy et al., ICLR 2021)."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, sizes.width, 16, 16)
        self.first = nn.Parameter(torch.zeros(1, 1, sizes.width))
        count = (sizes.length // 16) ** 2 + 1
        self.position = nn.Parameter(0.02 * torch.randn(1, count, sizes.width))
        self.blocks = nn.ModuleList(_ViTBlock(sizes) for _ in range(sizes.depth))
        self.norm = nn.LayerNorm(sizes.width)
        self.head = nn.Linear(sizes.width, _CLASSES)

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        x = self.patches(images).flatten(2).transpose(1, 2)
        x = torch.cat((self.first.expand(len(x), -1, -1).to(x.dtype), x), 1) + self.position
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(self.norm(x[:, 0])), labels)


def _vit(sizes: Sizes) -> Built:
    images = torch.randn(sizes.batch, 3, sizes.length, sizes.length)
    return ViT(sizes), (images, torch.randint(_CLASSES, (sizes.batch,)))


# --- U-Net --------------------------------------------------------------------------------------


class _Residual(nn.Module):
    """Two convolutions, between them the step of the diffusion, and a shortcut."""

    def __init__(self, inputs: int, outputs: int, step_width: int) -> None:
        super().__init__()
        self.norm1 = nn.GroupNorm(min(_GROUPS, inputs), inputs)
        self.conv1 = nn.Conv2d(inputs, outputs, 3, padding=1)
        self.step = nn.Linear(step_width, outputs)
        self.norm2 = nn.GroupNorm(min(_GROUPS, outputs), outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1)
        is_same = inputs == outputs
        self.shortcut = nn.Identity() if is_same else nn.Conv2d(inputs, outputs, 1)

    def forward(self, x: Tensor, step: Tensor) -> Tensor:
        y = self.conv1(F.silu(self.norm1(x))) + self.step(step)[:, :, None, None]
        return self.shortcut(x) + self.conv2(F.silu(self.norm2(y)))


class _PixelAttention(nn.Module):
    """Every pixel attends to every other."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm = nn.GroupNorm(min(_GROUPS, width), width)
        self.query_key_value = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        pixels = self.norm(x).flatten(2).transpose(1, 2)
        query, key, value = (
            part.unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for part in self.query_key_value(pixels).chunk(3, -1)
        )
        y = F.scaled_dot_product_attention(query, key, value).transpose(1, 2).flatten(2)
        return x + self.out(y).transpose(1, 2).unflatten(2, x.shape[2:])


class DiffusionUNet(nn.Module):
    """The U-Net of a diffusion model (Ho et al., NeurIPS 2020, appendix B): two residual blocks a
    level, each with a skip connection, attention at the lowest level, four times the channels."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        widths = [min(sizes.width << level, 4 * sizes.width) for level in range(sizes.depth)]
        step_width = 4 * sizes.width
        self.step_features = sizes.width
        self.step = nn.Sequential(
            nn.Linear(sizes.width, step_width), nn.SiLU(), nn.Linear(step_width, step_width)
        )
        self.stem = nn.Conv2d(3, sizes.width, 3, padding=1)
        self.down, self.shrink = nn.ModuleList(), nn.ModuleList()
        skips, channels = [sizes.width], sizes.width
        for width in widths:
            for _ in range(2):
                self.down.append(_Residual(channels, width, step_width))
                channels = width
                skips.append(channels)
            self.shrink.append(nn.Conv2d(channels, channels, 3, 2, 1))
        self.middle = nn.ModuleList(_Residual(channels, channels, step_width) for _ in range(2))
        self.attention = _PixelAttention(channels, sizes.heads)
        self.up, self.grow = nn.ModuleList(), nn.ModuleList()
        for width in reversed(widths):
            self.grow.append(nn.Conv2d(channels, channels, 3, padding=1))
            for _ in range(2):
                self.up.append(_Residual(channels + skips.pop(), width, step_width))
                channels = width
        self.norm = nn.GroupNorm(min(_GROUPS, channels), channels)
        self.out = nn.Conv2d(channels, 3, 3, padding=1)

    def forward(self, noisy: Tensor, steps: Tensor, noise: Tensor) -> Tensor:
        half = self.step_features // 2
        rates = torch.exp(torch.arange(half, device=noisy.device) * (-math.log(10_000) / half))
        turns = steps[:, None] * rates
        step = F.silu(self.step(torch.cat((turns.sin(), turns.cos()), -1).to(noisy.dtype)))
        x = self.stem(noisy)
        skips = []
        for level, shrink in enumerate(self.shrink):
            for block in self.down[2 * level : 2 * level + 2]:
                x = block(x, step)
                skips.append(x)
            x = shrink(x)
        x = self.middle[1](self.attention(self.middle[0](x, step)), step)
        for level, grow in enumerate(self.grow):
            x = grow(F.interpolate(x, scale_factor=2.0, mode="nearest"))
            for block in self.up[2 * level : 2 * level + 2]:
                x = block(torch.cat((x, skips.pop()), 1), step)
        return F.mse_loss(self.out(F.silu(self.norm(x))), noise)


def _unet(sizes: Sizes) -> Built:
    shape = (sizes.batch, 3, sizes.length, sizes.length)
    steps = torch.randint(1000, (sizes.batch,))
    return DiffusionUNet(sizes), (torch.randn(shape), steps, torch.randn(shape))


# ------------------------------------------------------------------------------------------------


def _of_zoo(name: str, sizes: Mapping[str, Sizes]) -> ZooModel:
    model = ZOO[name]
    return replace(model, sizes={**model.sizes, **sizes})


PLAIN: dict[str, ZooModel] = {
    model.name: model
    for model in (
        ZooModel(
            "plain_gpt",  # 2k and 8k: the shape of GPT-2 XL, 12 of 48 layers
            _gpt,
            {
                "quick": Sizes(1, 64, 4, 64),
                "few-gb": Sizes(4, 1024, 8, 1024, 16, 50257),
                "2k": Sizes(12, 1600, 8, 2048, 25, 50257),
                "8k": Sizes(12, 1600, 2, 8192, 25, 50257),
            },
            r"blocks\.\d+",
        ),
        ZooModel(
            "plain_llama",  # 2k and 8k: the shape of Llama 3.2 1B, 8 of 16 layers
            _llama,
            {
                "quick": Sizes(2, 64, 4, 64),
                "few-gb": Sizes(4, 1024, 4, 2048, 16, 32000),
                "2k": Sizes(8, 2048, 4, 2048, 32, 128256),
                "8k": Sizes(8, 2048, 1, 8192, 32, 128256),
            },
            r"blocks\.\d+",
        ),
        ZooModel(
            "plain_vit",  # large: the shape of ViT-L/16, 12 of 24 layers
            _vit,
            {
                "quick": Sizes(2, 64, 4, 64),
                "few-gb": Sizes(6, 768, 64, 224, 12),
                "large": Sizes(12, 1024, 128, 224, 16),
            },
            r"blocks\.\d+",
        ),
        ZooModel(
            "plain_unet",  # large: of the size of the U-Nets of diffusers
            _unet,
            {
                "quick": Sizes(2, 32, 2, 16),
                "few-gb": Sizes(3, 128, 8, 128),
                "large": Sizes(4, 128, 8, 256),
            },
            r"(down|up|middle)\.\d+",
        ),
        _of_zoo("mixture", {"few-gb": Sizes(4, 512, 8, 1024, 8, 32000)}),
        _of_zoo("resnet50", {"few-gb": Sizes(50, 64, 64, 224)}),
    )
}
