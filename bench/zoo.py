"""The ten models of `bench.rivals`: other people's code where there is some, random weights.

``ZOO[name].build(scale)`` gives a module and its inputs; ``module(*inputs)`` returns a scalar loss.
Three scales: ``quick`` (compiles in seconds), ``cpu`` (minutes on a few cores) and ``cuda`` (fills
one large GPU).  GPT-2, Llama, BERT, ViT and ConvNeXt are those of transformers, U-Net is that of
diffusers (``pip install 'dtrcompile[bench]'``); the others stand here or in `workloads.models`.
"""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from workloads.models import Bottleneck, ResNet
from workloads.models import Sizes as ResNetSizes

SCALES = ("quick", "cpu", "cuda")
_CLASSES = 100


@dataclass(frozen=True, slots=True)
class Sizes:
    """How large a model is built.

    Attributes:
        depth: layers, blocks of a stage, or levels.
        width: features or channels, of the first stage where they grow.
        batch: samples.
        length: tokens, or the edge of an image in pixels.
        heads: of attention; for the mixture, also the number of experts.
        vocabulary: of a language model.
    """

    depth: int
    width: int
    batch: int
    length: int
    heads: int = 4
    vocabulary: int = 512


Built = tuple[nn.Module, tuple[Tensor, ...]]


@dataclass(frozen=True, slots=True)
class ZooModel:
    """A model in three sizes.

    Attributes:
        make: builds it with torch's random state and default device, which `build` sets.
        sizes: scale -> sizes.
        blocks: pattern of the names of the modules that a user would checkpoint, one by one.
        dropout: whether it draws random numbers in forward.
        needs: a module that it is made of, and that may be missing.
    """

    name: str
    make: Callable[[Sizes], Built]
    sizes: Mapping[str, Sizes]
    blocks: str
    dropout: bool = False
    needs: str | None = None

    @property
    def is_there(self) -> bool:
        """Whether what it needs is installed."""
        return self.needs is None or importlib.util.find_spec(self.needs) is not None

    def build(
        self,
        scale: str,
        *,
        seed: int = 0,
        device: torch.device | str = "cpu",
        batch: int | None = None,
        depth: int | None = None,
    ) -> Built:
        """The module, in training mode, and its inputs, on ``device``.

        Args:
            batch: samples, where not the scale's own number.
            depth: likewise, of layers, blocks or levels.
        """
        sizes = self.sizes[scale]
        if batch is not None:
            sizes = replace(sizes, batch=batch)
        if depth is not None:
            sizes = replace(sizes, depth=depth)
        device = torch.device(device)
        forked = [device] if device.type == "cuda" else []
        with torch.random.fork_rng(devices=forked), device:
            torch.manual_seed(seed)
            module, inputs = self.make(sizes)
        return module.train(), inputs

    def block_names(self, module: nn.Module) -> list[str]:
        """The names of the modules to checkpoint."""
        return [name for name, _ in module.named_modules() if re.fullmatch(self.blocks, name)]


# --- transformers, diffusers --------------------------------------------------------------------


class LanguageModelLoss(nn.Module):
    """A language model of transformers, reduced to its loss."""

    def __init__(self, model: nn.Module, loss_type: str) -> None:
        super().__init__()
        # Not named, it is looked up with a logged warning, at which Dynamo breaks the graph.
        model.loss_type = loss_type
        self.model = model

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        loss: Tensor = self.model(input_ids=tokens, labels=labels).loss
        return loss


