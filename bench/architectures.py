"""Models of the `transformers` library as they are: do budgets hold, and are gradients right?

Each architecture is built from its configuration class with tiny sizes and random weights, is
given a batch with labels, and is trained as users do: ``model(**batch).loss.backward()``, with the
model's own output classes, warnings and dropout, and no ``fullgraph``.  At each budget (``"min"``,
and half of the unbudgeted peak or, where that is refused, the smallest that the refusal names) it
takes three steps; a model of several graphs is planned again at the second.  On the executor that
counts bytes:

- counted bytes are those predicted, at every step of every graph;
- what each graph may hold, and what stands beside it, is within the budget;
- gradients of every step are those of eager PyTorch; with dropout, whose masks are not eager
  PyTorch's, those of the run without a budget from the same seed, and at ``"min"`` with all dropout
  set to zero those of eager PyTorch again.

With ``--inductor`` the allocator's peak of each step is held to the budget too (at ``"min"``: that
of the last step to what was promised).

    python -m bench.architectures --out rows.jsonl
    python -m bench.architectures --inductor --names gpt2,t5
    python -m bench.architectures --rows rows.jsonl       # the table of rows measured before

Exits with 1 if any of this does not hold.  An architecture that Dynamo cannot compile, with
``backend="aot_eager"`` either, is listed with the reason.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import json
import logging
import random
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy
import torch
from torch import Tensor, nn

import dtrcompile
from bench.measure import (
    cause_of,
    format_table,
    machine,
    say,
    use_kernel_cache,
    write_json_line,
)
from dtrcompile.backend import dtr
from dtrcompile.demo.memory import static_bytes, trace_step
from dtrcompile.passes.errors import InfeasibleBudgetError
from dtrcompile.passes.graphs.executor import clear_executor_log, executor_log
from workloads.training import relative_error

BATCH, LENGTH, VOCABULARY, WIDTH, LAYERS, HEADS = 16, 16, 29, 16, 2, 2
PIXELS, SAMPLES, CLASSES = 32, 480, 3
STEPS = 3
SEED = 11
TOLERANCE = 1e-5
BUDGETS = ("min", "50%")
QUICK = ("gpt2",)
# As the library has them: a decoder, an encoder, an encoder and a decoder, a mixture of experts, a
# state space, images, images and text, sound.
UNDER_INDUCTOR = ("gpt2", "llama", "bert", "t5", "mixtral", "mamba", "vit", "clip")

Batch = dict[str, Any]
Gradients = dict[str, Tensor | None]


def ids(batch: int = BATCH, length: int = LENGTH) -> Tensor:
    """Tokens; none is one of the few lowest, which mean padding and the like."""
    return torch.randint(5, VOCABULARY, (batch, length))


def text() -> Batch:
    tokens = ids()
    return {"input_ids": tokens, "labels": tokens.clone()}


def padded_text() -> Batch:
    mask = torch.ones(BATCH, LENGTH, dtype=torch.long)
    mask[0, LENGTH // 2 :] = 0
    return {"input_ids": ids(), "attention_mask": mask, "labels": ids()}


def source_and_target() -> Batch:
    return {"input_ids": ids(), "labels": ids(length=LENGTH // 2)}


def image() -> Batch:
    labels = torch.randint(CLASSES, (BATCH,))
    return {"pixel_values": torch.randn(BATCH, 3, PIXELS, PIXELS), "labels": labels}


def segmented_image() -> Batch:
    labels = torch.randint(CLASSES, (BATCH, PIXELS, PIXELS))
    return {"pixel_values": torch.randn(BATCH, 3, PIXELS, PIXELS), "labels": labels}


def image_and_text() -> Batch:
    pixels = torch.randn(BATCH, 3, PIXELS, PIXELS)
    return {"input_ids": ids(), "pixel_values": pixels, "return_loss": True}


def sound() -> Batch:
    labels = torch.randint(CLASSES, (BATCH,))
    return {"input_values": torch.randn(BATCH, SAMPLES), "labels": labels}


def spectrum() -> Batch:
    return {"input_features": torch.randn(BATCH, 8, 2 * LENGTH), "labels": ids(length=8)}


class Trainable(Protocol):
    """What `judge` asks of an architecture, whichever library it is of."""

    @property
    def dtype(self) -> torch.dtype:
        """Of parameters and of what a batch has of floating-point numbers."""

    @property
    def draws(self) -> bool:
        """Whether the model draws numbers when it is built with dropout."""

    def build(self, *, dropout: bool) -> nn.Module:
        """Random weights, always the same.  Without dropout, nothing in it draws numbers."""

    def batch(self) -> Batch:
        """Arguments of one call, and what the loss compares its result with."""

    def loss(self, called: Callable[..., Any], batch: Batch) -> Tensor:
        """What a user computes of one call, and calls ``backward`` of."""


@dataclass(frozen=True)
class Architecture:
    """One model of the library, small.

    Attributes:
        model: its class; its configuration is of the class that this one names.
        batch: makes the arguments of one call.
        sizes: what the configuration is given.
        dtype: of parameters and images.
    """

    model: str
    batch: Callable[[], Batch]
    sizes: Mapping[str, Any] = field(default_factory=dict)
    dtype: torch.dtype = torch.float32

    def build(self, *, dropout: bool) -> nn.Module:
        """Random weights, always the same.  Without dropout, nothing in it draws numbers."""
        library = importlib.import_module("transformers")
        model_class = getattr(library, self.model)
        config = model_class.config_class(**self.sizes)
        if not dropout:
            silence(config)
        torch.manual_seed(SEED)
        module: nn.Module = model_class(config)
        return module.to(self.dtype).train()

    @property
    def draws(self) -> bool:
        """Whether the configuration has dropout or masks by itself."""
        library = importlib.import_module("transformers")
        config = getattr(library, self.model).config_class(**self.sizes)
        return silence(config)

    def loss(self, called: Callable[..., Any], batch: Batch) -> Tensor:
        """The model computes it."""
        return called(**batch).loss


DRAWN = ("drop", "mask_time_prob", "mask_feature_prob", "router_jitter_noise")


def silence(config: Any) -> bool:
    """Sets every probability in a configuration to zero; whether there was one."""
    found = False
    for name, value in list(vars(config).items()):
        if any(word in name for word in DRAWN) and isinstance(value, float) and value > 0:
            setattr(config, name, 0.0)
            found = True
        elif hasattr(value, "to_dict"):
            found |= silence(value)
    return found


# What most decoders of the library call their sizes.
_DECODER = {
    "vocab_size": VOCABULARY,
    "hidden_size": WIDTH,
    "intermediate_size": 2 * WIDTH,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_GROUPED = {**_DECODER, "num_key_value_heads": 1}
_HEAD_DIM = {**_GROUPED, "head_dim": WIDTH // HEADS}
_ENCODER = {**_DECODER, "type_vocab_size": 2}
_SEQ2SEQ = {
    "vocab_size": VOCABULARY,
    "d_model": WIDTH,
    "encoder_layers": 1,
    "decoder_layers": 1,
    "encoder_attention_heads": HEADS,
    "decoder_attention_heads": HEADS,
    "encoder_ffn_dim": 2 * WIDTH,
    "decoder_ffn_dim": 2 * WIDTH,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 2,
    "forced_eos_token_id": None,
}
_T5 = {
    "vocab_size": VOCABULARY,
    "d_model": WIDTH,
    "d_kv": WIDTH // HEADS,
    "d_ff": 2 * WIDTH,
    "num_layers": 1,
    "num_decoder_layers": 1,
    "num_heads": HEADS,
    "decoder_start_token_id": 0,
}
_IMAGE = {
    "hidden_size": WIDTH,
    "intermediate_size": 2 * WIDTH,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "image_size": PIXELS,
    "patch_size": 8,
    "num_labels": CLASSES,
}
_STAGES = {"embed_dim": 16, "image_size": PIXELS, "patch_size": 4, "num_labels": CLASSES}
_SOUND = {
    "vocab_size": VOCABULARY,
    "hidden_size": WIDTH,
    "intermediate_size": 2 * WIDTH,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "conv_dim": (WIDTH, WIDTH),
    "conv_stride": (5, 4),
    "conv_kernel": (8, 4),
    "num_feat_extract_layers": 2,
    "num_conv_pos_embeddings": 4,
    "num_conv_pos_embedding_groups": 2,
    "mask_time_length": 2,
    "classifier_proj_size": WIDTH,
    "num_labels": CLASSES,
}
_TEXT_TOWER = {**_DECODER, "projection_dim": WIDTH}
_IMAGE_TOWER = {**{k: v for k, v in _IMAGE.items() if k != "num_labels"}, "projection_dim": WIDTH}
_TOWERS = {"text_config": _TEXT_TOWER, "vision_config": _IMAGE_TOWER, "projection_dim": WIDTH}

DECODERS = {
    "gpt2": Architecture(
        "GPT2LMHeadModel",
        text,
        {"vocab_size": VOCABULARY, "n_embd": WIDTH, "n_layer": LAYERS, "n_head": HEADS}
        | {"n_positions": 64, "bos_token_id": 1, "eos_token_id": 2},
    ),
    "gpt_neo": Architecture(
        "GPTNeoForCausalLM",
        text,
        {"vocab_size": VOCABULARY, "hidden_size": WIDTH, "num_layers": 2, "num_heads": HEADS}
        | {"attention_types": [[["global", "local"], 1]], "window_size": 8}
        | {"max_position_embeddings": 64, "bos_token_id": 1, "eos_token_id": 2},
    ),
    "gpt_neox": Architecture("GPTNeoXForCausalLM", text, _DECODER),
    "gptj": Architecture(
        "GPTJForCausalLM",
        text,
        {"vocab_size": VOCABULARY, "n_embd": WIDTH, "n_layer": LAYERS, "n_head": HEADS}
        | {"n_positions": 64, "rotary_dim": 8, "bos_token_id": 1, "eos_token_id": 2},
    ),
    "codegen": Architecture(
        "CodeGenForCausalLM",
        text,
        {"vocab_size": VOCABULARY, "n_embd": WIDTH, "n_layer": LAYERS, "n_head": 4}
        | {"n_positions": 64, "rotary_dim": 4, "bos_token_id": 1, "eos_token_id": 2},
    ),
    "opt": Architecture(
        "OPTForCausalLM",
        text,
        {**_DECODER, "ffn_dim": 2 * WIDTH, "word_embed_proj_dim": WIDTH},
    ),
    "bloom": Architecture(
        "BloomForCausalLM",
        text,
        {"vocab_size": VOCABULARY, "hidden_size": WIDTH, "n_layer": LAYERS, "n_head": HEADS}
        | {"hidden_dropout": 0.1, "attention_dropout": 0.1},
    ),
    "llama": Architecture("LlamaForCausalLM", text, _GROUPED),
    "mistral": Architecture("MistralForCausalLM", text, {**_GROUPED, "sliding_window": 8}),
    "mixtral": Architecture(
        "MixtralForCausalLM",
        text,
        {**_GROUPED, "num_local_experts": 4, "output_router_logits": True},
    ),
    "qwen2": Architecture("Qwen2ForCausalLM", padded_text, _GROUPED),
    "qwen2_moe": Architecture(
        "Qwen2MoeForCausalLM",
        text,
        {**_GROUPED, "num_experts": 4, "num_experts_per_tok": 2}
        | {"moe_intermediate_size": WIDTH, "shared_expert_intermediate_size": WIDTH},
    ),
    "qwen3": Architecture("Qwen3ForCausalLM", text, _HEAD_DIM),
    "gemma": Architecture("GemmaForCausalLM", text, _HEAD_DIM),
    "gemma2": Architecture("Gemma2ForCausalLM", text, {**_HEAD_DIM, "sliding_window": 8}),
    "phi": Architecture("PhiForCausalLM", text, _DECODER),
    "phi3": Architecture("Phi3ForCausalLM", text, _GROUPED),
    "falcon": Architecture("FalconForCausalLM", text, {**_DECODER, "alibi": False}),
    "mpt": Architecture(
        "MptForCausalLM",
        text,
        {"vocab_size": VOCABULARY, "d_model": WIDTH, "n_layers": LAYERS, "n_heads": HEADS}
        | {"max_seq_len": 64},
    ),
    "stablelm": Architecture("StableLmForCausalLM", text, _GROUPED),
    "cohere": Architecture("CohereForCausalLM", text, _GROUPED),
    "olmo": Architecture("OlmoForCausalLM", text, _GROUPED),
    "granite": Architecture("GraniteForCausalLM", text, _GROUPED),
    "starcoder2": Architecture("Starcoder2ForCausalLM", text, _GROUPED),
    "mamba": Architecture(
        "MambaForCausalLM",
        text,
        {"vocab_size": VOCABULARY, "hidden_size": WIDTH, "num_hidden_layers": 1, "state_size": 4}
        | {"time_step_rank": 2},
    ),
    "biogpt": Architecture("BioGptForCausalLM", text, _DECODER),
}
ENCODERS_AND_DECODERS = {
    "t5": Architecture("T5ForConditionalGeneration", source_and_target, _T5),
    "mt5": Architecture("MT5ForConditionalGeneration", source_and_target, _T5),
    "bart": Architecture("BartForConditionalGeneration", source_and_target, _SEQ2SEQ),
    "mbart": Architecture("MBartForConditionalGeneration", source_and_target, _SEQ2SEQ),
    "pegasus": Architecture("PegasusForConditionalGeneration", source_and_target, _SEQ2SEQ),
    "marian": Architecture("MarianMTModel", source_and_target, _SEQ2SEQ),
    "whisper": Architecture(
        "WhisperForConditionalGeneration",
        spectrum,
        {k: v for k, v in _SEQ2SEQ.items() if k != "max_position_embeddings"}
        | {"num_mel_bins": 8, "max_source_positions": LENGTH, "max_target_positions": LENGTH},
    ),
}
ENCODERS = {
    "bert": Architecture("BertForMaskedLM", padded_text, _ENCODER),
    "roberta": Architecture("RobertaForMaskedLM", padded_text, _ENCODER),
    "distilbert": Architecture(
        "DistilBertForMaskedLM",
        padded_text,
        {"vocab_size": VOCABULARY, "dim": WIDTH, "hidden_dim": 2 * WIDTH, "n_layers": LAYERS}
        | {"n_heads": HEADS, "max_position_embeddings": 64},
    ),
    "albert": Architecture(
        "AlbertForMaskedLM",
        padded_text,
        {**_ENCODER, "embedding_size": 16, "hidden_dropout_prob": 0.1},
    ),
    "electra": Architecture("ElectraForMaskedLM", padded_text, {**_ENCODER, "embedding_size": 16}),
    "deberta_v2": Architecture(
        "DebertaV2ForMaskedLM",
        padded_text,
        {**_ENCODER, "relative_attention": True, "pos_att_type": ["p2c", "c2p"]},
    ),
    "mpnet": Architecture("MPNetForMaskedLM", padded_text, _DECODER),
    "convbert": Architecture(
        "ConvBertForMaskedLM", padded_text, {**_ENCODER, "embedding_size": WIDTH}
    ),
    "fnet": Architecture("FNetForMaskedLM", text, _ENCODER),
    "funnel": Architecture(
        "FunnelForMaskedLM",
        padded_text,
        {"vocab_size": VOCABULARY, "block_sizes": [1, 1], "num_decoder_layers": 1}
        | {"d_model": WIDTH, "n_head": HEADS, "d_head": 16, "d_inner": 2 * WIDTH},
    ),
    "longformer": Architecture(
        "LongformerForMaskedLM", padded_text, {**_ENCODER, "attention_window": 4}
    ),
    "big_bird": Architecture(
        "BigBirdForMaskedLM",
        padded_text,
        {**_ENCODER, "attention_type": "original_full"},
    ),
    "xlnet": Architecture(
        "XLNetLMHeadModel",
        text,
        {"vocab_size": VOCABULARY, "d_model": WIDTH, "n_layer": LAYERS, "n_head": HEADS}
        | {"d_inner": 2 * WIDTH},
    ),
}
IMAGES = {
    "vit": Architecture("ViTForImageClassification", image, _IMAGE),
    "deit": Architecture("DeiTForImageClassification", image, _IMAGE),
    "dinov2": Architecture("Dinov2ForImageClassification", image, _IMAGE),
    "beit": Architecture("BeitForImageClassification", image, {**_IMAGE, "drop_path_rate": 0.1}),
    "swin": Architecture(
        "SwinForImageClassification",
        image,
        {**_STAGES, "depths": [2, 1], "num_heads": [1, 2], "window_size": 4},
    ),
    "convnext": Architecture(
        "ConvNextForImageClassification",
        image,
        {"hidden_sizes": [16, 32], "depths": [1, 1], "num_stages": 2, "num_labels": CLASSES},
    ),
    "resnet": Architecture(
        "ResNetForImageClassification",
        image,
        {"embedding_size": 8, "hidden_sizes": [16, 32], "depths": [1, 1], "num_labels": CLASSES}
        | {"layer_type": "basic"},
    ),
    "mobilenet_v2": Architecture(
        "MobileNetV2ForImageClassification",
        image,
        {"depth_multiplier": 0.25, "image_size": PIXELS, "num_labels": CLASSES},
        # In float32 eager PyTorch's own gradients are off by 2e-3: batch norm of few pixels.
        dtype=torch.float64,
    ),
    "segformer": Architecture(
        "SegformerForSemanticSegmentation",
        segmented_image,
        {"num_encoder_blocks": 2, "depths": [1, 1], "sr_ratios": [2, 1], "hidden_sizes": [16, 32]}
        | {"patch_sizes": [7, 3], "strides": [4, 2], "num_attention_heads": [1, 2]}
        | {"mlp_ratios": [2, 2], "decoder_hidden_size": 16, "num_labels": CLASSES},
    ),
}
IMAGES_AND_TEXT = {
    "clip": Architecture("CLIPModel", image_and_text, _TOWERS),
    "siglip": Architecture("SiglipModel", image_and_text, _TOWERS),
}
SOUND = {
    "wav2vec2": Architecture("Wav2Vec2ForSequenceClassification", sound, _SOUND),
    "hubert": Architecture("HubertForSequenceClassification", sound, _SOUND),
}
FAMILIES = {
    "decoders": DECODERS,
    "encoders and decoders": ENCODERS_AND_DECODERS,
    "encoders": ENCODERS,
    "images": IMAGES,
    "images and text": IMAGES_AND_TEXT,
    "sound": SOUND,
}
ARCHITECTURES: dict[str, Architecture] = {
    name: architecture for family in FAMILIES.values() for name, architecture in family.items()
}


@dataclass(frozen=True)
class Trained:
    """What a few steps of one compiled model were.

    Attributes:
        gradients: of each step.
        budget: as asked for, or the smallest that a refusal named.
        peak_bytes: the most that the allocator held in each step, where it was looked at.
        uncounted: bytes that differ from what was predicted, in words.
    """

    gradients: tuple[Gradients, ...]
    budget: object
    peak_bytes: tuple[int, ...]
    uncounted: tuple[str, ...] = ()


def seed_all() -> None:
    """Every generator that a model of the library draws from."""
    random.seed(SEED)
    numpy.random.seed(SEED)
    torch.manual_seed(SEED)


def batch_of(architecture: Trainable) -> Batch:
    torch.manual_seed(SEED)
    batch = architecture.batch()
    return {
        name: value.to(architecture.dtype)
        if isinstance(value, Tensor) and value.is_floating_point()
        else value
        for name, value in batch.items()
    }


def steps(
    architecture: Trainable,
    module: nn.Module,
    called: Callable[..., Any],
    *,
    count: int,
    traced: bool,
) -> Trained:
    """Trains as a user does; every step sees the same weights, batch and random numbers."""
    batch = batch_of(architecture)
    gradients, peaks, uncounted = [], [], []
    tensors = [value for value in batch.values() if isinstance(value, Tensor)]
    before_bytes = static_bytes(module, *tensors)

    def step() -> None:
        architecture.loss(called, batch).backward()

    for number in range(count):
        module.zero_grad(set_to_none=True)
        clear_executor_log()
        seed_all()
        if traced:
            peaks.append(trace_step(step, before_bytes, torch.device("cpu")).peak_bytes)
        else:
            step()
        gradients.append({name: p.grad for name, p in module.named_parameters()})
        uncounted += [f"step {number + 1}: {text}" for text in miscounted()]
    return Trained(tuple(gradients), None, tuple(peaks), tuple(uncounted))


def miscounted() -> Iterable[str]:
    """Where the executor counted other bytes than were predicted."""
    for record in executor_log():
        if not record.is_sized or record.mistraced:
            continue
        if len(record.counted_bytes) != len(record.predicted_bytes):
            yield f"{record.phase}: {len(record.counted_bytes)} steps were counted"
        pairs = zip(record.counted_bytes, record.predicted_bytes, strict=False)
        for at, (counted, predicted) in enumerate(pairs):
            if counted != predicted:
                yield f"{record.phase} at {at}: counted {counted} bytes, predicted {predicted}"
                break


def train(
    architecture: Trainable,
    budget: object,
    *,
    compiler: str,
    dropout: bool,
    count: int = STEPS,
) -> Trained:
    """Three steps at a budget, or at the smallest that a refusal names.

    Of several graphs each names its own minimum in the first step, so it may have to be raised more
    than once; each time it must grow.

    Raises:
        InfeasibleBudgetError: what was named is refused too.
    """
    named, last_bytes = budget, 0
    while True:
        torch._dynamo.reset()
        dtrcompile.clear_reports()
        module = architecture.build(dropout=dropout)
        options = {"budget": named, "compiler": compiler}
        compiled = torch.compile(module, backend=dtr, options=options)
        try:
            traced = compiler == "inductor"
            trained = steps(architecture, module, compiled, count=count, traced=traced)
        except Exception as error:
            refusal = cause_of(error)
            if not isinstance(refusal, InfeasibleBudgetError):
                raise
            if refusal.minimum_bytes is None or refusal.minimum_bytes <= last_bytes:
                raise
            named = last_bytes = refusal.minimum_bytes
            continue
        return Trained(trained.gradients, named, trained.peak_bytes, trained.uncounted)


def eager(architecture: Trainable) -> Gradients:
    """Without `torch.compile` and without dropout."""
    module = architecture.build(dropout=False)
    return steps(architecture, module, module, count=1, traced=False).gradients[0]


def dynamo_fails(architecture: Trainable) -> str | None:
    """What stops Dynamo and AOTAutograd by themselves, or None."""
    torch._dynamo.reset()
    module = architecture.build(dropout=True)
    compiled = torch.compile(module, backend="aot_eager")
    try:
        steps(architecture, module, compiled, count=1, traced=False)
    except Exception as error:  # whatever it is, it is not ours
        return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
    return None


def furthest(trained: Trained, reference: Gradients) -> float:
    """The largest relative error of a step's gradients."""
    return max(relative_error(gradients, reference) for gradients in trained.gradients)


