"""Small models of `timm` and `diffusers` for `bench.hub`, each as its library builds it.

Every model has random weights, and sizes that its own constructor takes: few blocks and narrow ones
where the constructor has an argument for that, else the smallest variant that the library knows.
An image has as few pixels as the model takes.  Some models, mostly transformers, drop connections
at random, as recipes for training them have it.

A model runs in float64 only where float32 is too coarse to judge by: where eager PyTorch's own
float32 gradients differ from those in float64 by more than about a third of the tolerance of
`bench.architectures`, mostly because batch norm has few pixels.  `bench.hub` measures by how much
they differ, and writes it into the row.
"""

from __future__ import annotations

import abc
import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from bench.architectures import BATCH, CLASSES, FAMILIES, SEED, Batch, Trainable

LATENT = 8
TOKENS = 8
TEXT_WIDTH = 16


# What the modules of both libraries call the probability with which they drop.
PROBABILITIES = ("p", "drop_prob", "drop_rate", "prob", "attn_drop", "dropout", "dropout_p")


def silence(module: nn.Module) -> bool:
    """Sets every probability of dropping something to zero; whether there was one."""
    found = False
    for part in module.modules():
        for name in PROBABILITIES:
            value = vars(part).get(name)
            if isinstance(value, float) and 0 < value < 1:
                setattr(part, name, 0.0)
                found = True
    return found


def wake(module: nn.Module) -> None:
    """Makes parameters that begin at or near zero larger: they hide what is behind them.

    A block whose output is scaled by 1e-6 has gradients that no error of theirs would show among
    the others.
    """
    with torch.no_grad():
        for parameter in module.parameters():
            if parameter.abs().max() < 0.01:
                parameter.normal_(std=0.1)


class _OfALibrary(abc.ABC):
    """How the models of both libraries get ready to train."""

    dtype: torch.dtype

    @abc.abstractmethod
    def _made(self) -> nn.Module:
        """As the library makes it."""

    def build(self, *, dropout: bool) -> nn.Module:
        """Random weights, always the same.  Without dropout, nothing in it draws numbers."""
        torch.manual_seed(SEED)
        module = self._made()
        wake(module)
        if not dropout:
            silence(module)
        # Some models keep parts in float32 and warn of any conversion.
        return (module if self.dtype == torch.float32 else module.to(self.dtype)).train()

    @property
    def draws(self) -> bool:
        """Whether the constructor puts something that drops into the model."""
        return silence(self.build(dropout=True))


@dataclass(frozen=True)
class OfTimm(_OfALibrary):
    """A classifier of images; users compute its loss outside of it.

    Attributes:
        model: what `timm.create_model` calls it; or ``module.Class`` of `timm.models` where the
            library's function for the model takes no other sizes than its own.
        sizes: what its constructor is given.
        pixels: of an image's side.
        dtype: of parameters and images.
    """

    model: str
    sizes: Mapping[str, Any] = field(default_factory=dict)
    pixels: int = 32
    dtype: torch.dtype = torch.float32

    def _made(self) -> nn.Module:
        if "." in self.model:
            file, name = self.model.split(".")
            make = getattr(importlib.import_module(f"timm.models.{file}"), name)
        else:
            make = partial(importlib.import_module("timm").create_model, self.model)
        module: nn.Module = make(num_classes=CLASSES, **self.sizes)
        return module

    def batch(self) -> Batch:
        """Images and their classes."""
        images = torch.randn(BATCH, 3, self.pixels, self.pixels)
        return {"images": images, "labels": torch.randint(CLASSES, (BATCH,))}

    def loss(self, called: Callable[..., Any], batch: Batch) -> Tensor:
        """Cross entropy, of each of the outputs if a model has several."""
        result = called(batch["images"])
        outputs = result if isinstance(result, tuple) else (result,)
        return sum(functional.cross_entropy(output, batch["labels"]) for output in outputs)


@dataclass(frozen=True)
class OfDiffusers(_OfALibrary):
    """A network of `diffusers`; its loss is the squared distance of its result from noise.

    Attributes:
        model: its class.
        batch: makes the arguments of one call.
        sizes: what its constructor is given.
        dtype: of parameters and floating-point arguments.
    """

    model: str
    batch: Callable[[], Batch]
    sizes: Mapping[str, Any] = field(default_factory=dict)
    dtype: torch.dtype = torch.float32

    def _made(self) -> nn.Module:
        module: nn.Module = getattr(importlib.import_module("diffusers"), self.model)(**self.sizes)
        return module

    def loss(self, called: Callable[..., Any], batch: Batch) -> Tensor:
        """The mean square of what the call returns, tensor by tensor, with the target at one."""
        return sum(
            functional.mse_loss(value, torch.ones_like(value)) for value in tensors(called(**batch))
        )


def tensors(result: Any) -> list[Tensor]:
    """The tensors of a result that gradients flow to, in order."""
    if isinstance(result, Tensor):
        return [result] if result.requires_grad else []
    if isinstance(result, Mapping):
        result = list(result.values())
    if isinstance(result, list | tuple):
        return [tensor for value in result for tensor in tensors(value)]
    return []