class _ClassifierLoss(nn.Module):
    """An image classifier of transformers and its cross-entropy."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(self.model(pixel_values=images).logits, labels)


def _tokens(sizes: Sizes) -> Tensor:
    return torch.randint(sizes.vocabulary, (sizes.batch, sizes.length))


def _images(sizes: Sizes) -> tuple[Tensor, Tensor]:
    images = torch.randn(sizes.batch, 3, sizes.length, sizes.length)
    return images, torch.randint(_CLASSES, (sizes.batch,))


def _gpt2(sizes: Sizes) -> Built:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=sizes.vocabulary,
        n_positions=sizes.length,
        n_embd=sizes.width,
        n_layer=sizes.depth,
        n_head=sizes.heads,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        use_cache=False,
        attn_implementation="sdpa",
    )
    tokens = _tokens(sizes)
    return LanguageModelLoss(GPT2LMHeadModel(config), "ForCausalLM"), (tokens, tokens.clone())


def _llama(sizes: Sizes) -> Built:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=sizes.vocabulary,
        hidden_size=sizes.width,
        intermediate_size=4 * sizes.width,
        num_hidden_layers=sizes.depth,
        num_attention_heads=sizes.heads,
        num_key_value_heads=max(1, sizes.heads // 4),
        max_position_embeddings=sizes.length,
        tie_word_embeddings=True,
        use_cache=False,
        attn_implementation="sdpa",
    )
    tokens = _tokens(sizes)
    model = LlamaForCausalLM(config)
    # Only other kinds of rotary embedding read it, so no graph has it among its inputs.
    model.model.rotary_emb._buffers.pop("original_inv_freq", None)
    return LanguageModelLoss(model, "ForCausalLM"), (tokens, tokens.clone())


def _bert(sizes: Sizes) -> Built:
    from transformers import BertConfig, BertForMaskedLM

    config = BertConfig(
        vocab_size=sizes.vocabulary,
        hidden_size=sizes.width,
        num_hidden_layers=sizes.depth,
        num_attention_heads=sizes.heads,
        intermediate_size=4 * sizes.width,
        max_position_embeddings=sizes.length,
        hidden_dropout_prob=0.1,
        attention_probs_dropout_prob=0.1,
        attn_implementation="sdpa",
    )
    return LanguageModelLoss(BertForMaskedLM(config), "ForMaskedLM"), (
        _tokens(sizes),
        _tokens(sizes),
    )


def _vit(sizes: Sizes) -> Built:
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(
        hidden_size=sizes.width,
        num_hidden_layers=sizes.depth,
        num_attention_heads=sizes.heads,
        intermediate_size=4 * sizes.width,
        image_size=sizes.length,
        patch_size=16 if sizes.length >= 96 else 8,
        num_labels=_CLASSES,
        attn_implementation="sdpa",
    )
    return _ClassifierLoss(ViTForImageClassification(config)), _images(sizes)


def _convnext(sizes: Sizes) -> Built:
    from transformers import ConvNextConfig, ConvNextForImageClassification

    # ConvNeXt's stages are 3, 3, 9 and 3 blocks deep (Liu et al., CVPR 2022, section 2.2).
    config = ConvNextConfig(
        hidden_sizes=[sizes.width << stage for stage in range(4)],
        depths=[sizes.depth, sizes.depth, 3 * sizes.depth, sizes.depth],
        image_size=sizes.length,
        num_labels=_CLASSES,
    )
    return _ClassifierLoss(ConvNextForImageClassification(config)), _images(sizes)


class _DenoisingLoss(nn.Module):
    """A U-Net that predicts the noise (Ho et al., NeurIPS 2020, section 3.4)."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, noisy: Tensor, steps: Tensor, noise: Tensor) -> Tensor:
        return F.mse_loss(self.model(noisy, steps).sample, noise)


def _unet(sizes: Sizes) -> Built:
    from diffusers import UNet2DModel

    widths = tuple(min(sizes.width << level, 4 * sizes.width) for level in range(sizes.depth))
    plain = sizes.depth - 1
    model = UNet2DModel(
        sample_size=sizes.length,
        block_out_channels=widths,
        down_block_types=("DownBlock2D",) * plain + ("AttnDownBlock2D",),
        up_block_types=("AttnUpBlock2D",) + ("UpBlock2D",) * plain,
        norm_num_groups=8,
        attention_head_dim=8,
    )
    shape = (sizes.batch, 3, sizes.length, sizes.length)
    steps = torch.randint(1000, (sizes.batch,))
    return _DenoisingLoss(model), (torch.randn(shape), steps, torch.randn(shape))


# --- own code -----------------------------------------------------------------------------------


def _resnet50(sizes: Sizes) -> Built:
    depth = 50 if sizes.depth > 1 else 14
    model = ResNet(ResNetSizes(depth, sizes.width, sizes.batch, sizes.length), _CLASSES)
    return model, _images(sizes)


