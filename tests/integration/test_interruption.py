"""What planning says while it runs, and what is left where it was interrupted: nothing."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import dtrcompile
from dtrcompile import progress
from dtrcompile.compilation.one_graph import asked_for
from dtrcompile.compilation.session import CURRENT
from dtrcompile.options import Options
from dtrcompile.passes.fitting.fit import _Fit
from dtrcompile.passes.fitting.progress import listening
from dtrcompile.passes.inductor import lowering, patches
from dtrcompile.passes.torch_private import (
    GraphLowering,
    functorch_config,
    inductor_config,
)
from dtrcompile.probe import planned_outcome
from tests.integration.scenarios import layers
from workloads.training import compile_dtr, gradients_of, relative_error


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return layers(4, 16)


def test_each_plan_is_told_before_it_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(progress.VARIABLE, "0")  # else the line on the terminal is what listens
    told: list[str] = []
    with listening(told.append):
        outcome = planned_outcome(
            nn.Sequential(model(), nn.Linear(16, 16)),
            [torch.randn(256, 16)],
            Options.parse({"budget": "min", "compiler": "eager"}),
        )
    assert outcome.chosen is not None
    assert told[:3] == ["lowering the default split", "searching for plan 1", "lowering plan 1"]
    assert any("the smallest so far holds" in text for text in told)


def what_is_set() -> dict[str, Any]:
    """Everything that a compilation changes for as long as it takes."""
    return {
        "patches": patches._users,
        "purposes": patches._ACTIVE.get(),
        "replaced": [patch.target for patch in patches.PATCHES if is_replaced(patch)],
        "collector": gc.isenabled(),
        "listener": GraphLowering.save_output_code,
        "session": CURRENT.get(),
        "asked for": asked_for(),
        "Inductor": inductor_config.get_config_copy(),
        "AOTAutograd": functorch_config.get_config_copy(),
        "grad": torch.is_grad_enabled(),
    }


def is_replaced(patch: patches.Patch) -> bool:
    found = vars(patch.owner)[patch.name]
    return hasattr(getattr(found, "__func__", found), "_dtr_original")


@pytest.mark.inductor
@pytest.mark.parametrize("where", ["planning", "lowering", "compiling"])
def test_ctrl_c_leaves_nothing_behind(
    cache_folder: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    owner, name = {
        "planning": (_Fit, "plan_with"),
        "lowering": (GraphLowering, "codegen"),
        "compiling": (GraphLowering, "compile_to_module"),
    }[where]
    module, x = model(), torch.randn(256, 16)
    module(x).sum().backward()
    expected = gradients_of(module)
    module.zero_grad(set_to_none=True)
    compiled = compile_dtr(module, "70%", compiler="inductor")
    before = what_is_set()

    def interrupt(*_args: Any, **_kwargs: Any) -> None:
        raise KeyboardInterrupt

    lowering._LOWERED.clear()
    with monkeypatch.context() as interrupted:
        interrupted.setattr(owner, name, interrupt)
        with pytest.raises(KeyboardInterrupt):
            compiled(x).sum().backward()
    assert what_is_set() == before
    entries = sorted((cache_folder / "dtrcompile").rglob("*"))
    assert not [p for p in entries if p.is_file() and p.suffix not in (".json", ".lock")]
    # No lock is held, no half of a plan is used.
    dtrcompile.clear_reports()
    compiled(x).sum().backward()
    assert relative_error(gradients_of(module), expected) <= 1e-5
    (report,) = dtrcompile.reports()
    assert report.recomputed_runs > 0
    assert report.verification.startswith("verified")
