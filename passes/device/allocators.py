"""What an allocator counts for a request: on CUDA often more than was asked for.

PyTorch's caching allocator for CUDA (``c10/cuda/CUDACachingAllocator.cpp``, ``round_size`` and
``should_split``) rounds a request up to 512 bytes and takes the smallest cached block that is large
enough.  A block for more than 1 MiB is split only if more than 1 MiB would be left of it;
otherwise all of it is handed out, and ``torch.cuda.max_memory_allocated`` counts all of it.  Which
blocks are cached depends on all that the process did before, so what is counted here is the most
that a request can be given: the same in every run.  Blocks of expandable segments
(``PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True``) are split to 512 bytes.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from dtrcompile.passes.device.caching_allocator import GRANULE_BYTES, SMALL_BYTES, UNSPLIT_BYTES
from dtrcompile.passes.target.devices import current_target
from dtrcompile.passes.target.workspaces import keeps_workspaces, product_bytes
from dtrcompile.passes.torch_private import allocator_snapshot

_MIB = 1 << 20
# The same for requests of at least ``max_split_size_mb`` (``max_non_split_rounding_mb``).
_UNSPLIT_OVERSIZE_BYTES = 20 * _MIB


@dataclass(frozen=True, slots=True)
class Allocator:
    """How requests become blocks.

    Attributes:
        granule_bytes: requests are rounded up to a multiple.
        splits_all: a block is split whatever would be left of it.
        max_split_bytes: blocks of this size and more are not split; None for no such size.
        divisions: into how many parts a power of two is divided, to which a request is rounded up
            (``roundup_power2_divisions``); one entry for each power of two from 1 MiB on.
    """

    granule_bytes: int = 1
    splits_all: bool = True
    max_split_bytes: int | None = None
    divisions: tuple[int, ...] = ()

    def block_bytes(self, size_bytes: int) -> int:
        """The most that a request for ``size_bytes`` counts as."""
        size_bytes = self._rounded(size_bytes)
        if self.splits_all or size_bytes <= SMALL_BYTES:
            return size_bytes
        if self.max_split_bytes is not None and size_bytes >= self.max_split_bytes:
            return size_bytes + _UNSPLIT_OVERSIZE_BYTES
        return size_bytes + UNSPLIT_BYTES

    def _rounded(self, size_bytes: int) -> int:
        if self.divisions and size_bytes > self.granule_bytes:
            power = size_bytes.bit_length() - 1
            index = min(max(power - _MIB.bit_length() + 1, 0), len(self.divisions) - 1)
            parts = self.divisions[index]
            if parts > 1 and size_bytes > self.granule_bytes * parts:
                part_bytes = max((1 << power) // parts, 1)
                return size_bytes + -size_bytes % part_bytes
        return size_bytes + -size_bytes % self.granule_bytes


EXACT = Allocator()
"""Counts what was asked for, as on the CPU."""


def allocator_of(device: torch.device) -> Allocator:
    """How the allocator of ``device`` is set up in this process."""
    if device.type != "cuda":
        return EXACT
    if current_target() is not None:
        return from_settings(_settings_of_environment())
    if torch.cuda.get_allocator_backend() != "native":
        return Allocator(GRANULE_BYTES)
    return from_settings(allocator_snapshot()["allocator_settings"])


def library_blocks(device: torch.device) -> tuple[int, ...]:
    """What cuBLAS asks the allocator for at its first products, and keeps.

    Each thread has a workspace of its own, and autograd runs backward in another than forward.
    """
    if device.type != "cuda":
        return ()
    is_rocm = torch.version.hip is not None
    if not keeps_workspaces(is_rocm=is_rocm):
        return ()
    capability = torch.cuda.get_device_capability(device)
    return (product_bytes(capability, is_rocm=is_rocm),) * 2


def _settings_of_environment() -> dict[str, Any]:
    """What a process with these environment variables would have, as far as it can be told."""
    text = os.environ.get("PYTORCH_ALLOC_CONF") or os.environ.get("PYTORCH_CUDA_ALLOC_CONF", "")
    given = dict(part.split(":", 1) for part in text.replace(" ", "").split(",") if ":" in part)
    max_split_mib = given.get("max_split_size_mb", "")
    return {
        "expandable_segments": given.get("expandable_segments", "").lower() == "true",
        "max_split_size": int(max_split_mib) * _MIB if max_split_mib.isdigit() else -1,
    }


def from_settings(settings: Mapping[str, Any]) -> Allocator:
    """Of the native allocator, as a snapshot names its settings."""
    max_split_bytes = settings.get("max_split_size", -1)
    by_mib = settings.get("roundup_power2_divisions", {})
    divisions = tuple(by_mib[mib] for mib in sorted(by_mib, key=int))
    return Allocator(
        GRANULE_BYTES,
        settings.get("expandable_segments", False),
        max_split_bytes if max_split_bytes > 0 else None,
        divisions if any(parts > 1 for parts in divisions) else (),
    )
