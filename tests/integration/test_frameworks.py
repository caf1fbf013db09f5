"""The recipes of ``docs/frameworks.md``, run as they are, where their libraries are installed.

pip install '.[frameworks]' && pytest tests/integration/test_frameworks.py
"""

from __future__ import annotations

import importlib.util
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "docs" / "examples"

# The entry point is there once the package is installed; here it may be a checkout.
RUN = """
import runpy, sys
from torch._dynamo import list_backends, register_backend
from dtrcompile.backend import dtr
if "dtr" not in list_backends():
    register_backend(dtr, name="dtr")
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


def run_python(code: str, *arguments: str, **variables: str) -> str:
    """What a process prints that runs ``code``, in this checkout; fails if the process does."""
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "MASTER_PORT": str(free_port()),
        "OMP_NUM_THREADS": "1",
        **variables,
    }
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


def run_example(script: str, *arguments: str, **variables: str) -> str:
    """What a script prints, with these environment variables; fails if the script does."""
    return run_python(RUN, str(EXAMPLES / script), *arguments, **variables)


def run(script: str, *arguments: str) -> str:
    """What a script prints, on the eager executor: the recipes are not about kernels."""
    variables = {"DTRCOMPILE_COMPILER": "eager", "DTRCOMPILE_RESERVE": "optimizer"}
    return run_example(script, *arguments, **variables)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("script", "needs"),
    [
        ("transformers_trainer.py", ["transformers", "accelerate"]),
        ("accelerate_loop.py", ["accelerate"]),
        ("lightning_module.py", ["lightning"]),
        ("peft_lora.py", ["transformers", "peft"]),
    ],
)
def test_a_recipe_trains_and_counts_its_optimizer(script: str, needs: list[str]) -> None:
    for library in needs:
        if importlib.util.find_spec(library) is None:
            pytest.skip(f"{library} is not installed")
    printed = run(script)
    assert "training" in printed and "optimizer.step()" in printed


@pytest.mark.slow
@pytest.mark.parametrize(
    "arguments", [("ddp.py",), ("fsdp2.py", "--per", "block"), ("fsdp2.py", "--per", "model")]
)
def test_a_distributed_recipe_trains_and_counts_its_optimizer(arguments: tuple[str, ...]) -> None:
    import torch

    if not torch.distributed.is_available():
        pytest.skip("this PyTorch has no torch.distributed")
    printed = run(*arguments)
    assert "training" in printed and "AdamW's exp_avg" in printed


@pytest.mark.slow
def test_two_jobs_share_a_device() -> None:
    """Each holds to all of it while it is alone, and to half beside the other."""
    lines = run("shared_device.py").splitlines()
    told = [line.split(", ")[0] for line in lines if line.startswith(("first: ", "second: "))]
    first = [line for line in told if line.startswith("first")]
    assert first == [f"first: budget {n} MiB" for n in (24, 12, 24)]
    assert told.count("second: budget 12 MiB") == 1
