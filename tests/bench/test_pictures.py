"""The pictures of the documents: what is drawn, and that it is the same file every time."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.pictures import CURVES, Life, lives, make_pictures, memories, pareto
from dtrcompile.passes.planning.planners import keep_all
from dtrcompile.passes.program.plan import Boundary, Compute, Free, Plan
from dtrcompile.passes.program.replay import replay
from workloads.synthetic import training_chain

ROOT = Path(__file__).resolve().parents[2]


def test_lives() -> None:
    program = training_chain(2)  # f1, f2; g2 reads f1, g1 reads g2
    steps = (
        Compute(0), Compute(1), Free(3), Free(2), Boundary(), Compute(0), Compute(2), Free(2),
        Compute(3), Free(4),
    )  # fmt: skip
    plan = Plan(steps, program.fingerprint, "test")
    replay(program, plan)
    assert [s.name for s in program.storages] == ["x", "dy", "f1", "f2", "g2", "g1"]
    assert lives(plan, program) == [
        Life(3, 1, 2, again=False),
        Life(2, 0, 2, again=False),
        Life(2, 2, 4, again=True),
        Life(4, 3, 5, again=False),
        Life(5, 4, 5, again=False),
    ]


def test_no_copy_of_the_baseline_is_a_second_one() -> None:
    program = training_chain(20)
    assert not any(life.again for life in lives(keep_all(program), program))


def test_memories_of_the_paper() -> None:
    assert memories(80) == ((18, "2 √N"), (11, "log2 N + 4"))  # √80 = 8.9, log2 80 = 6.3


def test_every_planner_has_a_curve_of_what_it_finds() -> None:
    curves = pareto(training_chain(16), (1.0, 0.1))
    assert set(curves) == set(CURVES)
    for points in curves.values():
        assert points == [(1.0, 0.0)]  # a tenth of 16 tensors is 1, which nothing fits


@pytest.mark.slow
def test_pictures_are_the_same_every_time(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    make_pictures(tmp_path / "a", quick=True)
    make_pictures(tmp_path / "b", quick=True)
    names = sorted(path.name for path in (tmp_path / "a").iterdir())
    assert names == sorted(path.name for path in (ROOT / "docs" / "pictures").iterdir())
    for name in names:
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()


def test_the_pictures_of_the_documents_are_small() -> None:
    for path in (ROOT / "docs" / "pictures").iterdir():
        assert path.stat().st_size < 150_000, path.name
