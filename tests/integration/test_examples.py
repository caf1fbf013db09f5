"""The examples of ``docs/examples`` that check themselves, run as they are.

They fail if their losses are not those without a budget, or if a step held more than its budget.
"""

from __future__ import annotations

import importlib.util
import json
import os
import sys
from pathlib import Path

import pytest
from torch._dynamo import list_backends

from tests.integration.test_frameworks import EXAMPLES, run_example, run_python

# As in a user's process: plans and code of an earlier run are read from disk.
CACHES = {"TORCHINDUCTOR_FX_GRAPH_CACHE": "1", "TORCHINDUCTOR_AUTOGRAD_CACHE": "1"}


@pytest.mark.slow
@pytest.mark.inductor
@pytest.mark.parametrize(
    ("script", "needs", "told"),
    [
        ("plain_loop.py", "torch", "a step held"),
        ("custom_operator.py", "torch", "softcap runs"),
        *(
            pytest.param(*example, marks=pytest.mark.sweep)
            for example in (
                ("accumulation_amp.py", "torch", "a micro-batch held"),
                ("diffusers_unet.py", "diffusers", "a step held"),
                ("gan.py", "torch", "the generator's"),
                ("higher_order.py", "torch", "a step held"),
            )
        ),
    ],
)
def test_an_example_trains_as_without_a_budget_and_within_it(
    script: str, needs: str, told: str
) -> None:
    if importlib.util.find_spec(needs) is None:
        pytest.skip(f"{needs} is not installed")
    printed = run_example(script, **CACHES)
    assert "as without a budget" in printed and told in printed


# Runs a notebook in a kernel of its own, and writes it with what its cells print.
EXECUTE = """
import sys, nbformat
from nbclient import NotebookClient
notebook = nbformat.read(sys.argv[1], 4)
NotebookClient(notebook, timeout=600, kernel_name="python3", record_timing=False).execute()
nbformat.write(notebook, sys.argv[2])
"""


@pytest.mark.slow
@pytest.mark.inductor
@pytest.mark.skipif(sys.platform != "linux", reason="only Linux limits what a process allocates")
@pytest.mark.skipif("dtr" not in list_backends(), reason="the package is not installed")
def test_a_notebook_trains_where_plain_compilation_runs_out_of_memory(tmp_path: Path) -> None:
    """``DOCS_ACCEPT=1`` writes what was printed into the notebook, to be read before a commit."""
    pytest.importorskip("nbclient")
    pytest.importorskip("ipykernel")
    path, executed = EXAMPLES / "out_of_memory.ipynb", tmp_path / "executed.ipynb"
    run_python(EXECUTE, str(path), str(executed), **CACHES)
    if os.environ.get("DOCS_ACCEPT") == "1":
        path.write_text(executed.read_text(encoding="utf-8"), encoding="utf-8")
    printed = [
        text
        for cell in json.loads(executed.read_text(encoding="utf-8"))["cells"]
        for output in cell.get("outputs", ())
        if output.get("name") != "stderr"  # what a release of PyTorch says of the machine
        for text in ("".join(output.get("text", output.get("data", {}).get("text/plain", ""))),)
    ]
    error, losses, report, plain = printed
    assert "allocate memory" in error
    assert "448.0 MiB" in report and "verified" in report
    assert json.loads(losses) == pytest.approx(json.loads(plain), rel=1e-4)
