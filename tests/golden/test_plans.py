"""A dozen plans that a person can read, each beside what it costs.

A change of the planner shows up here as a diff: read it, and if it is right write the files anew
with ``pytest tests/golden --update-golden``.  The files hold names, not ids: ``f3`` runs f3,
``f3 again`` runs it once more, ``- f3`` frees its storage.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from dtrcompile.passes.planning.planners import keep_all, make_planner
from dtrcompile.passes.program.plan import Boundary, Compute, Free
from dtrcompile.passes.program.program import Program, StorageKind
from dtrcompile.passes.program.replay import replay
from workloads.synthetic import ProgramBuilder, training_chain, transformer

FOLDER = Path(__file__).parent / "plans"


def residual() -> Program:
    """Two residual blocks, forward and backward; the skip connection lives long."""
    p = ProgramBuilder()
    x = p.constant("x", 4, StorageKind.INPUT)
    g = p.constant("dy", 4, StorageKind.TANGENT)
    blocks = []
    for k in (1, 2):
        (h,) = p.operator(f"conv{k}", [x], [4], 20)
        (r,) = p.operator(f"relu{k}", [h], [4], 1)
        (y,) = p.operator(f"add{k}", [r, x], [4], 1)
        blocks.append((x, h, r))
        x = y
    p.begin_backward()
    for k, (x, _, r) in zip((2, 1), reversed(blocks), strict=True):
        (gr,) = p.operator(f"drelu{k}", [g, r], [4], 1)
        (gx,) = p.operator(f"dconv{k}", [gr, x], [4], 40)
        (g,) = p.operator(f"dadd{k}", [gx, g], [4], 1)
    return p.build([g])


def dropout() -> Program:
    """A seed that may be read only once, masks computed from it, and views on the way."""
    p = ProgramBuilder()
    x = p.constant("x", 8, StorageKind.INPUT)
    g = p.constant("dy", 8, StorageKind.TANGENT)
    (seed,) = p.operator("seed", [], [1], 1, not_recomputable="draws from the generator")
    saved = []
    for k in (1, 2, 3):
        (h,) = p.operator(f"mm{k}", [x], [8], 50)
        flat = p.view(f"flat{k}", h)
        (mask,) = p.operator(f"mask{k}", [seed], [8], 2)
        (x,) = p.operator(f"drop{k}", [flat, mask], [8], 2)
        saved.append((h, mask))
    p.begin_backward()
    for k, (h, mask) in zip((3, 2, 1), reversed(saved), strict=True):
        (gd,) = p.operator(f"ddrop{k}", [g, mask], [8], 2)
        (g,) = p.operator(f"dmm{k}", [gd, h], [8], 100)
    return p.build([g])


def split() -> Program:
    """One operator with three outputs, used far apart; one of them is pinned."""
    p = ProgramBuilder()
    x = p.constant("x", 2, StorageKind.INPUT)
    q, k, v = p.operator("qkv", [x], [2, 2, 2], 9)
    (kept,) = p.operator("kept", [q], [3], 4, pinned="the user said so")
    (big,) = p.operator("big", [q], [6], 9, workspace_bytes=2)
    (less,) = p.operator("less", [big], [1], 9)
    (late,) = p.operator("late", [less, k, v, kept], [2], 9)
    return p.build([late])


CASES: dict[str, tuple[Callable[[], Program], str, int]] = {
    "chain8-baseline": (lambda: training_chain(8), "auto", 9),
    "chain8-6": (lambda: training_chain(8), "auto", 6),
    "chain8-4": (lambda: training_chain(8), "auto", 4),
    "chain8-4-h_dtr": (lambda: training_chain(8), "h_dtr", 4),
    "chain8-4-h_dtr_eq": (lambda: training_chain(8), "h_dtr_eq", 4),
    "chain8-4-h_lru": (lambda: training_chain(8), "h_lru", 4),
    "residual-20": (residual, "auto", 20),
    "residual-24-h_dtr_local": (residual, "h_dtr_local", 24),
    "dropout-60": (dropout, "auto", 60),
    "dropout-48": (dropout, "auto", 48),
    "split-17": (split, "auto", 17),
    "transformer1-half": (lambda: transformer(1), "auto", 19_500),
}


def readable(program: Program, planner_name: str, budget_bytes: int) -> str:
    """The plan with names, and what the referee says of it."""
    planner = (
        make_planner("auto")
        if planner_name == "auto"
        else make_planner("dtr", heuristic=planner_name)
    )
    plan = planner.plan(program, budget_bytes)
    timeline, stats = replay(program, plan)
    baseline_bytes = replay(program, keep_all(program))[0].peak_bytes
    lines = [
        f"# {program.name}: {plan.planner}, budget {budget_bytes} of {baseline_bytes} bytes",
        f"# peak {timeline.peak_bytes} at {stats.peak_operator},"
        f" cost {stats.cost_ns} of {stats.baseline_cost_ns},"
        f" {stats.recomputed_operators} again",
    ]
    runs: Counter[int] = Counter()
    for step, during in zip(plan.steps, timeline.during_bytes, strict=True):
        match step:
            case Compute(o):
                runs[o] += 1
                again = " again" if runs[o] > 1 else ""
                lines.append(f"{during:>6}  {program.operators[o].name}{again}")
            case Free(s):
                lines.append(f"{'':>6}  - {program.storages[s].name}")
            case Boundary():
                lines.append(f"{during:>6}  ---- backward ----")
    return "\n".join(lines) + "\n"


@pytest.mark.parametrize("case", CASES)
def test_golden(case: str, request: pytest.FixtureRequest) -> None:
    build, planner_name, budget_bytes = CASES[case]
    text = readable(build(), planner_name, budget_bytes)
    path = FOLDER / f"{case}.txt"
    if request.config.getoption("--update-golden", default=False):
        path.write_text(text)
    assert path.read_text() == text, f"{path} differs; see the module docstring"


def test_every_file_has_its_case() -> None:
    assert {path.stem for path in FOLDER.glob("*.txt")} == set(CASES)
