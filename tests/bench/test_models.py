"""Small variants of the benchmark's models, through the benchmark's own judgement."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from bench.budgets import Row, parse, run_model
from workloads.models import MODELS


@pytest.fixture(autouse=True)
def restored_settings() -> Iterator[None]:
    """The benchmark runs in processes of its own, so it sets what it needs and leaves it."""
    with torch._dynamo.config.patch(recompile_limit=torch._dynamo.config.recompile_limit):
        yield
    torch.use_deterministic_algorithms(False)


def rows(name: str, compiler: str, budgets: list[str]) -> dict[str, Row]:
    arguments = parse(["--quick", "--rounds", "0", "--compiler", compiler])
    found = {row.budget: row for row in run_model(name, budgets, arguments)}
    broken = {budget: row.broken for budget, row in found.items() if row.broken}
    assert not broken
    return found


# One with matrix products, one with attention, one with convolutions; the others in the sweep.
MARKS = {"mlp16": (), "gpt_demo": pytest.mark.slow, "unet": pytest.mark.slow}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=MARKS.get(name, pytest.mark.sweep)) for name in MODELS]
)
def test_eager_executor_keeps_its_promises(name: str) -> None:
    found = rows(name, "eager", ["60%", "min"])
    assert found["min"].status == "ok"
    assert found["min"].recomputed_runs
    assert found["60%"].status == "ok"
    assert found["60%"].recomputed_runs


@pytest.mark.inductor
@pytest.mark.slow
def test_inductor_keeps_its_promises() -> None:
    found = rows("mlp16", "inductor", ["100%", "60%"])
    assert found["100%"].status == "ok"
    assert found["100%"].recomputed_runs == 0


@pytest.mark.inductor
@pytest.mark.slow
@pytest.mark.sweep
@pytest.mark.parametrize("name", MODELS)
def test_inductor_keeps_its_promises_with_every_model(name: str) -> None:
    found = rows(name, "inductor", ["100%", "60%", "min"])
    assert found["100%"].status == "ok"
    assert found["100%"].recomputed_runs == 0
    assert found["min"].status == "ok"


def test_the_same_seed_builds_the_same_model() -> None:
    for model in MODELS.values():
        first, inputs = model.build(3, quick=True)
        second, same_inputs = model.build(3, quick=True)
        parameters = zip(first.parameters(), second.parameters(), strict=True)
        assert all(torch.equal(a, b) for a, b in parameters)
        assert all(torch.equal(a, b) for a, b in zip(inputs, same_inputs, strict=True))