DROP_PATH = {"drop_path_rate": 0.1}
_VIT = {"img_size": 32, "patch_size": 8, "embed_dim": 16, "depth": 2, "num_heads": 2}
_DROPPED_VIT = {**_VIT, **DROP_PATH}
_FOUR = {"depths": (1, 1, 1, 1)}
_WIDTHS = (8, 16, 24, 32)

CONVOLUTIONS: dict[str, Trainable] = {
    "byobnet": OfTimm("test_byobnet"),
    "convmixer": OfTimm("convmixer.ConvMixer", {"dim": 16, "depth": 2, "patch_size": 4}),
    "convnext": OfTimm("convnext_atto", {**_FOUR, "dims": _WIDTHS, **DROP_PATH}),
    "cspnet": OfTimm("darknet17", dtype=torch.float64),
    "cspnext": OfTimm(
        "cspnext_tiny", {**_FOUR, "widen_factor": 0.125, **DROP_PATH}, dtype=torch.float64
    ),
    "densenet": OfTimm("densenet121", {"growth_rate": 8, "block_config": (2, 2, 2, 2)}),
    "dla": OfTimm("dla46_c", dtype=torch.float64),
    "dpn": OfTimm("dpn48b", dtype=torch.float64),
    "efficientnet": OfTimm("test_efficientnet"),
    "fasternet": OfTimm("fasternet_t0", {**_FOUR, "embed_dim": 16}),
    "focalnet": OfTimm("focalnet.FocalNet", {**_FOUR, "embed_dim": 16}),
    "ghostnet": OfTimm("ghostnet_050"),
    "hardcorenas": OfTimm("hardcorenas_a", dtype=torch.float64),
    "hgnet": OfTimm("hgnetv2_b0", dtype=torch.float64),
    "hrnet": OfTimm("hrnet_w18_small", dtype=torch.float64),
    "inception_next": OfTimm("inception_next_atto", {**_FOUR, "dims": _WIDTHS, **DROP_PATH}),
    "inception_resnet_v2": OfTimm("inception_resnet_v2", pixels=80, dtype=torch.float64),
    "inception_v3": OfTimm("inception_v3", {"drop_rate": 0.1}, pixels=80, dtype=torch.float64),
    "inception_v4": OfTimm("inception_v4", pixels=80, dtype=torch.float64),
    "lcnetv2": OfTimm("lcnetv2_small", _FOUR),
    "mambaout": OfTimm("test_mambaout"),
    "mnasnet": OfTimm("mnasnet_small", dtype=torch.float64),
    "mobilenetv1": OfTimm("mobilenetv1_100", dtype=torch.float64),
    "mobilenetv2": OfTimm("mobilenetv2_035", dtype=torch.float64),
    "mobilenetv3": OfTimm("mobilenetv3_small_050", {"drop_rate": 0.2}, dtype=torch.float64),
    "mobilenetv4": OfTimm("mobilenetv4_conv_small_035", dtype=torch.float64),
    "mobilenetv5": OfTimm("mobilenetv5_base"),
    "nasnet": OfTimm("nasnetalarge", {"stem_size": 16, "num_features": 672}, dtype=torch.float64),
    "nfnet": OfTimm("test_nfnet"),
    "pnasnet": OfTimm("pnasnet5large", dtype=torch.float64),
    "rdnet": OfTimm(
        "rdnet_tiny",
        {"growth_rates": (8, 8, 8), "num_blocks_list": (1, 1, 1), "num_init_features": 16}
        | {"is_downsample_block": (None, True, True), "block_type": ("Block", "Block", "BlockESE")}
        | DROP_PATH,
    ),
    "regnet": OfTimm("regnetx_002"),
    "repghost": OfTimm("repghostnet_050", {"drop_rate": 0.2}, dtype=torch.float64),
    "repvgg": OfTimm("repvgg_a0", dtype=torch.float64),
    "res2net": OfTimm("res2net50_14w_8s", {"layers": (1, 1, 1, 1)}),
    "resnest": OfTimm("resnest14d", dtype=torch.float64),
    "resnet": OfTimm("test_resnet"),
    "resnetv2": OfTimm("resnetv2_18", {"layers": (1, 1, 1, 1), "channels": _WIDTHS}),
    "rexnet": OfTimm("rexnet_100", {"width_mult": 0.5, "depth_mult": 0.5}, dtype=torch.float64),
    "selecsls": OfTimm("selecsls42", dtype=torch.float64),
    "senet": OfTimm("legacy_seresnet18", {"layers": (1, 1, 1, 1)}),
    "sknet": OfTimm("skresnet18", {"layers": (1, 1, 1, 1)}),
    "starnet": OfTimm("starnet_s050", {"depths": (1, 1, 1, 1)}),
    "tresnet": OfTimm("tresnet_m", {"layers": (1, 1, 1, 1), "width_factor": 0.25}),
    "vgg": OfTimm("vgg11_bn", {"mlp_ratio": 1 / 64}),
    "vovnet": OfTimm("ese_vovnet19b_slim_dw", dtype=torch.float64),
    "xception": OfTimm("legacy_xception", pixels=48, dtype=torch.float64),
    "xception_aligned": OfTimm("xception41", dtype=torch.float64),
}
TRANSFORMERS: dict[str, Trainable] = {
    "beit": OfTimm("beit_base_patch16_224", _DROPPED_VIT),
    "cait": OfTimm("cait_xxs24_224", _DROPPED_VIT),
    "crossvit": OfTimm(
        "crossvit_9_240",
        {"img_size": 32, "embed_dim": (8, 16), "depth": ((1, 1, 0), (1, 1, 0)), "num_heads": (2, 2)}
        | {"img_scale": (1.0, 1.0), "patch_size": (4, 8), **DROP_PATH},
    ),
    "davit": OfTimm(
        "davit_tiny", {**_FOUR, "embed_dims": _WIDTHS, "num_heads": (1, 2, 2, 4), **DROP_PATH}
    ),
    "deepseek_vit": OfTimm("deepseek_vit_412m", {**_VIT, "downsample_ratio": 2}),
    "deit": OfTimm("deit_tiny_distilled_patch16_224", _DROPPED_VIT),
    "deit3": OfTimm("deit3_small_patch16_224", _DROPPED_VIT),
    "eva": OfTimm("eva02_tiny_patch14_224", _DROPPED_VIT),
    "flexivit": OfTimm("flexivit_small", _DROPPED_VIT),
    "gcvit": OfTimm(
        "gcvit.GlobalContextVit",
        {**_FOUR, "img_size": 64, "embed_dim": 8, "num_heads": (1, 2, 2, 4), **DROP_PATH},
        pixels=64,
    ),
    "gemma4_vit": OfTimm(
        "gemma4_vit_167m",
        {**_VIT, "head_dim": 8, "intermediate_size": 32, "pooling_kernel_size": 2},
    ),
    "hiera": OfTimm(
        "hiera_tiny_224",
        {"img_size": 64, "embed_dim": 8, "num_heads": 1, "stages": (1, 1, 1, 1), **DROP_PATH}
        | {"mask_unit_size": (8, 8)},
        pixels=64,
    ),
    "hieradet_sam2": OfTimm(
        "hieradet_small",
        {"embed_dim": 8},
        pixels=64,
    ),
    "mvitv2": OfTimm("mvitv2_tiny", {"img_size": 32}),
    "naflexvit": OfTimm(
        "naflexvit_base_patch16_gap",
        {"embed_dim": 16, "depth": 2, "num_heads": 2, "patch_size": 8},
    ),
    "nest": OfTimm(
        "nest.Nest",
        {"img_size": 64, "embed_dims": (8, 16, 24), "num_heads": (2, 2, 2), "depths": (1, 1, 1)}
        | DROP_PATH,
        pixels=64,
    ),
    "pit": OfTimm(
        "pit_ti_224", {"img_size": 64, "base_dims": (8, 8, 8), "depth": (1, 1, 1)}, pixels=64
    ),
    "pvt_v2": OfTimm("pvt_v2_b0", {**_FOUR, "embed_dims": (8, 16, 40, 32), **DROP_PATH}),
    "qwen3_vit": OfTimm("qwen3_vit_88m", _VIT),
    "swin_transformer": OfTimm(
        "swin_tiny_patch4_window7_224",
        {"img_size": 32, "embed_dim": 16, "depths": (2, 1), "num_heads": (1, 2)}
        | {"window_size": 4, **DROP_PATH},
    ),
    "swin_transformer_v2": OfTimm(
        "swinv2_tiny_window8_256",
        {"img_size": 32, "embed_dim": 16, "depths": (2, 1), "num_heads": (1, 2)}
        | {"window_size": 4, **DROP_PATH},
    ),
    "swin_transformer_v2_cr": OfTimm(
        "swinv2_cr_tiny_224",
        {"img_size": 32, "embed_dim": 16, "depths": (2, 1), "num_heads": (1, 2)}
        | {"window_size": 4, **DROP_PATH},
    ),
    "tnt": OfTimm(
        "tnt_s_patch16_224",
        {"img_size": 32, "embed_dim": 16, "inner_dim": 8, "depth": 2}
        | {"num_heads_inner": 2, "num_heads_outer": 2, **DROP_PATH},
    ),
    "twins": OfTimm(
        "twins_svt_small",
        {**_FOUR, "img_size": 64, "embed_dims": _WIDTHS, "num_heads": (1, 2, 2, 4), **DROP_PATH},
        pixels=64,
    ),
    "vision_transformer": OfTimm("test_vit", {"img_size": 32, "patch_size": 8}),
    "vision_transformer_relpos": OfTimm("test_vit_relpos", {"img_size": 32, "patch_size": 8}),
    "vision_transformer_sam": OfTimm(
        "samvit_base_patch16",
        {**_VIT, "window_size": 2, "global_attn_indexes": (1,), "neck_chans": 16},
    ),
    "volo": OfTimm(
        "volo.VOLO",
        {"img_size": 32, "layers": (1, 1, 1, 1), "embed_dims": (16, 32, 32, 32), **DROP_PATH}
        | {"num_heads": (2, 2, 2, 2), "stem_hidden_dim": 8},
    ),
    "xcit": OfTimm("xcit_nano_12_p16_224", {**_VIT, "patch_size": 16, **DROP_PATH}),
}
HYBRIDS: dict[str, Trainable] = {
    "botnet": OfTimm("botnet26t_256", {"img_size": 64}, pixels=64, dtype=torch.float64),
    "coat": OfTimm(
        "coat_lite_tiny",
        {"img_size": 32, "embed_dims": _WIDTHS, "serial_depths": (1, 1, 1, 1)} | DROP_PATH,
    ),
    "coatnet": OfTimm("coatnet_pico_rw_224", {"img_size": 64}, pixels=64),
    "convit": OfTimm("convit_tiny", {**_DROPPED_VIT, "local_up_to_layer": 1}),
    "cpubone": OfTimm("cpubone_nano"),
    "csatv2": OfTimm(
        "csatv2",
        {**_FOUR, "dims": _WIDTHS, "transformer_depths": (0, 0, 1, 1), **DROP_PATH},
        pixels=64,
    ),
    "edgenext": OfTimm("edgenext_xx_small", {"depths": (2, 2, 2, 2)}, pixels=64),
    "efficientformer": OfTimm(
        "efficientformer_l1",
        {**_FOUR, "embed_dims": _WIDTHS, "num_vit": 1, **DROP_PATH},
        pixels=224,
        dtype=torch.float64,
    ),
    "efficientformer_v2": OfTimm("efficientformerv2_s0", {"img_size": 64}, pixels=64),
    "efficientvim": OfTimm(
        "efficientvim_m1", {"depths": (1, 1, 1), "embed_dim": (16, 24, 32)}, dtype=torch.float64
    ),
    "efficientvit_mit": OfTimm("efficientvit_b0", dtype=torch.float64),
    "efficientvit_msra": OfTimm("efficientvit_m0", {"img_size": 64}, pixels=64),
    "fastvit": OfTimm(
        "fastvit_t8",
        {"layers": (1, 1, 1, 1), "embed_dims": (16, 16, 32, 32), **DROP_PATH},
    ),
    "iformer": OfTimm("iformer_t"),
    "lambda_resnet": OfTimm("lambda_resnet26t", pixels=64, dtype=torch.float64),
    "levit": OfTimm("levit_128s", {"img_size": 64}, pixels=64),
    "lowformer": OfTimm("lowformer_b0", dtype=torch.float64),
    "maxvit": OfTimm("maxvit_pico_rw_256", {"img_size": 64}, pixels=64),
    "maxxvit": OfTimm("test_vit4"),
    "mobilevit": OfTimm("mobilevit_xxs", pixels=64),
    "mobilevitv2": OfTimm("mobilevitv2_050", pixels=64, dtype=torch.float64),
    "nextvit": OfTimm("nextvit_small", dtype=torch.float64),
    "poolformer": OfTimm("metaformer.MetaFormer", {**_FOUR, "dims": _WIDTHS, **DROP_PATH}),
    "caformer": OfTimm("caformer_s18"),
    "repvit": OfTimm("repvit_m0_9", {"embed_dim": (16, 16, 24, 32), "depth": (1, 1, 2, 1)}),
    "shvit": OfTimm("shvit_s1", pixels=64),
    "swiftformer": OfTimm("swiftformer_xs", {"layers": [1, 1, 1, 1]}),
    "tiny_vit": OfTimm(
        "tiny_vit_5m_224",
        {**_FOUR, "embed_dims": (16, 16, 32, 32), "num_heads": (1, 1, 2, 2)}
        | {"window_sizes": (2, 2, 2, 2), **DROP_PATH},
        pixels=64,
    ),
    "vision_transformer_hybrid": OfTimm(
        "vit_tiny_r_s16_p8_224",
        {"img_size": 64, "embed_dim": 16, "depth": 2, "num_heads": 2},
        pixels=64,
    ),
    "visformer": OfTimm(
        "visformer_tiny",
        {"img_size": 64, "embed_dim": 32, "depth": (1, 1, 1), "num_heads": 2, **DROP_PATH},
        pixels=64,
    ),
    "vitamin": OfTimm("vitamin_small_224", {"img_size": 64}, pixels=64),
}
_MIXER = {"img_size": 32, "patch_size": 8, "num_blocks": 2, "embed_dim": 16, **DROP_PATH}
PERCEPTRONS: dict[str, Trainable] = {
    "mlp_mixer": OfTimm("mlp_mixer.MlpMixer", _MIXER),
    "gmixer": OfTimm("gmixer_12_224", {"img_size": 64}, pixels=64),
    "resmlp": OfTimm("resmlp_12_224", {"img_size": 64}, pixels=64),
    "gmlp": OfTimm("gmlp_ti16_224", {"img_size": 64}, pixels=64),
    "sequencer": OfTimm(
        "sequencer2d_s",
        {"img_size": 32, "layers": (1, 1, 1, 1), "embed_dims": (16, 24, 24, 24), **DROP_PATH}
        | {"hidden_sizes": (4, 6, 6, 6), "patch_sizes": (4, 2, 1, 1)},
    ),
}


