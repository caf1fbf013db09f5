"""Each formula on numbers that a person can check."""

from __future__ import annotations

import numpy as np
import pytest

from dtrcompile.passes.planning.heuristics import (
    HDTR,
    HEURISTICS,
    HLRU,
    HMSPS,
    HDTREq,
    HDTREqNext,
    HDTRLocal,
    HDTRNext,
    Heuristic,
    HMSPSNext,
    HRand,
    HSize,
    Neighborhood,
    Pool,
    PoolState,
)
from dtrcompile.passes.planning.neighborhoods import make_tracker
from dtrcompile.passes.program.index import NEVER, ProgramIndex
from dtrcompile.passes.program.program import Program
from workloads.synthetic import ProgramBuilder

# Two candidates: ids 1 and 3, of four storages.
POOL = Pool(
    np.array([1, 3]),
    PoolState(
        size_bytes=np.array([9.0, 4.0, 9.0, 10.0]),
        cost_ns=np.array([9.0, 8.0, 9.0, 30.0]),
        neighborhood_ns=np.array([9.0, 12.0, 9.0, 0.0]),
        last_access_ns=np.array([9.0, 90.0, 9.0, 75.0]),
        next_use_ns=np.array([9.0, 55.0, 9.0, 90.0]),
        clock_ns=100.0,
        baseline_clock_ns=50.0,
    ),
)


@pytest.mark.parametrize(
    ("heuristic", "scores"),
    [
        (HDTR(), [(8 + 12) / (4 * 10), 30 / (10 * 25)]),
        (HDTREq(), [(8 + 12) / (4 * 10), 30 / (10 * 25)]),
        (HDTRLocal(), [8 / (4 * 10), 30 / (10 * 25)]),
        (HLRU(), [1 / 10, 1 / 25]),
        (HSize(), [1 / 4, 1 / 10]),
        (HMSPS(), [(8 + 12) / 4, 30 / 10]),
        (HDTRNext(), [(8 + 12) / (4 * 5), 30 / (10 * 40)]),
        (HDTREqNext(2.0, 0.0), [(8 + 12) / 16, 30 / 100]),
        (HMSPSNext(1.0, 0.5), [(8 + 12) / (4 * 5**0.5), 30 / (10 * 40**0.5)]),
    ],
)
def test_formula(heuristic: Heuristic, scores: list[float]) -> None:
    assert heuristic.scores(POOL) == pytest.approx(scores)


def test_random_is_seeded() -> None:
    assert (HRand(1).scores(POOL) == HRand(1).scores(POOL)).all()
    assert (HRand(1).scores(POOL) != HRand(2).scores(POOL)).all()


@pytest.mark.parametrize("name", HEURISTICS)
def test_every_heuristic_says_what_it_is(name: str) -> None:
    heuristic = HEURISTICS[name]
    assert heuristic.name == name
    assert heuristic.formula
    assert heuristic.source
    assert heuristic.__doc__


def chain() -> tuple[Program, ProgramIndex]:
    """a -> b -> c -> d -> e with costs 1, 2, 4, 8, 16: any sum says which are in it."""
    p = ProgramBuilder()
    tensors: list[int] = []
    for k, name in enumerate("abcde"):
        tensors += p.operator(name, tensors[-1:], [1], 2**k)
    program = p.build(tensors)
    return program, ProgramIndex.of(program)


def tracked(kind: Neighborhood, events: str, dead: str = "") -> dict[str, float]:
    """Neighborhood costs after events: "-b" b is evicted, "+b" computed again, "!b" banished."""
    program, index = chain()
    n = len(program.storages)
    ids = {s.name: s.id for s in program.storages}
    state = PoolState(*(np.zeros(n) for _ in range(5)))
    absent = [False] * n
    next_use = [NEVER if s.name in dead else 9 for s in program.storages]
    tracker = make_tracker(kind, index, state, absent, next_use, 100)
    for s in range(n):
        tracker.on_resident(s)
    for event, name in zip(events[::2], events[1::2], strict=True):
        s = ids[name]
        match event:
            case "-":
                absent[s] = True
                tracker.on_absent(s)
            case "+":
                absent[s] = False
                tracker.on_resident(s)
            case "!":
                tracker.on_banished(s)
                absent[s] = False
    tracker.refresh(np.arange(n), np.ones(n, dtype=np.bool_))
    return {
        s.name: float(state.neighborhood_ns[s.id]) for s in program.storages if not absent[s.id]
    }


def test_exact_neighborhood() -> None:
    # b and d are gone: c would need b (2), and d (8) would need c.
    assert tracked(Neighborhood.EXACT, "-b-d") == {"a": 2, "c": 2 + 8, "e": 8}
    # b and c: a is needed by both, d needs both, e needs d, which is there.
    assert tracked(Neighborhood.EXACT, "-b-c") == {"a": 6, "d": 6, "e": 0}
    assert tracked(Neighborhood.EXACT, "-b-c+b") == {"a": 0, "b": 4, "d": 4, "e": 0}


def test_what_nothing_needs_is_no_descendant_but_still_an_ancestor() -> None:
    assert tracked(Neighborhood.EXACT, "-b", dead="b") == {"a": 0, "c": 2, "d": 0, "e": 0}


def test_ancestors_only() -> None:
    assert tracked(Neighborhood.ANCESTORS, "-b-d") == {"a": 0, "c": 2, "e": 8}


def test_equivalence_classes_join() -> None:
    # Two classes {b} and {d} touch c, as e* has it; when c goes too they become one.
    assert tracked(Neighborhood.EQUIVALENCE, "-b-d") == {"a": 2, "c": 2 + 8, "e": 8}
    assert tracked(Neighborhood.EQUIVALENCE, "-b-d-c") == {"a": 14, "e": 14}


def test_computing_again_splits_the_cost_and_leaves_phantom_connections() -> None:
    # c's own 4 leaves the class {b, c, d}; b and d stay joined although c is back between them
    # (appendix C.2), so a and e still see both.
    assert tracked(Neighborhood.EQUIVALENCE, "-b-d-c+c") == {"a": 10, "c": 10, "e": 10}


def test_lost_storages_leave_their_class() -> None:
    assert tracked(Neighborhood.EQUIVALENCE, "-b-c!b")["d"] == 4
    assert tracked(Neighborhood.NONE, "-b-c") == {"a": 0, "d": 0, "e": 0}


def test_a_walk_is_cut() -> None:
    program, index = chain()
    state = PoolState(*(np.zeros(5) for _ in range(5)))
    absent = [True, True, True, True, False]
    tracker = make_tracker(Neighborhood.ANCESTORS, index, state, absent, [9] * 5, 1)
    tracker.on_resident(4)
    tracker.refresh(np.array([4]), np.arange(5) == 4)
    assert 0 < state.neighborhood_ns[4] < 1 + 2 + 4 + 8
    assert program.cost_ns == 31
