"""The calculator of the documentation: its arithmetic is that of the text, and of PyTorch."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn, optim

from dtrcompile.passes.device.allocators import EXACT
from dtrcompile.passes.device.optimizer_step import step_bytes

DOCS = Path(__file__).resolve().parents[2] / "docs"
GIB = 2**30
# What is spoken of in the text: a card of 24 GB, and what its process's context takes.
DEVICE, ASIDE = 23.5, 0.5

MAKE: dict[str, Callable[..., optim.Optimizer]] = {
    "sgd": lambda p, **how: optim.SGD(p, lr=0.1, **how),
    "sgd-momentum": lambda p, **how: optim.SGD(p, lr=0.1, momentum=0.9, **how),
    "rmsprop": optim.RMSprop,
    "adagrad": optim.Adagrad,
    "adam": optim.AdamW,
    "adam-amsgrad": lambda p, **how: optim.Adam(p, amsgrad=True, **how),
}


def node(expression: str) -> Any:
    """What an expression is that uses docs/javascripts/budget.js."""
    program = shutil.which("node")
    if program is None:
        pytest.skip("node is not installed, so the calculator's arithmetic cannot be run")
    script = f"const b = require({json.dumps(str(DOCS / 'javascripts/budget.js'))});"
    script += f"console.log(JSON.stringify({expression}));"
    done = subprocess.run([program, "-e", script], capture_output=True, text=True, check=True)
    return json.loads(done.stdout)


def rows() -> list[list[str]]:
    """Those of the worked sum."""
    text = (DOCS / "choosing-a-budget.md").read_text(encoding="utf-8")
    table = text.split("| trained | frozen |")[1].split("\n\n")[0]
    return [line.strip("| ").split(" | ") for line in table.splitlines()[2:]]


def test_the_sums_of_the_text_are_those_of_the_calculator() -> None:
    found = rows()
    assert len(found) == 6
    optimizers = {value["label"]: key for key, value in node("b.OPTIMIZERS").items()}
    given = [
        {
            "trained": float(trained) * 1e9,
            "frozen": float(frozen) * 1e9,
            "parameterBytes": int(size),
            "gradientBytes": int(size),
            "optimizer": optimizers[label],
            "fused": False,
            "deviceBytes": DEVICE * GIB,
            "asideBytes": ASIDE * GIB,
        }
        for trained, frozen, size, label, *_ in found
    ]
    computed = node(f"{json.dumps(given)}.map(b.budgetFor)")
    for row, sums in zip(found, computed, strict=True):
        names = ("parameters", "gradients", "state", "sum", "left")
        told = [float(cell.replace("\N{MINUS SIGN}", "-")) for cell in row[4:]]
        assert told == [round(sums[name] / GIB, 1) for name in names], row


def test_a_step_of_the_optimizer_may_be_what_does_not_fit() -> None:
    """1.5 billion parameters in float32 with Adam: the text says that fused=True is needed."""
    given = {
        "trained": 1.5e9,
        "frozen": 0,
        "parameterBytes": 4,
        "gradientBytes": 4,
        "optimizer": "adam",
        "deviceBytes": DEVICE * GIB,
        "asideBytes": ASIDE * GIB,
    }
    plain, fused = node(
        f"[false, true].map(fused => b.budgetFor({{...{json.dumps(given)}, fused}}))"
    )
    assert round(plain["temporaries"] / GIB, 1) == 5.6
    assert not plain["fits"]
    assert fused["fits"]
    assert plain["budgetOfGraphs"] == plain["budget"] - plain["state"]


@pytest.mark.parametrize("how", ["foreach", "fused"])
@pytest.mark.parametrize("name", MAKE)
def test_the_multiples_are_those_of_the_optimizers(name: str, how: str) -> None:
    told = node("b.OPTIMIZERS")[name]
    parameters = [nn.Parameter(torch.zeros(1 << 14)) for _ in range(8)]
    trained_bytes = sum(p.numel() * p.element_size() for p in parameters)
    if told[how] is None:
        with pytest.raises(TypeError, match="fused"):
            MAKE[name](parameters, fused=True)
        return
    found = step_bytes(MAKE[name](parameters, **{how: True}), torch.device("cpu"), EXACT)
    # Beside the multiples, there are counts of steps, and numbers that are made tensors.
    assert found.state_bytes / trained_bytes == pytest.approx(told["state"], abs=1e-3)
    assert found.later_peak_bytes / trained_bytes == pytest.approx(told[how], abs=1e-3)


def test_the_form_has_what_its_script_asks_for() -> None:
    page = (DOCS / "budget-calculator.md").read_text(encoding="utf-8")
    script = (DOCS / "javascripts/calculator.js").read_text(encoding="utf-8")
    fields = set(re.findall(r' name="(\w+)"', page))
    asked = set(re.findall(r'(?:number|show)\("(\w+)"|form\.elements\.(\w+)', script))
    names = {a or b for a, b in asked} | set(
        re.findall(r'"(\w+)"', re.findall(r"const names = \[(.*?)\]", script)[0])
    )
    assert names == fields