def latent(channels: int = 4, batch: int = 4) -> Tensor:
    return torch.randn(batch, channels, LATENT, LATENT)


def moments(batch: int = 4) -> Tensor:
    return torch.randint(1000, (batch,))


def words(batch: int = 4, width: int = TEXT_WIDTH) -> Tensor:
    return torch.randn(batch, TOKENS, width)


def noised(channels: int = 4) -> Batch:
    return {"sample": latent(channels), "timestep": moments()}


def noised_image() -> Batch:
    return noised(3)


def described() -> Batch:
    return noised() | {"encoder_hidden_states": words()}


def controlled() -> Batch:
    return described() | {"controlnet_cond": torch.randn(4, 3, 8 * LATENT, 8 * LATENT)}


def picture() -> Batch:
    return {"sample": torch.randn(4, 3, 32, 32)}


def hint() -> Batch:
    return {"x": torch.randn(4, 3, 32, 32)}


def waveform() -> Batch:
    return {"sample": torch.randn(4, 2, 64)}


def noised_waveform() -> Batch:
    return {"sample": torch.randn(4, 2, 64), "timestep": moments()}


def film() -> Batch:
    return {"sample": torch.randn(2, 4, 3, LATENT, LATENT), "timestep": moments(2)} | {
        "encoder_hidden_states": words(2)
    }


