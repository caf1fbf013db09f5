"""Run as a process by `test_kept_code`: training scripts with PyTorch's caches on.

The tests' own environment switches these caches off by force, so that every test plans anew.

    python -m tests.integration.kept_code_worker BUDGET SCENARIO...

Prints one JSON object: scenario -> what was seen of it.
"""

from __future__ import annotations

import hashlib
import json
import sys
import time
import traceback
from typing import Any

import torch
from torch import nn
from torch._dynamo.utils import counters

import dtrcompile
from dtrcompile.passes.errors import InfeasibleBudgetError
from tests.integration.counting import Counted
from tests.integration.scenarios import SCENARIOS, layers, state_of
from workloads.training import (
    Compile,
    Observed,
    Scenario,
    compile_dtr,
    flatten,
    live_peak_bytes,
    observe,
    static_bytes,
    unwrap,
)

# Reports say how long things took, and whether the plan came from disk.
_OWN_TO_A_PROCESS = ("planning_s", "lowering_s", "is_plan_from_disk")


def _hash(observed: Observed) -> str:
    digest = hashlib.sha256()
    for name, value in flatten(observed):
        digest.update(name.encode())
        if isinstance(value, torch.Tensor):
            digest.update(f"{value.dtype} {value.shape} {value.stride()}".encode())
            value = value.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
            digest.update(value)
        else:
            digest.update(repr(value).encode())
    return digest.hexdigest()


# --- scripts that look at what the ledger knows ---------------------------------------------------


class _Broken(nn.Module):
    """Two graphs a step."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = layers(4), layers(4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        torch._dynamo.graph_break()
        return self.second(x).square().sum()


def _steps(model: nn.Module, compile_: Compile, rows: int, loss: Any = None) -> Observed:
    """Peaks of the last three of four steps, and the gradients of the last.

    The first step compiles, which holds copies of the random state for a moment; loading code
    does not.
    """
    compiled = compile_(model)
    x = torch.randn(rows, 16)
    peaks = []

    def step() -> None:
        result = compiled(x)
        (result if loss is None else loss(result)).backward()

    for _ in range(4):
        model.zero_grad()
        static = static_bytes(model, x)
        peaks.append(static + live_peak_bytes(step))
    return {**state_of(model), "peaks": peaks[1:]}


def two_graphs(compile_: Compile) -> Observed:
    return _steps(_Broken(), compile_, 512)


def loss_outside(compile_: Compile) -> Observed:
    return _steps(layers(6), compile_, 512, lambda logits: logits.square().sum())


def evaluation_between(compile_: Compile) -> Observed:
    model = layers(6)
    compiled = compile_(model)
    x = torch.randn(256, 16)
    seen = []
    for _ in range(2):
        compiled(x).square().sum().backward()
        with torch.no_grad():
            seen.append(compiled(x))
    return {**state_of(model), "seen": seen}


def a_step_of_the_optimizer(compile_: Compile) -> Observed:
    model = layers(6)
    optimizer = torch.optim.AdamW(model.parameters())
    compiled = compile_(model, optimizer=optimizer)
    x = torch.randn(256, 16)
    for _ in range(3):
        compiled(x).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return {"parameters": dict(model.named_parameters())}


OWN: dict[str, Scenario] = {
    f.__name__: f for f in (two_graphs, loss_outside, evaluation_between, a_step_of_the_optimizer)
}


def run(name: str, budget: object, counts: Counted) -> dict[str, Any]:
    scenario = OWN[name] if name in OWN else SCENARIOS[name].run

    def compile_(target: Any, **options: Any) -> Any:
        return compile_dtr(target, budget, compiler="inductor", **options)

    counts.taken()
    counters.clear()
    start = time.perf_counter()
    refused = None
    observed: Observed = {}
    try:
        observed = observe(scenario, compile_)
    except Exception as error:
        refusal = unwrap(error)
        is_refusal = isinstance(refusal, InfeasibleBudgetError)
        if not is_refusal:
            traceback.print_exc()
        refused = str(refusal) if is_refusal else f"failed: {type(error).__name__}"
    reports = [json.loads(report.to_json()) for report in dtrcompile.reports()]
    return {
        "observed": _hash(observed),
        "peaks": observed.get("peaks", []),
        "refused": refused,
        "from_disk": [report["is_plan_from_disk"] for report in reports],
        "reports": [
            {k: v for k, v in report.items() if k not in _OWN_TO_A_PROCESS} for report in reports
        ],
        "hits": counters["aot_autograd"].get("autograd_cache_hit", 0),
        "misses": counters["aot_autograd"].get("autograd_cache_miss", 0),
        "seconds": time.perf_counter() - start,
        **counts.taken(),
    }


def main(budget: str, *names: str) -> None:
    torch.set_num_threads(1)
    counts = Counted()
    given: object = int(budget) if budget.isdigit() else budget
    print(json.dumps({name: run(name, given, counts) for name in names or (*SCENARIOS, *OWN)}))


if __name__ == "__main__":
    main(*sys.argv[1:])
