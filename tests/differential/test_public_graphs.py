"""Plans of the public graphs, against the MILP optimum and the authors' own simulator.

The data is not part of the repository; see `public_graphs.shared_data`.
"""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

from dtrcompile.passes.errors import InfeasibleBudgetError
from dtrcompile.passes.planning.planners import keep_all, lower_bound_bytes, make_planner
from dtrcompile.passes.program.replay import replay
from workloads.bounds import unit_chain_cost
from workloads.public_graphs import from_checkmate_json, from_simrd_log, shared_data

DATA = shared_data()
pytestmark = pytest.mark.skipif(
    DATA is None, reason="no public graphs beside the repository (DTRCOMPILE_SHARED)"
)

GRAPHS = ("linear16", "linear32", "vgg16_b256_flops", "vgg_unet_b32_flops")
LOGS = ("resnet32", "transformer", "inceptionv4", "unroll_gan", "lstm")


def data() -> Path:
    assert DATA is not None
    return DATA


@pytest.mark.parametrize("name", GRAPHS)
def test_checkmate_graphs(name: str) -> None:
    """Within 1 % of the optimum's total compute wherever that is proven, and never below it."""
    program, references = from_checkmate_json(data() / "checkmate" / f"{name}.json")
    met = compared = 0
    for reference in references:
        try:
            plan = make_planner("auto").plan(program, reference.budget_bytes)
        except InfeasibleBudgetError:
            assert reference.milp_status == "infeasible"
            assert reference.budget_bytes < lower_bound_bytes(program)
            continue
        _, stats = replay(program, plan)
        best = min(reference.simrd_overhead.values(), default=10.0)
        assert stats.overhead <= best + 1e-6
        met += 1
        if reference.milp_status == "optimal":
            assert reference.milp_overhead is not None
            # The MILP holds inputs until its stage ends, so ours may come in just below it.
            assert reference.milp_overhead - 1e-3 <= stats.overhead
            assert stats.overhead <= 1.01 * reference.milp_overhead
            compared += 1
    assert met == sum(r.milp_status != "infeasible" for r in references)
    assert compared == sum(r.milp_status == "optimal" for r in references) > 0


def reference_rows(name: str) -> list[dict[str, str]]:
    with (data() / "simrd" / "reference.csv").open() as lines:
        return [row for row in csv.DictReader(lines) if row["log"] == name]


@pytest.mark.parametrize("layers", [16, 32])
def test_the_binomial_formula_is_the_optimum_of_unit_chains(layers: int) -> None:
    program, references = from_checkmate_json(data() / "checkmate" / f"linear{layers}.json")
    proven = [r for r in references if r.milp_status == "optimal"]
    assert proven
    for reference in proven:
        cost_ns = unit_chain_cost(layers, reference.budget_bytes)
        assert cost_ns / program.cost_ns == pytest.approx(reference.milp_overhead, abs=1e-6)
        plan = make_planner("treeverse").plan(program, reference.budget_bytes)
        assert replay(program, plan)[1].cost_ns == cost_ns


@pytest.mark.parametrize("name", ["vgg16_b256_flops", "vgg_unet_b32_flops"])
def test_auto_is_at_least_as_good_as_the_classic_planners(name: str) -> None:
    program, references = from_checkmate_json(data() / "checkmate" / f"{name}.json")
    compared = 0
    for reference in references:
        costs = {}
        for planner in ("auto", "chen-sqrt", "chen-greedy", "treeverse"):
            try:
                plan = make_planner(planner).plan(program, reference.budget_bytes)
            except InfeasibleBudgetError:
                continue
            costs[planner] = replay(program, plan)[1].cost_ns
        if reference.milp_status == "infeasible":
            assert not costs
            continue
        assert costs["auto"] == min(costs.values()), reference.budget_bytes
        compared += len(costs) > 1
    assert compared > 0


@pytest.mark.parametrize("name", LOGS)
def test_simrd_logs_are_read_as_their_authors_read_them(name: str) -> None:
    program = from_simrd_log(data() / "simrd" / f"{name}.log.gz")
    row = reference_rows(name)[0]
    assert program.cost_ns == int(row["baseline_compute_ns"])
    assert program.constant_bytes == int(row["constant_bytes"])
    # Ours frees at the last use, theirs when Python let go.
    baseline_bytes = replay(program, keep_all(program))[0].peak_bytes
    assert baseline_bytes <= int(row["baseline_memory_bytes"])


@pytest.mark.slow
@pytest.mark.parametrize("name", LOGS)
@pytest.mark.parametrize("ratio", [0.8, 0.5, pytest.param(0.3, marks=pytest.mark.sweep)])
def test_auto_is_never_worse_than_the_authors_best(name: str, ratio: float) -> None:
    program = from_simrd_log(data() / "simrd" / f"{name}.log.gz")
    rows = [row for row in reference_rows(name) if float(row["ratio"]) == ratio]
    best = min(float(row["overhead"]) for row in rows if row["status"] == "ok")
    plan = make_planner("auto").plan(program, int(rows[0]["budget_bytes"]))
    assert replay(program, plan)[1].overhead <= best + 1e-6