class _Steps(nn.Module):
    """Stacked LSTM cells over a part of a sequence."""

    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        self.cells = nn.ModuleList(nn.LSTMCell(width, width) for _ in range(depth))

    def forward(self, xs: Tensor, states: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
        hidden = []
        states = list(states)
        for x in xs.unbind(0):
            for layer, cell in enumerate(self.cells):
                x, states[2 * layer + 1] = cell(x, (states[2 * layer], states[2 * layer + 1]))
                states[2 * layer] = x
            hidden.append(x)
        return torch.stack(hidden), states


class LSTMLanguageModel(nn.Module):
    """Stacked LSTM cells over a text, in parts of about the root of its length, tied embeddings."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.embedding = nn.Embedding(sizes.vocabulary, sizes.width)
        nn.init.normal_(self.embedding.weight, std=0.02)
        self.part = _Steps(sizes.width, sizes.depth)
        self.part_length = max(2, round(sizes.length**0.5))

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        xs = self.embedding(tokens)  # (length, batch, width)
        states = [xs.new_zeros(xs.shape[1:]) for _ in range(2 * len(self.part.cells))]
        hidden = []
        for part in xs.split(self.part_length):
            h, states = self.part(part, states)
            hidden.append(h)
        logits = F.linear(torch.cat(hidden), self.embedding.weight)
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def _lstm_lm(sizes: Sizes) -> Built:
    text = torch.randint(sizes.vocabulary, (sizes.length + 1, sizes.batch))
    return LSTMLanguageModel(sizes), (text[:-1].contiguous(), text[1:].contiguous())


class _Attention(nn.Module):
    """Causal self-attention."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            part.unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for part in self.qkv(x).chunk(3, -1)
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).flatten(2))


class _Experts(nn.Module):
    """Top-1 experts with a capacity (Fedus et al., JMLR 2022, section 2.2 and appendix F).

    A token beyond its expert's capacity passes by.  All shapes are static.
    """

    def __init__(self, width: int, experts: int, capacity_factor: float = 1.25) -> None:
        super().__init__()
        self.experts, self.capacity_factor = experts, capacity_factor
        self.router = nn.Linear(width, experts, bias=False)
        self.up = nn.Parameter(torch.randn(experts, width, 4 * width) * width**-0.5)
        self.down = nn.Parameter(torch.randn(experts, 4 * width, width) * (4 * width) ** -0.5)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        tokens = x.flatten(0, 1)
        count, width = tokens.shape
        capacity = max(1, int(self.capacity_factor * count / self.experts))
        probabilities = self.router(tokens).float().softmax(-1)
        gate, expert = probabilities.max(-1)
        chosen = F.one_hot(expert, self.experts)
        place = ((chosen.cumsum(0) - 1) * chosen).sum(-1)  # in the expert's queue
        # The last row of the table takes what does not fit, and is thrown away.
        slot = torch.where(place < capacity, expert * capacity + place, self.experts * capacity)
        table = tokens.new_zeros(self.experts * capacity + 1, width).index_add(0, slot, tokens)
        queued = table[:-1].unflatten(0, (self.experts, capacity))
        made = torch.bmm(F.gelu(torch.bmm(queued, self.up)), self.down).flatten(0, 1)
        found = F.pad(made, (0, 0, 0, 1)).index_select(0, slot)
        balance = (chosen.float().mean(0) * probabilities.mean(0)).sum() * self.experts
        return (found * gate[:, None].to(found.dtype)).view_as(x), balance


class _MixtureBlock(nn.Module):
    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(sizes.width), nn.LayerNorm(sizes.width)
        self.attention = _Attention(sizes.width, sizes.heads)
        self.experts = _Experts(sizes.width, sizes.heads)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = x + self.attention(self.norm1(x))
        y, balance = self.experts(self.norm2(x))
        return x + y, balance


