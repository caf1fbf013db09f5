"""Which of a graph's plans a call runs, when there is one more, and which goes then."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from dtrcompile.steps.family import Family

BASELINE_NS = 1000


def code(number: int, bytes_of: dict[int, int], cost_ns: int) -> Any:
    """A plan by what it holds at each size; at others it may not run."""

    def at(size: int) -> Any:
        if size not in bytes_of:
            return None
        return SimpleNamespace(
            own_peak_bytes=bytes_of[size],
            cost_ns=cost_ns,
            baseline_peak_bytes=10_000,
            program=SimpleNamespace(cost_ns=BASELINE_NS),
        )

    return SimpleNamespace(number=number, at=at, may_run_at=lambda _: True, sizes=None)


def family(*codes: Any, budget_bytes: int, most_plans: int = 4) -> tuple[Family, list[int]]:
    """One of a single symbol, and the numbers of the plans that it was told to forget."""
    symbols: Any = SimpleNamespace(sizes=lambda values: values[0], hints=lambda: (1,))
    forgotten: list[int] = []

    def compile_for(*_: object) -> Any:
        raise AssertionError("nothing is to be compiled")

    made = Family(
        symbols,
        compile_for,
        lambda _: budget_bytes,
        forgotten.append,
        planner=None,  # type: ignore[arg-type]
        most_plans=most_plans,
        codes={c.number: c for c in codes},
    )
    return made, forgotten


def test_a_call_runs_the_cheapest_plan_that_holds_the_budget() -> None:
    cheap, dear = code(0, {1: 90, 2: 180}, 1000), code(1, {1: 50, 2: 100}, 1300)
    plans, _ = family(cheap, dear, budget_bytes=100)
    assert plans.choose((1,)) is cheap
    assert plans.choose((2,)) is dear


def test_a_higher_budget_is_seen_once_it_is_considered() -> None:
    cheap, dear = code(0, {2: 180}, 1000), code(1, {2: 100}, 1300)
    plans, _ = family(cheap, dear, budget_bytes=100)
    assert plans.choose((2,)) is dear
    plans.own_bytes = lambda _: 200
    assert plans.choose((2,)) is dear  # as it was decided
    plans.reconsider()
    assert plans.choose((2,)) is cheap


def test_the_plan_that_is_missed_least_goes() -> None:
    # Size 1 is called most, and only the first plan serves it cheaply; size 2 is the second's
    # alone, and would have to be planned again; the third serves size 1 a little dearer.
    first, second = code(0, {1: 50}, 1000), code(1, {2: 90}, 1500)
    third, new = code(2, {1: 40}, 1100), code(3, {3: 100}, 1200)
    plans, forgotten = family(first, second, third, budget_bytes=100, most_plans=3)
    for _ in range(20):
        plans.choose((1,))
    plans.choose((2,))
    # Without the first a call of size 1 would take 0.1 more, 2 in all; without the second the one
    # call of size 2 would be planned again, 1; without the third nothing is lost.
    assert [plans._missed(n)[0] for n in range(3)] == pytest.approx([2.0, 1.0, 0.0])
    plans._add(new)
    assert forgotten == [2]
    assert plans.codes.keys() == {0, 1, 3}


def test_a_restart_forgets_all_but_the_first() -> None:
    plans, forgotten = family(*(code(n, {1: 50}, 1000) for n in range(3)), budget_bytes=100)
    first = code(0, {1: 60}, 1000)
    plans.restart(first)
    assert forgotten == [1, 2]
    assert plans.choose((1,)) is first
