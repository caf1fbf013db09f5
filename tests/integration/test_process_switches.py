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
from torch import Tensor, nn

import dtrcompile
from workloads.training import compile_dtr

ROOT = Path(__file__).resolve().parents[2]


class Attention(nn.Module):
    """One layer, and its loss."""

    def __init__(self, n_heads: int = 4, head_dim: int = 16) -> None:
        super().__init__()
        self.head_shape = (n_heads, head_dim)
        self.inputs = nn.Linear(n_heads * head_dim, 3 * n_heads * head_dim)
        self.output = nn.Linear(n_heads * head_dim, n_heads * head_dim)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = (
            part.unflatten(-1, self.head_shape).transpose(1, 2)
            for part in self.inputs(x).chunk(3, -1)
        )
        heads = nn.functional.scaled_dot_product_attention(query, key, value)
        return self.output(heads.transpose(1, 2).flatten(-2)).square().mean()


@pytest.fixture
def threads_are_restored() -> Iterator[None]:
    n_threads = torch.get_num_threads()
    yield
    torch.set_num_threads(n_threads)


@pytest.mark.inductor
@pytest.mark.usefixtures("threads_are_restored")
def test_a_step_with_more_threads_holds_what_is_promised_for_it() -> None:
    """Each thread of attention on a CPU has buffers of its own."""
    module, x = Attention(), torch.randn(2, 512, 64)
    step = compile_dtr(module, "1GiB", compiler="inductor")
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
