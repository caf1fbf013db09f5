"""What keeps the tests short: their order, and what is left out of them."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.conftest import long_ones_first

ROOT = Path(__file__).resolve().parents[2]


def item(name: str) -> Any:
    """In capitals: slow."""
    is_slow = name.isupper()
    return SimpleNamespace(
        name=name, get_closest_marker=lambda marker: is_slow and marker == "slow"
    )


@pytest.mark.parametrize(
    ("names", "workers", "expected"),
    [
        ("abAcB", 1, "ABabc"),
        # xdist hands the first three to one worker and the others to the second.
        ("abAcdB", 2, "AabBcd"),
        ("aAbBcC", 2, "ACaBbc"),
        ("aAbcd", 2, "Aabcd"),
        ("ABC", 2, "ACB"),
        ("", 2, ""),
    ],
)
def test_every_worker_begins_with_long_tests(names: str, workers: int, expected: str) -> None:
    ordered = long_ones_first([item(name) for name in names], workers)
    assert "".join(i.name for i in ordered) == expected


def test_what_is_left_out_of_make_test_is_run_elsewhere() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    assert "\ntest: MARKS = not slow and not sweep\n" in makefile
    assert "\ntest-slow: MARKS = slow and not sweep\n" in makefile
    for every_change in (".ci/run", ".github/workflows/ci.yml"):
        runs = (ROOT / every_change).read_text(encoding="utf-8")
        assert re.search(r"make test\b(?!-)", runs) and "make test-slow" in runs
    test_all = makefile.split("\ntest-all:\n")[1].split("\n\n")[0]
    assert "pytest" in test_all
    assert " -m " not in test_all.split("pytest")[1]
    assert "make test-all" in (ROOT / ".github/workflows/sweep.yml").read_text(encoding="utf-8")