def latest_reports() -> list[dtrcompile.CompileReport]:
    """The last of each graph, which is what ran in the last step."""
    return list({report.graph: report for report in dtrcompile.reports()}.values())


def judge(
    architecture: Trainable,
    budget: object,
    *,
    compiler: str,
    expected: Gradients,
    unbudgeted: Trained | None,
) -> dict[str, Any]:
    """One row: the three steps at ``budget`` with everything that must hold of them.

    Args:
        expected: eager PyTorch's gradients, without dropout.
        unbudgeted: steps without a budget, where the architecture draws numbers.
    """
    bad: list[str] = []
    begun = time.perf_counter()
    trained = train(architecture, budget, compiler=compiler, dropout=unbudgeted is not None)
    seconds = time.perf_counter() - begun
    reports = latest_reports()
    budgets = {report.budget_bytes for report in reports if report.budget_bytes is not None}
    budget_bytes = max(budgets, default=None)
    promised_bytes = max((report.step_bytes for report in reports), default=0)
    bad += trained.uncounted[:2]
    if not reports:
        bad.append("nothing was compiled")
    if budget_bytes is not None and promised_bytes > budget_bytes:
        bad.append(f"promised {promised_bytes} bytes of {budget_bytes}")
    if trained.peak_bytes:
        allowed_bytes = promised_bytes if budget_bytes is None else budget_bytes
        held_bytes = trained.peak_bytes[-1:] if budget_bytes is None else trained.peak_bytes
        if max(held_bytes) > allowed_bytes:
            bad.append(f"held {list(held_bytes)} of {allowed_bytes} bytes")
    row: dict[str, Any] = {
        "budget": str(budget),
        "compiler": compiler,
        "draws": unbudgeted is not None,
        "trained_at": str(trained.budget),
        "budget_bytes": budget_bytes,
        "promised_bytes": promised_bytes,
        "allocator_bytes": list(trained.peak_bytes),
        "graphs": len(reports),
        "recomputed_runs": sum(report.recomputed_runs for report in reports),
        "baseline_bytes": max((report.baseline_peak_bytes for report in reports), default=0),
        "seconds": round(seconds, 1),
    }
    if unbudgeted is not None:
        error = furthest(trained, unbudgeted.gradients[-1])
        row["error_of_unbudgeted"] = str(error)
        if not error <= TOLERANCE:
            bad.append(f"gradients differ by {error:.1e} from unbudgeted ones")
        if budget == "min":
            trained = train(architecture, budget, compiler=compiler, dropout=False)
            bad += [f"without dropout, {text}" for text in trained.uncounted[:1]]
    if unbudgeted is None or budget == "min":
        error = furthest(trained, expected)
        row["error_of_eager"] = str(error)
        if not error <= TOLERANCE:
            bad.append(f"gradients differ by {error:.1e} from eager ones")
    row["bad"] = bad
    return row


