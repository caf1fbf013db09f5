"""The examples of ``docs/examples`` that check themselves, run as they are.

They fail if their losses are not those without a budget, or if a step held more than its budget.
"""

from __future__ import annotations

import importlib.util
import sys

import pytest

from tests.integration.test_frameworks import run_example

# As in a user's process: plans and code of an earlier run are read from disk.
CACHES = {"TORCHINDUCTOR_FX_GRAPH_CACHE": "1", "TORCHINDUCTOR_AUTOGRAD_CACHE": "1"}


@pytest.mark.slow
@pytest.mark.inductor
@pytest.mark.parametrize(
    ("script", "needs", "told"),
    [
        ("plain_loop.py", "torch", "a step held"),
        ("custom_operator.py", "torch", "softcap runs"),
        # Each compiles for half a minute what other tests compile too.
        pytest.param("accumulation_amp.py", "torch", "a micro-batch held", marks=pytest.mark.sweep),
        pytest.param("diffusers_unet.py", "diffusers", "a step held", marks=pytest.mark.sweep),
        pytest.param("gan.py", "torch", "the generator's", marks=pytest.mark.sweep),
        pytest.param("higher_order.py", "torch", "a step held", marks=pytest.mark.sweep),
    ],
)
def test_an_example_trains_as_without_a_budget_and_within_it(
    script: str, needs: str, told: str
) -> None:
    if importlib.util.find_spec(needs) is None:
        pytest.skip(f"{needs} is not installed")
    printed = run_example(script, **CACHES)
    assert "as without a budget" in printed and told in printed


@pytest.mark.slow
@pytest.mark.inductor
@pytest.mark.skipif(sys.platform != "linux", reason="only Linux limits what a process allocates")
def test_a_budget_trains_where_plain_compilation_runs_out_of_memory() -> None:
    without, within = run_example("out_of_memory.py", **CACHES).splitlines()
    assert "allocate memory" in without and "losses" in within
