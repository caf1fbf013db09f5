"""The next target, from what was tried so far: one case for each branch, without a plan."""

from __future__ import annotations

import subprocess
import sys

import pytest

from dtrcompile.passes.fitting.targets import (
    Attempt,
    BudgetSearch,
    Confirmed,
    Learned,
    NoPlan,
    SmallerAttempt,
    first_target,
    is_worth_measuring,
    next_smaller_target,
    next_target,
    smaller_plans_left,
)

# 1,024 bytes: steps of 4 (a 256th), an interval of 8 (a 128th), a fallback of 16 (a 64th).
SEARCH = BudgetSearch(budget_bytes=1024, first_target_bytes=900, too_large_bytes=1200, max_rounds=4)


def test_the_decision_needs_no_torch() -> None:
    code = (
        "import sys, dtrcompile.passes.fitting.targets;"
        " sys.exit(any(name.split('.')[0] == 'torch' for name in sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize(
    ("budget_bytes", "planned_bytes", "measured_bytes", "target_bytes"),
    [
        # Half of the default split's gap is expected in the plan: 800 * ((1000 + 1200) / 2) / 1200.
        (800, 1000, 1200, 733),
        # The schedule holds less than the plan: the target is the budget, not more.
        (800, 1000, 900, 800),
        # Never the default split's own plan again, which was measured.
        (1000, 1000, 1000, 999),
        (1000, 1000, 0, 999),
    ],
)
def test_the_first_target_expects_half_of_the_gap_of_the_default_split(
    budget_bytes: int, planned_bytes: int, measured_bytes: int, target_bytes: int
) -> None:
    assert first_target(budget_bytes, planned_bytes, measured_bytes) == target_bytes


@pytest.mark.parametrize(
    ("attempts", "target_bytes"),
    [
        pytest.param([], 900, id="the first target"),
        pytest.param([NoPlan(900)], None, id="no plan, and nothing measured: over"),
        pytest.param(
            [Learned(900, 1100), NoPlan(1024)], 1112, id="no plan: halfway from it to too large"
        ),
        pytest.param(
            # Largest too small 950, smallest too large 1000.
            [Confirmed(1000, 1100, 1000), NoPlan(950)],
            975,
            id="no plan: halfway to what does not fit",
        ),
        pytest.param([Learned(900, 1000)], None, id="learned, but the budget is filled: over"),
        pytest.param([Learned(900, 993)], 1024, id="learned, below 97 %: the budget itself"),
        pytest.param([Learned(900, 1100)], 1024, id="learned, too large: the budget itself"),
        pytest.param([Confirmed(900, 994, 890)], None, id="the budget is filled: over"),
        pytest.param([Confirmed(900, 1024, 890)], None, id="the budget is filled to the byte"),
        pytest.param(
            # 960 held, 890 planned: 70 come on top of a plan, so 1024 - 70.
            [Confirmed(900, 960, 890)],
            954,
            id="fits with room: the budget less the gap",
        ),
        pytest.param(
            [Confirmed(900, 800, 900)], 1124, id="fits, the schedule holds less: above the budget"
        ),
        pytest.param(
            # 1024 - (960 - 800) = 864, below the target: a looser plan would not fit.
            [Confirmed(900, 960, 800)],
            None,
            id="fits, but no looser plan would: over",
        ),
        pytest.param(
            # 1024 - (1100 - 890) = 814, below 900.
            [Confirmed(900, 1100, 890)],
            814,
            id="does not fit: the budget less the gap",
        ),
        pytest.param(
            # 1024 - (1030 - 910) = 904 is no step down: 900 - 4.
            [Confirmed(900, 1030, 910)],
            896,
            id="does not fit: a step down at least",
        ),
        pytest.param(
            # 1024 - (1100 - 890) = 814 is below 850, which fits: halfway between 850 and 900.
            [Confirmed(850, 900, 850), Confirmed(900, 1100, 890)],
            875,
            id="out of the interval: its middle",
        ),
        pytest.param(
            # 1024 - (2100 - 1000) = -76: nothing fits yet, so 900 - 16.
            [Confirmed(900, 2100, 1000)],
            884,
            id="out of the interval, nothing fits: a larger step down",
        ),
        pytest.param(
            # 894 to 900 spans less than 8.
            [Confirmed(894, 960, 860), Confirmed(900, 1100, 890)],
            None,
            id="the interval is spent: over",
        ),
        pytest.param(
            [Learned(900, 1100), Learned(1024, 1060), Learned(1024, 1050), Learned(1024, 1040)],
            None,
            id="all rounds are spent: over",
        ),
        pytest.param(
            # The target of what was learned from may be tried again: it bounds nothing.
            [Learned(900, 1100), Confirmed(1024, 1060, 1024)],
            988,
            id="what taught something bounds nothing",
        ),
    ],
)
def test_the_next_target(attempts: list[Attempt], target_bytes: int | None) -> None:
    assert next_target(SEARCH, attempts) == target_bytes