def judged(
    architecture: Trainable, budgets: Sequence[str], *, compiler: str
) -> Iterator[dict[str, Any]]:
    """A row for each budget; where the model does not train, the last row says why."""
    budget = budgets[0]
    try:
        expected = eager(architecture)
        unbudgeted = None
        if architecture.draws:
            unbudgeted = train(architecture, "100%", compiler=compiler, dropout=True)
        for budget in budgets:
            yield judge(
                architecture, budget, compiler=compiler, expected=expected, unbudgeted=unbudgeted
            )
    except Exception as error:  # any is a finding, unless Dynamo has it by itself
        reason = dynamo_fails(architecture)
        text = f"Dynamo cannot: {reason}" if reason else repr(cause_of(error))[:500]
        if reason is None:
            traceback.print_exc(limit=-4)
        yield {"budget": budget, "compiler": compiler, "dynamo_fails": reason, "error": text}


def is_ours(row: Mapping[str, Any]) -> bool:
    """Whether a row says of something that has to hold that it does not."""
    return bool(row.get("bad")) or ("error" in row and row.get("dynamo_fails") is None)


def prepare() -> None:
    """What every run begins with: quiet libraries, one thread, kernels kept."""
    use_kernel_cache()
    for logger in ("dtrcompile", "torch._dynamo", "transformers"):
        logging.getLogger(logger).setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)  # several add an embedding's gradients in any order


