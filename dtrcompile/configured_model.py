"""The model of a configuration of the transformers library, with a loss, and its inputs.

The model is built on the meta device: 70 billion parameters take no memory.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from dtrcompile.passes.errors import OptionError

_LENGTH = 1024
# Classes that build models of language -> the name of their loss in the library.  Encoders are also
# there as decoders, so these come last.
_LANGUAGE = {
    "AutoModelForSeq2SeqLM": "ForCausalLM",
    "AutoModelForMaskedLM": "ForMaskedLM",
    "AutoModelForCausalLM": "ForCausalLM",
}


@dataclass(frozen=True)
class UserModel:
    """A model, and what it is called with."""

    model: Callable[..., Any]
    inputs: tuple[Any, ...]


class _Loss(nn.Module):
    """A model of transformers as a training step calls it, for its loss."""

    def __init__(self, model: nn.Module, input_name: str) -> None:
        super().__init__()
        self.model = model
        self.input_name = input_name

    def forward(self, given: torch.Tensor, labels: torch.Tensor) -> Any:
        """The loss, a scalar."""
        return self.model(**{self.input_name: given, "labels": labels}).loss


def is_config(found: Any) -> bool:
    """Whether something is a configuration class of transformers."""
    transformers = sys.modules.get("transformers")
    return (
        transformers is not None
        and isinstance(found, type)
        and issubclass(found, transformers.PretrainedConfig)
    )


def model_of_config(
    config_class: Callable[[], Any], batch: int | None, length: int | None
) -> UserModel:
    """The model that a configuration's defaults describe, for language or for images.

    Args:
        batch, length: of the inputs, in samples and in tokens.

    Raises:
        OptionError: if the library has no such model with a loss, or cannot build it.
    """
    import transformers

    config = config_class()
    for setting in ("use_cache", "return_dict"):
        if hasattr(config, setting):
            setattr(config, setting, setting == "return_dict")
    if getattr(config, "is_encoder_decoder", False):
        start = getattr(config, "decoder_start_token_id", None)
        config.decoder_start_token_id = start or getattr(config, "pad_token_id", None) or 0
    n = batch or 1
    for builder, loss_type in _LANGUAGE.items():
        model = _built(getattr(transformers, builder), config, loss_type)
        if model is not None:
            longest = getattr(config, "max_position_embeddings", None) or _LENGTH
            tokens = torch.zeros(n, length or min(longest, _LENGTH), dtype=torch.int64)
            return UserModel(_Loss(model, "input_ids"), (tokens, tokens.clone()))
    model = _built(transformers.AutoModelForImageClassification, config, "ForImageClassification")
    if model is None:
        raise OptionError(
            f"transformers has no model for language or for classifying images of {config_class}:"
            " write a function that returns a model and its inputs, and name that."
        )
    if length is not None:
        raise OptionError("--length is for models of language, and this one reads images.")
    size = getattr(config, "image_size", 224)
    height, width = size if isinstance(size, (tuple, list)) else (size, size)
    images = torch.zeros(n, getattr(config, "num_channels", 3), height, width)
    labels = torch.zeros(n, dtype=torch.int64)
    return UserModel(_Loss(model, "pixel_values"), (images, labels))


def _built(builder: Any, config: Any, loss_type: str) -> nn.Module | None:
    """The model; None if there is none of this kind for the configuration.

    Args:
        loss_type: of the library's loss functions.  Where a model does not name it, a warning is
            logged while the loss is computed, and the graph ends there.
    """
    if type(config) not in builder._model_mapping:
        return None
    try:
        with torch.device("meta"):
            model = builder.from_config(config)
    except Exception as error:
        text = " ".join(str(error).split())
        raise OptionError(
            f"transformers cannot build the model of {type(config).__name__} from its defaults:"
            f" {type(error).__name__}: {text}"
        ) from error
    model.loss_type = loss_type
    return model  # type: ignore[no-any-return]
