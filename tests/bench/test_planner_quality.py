"""How `bench.planner_quality` sums up what it measured."""

from __future__ import annotations

import math

from bench.planner_quality import summarize


def test_quality_is_judged_by_both_simulators() -> None:
    nan = math.nan
    cases = [
        {"simrd": 1.4, "h_dtr": 1.2, "h_lru": 1.3, "auto": 1.1, "bound": 1.05},
        {"simrd": nan, "h_dtr": 1.4, "h_lru": nan, "auto": 1.4, "bound": nan},  # theirs: no plan
        {"simrd": nan, "h_dtr": nan, "h_lru": nan, "auto": 1.9, "bound": nan},
        {"simrd": 1.0, "h_dtr": 1.0, "h_lru": 1.0, "auto": 1.0, "bound": 1.0},  # nothing to save
    ]
    theirs, bound, ours, _ = summarize(cases).splitlines()
    assert "auto" in theirs
    assert "mean of ratios 0.250, of sums 0.250, worst 0.250, 1 budgets" in theirs
    assert "bound" in bound
    assert "mean of ratios 0.125" in bound
    assert "mean of ratios 0.750, of sums 0.833, worst 1.000, 2 budgets" in ours
    assert summarize(cases[3:]) == "nothing to compare"