def table(rows: Iterable[Mapping[str, Any]]) -> str:
    """One line for each architecture and budget."""
    header = ("architecture", "budget", "KiB", "promised", "graphs", "recomputed", "error", "")
    lines = []
    for row in rows:
        if "error" in row:
            lines.append((row["name"], row["budget"], "", "", "", "", "", row["error"][:90]))
            continue
        errors = [row.get("error_of_eager", 0), row.get("error_of_unbudgeted", 0)]
        named = row["budget"] != row["trained_at"]
        lines.append(
            (
                row["name"],
                row["budget"] + (", as named" if named else ""),
                f"{row['budget_bytes'] / 1024:.1f}" if row["budget_bytes"] else "",
                f"{row['promised_bytes'] / 1024:.1f}",
                str(row["graphs"]),
                str(row["recomputed_runs"]),
                f"{max(map(float, errors)):.0e}",
                "; ".join(row["bad"]),
            )
        )
    return format_table(header, lines)


def span(ratios: Sequence[float]) -> str:
    return f"{min(ratios):.2f} to {max(ratios):.2f}" if ratios else ""


def summary(rows: Sequence[Mapping[str, Any]]) -> str:
    """The table of docs/benchmarks.md: one line a family, and what did not train."""
    lines = [
        "| family | models | several graphs | 50 % kept | refused, kept as named"
        " | promised of budget | one graph: `min` of the unbudgeted peak | gradient error |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for family, members in FAMILIES.items():
        mine = [row for row in rows if row["name"] in members]
        trained = [row for row in mine if "error" not in row]
        half = [row for row in trained if row["budget"] == "50%"]
        least = [row for row in trained if row["budget"] == "min" and row["graphs"] == 1]
        kept = [row for row in half if row["trained_at"] == "50%"]
        used = [row["promised_bytes"] / row["budget_bytes"] for row in half]
        # A report of one graph of several does not say what the whole step would hold.
        shares = [row["promised_bytes"] / row["baseline_bytes"] for row in least]
        errors = [
            float(row.get(key, 0))
            for row in trained
            for key in ("error_of_eager", "error_of_unbudgeted")
        ]
        cells = (
            family,
            str(len({row["name"] for row in mine})),
            str(len({row["name"] for row in trained if row["graphs"] > 1})),
            str(len(kept)),
            str(len(half) - len(kept)),
            span(used),
            span(shares),
            f"{max(errors):.0e}" if errors else "",
        )
        if mine:
            lines.append(f"| {' | '.join(cells)} |")
    for row in rows:
        if row.get("bad"):
            lines.append(f"{row['name']} at {row['budget']}: {'; '.join(row['bad'])}")
        if "error" in row:
            lines.append(f"{row['name']} at {row['budget']}: {row['error']}")
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    """Run, print the table, return the exit status."""
    assert __doc__ is not None
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--names", help="comma-separated; all by default")
    usual = ",".join(BUDGETS).replace("%", "%%")
    parser.add_argument("--budgets", help=f"comma-separated, by default {usual}")
    parser.add_argument("--inductor", action="store_true", help="some of them, under Inductor")
    parser.add_argument("--quick", action="store_true", help="the smallest alone, at 50 %%")
    parser.add_argument("--out", type=Path, help="append JSON lines to this file")
    parser.add_argument("--rows", type=Path, help="only print what is in this file")
    arguments = parser.parse_args(argv)
    if arguments.rows:
        lines = arguments.rows.read_text(encoding="utf-8").splitlines()
        measured_before = [json.loads(line) for line in lines]
        print(table(measured_before))
        print(summary(measured_before))
        return 0
    if importlib.util.find_spec("transformers") is None:
        print("skipped: transformers is not installed")
        return 0
    compiler = "inductor" if arguments.inductor else "eager"
    chosen = UNDER_INDUCTOR if arguments.inductor else tuple(ARCHITECTURES)
    names = arguments.names.split(",") if arguments.names else QUICK if arguments.quick else chosen
    budgets = (arguments.budgets or ("50%" if arguments.quick else ",".join(BUDGETS))).split(",")
    prepare()
    versions = {"transformers": importlib.import_module("transformers").__version__}
    description = machine(torch.device("cpu")) | versions
    rows: list[dict[str, Any]] = []
    failed = False
    for name in names:
        begun = time.perf_counter()
        say(name)
        row = {"bench": "architectures", "name": name, "machine": description}
        judgements = judged(ARCHITECTURES[name], budgets, compiler=compiler)
        measured = [row | judgement for judgement in judgements]
        for row in measured:
            failed |= is_ours(row)
            say("; ".join([f"  {row['budget']}", *row.get("bad", [row.get("error", "")])]))
            write_json_line(arguments.out, row)
        rows += measured
        say(f"  {time.perf_counter() - begun:.0f} s")
    print(table(rows))
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