class MixtureLanguageModel(nn.Module):
    """A transformer whose feed-forward layers are mixtures of experts."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.embedding = nn.Embedding(sizes.vocabulary, sizes.width)
        self.blocks = nn.ModuleList(_MixtureBlock(sizes) for _ in range(sizes.depth))
        self.norm = nn.LayerNorm(sizes.width)
        self.head = nn.Linear(sizes.width, sizes.vocabulary, bias=False)

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        x = self.embedding(tokens)
        penalty = x.new_zeros((), dtype=torch.float32)
        for block in self.blocks:
            x, balance = block(x)
            penalty = penalty + balance
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten()) + 0.01 * penalty


def _mixture(sizes: Sizes) -> Built:
    text = torch.randint(sizes.vocabulary, (sizes.batch, sizes.length + 1))
    return MixtureLanguageModel(sizes), (text[:, :-1].contiguous(), text[:, 1:].contiguous())


class Siamese(nn.Module):
    """SimSiam (Chen and He, CVPR 2021): one trunk runs on two pictures of each thing."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, sizes.width, 3, 2, 1, bias=False), nn.BatchNorm2d(sizes.width), nn.ReLU()
        )
        blocks: list[nn.Module] = []
        channels = sizes.width
        for stage in range(3):
            for index in range(sizes.depth):
                stride = 2 if stage and not index else 1
                blocks.append(Bottleneck(channels, sizes.width << stage, stride))
                channels = 4 * (sizes.width << stage)
        self.blocks = nn.Sequential(*blocks)
        self.predictor = nn.Sequential(
            nn.Linear(channels, channels // 4), nn.ReLU(), nn.Linear(channels // 4, channels)
        )

    def forward(self, first: Tensor, second: Tensor) -> Tensor:
        a, b = (self.blocks(self.stem(x)).mean((2, 3)) for x in (first, second))
        p, q = self.predictor(a), self.predictor(b)
        towards = F.cosine_similarity(p, b.detach()) + F.cosine_similarity(q, a.detach())
        return -0.5 * towards.mean()


def _siamese(sizes: Sizes) -> Built:
    shape = (sizes.batch, 3, sizes.length, sizes.length)
    return Siamese(sizes), (torch.randn(shape), torch.randn(shape))


def _sizes(quick: Sizes, cpu: Sizes, cuda: Sizes) -> dict[str, Sizes]:
    return {"quick": quick, "cpu": cpu, "cuda": cuda}


ZOO: dict[str, ZooModel] = {
    model.name: model
    for model in (
        ZooModel(
            "gpt2",  # on CUDA: XL
            _gpt2,
            _sizes(
                Sizes(2, 64, 4, 64),
                Sizes(6, 256, 8, 256, vocabulary=2048),
                Sizes(48, 1600, 16, 1024, 25, 50257),
            ),
            r"model\.transformer\.h\.\d+",
            needs="transformers",
        ),
        ZooModel(
            "llama",  # on CUDA: the shape of Llama 3.2 1B
            _llama,
            _sizes(
                Sizes(2, 64, 4, 64),
                Sizes(8, 256, 8, 256, 8, 2048),
                Sizes(16, 2048, 1, 16384, 32, 128256),
            ),
            r"model\.model\.layers\.\d+",
            needs="transformers",
        ),
        ZooModel(
            "bert",
            _bert,
            _sizes(
                Sizes(2, 64, 4, 64),
                Sizes(6, 256, 8, 256, vocabulary=2048),
                Sizes(24, 1024, 64, 512, 16, 30522),
            ),
            r"model\.bert\.encoder\.layer\.\d+",
            dropout=True,
            needs="transformers",
        ),
        ZooModel(
            "vit",  # on CUDA: ViT-L/16
            _vit,
            _sizes(
                Sizes(2, 64, 4, 64),
                Sizes(6, 192, 16, 224, 3),
                Sizes(24, 1024, 256, 224, 16),
            ),
            r"model\.vit\.(encoder\.)?layers?\.\d+",
            needs="transformers",
        ),
        ZooModel(
            "resnet50",
            _resnet50,
            _sizes(Sizes(1, 8, 4, 64), Sizes(50, 32, 8, 96), Sizes(50, 64, 512, 224)),
            r"blocks\.\d+",
        ),
        ZooModel(
            "unet",
            _unet,
            _sizes(Sizes(2, 16, 2, 16), Sizes(3, 32, 4, 64), Sizes(4, 128, 32, 256)),
            r"model\.(down_blocks|up_blocks)\.\d+|model\.mid_block",
            needs="diffusers",
        ),
        ZooModel(
            "convnext",  # on CUDA: ConvNeXt-B
            _convnext,
            _sizes(Sizes(1, 16, 2, 64), Sizes(2, 48, 8, 128), Sizes(3, 128, 256, 224)),
            r"model\.convnext\.encoder\.stages\.\d+\.layers\.\d+",
            needs="transformers",
        ),
        ZooModel(
            "lstm_lm",
            _lstm_lm,
            _sizes(
                Sizes(1, 64, 8, 4),
                Sizes(2, 256, 32, 36, vocabulary=2048),
                Sizes(2, 2048, 1024, 100, vocabulary=32000),
            ),
            r"part",
        ),
        ZooModel(
            "mixture",
            _mixture,
            _sizes(
                Sizes(1, 64, 4, 64),
                Sizes(4, 256, 8, 256, vocabulary=2048),
                Sizes(16, 1024, 16, 2048, 16, 32000),
            ),
            r"blocks\.\d+",
        ),
        ZooModel(
            "siamese",
            _siamese,
            _sizes(Sizes(1, 8, 4, 32), Sizes(2, 32, 8, 96), Sizes(6, 64, 512, 160)),
            r"blocks\.\d+",
        ),
    )
}
