"""What tests begin with: nothing compiled, or nothing on disk."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import dtrcompile
from dtrcompile.passes.inductor import disk_cache
from dtrcompile.passes.torch_private import CacheArtifactManager, inductor_config


@pytest.fixture
def nothing_compiled() -> Iterator[None]:
    torch._dynamo.reset()
    dtrcompile.clear_reports()
    yield
    torch._dynamo.reset()


@pytest.fixture
def cache_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty cache, switched on: the tests' environment switches Inductor's off by force."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(disk_cache, "is_on", lambda: not inductor_config.force_disable_caches)
    with CacheArtifactManager.with_fresh_cache():
        yield tmp_path


@pytest.fixture(scope="module", autouse=True)
def plans_that_will_do(planned_quickly: None, planned_in_one_order: None) -> None:
    """What is asserted here is what a step holds and computes, for whatever plan it runs."""


@pytest.fixture
def code_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Inductor's cache of compiled graphs, on and empty.

    A patch of the setting alone does nothing, because the tests' environment switches it off.
    """
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    entry = inductor_config._config["fx_graph_cache"]
    monkeypatch.setattr(entry, "env_value_force", True)
