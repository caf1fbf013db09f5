"""Random modules at random budgets: the eager executor against the unbudgeted run.

Everything that can be observed agrees bit for bit, the bytes counted are the bytes predicted, or
the budget is infeasible, and then the minimum that the error names works.

``DTRCOMPILE_RANDOM_MODULES=1000`` runs a thousand seeds, ``=17:18`` the seed 17 alone; of forty
without it, ``make test`` runs the first four.
"""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch

from tests.differential.random_modules import make
from workloads.training import (
    UNBUDGETED,
    Compile,
    Observed,
    assert_bitwise,
    observe_dtr,
    smallest_that_works,
    state_of,
)


def seeds() -> list[Any]:
    text = os.environ.get("DTRCOMPILE_RANDOM_MODULES")
    if text is None:
        return [*range(4), *(pytest.param(s, marks=pytest.mark.sweep) for s in range(4, 40))]
    start, _, stop = text.rpartition(":")
    return list(range(int(start or 0), int(stop)))


# Dynamo looks at ``.grad`` of every input, a non-leaf's included.
pytestmark = [
    pytest.mark.usefixtures("planned_quickly"),
    pytest.mark.filterwarnings(
        "ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"
    ),
]


@pytest.mark.parametrize("seed", seeds())
def test_budgeted_run_equals_unbudgeted_run(seed: int) -> None:
    def train(compile_: Compile) -> Observed:
        sample = make(seed)
        module = sample.module
        compiled = compile_(module)
        outputs = []
        for _ in range(2):  # the second step sees the buffers that the first one updated
            x = torch.randn(sample.shape, requires_grad=sample.input_requires_grad)
            out = compiled(x)
            weights = [torch.randn(t.shape) for t in out]
            sum((t * w).sum() for t, w in zip(out, weights, strict=True)).backward()
            outputs.append([*out, x.grad])
        return {"outputs": outputs, **state_of(module)}

    budget = make(seed).budget
    expected = observe_dtr(train, UNBUDGETED)
    _, observed = smallest_that_works(lambda b: observe_dtr(train, b), budget)
    assert_bitwise(observed, expected)
