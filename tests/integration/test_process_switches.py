"""A promise holds under PyTorch's process-wide switches, whatever they were before."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import dtrcompile
from tests.integration.scenarios import WIDTH, Attention
from workloads.training import compile_dtr

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def threads_are_restored() -> Iterator[None]:
    n_threads = torch.get_num_threads()
    yield
    torch.set_num_threads(n_threads)


@pytest.mark.inductor
@pytest.mark.usefixtures("threads_are_restored")
def test_a_step_with_more_threads_holds_what_is_promised_for_it() -> None:
    """Each thread of attention on a CPU has buffers of its own."""
    module, x = Attention(), torch.randn(2, 512, WIDTH)
    step = compile_dtr(lambda x: module(x).square().mean(), "1GiB", compiler="inductor")
    promised = []
    for n_threads in (1, 2):
        torch.set_num_threads(n_threads)
        module.zero_grad()
        with dtrcompile.watch() as seen:
            step(x).backward()
        assert seen.promised_bytes == seen.observed_bytes
        promised.append(seen.promised_bytes)
    assert promised[0] < promised[1]


_SCRIPT = """
import json, sys
import torch
from torch import nn
import dtrcompile
from workloads.training import compile_dtr

{setting}
layers = nn.Sequential(*(layer for _ in range(3) for layer in (nn.Linear(64, 64), nn.GELU())))
step = compile_dtr(lambda x: layers(x).square().mean(), "min", compiler="inductor")
found = []
for _ in range(2):
    layers.zero_grad()
    with dtrcompile.watch() as seen:
        step(torch.ones(64, 64)).backward()
    found.append([seen.promised_bytes, seen.observed_bytes])
print(json.dumps(found))
"""


@pytest.mark.inductor
@pytest.mark.slow
@pytest.mark.parametrize(
    "setting",
    [
        'torch.set_float32_matmul_precision("medium")',
        # After this, PyTorch does not tell any more what the line above set.
        'torch.backends.mkldnn.matmul.fp32_precision = "bf16"',
    ],
)
def test_products_of_float32_in_bfloat16_hold_what_is_promised(setting: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", _SCRIPT.format(setting=setting)],
        # With keys of entries on disk.
        env={**os.environ, "TORCHINDUCTOR_FX_GRAPH_CACHE": "1"},
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    for promised_bytes, observed_bytes in json.loads(done.stdout.splitlines()[-1]):
        assert promised_bytes == observed_bytes
