"""What tests on a device begin with: its memory, without what earlier tests left in the cache."""

from __future__ import annotations

import gc

import pytest
import torch


@pytest.fixture(autouse=True)
def empty_cache() -> None:
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
