"""A GPT in plain PyTorch (Radford et al., 2019: pre-norm blocks, learned positions, tied head).

Nothing in it knows about budgets: no checkpointed block, no hook.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True, slots=True)
class GPTSizes:
    """What a `GPT` is made of; ``vocabulary`` 256 reads bytes."""

    layers: int = 6
    width: int = 256
    heads: int = 4
    context: int = 256
    vocabulary: int = 256
    dropout: float = 0.1


class Block(nn.Module):
    """Attention and a two-layer perceptron, each on a residual branch."""

    def __init__(self, sizes: GPTSizes) -> None:
        super().__init__()
        width = sizes.width
        self.heads = sizes.heads
        self.dropout = sizes.dropout
        self.attention_norm = nn.LayerNorm(width)
        self.query_key_value = nn.Linear(width, 3 * width)
        self.attention_out = nn.Linear(width, width)
        self.mlp_norm = nn.LayerNorm(width)
        self.mlp_in = nn.Linear(width, 4 * width)
        self.mlp_out = nn.Linear(4 * width, width)
        self.drop = nn.Dropout(sizes.dropout)

    def forward(self, x: Tensor) -> Tensor:
        """``x`` and the result have the shape (batch, context, width)."""
        x = x + self.drop(self.attend(self.attention_norm(x)))
        hidden = F.gelu(self.mlp_in(self.mlp_norm(x)))
        return x + self.drop(self.mlp_out(hidden))

    def attend(self, x: Tensor) -> Tensor:
        query, key, value = (
            part.unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for part in self.query_key_value(x).chunk(3, dim=-1)
        )
        mixed = F.scaled_dot_product_attention(
            query, key, value, dropout_p=self.dropout if self.training else 0.0, is_causal=True
        )
        return self.attention_out(mixed.transpose(1, 2).flatten(2))


class GPT(nn.Module):
    """Tokens and next tokens in, mean cross entropy out.

    The loss is computed inside, so that the compiled graph holds the logits too.
    """

    def __init__(self, sizes: GPTSizes) -> None:
        super().__init__()
        self.token = nn.Embedding(sizes.vocabulary, sizes.width)
        self.position = nn.Embedding(sizes.context, sizes.width)
        self.drop = nn.Dropout(sizes.dropout)
        self.blocks = nn.ModuleList(Block(sizes) for _ in range(sizes.layers))
        self.norm = nn.LayerNorm(sizes.width)
        self.head = nn.Linear(sizes.width, sizes.vocabulary, bias=False)
        self.head.weight = self.token.weight
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                # GPT-2's: residual branches start small, the deeper the smaller.
                is_branch_end = name.endswith(("attention_out.weight", "mlp_out.weight"))
                scale = 1 / math.sqrt(2 * sizes.layers) if is_branch_end else 1.0
                nn.init.normal_(parameter, std=0.02 * scale)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """``tokens`` and ``targets`` have the shape (batch, context); the result is a scalar."""
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.drop(self.token(tokens) + self.position(positions))
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())