def test_a_target_has_bytes() -> None:
    search = BudgetSearch(budget_bytes=64, first_target_bytes=1, too_large_bytes=100, max_rounds=4)
    # 64 - (90 - 1) is negative; 1 - 64 // 64 is 0.
    assert next_target(search, [Confirmed(1, 90, 1)]) is None


def test_no_round_no_target() -> None:
    assert next_target(BudgetSearch(64, 64, 100, max_rounds=0), []) is None


def test_a_plan_is_worth_measuring_that_saves_half_a_percent() -> None:
    assert is_worth_measuring(995, 1000)
    assert not is_worth_measuring(996, 1000)


@pytest.mark.parametrize(
    ("attempts", "smallest_bytes", "target_bytes"),
    [
        pytest.param([], 1280, 1140, id="halfway from the planner's minimum"),
        pytest.param([], 1010, 994, id="a 64th below, rounded up, at least"),
        pytest.param([], 900, 885, id="the schedule holds less than the plan"),
        pytest.param(
            [SmallerAttempt(1140, 1280, 1, False)], 1280, 1210, id="failed: halfway from there"
        ),
        pytest.param(
            [SmallerAttempt(1140, 1280, 2, True)], 1100, 1050, id="found: halfway to what was found"
        ),
        pytest.param(
            [SmallerAttempt(1140, 1280, 1, False), SmallerAttempt(1210, 1280, 1, True)],
            1200,
            1170,
            id="found: what failed before still counts",
        ),
        pytest.param(
            [SmallerAttempt(1260, 1280, 1, False)], 1280, None, id="the nearest failed: over"
        ),
        pytest.param(
            # Nearest when it was tried, though something smaller was found on the way.
            [SmallerAttempt(1260, 1280, 2, False)],
            1270,
            None,
            id="the nearest failed, but less was found: over",
        ),
        pytest.param(
            [SmallerAttempt(1260, 1280, 1, True)], 1250, 1125, id="the nearest was found: on"
        ),
        pytest.param([SmallerAttempt(1140, 1280, 2, True)] * 3, 1140, None, id="six plans: over"),
    ],
)
def test_the_next_smaller_target(
    attempts: list[SmallerAttempt], smallest_bytes: int, target_bytes: int | None
) -> None:
    assert next_smaller_target(1000, smallest_bytes, attempts) == target_bytes


def test_at_most_six_smaller_plans_two_for_each_target() -> None:
    attempts: list[SmallerAttempt] = []
    assert smaller_plans_left(attempts) == 2
    attempts += [SmallerAttempt(900, 1000, 2, False), SmallerAttempt(950, 1000, 0, False)]
    assert smaller_plans_left(attempts) == 2
    attempts += [SmallerAttempt(975, 1000, 1, False), SmallerAttempt(980, 1000, 2, True)]
    assert smaller_plans_left(attempts) == 1