def moving() -> Batch:
    return {"hidden_states": torch.randn(2, 4, 3, LATENT, LATENT), "timestep": moments(2)} | {
        "encoder_hidden_states": words(2)
    }


def classed() -> Batch:
    return {"hidden_states": latent(), "timestep": moments(), "class_labels": moments() % 10}


def patched() -> Batch:
    return {"hidden_states": latent(), "timestep": moments(), "encoder_hidden_states": words()}


def unconditioned() -> Batch:
    return {"hidden_states": latent()}


def conditioned() -> Batch:
    return {"hidden_states": latent(), "encoder_hidden_states": words()}


def pooled() -> Batch:
    return patched() | {"pooled_projections": torch.randn(4, TEXT_WIDTH)}


def packed() -> Batch:
    """As Flux takes latents: a sequence of patches, with the place of each."""
    return {
        "hidden_states": torch.randn(4, 16, 4),
        "encoder_hidden_states": words(),
        "pooled_projections": torch.randn(4, TEXT_WIDTH),
        "timestep": torch.rand(4),
        "img_ids": torch.randint(4, (16, 3)),
        "txt_ids": torch.zeros(TOKENS, 3, dtype=torch.int64),
    }


def unpooled() -> Batch:
    return {name: value for name, value in packed().items() if name != "pooled_projections"}


