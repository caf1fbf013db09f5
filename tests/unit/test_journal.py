"""Changes that are taken back in the order in which they were made, latest first."""

from __future__ import annotations

import random

from dtrcompile.passes.planning.planners.journal import Journal


class Counter:
    """A change that is taken back by itself with another argument."""

    def __init__(self, journal: Journal) -> None:
        self.journal = journal
        self.count = 0

    def add(self, change: int) -> None:
        self.journal.note((self.add, (-change,)))
        self.count += change


def test_what_was_assigned_is_as_before() -> None:
    journal = Journal()
    values = {"a": 1}
    journal.assign(values, "a", 2)
    journal.assign(values, "b", 3)
    assert values == {"a": 2, "b": 3}
    journal.roll_back(0)
    assert values == {"a": 1}


def test_zero_empty_and_none_are_no_entry() -> None:
    journal = Journal()
    numbers, lists = {"a": 1}, {"a": [1], "b": [2]}
    journal.assign(numbers, "a", 0)
    journal.assign(lists, "a", [])
    journal.assign(lists, "b", None)
    journal.assign(lists, "c", None)
    assert (numbers, lists) == ({}, {})
    journal.roll_back(0)
    assert (numbers, lists) == ({"a": 1}, {"a": [1], "b": [2]})


def test_only_what_came_after_a_mark_is_taken_back() -> None:
    journal = Journal()
    counter = Counter(journal)
    counter.add(3)
    mark = len(journal)
    counter.add(4)
    counter.add(-1)
    journal.roll_back(mark)
    assert (counter.count, len(journal)) == (3, mark)
    journal.roll_back(0)
    assert (counter.count, len(journal)) == (0, 0)


def test_what_is_forgotten_stays() -> None:
    journal = Journal()
    counter = Counter(journal)
    counter.add(3)
    journal.clear()
    assert not len(journal)
    journal.roll_back(0)
    assert counter.count == 3


def test_any_series_of_changes_can_be_taken_back_to_any_point() -> None:
    rng = random.Random(0)
    for _ in range(100):
        journal = Journal()
        values: dict[int, int] = {}
        points = []
        for _ in range(rng.randrange(1, 30)):
            points.append((len(journal), dict(values)))
            journal.assign(values, rng.randrange(4), rng.randrange(3))
        for length, before in rng.sample(points[::-1], len(points)):
            if length <= len(journal):
                journal.roll_back(length)
                assert values == before
