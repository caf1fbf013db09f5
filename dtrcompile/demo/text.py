"""The training text: the source of Python's own standard library, which every machine has."""

from __future__ import annotations

import sysconfig
from pathlib import Path

import torch
from torch import Tensor

from dtrcompile.passes.errors import DTRError

MOST_BYTES = 2_000_000


def standard_library_text(most_bytes: int = MOST_BYTES) -> Tensor:
    """The modules at the top of the standard library, by name, as one tensor of bytes (uint8).

    Raises:
        DTRError: if this Python came without the sources.
    """
    folder = Path(sysconfig.get_path("stdlib"))
    text = bytearray()
    for path in sorted(folder.glob("*.py")):
        text += path.read_bytes()
        if len(text) >= most_bytes:
            break
    if not text:
        raise DTRError(
            f"found no Python sources in {folder}; the demo trains on the standard library's."
            " Use a Python that has them."
        )
    return torch.frombuffer(text[:most_bytes], dtype=torch.uint8)


class Batches:
    """An endless, seeded sequence of (tokens, next tokens) pairs of shape (batch, context)."""

    def __init__(
        self, text: Tensor, *, batch: int, context: int, seed: int, device: torch.device
    ) -> None:
        self.text = text
        self.batch = batch
        self.context = context
        self.device = device
        self.generator = torch.Generator().manual_seed(seed)

    def next(self) -> tuple[Tensor, Tensor]:
        starts = torch.randint(
            len(self.text) - self.context, (self.batch, 1), generator=self.generator
        )
        window = self.text[starts + torch.arange(self.context + 1)].long().to(self.device)
        return window[:, :-1].contiguous(), window[:, 1:].contiguous()