def embedded() -> Batch:
    return {
        "hidden_states": torch.randn(4, TEXT_WIDTH),
        "timestep": moments(),
        "proj_embedding": torch.randn(4, TEXT_WIDTH),
        "encoder_hidden_states": words(),
    }


def masked() -> Batch:
    mask = torch.ones(4, TOKENS, dtype=torch.int64)
    mask[0, TOKENS // 2 :] = 0
    return patched() | {"encoder_attention_mask": mask}


def framed() -> Batch:
    batch = moving()
    batch["hidden_states"] = batch["hidden_states"].transpose(1, 2).contiguous()
    return batch


def sized() -> Batch:
    size = torch.tensor([[64.0, 64.0]] * 4)
    return patched() | {
        "original_size": size,
        "target_size": size,
        "crop_coords": torch.zeros_like(size),
    }


def sequence_of_frames() -> Batch:
    mask = torch.ones(2, TOKENS, dtype=torch.int64)
    return {
        "hidden_states": torch.randn(2, 12, 4),
        "encoder_hidden_states": words(2),
        "timestep": moments(2),
        "encoder_attention_mask": mask,
        "num_frames": 3,
        "height": 2,
        "width": 2,
    }


def masked_moving() -> Batch:
    batch = moving()
    mask = torch.ones(2, TOKENS, dtype=torch.bool)
    return batch | {"encoder_attention_mask": mask}


def audio() -> Batch:
    return {
        "hidden_states": torch.randn(4, 4, 8),
        "timestep": moments(),
        "encoder_hidden_states": words(),
        "global_hidden_states": torch.randn(4, 1, TEXT_WIDTH),
        "rotary_embedding": (torch.ones(9, 8), torch.zeros(9, 8)),
    }


def frames() -> Batch:
    return {"sample": torch.randn(1, 3, 9, 16, 16)}


_TWO = {"block_out_channels": (8, 16), "layers_per_block": 1, "norm_num_groups": 4}
_CROSS_DOWN = ("CrossAttnDownBlock2D", "DownBlock2D")
_CROSS_UP = ("UpBlock2D", "CrossAttnUpBlock2D")
_CROSS = {"cross_attention_dim": TEXT_WIDTH, "attention_head_dim": 4, "sample_size": LATENT}
_HEADS = {"num_attention_heads": 2, "attention_head_dim": 8}
_DIT = {**_HEADS, "in_channels": 4, "sample_size": LATENT, "patch_size": 2, "num_layers": 2}
_COGVIEW = {
    **_DIT,
    "out_channels": 4,
    "text_embed_dim": 16,
    "time_embed_dim": 8,
    "condition_dim": 4,
    "pos_embed_max_size": 8,
}
_CODED = {
    "block_out_channels": (8, 16),
    "down_block_types": ("DownEncoderBlock2D",) * 2,
    "up_block_types": ("UpDecoderBlock2D",) * 2,
    "norm_num_groups": 4,
}

UNETS: dict[str, Trainable] = {
    "unet_2d": OfDiffusers(
        "UNet2DModel",
        noised_image,
        {**_TWO, "sample_size": LATENT, "attention_head_dim": 4, "dropout": 0.1}
        | {"down_block_types": ("DownBlock2D", "AttnDownBlock2D")}
        | {"up_block_types": ("AttnUpBlock2D", "UpBlock2D")},
    ),
    "unet_2d_skip": OfDiffusers(
        "UNet2DModel",
        noised_image,
        {"block_out_channels": (32, 64), "layers_per_block": 1, "sample_size": LATENT}
        | {"attention_head_dim": 4, "time_embedding_type": "fourier"}
        | {"down_block_types": ("SkipDownBlock2D", "AttnSkipDownBlock2D")}
        | {"up_block_types": ("AttnSkipUpBlock2D", "SkipUpBlock2D")},
        dtype=torch.float64,
    ),
    "unet_2d_condition": OfDiffusers(
        "UNet2DConditionModel",
        described,
        {**_TWO, **_CROSS, "down_block_types": _CROSS_DOWN, "up_block_types": _CROSS_UP},
    ),
    "unet_1d": OfDiffusers(
        "UNet1DModel",
        noised_waveform,
        {"block_out_channels": (8, 8, 16, 16), "time_embedding_type": "positional"}
        | {"use_timestep_embedding": True, "out_block_type": "OutConv1DBlock", "freq_shift": 1.0}
        | {"flip_sin_to_cos": False, "mid_block_type": "MidResTemporalBlock1D", "act_fn": "swish"}
        | {"down_block_types": ("DownResnetBlock1D",) * 4}
        | {"up_block_types": ("UpResnetBlock1D",) * 3},
    ),
    "unet_3d_condition": OfDiffusers(
        "UNet3DConditionModel",
        film,
        {**_TWO, **_CROSS}
        | {"down_block_types": ("CrossAttnDownBlock3D", "DownBlock3D")}
        | {"up_block_types": ("UpBlock3D", "CrossAttnUpBlock3D")},
    ),
    "unet_motion": OfDiffusers(
        "UNetMotionModel",
        lambda: film() | {"encoder_hidden_states": words(6)},
        {**_TWO, "cross_attention_dim": TEXT_WIDTH, "num_attention_heads": 2}
        | {"motion_num_attention_heads": 2}
        | {"down_block_types": ("CrossAttnDownBlockMotion", "DownBlockMotion")}
        | {"up_block_types": ("UpBlockMotion", "CrossAttnUpBlockMotion")},
    ),
    "controlnet": OfDiffusers(
        "ControlNetModel",
        controlled,
        {**_TWO, **{k: v for k, v in _CROSS.items() if k != "sample_size"}}
        | {"down_block_types": _CROSS_DOWN, "conditioning_embedding_out_channels": (8, 8, 8, 8)},
    ),
    "t2i_adapter": OfDiffusers(
        "T2IAdapter", hint, {"channels": [8, 16], "num_res_blocks": 1, "downscale_factor": 4}
    ),
}
AUTOENCODERS: dict[str, Trainable] = {
    "autoencoder_kl": OfDiffusers("AutoencoderKL", picture, _CODED),
    "autoencoder_tiny": OfDiffusers(
        "AutoencoderTiny",
        picture,
        {"encoder_block_out_channels": (8, 8), "decoder_block_out_channels": (8, 8)}
        | {"num_encoder_blocks": (1, 1), "num_decoder_blocks": (1, 1)},
    ),
    "vq_model": OfDiffusers("VQModel", picture, {**_CODED, "num_vq_embeddings": 16}),
    "autoencoder_asym_kl": OfDiffusers(
        "AsymmetricAutoencoderKL",
        picture,
        {"down_block_types": ("DownEncoderBlock2D",) * 2, "norm_num_groups": 4}
        | {"up_block_types": ("UpDecoderBlock2D",) * 2}
        | {"down_block_out_channels": (8, 16), "up_block_out_channels": (8, 16)},
    ),
    "autoencoder_oobleck": OfDiffusers(
        "AutoencoderOobleck",
        waveform,
        {"encoder_hidden_size": 8, "decoder_channels": 8, "decoder_input_channels": 4}
        | {"downsampling_ratios": [2, 2], "channel_multiples": [1, 2]},
    ),
    "autoencoder_dc": OfDiffusers(
        "AutoencoderDC",
        picture,
        {"latent_channels": 4, "attention_head_dim": 4}
        | {"encoder_block_types": ("ResBlock", "EfficientViTBlock")}
        | {"decoder_block_types": ("ResBlock", "EfficientViTBlock")}
        | {"encoder_block_out_channels": (8, 16), "decoder_block_out_channels": (8, 16)}
        | {"encoder_layers_per_block": (1, 1), "decoder_layers_per_block": (1, 1)}
        | {"encoder_qkv_multiscales": ((), (5,)), "decoder_qkv_multiscales": ((), (5,))},
    ),
    "autoencoder_kl_temporal": OfDiffusers(
        "AutoencoderKLTemporalDecoder",
        lambda: picture() | {"num_frames": 2},
        {"block_out_channels": (32, 32), "down_block_types": ("DownEncoderBlock2D",) * 2},
    ),
    "autoencoder_kl_cogvideox": OfDiffusers(
        "AutoencoderKLCogVideoX",
        frames,
        {"block_out_channels": (8, 8), "norm_num_groups": 2, "layers_per_block": 1}
        | {"down_block_types": ("CogVideoXDownBlock3D",) * 2}
        | {"up_block_types": ("CogVideoXUpBlock3D",) * 2, "latent_channels": 4},
    ),
    "autoencoder_kl_wan": OfDiffusers(
        "AutoencoderKLWan",
        frames,
        {"base_dim": 4, "z_dim": 4, "dim_mult": [1, 1, 1, 1], "num_res_blocks": 1}
        | {"temperal_downsample": [False, True, True]},
    ),
}
DIFFUSION_TRANSFORMERS: dict[str, Trainable] = {
    "dit": OfDiffusers(
        "DiTTransformer2DModel", classed, {**_DIT, "num_embeds_ada_norm": 10, "norm_num_groups": 4}
    ),
    "pixart": OfDiffusers(
        "PixArtTransformer2DModel",
        lambda: patched() | {"added_cond_kwargs": {"resolution": None, "aspect_ratio": None}},
        {**_DIT, "cross_attention_dim": 16, "caption_channels": 16, "norm_num_groups": 4}
        | {"use_additional_conditions": False, "dropout": 0.1},
    ),
    "sd3": OfDiffusers(
        "SD3Transformer2DModel",
        pooled,
        {**_DIT, "joint_attention_dim": 16, "caption_projection_dim": 16, "out_channels": 4}
        | {"pooled_projection_dim": 16, "pos_embed_max_size": 8, "qk_norm": "rms_norm"}
        | {"dual_attention_layers": (0,)},
    ),
    "flux": OfDiffusers(
        "FluxTransformer2DModel",
        packed,
        {**_HEADS, "in_channels": 4, "num_layers": 1, "num_single_layers": 1}
        | {"joint_attention_dim": 16, "pooled_projection_dim": 16, "axes_dims_rope": (2, 2, 4)},
    ),
    "chroma": OfDiffusers(
        "ChromaTransformer2DModel",
        unpooled,
        {**_HEADS, "in_channels": 4, "num_layers": 1, "num_single_layers": 1}
        | {"joint_attention_dim": 16, "axes_dims_rope": (2, 2, 4)}
        | {"approximator_num_channels": 8, "approximator_hidden_dim": 16, "approximator_layers": 1},
    ),
    "auraflow": OfDiffusers(
        "AuraFlowTransformer2DModel",
        patched,
        {**_HEADS, "sample_size": LATENT, "num_mmdit_layers": 1, "num_single_dit_layers": 1}
        | {"joint_attention_dim": 16, "caption_projection_dim": 16, "pos_embed_max_size": 16},
    ),
    "sana": OfDiffusers(
        "SanaTransformer2DModel",
        patched,
        {**_HEADS, "in_channels": 4, "out_channels": 4, "num_layers": 1, "sample_size": LATENT}
        | {"num_cross_attention_heads": 2, "cross_attention_head_dim": 8, "dropout": 0.1}
        | {"cross_attention_dim": 16, "caption_channels": 16},
    ),
    "prior": OfDiffusers(
        "PriorTransformer",
        embedded,
        {**_HEADS, "num_layers": 2, "embedding_dim": 16, "num_embeddings": TOKENS, "dropout": 0.1},
    ),
    "cogview3plus": OfDiffusers(
        "CogView3PlusTransformer2DModel",
        sized,
        _COGVIEW,
    ),
    "cogview4": OfDiffusers(
        "CogView4Transformer2DModel",
        sized,
        {**_COGVIEW, "rope_axes_dim": (8, 8)},
    ),
    "cogvideox": OfDiffusers(
        "CogVideoXTransformer3DModel",
        lambda: moving() | {"hidden_states": torch.randn(2, 3, 4, LATENT, LATENT)},
        {**_HEADS, "in_channels": 4, "out_channels": 4, "time_embed_dim": 8, "num_layers": 1}
        | {"text_embed_dim": 16, "sample_width": LATENT, "sample_height": LATENT}
        | {"sample_frames": 9, "max_text_seq_length": TOKENS, "dropout": 0.1},
    ),
    "latte": OfDiffusers(
        "LatteTransformer3DModel",
        moving,
        {**_DIT, "video_length": 3, "caption_channels": 16, "out_channels": 4, "num_layers": 1}
        | {"cross_attention_dim": 16, "norm_type": "ada_norm_single", "dropout": 0.1},
    ),
    "ltx": OfDiffusers(
        "LTXVideoTransformer3DModel",
        sequence_of_frames,
        {**_HEADS, "in_channels": 4, "out_channels": 4, "num_layers": 1}
        | {"cross_attention_dim": 16, "caption_channels": 16},
    ),
    "mochi": OfDiffusers(
        "MochiTransformer3DModel",
        masked_moving,
        {**_HEADS, "in_channels": 4, "num_layers": 2, "pooled_projection_dim": 16}
        | {"text_embed_dim": 16, "time_embed_dim": 4},
    ),
    "hunyuan_video": OfDiffusers(
        "HunyuanVideoTransformer3DModel",
        lambda: masked_moving() | {"pooled_projections": torch.randn(2, 8)},
        {**_HEADS, "in_channels": 4, "out_channels": 4, "num_layers": 1, "num_single_layers": 1}
        | {"num_refiner_layers": 1, "guidance_embeds": False, "text_embed_dim": 16}
        | {"pooled_projection_dim": 8, "rope_axes_dim": (2, 2, 4)},
    ),
    "wan": OfDiffusers(
        "WanTransformer3DModel",
        moving,
        {**_HEADS, "in_channels": 4, "out_channels": 4, "text_dim": 16, "freq_dim": 16}
        | {"ffn_dim": 32, "num_layers": 2, "rope_max_seq_len": 32, "attention_head_dim": 12},
    ),
    "allegro": OfDiffusers(
        "AllegroTransformer3DModel",
        lambda: moving() | {"attention_mask": torch.ones(2, 3, LATENT, LATENT)},
        {**_HEADS, "in_channels": 4, "out_channels": 4, "num_layers": 1, "attention_head_dim": 12}
        | {"cross_attention_dim": 24, "sample_width": LATENT, "sample_height": LATENT}
        | {"sample_frames": 3, "caption_channels": 16, "dropout": 0.1},
    ),
    "stable_audio": OfDiffusers(
        "StableAudioDiTModel",
        audio,
        {"sample_size": 8, "in_channels": 4, "out_channels": 4, "num_layers": 1}
        | {"num_attention_heads": 2, "num_key_value_attention_heads": 2, "attention_head_dim": 16}
        | {"cross_attention_dim": 16, "cross_attention_input_dim": 16, "time_proj_dim": 8}
        | {"global_states_input_dim": 16},
        dtype=torch.float64,
    ),
    "transformer_2d": OfDiffusers(
        "Transformer2DModel",
        conditioned,
        {**_HEADS, "in_channels": 4, "norm_num_groups": 4, "cross_attention_dim": 16}
        | {"dropout": 0.1},
    ),
    "transformer_temporal": OfDiffusers(
        "TransformerTemporalModel",
        lambda: unconditioned() | {"num_frames": 2},
        {**_HEADS, "in_channels": 4, "norm_num_groups": 4, "dropout": 0.1},
    ),
    "qwen_image": OfDiffusers(
        "QwenImageTransformer2DModel",
        lambda: {
            "hidden_states": torch.randn(2, 16, 16),
            "encoder_hidden_states": words(2),
            "encoder_hidden_states_mask": torch.ones(2, TOKENS, dtype=torch.int64),
            "timestep": torch.rand(2),
            "img_shapes": [[(1, 4, 4)]] * 2,
        },
        {**_HEADS, "in_channels": 16, "out_channels": 4, "num_layers": 1}
        | {"joint_attention_dim": 16, "axes_dims_rope": (2, 2, 4)},
    ),
    "lumina2": OfDiffusers(
        "Lumina2Transformer2DModel",
        lambda: patched() | {"encoder_attention_mask": torch.ones(4, TOKENS, dtype=torch.bool)},
        {"sample_size": LATENT, "patch_size": 2, "in_channels": 4, "hidden_size": 24}
        | {"num_layers": 1, "num_refiner_layers": 1, "num_attention_heads": 3, "num_kv_heads": 1}
        | {"multiple_of": 2, "cap_feat_dim": 16, "axes_dim_rope": (4, 2, 2)}
        | {"axes_lens": (128, 128, 128)},
    ),
}

# By library and family, in the order of the summary.
LIBRARIES: dict[str, dict[str, Mapping[str, Trainable]]] = {
    "transformers": dict(FAMILIES),
    "timm": {
        "convolutions": CONVOLUTIONS,
        "transformers": TRANSFORMERS,
        "both": HYBRIDS,
        "perceptrons": PERCEPTRONS,
    },
    "diffusers": {
        "U-Nets and adapters": UNETS,
        "autoencoders": AUTOENCODERS,
        "transformers": DIFFUSION_TRANSFORMERS,
    },
}
