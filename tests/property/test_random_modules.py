"""A few random modules; ``bench/random_modules.py`` makes a thousand."""

from __future__ import annotations

import pytest

from workloads.random_modules import (
    Case,
    check,
    check_inductor,
    check_sizes,
    check_sizes_inductor,
)

pytestmark = [
    pytest.mark.usefixtures("planned_quickly"),
    pytest.mark.filterwarnings(
        "ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"
    ),
]


@pytest.mark.parametrize(
    "seed", [0, 1, 2, 3, *(pytest.param(seed, marks=pytest.mark.sweep) for seed in (5, 6, 7))]
)
def test_random_modules(seed: int) -> None:
    assert check(Case(seed), ("min", "50%")[seed % 2]) == "recomputed"


def test_a_random_module_without_a_trained_parameter_says_so() -> None:
    assert check(Case(4), "min") == "nothing to train"


# 8: a number that Dynamo had made a symbol, and settled on before it compiled the graph.
# 162: an evaluation at a larger size, by a graph that had been seen in a step of two graphs.
@pytest.mark.slow
@pytest.mark.parametrize(
    ("seed", "moves", "share", "seen"),
    [
        pytest.param(3, 6, 0.4, "recomputed", marks=pytest.mark.sweep),
        (8, 3, 0.4, "kept"),
        (162, 8, 0.6, "recomputed"),
    ],
)
def test_random_modules_at_random_sizes(seed: int, moves: int, share: float, seen: str) -> None:
    assert check_sizes(Case(seed, moves), share, True) == seen


# Shrunk failures of the benchmark: (seed, moves).
# 10: a CPU gives a frozen convolution weight a gradient, if the bias has one.
# 5073: a graph that returns the input that it wrote into, and nothing else.
@pytest.mark.parametrize(("seed", "moves"), [(10, 1), (5073, 4)])
def test_modules_that_once_failed(seed: int, moves: int) -> None:
    assert check(Case(seed, moves), "min") == "kept"


# 5020: the gradient of an output whose layout is not the traced one is copied before backward; and
# later steps hold the gradient that the first ones gave up.
# 5060: a step of several graphs that begins with one that has no backward; results held to the end.
# Dynamo leaves its batch norm to eager PyTorch, so that what that holds comes on top of the budget.
@pytest.mark.inductor
@pytest.mark.slow
@pytest.mark.parametrize(
    ("seed", "moves", "budget", "seen"),
    [(5020, 6, "min", "Inductor"), (5060, 5, "50%", "Inductor")],
)
def test_modules_whose_promise_once_broke_under_inductor(
    seed: int, moves: int, budget: str, seen: str
) -> None:
    assert check_inductor(Case(seed, moves), budget) == seen


# 850: a peak in forward, and a caller who holds in backward what earlier steps dropped: both were
# added up.
@pytest.mark.inductor
@pytest.mark.slow
def test_a_minimum_that_once_did_not_work_at_random_sizes() -> None:
    assert check_sizes_inductor(Case(850, 4), 0.6, True) == "Inductor"
