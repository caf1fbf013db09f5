"""Pages whose blocks run: what they print is what the text below them says.

A page's blocks run one after the other in one namespace.  ``DOCS_ACCEPT=1`` writes what was printed
into the page instead of comparing it, to be read before it is committed.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
from pathlib import Path
from typing import Any

import pytest

from dtrcompile.passes.planning.heuristics import HDTR, HLRU, HDTREq, Heuristic
from dtrcompile.passes.planning.simulator import SimulatorOptions, simulate
from dtrcompile.passes.program.index import ProgramIndex
from dtrcompile.passes.program.plan import Boundary, Compute, Free, Plan, Step
from dtrcompile.passes.program.program import Program
from dtrcompile.passes.program.replay import replay
from workloads.synthetic import training_chain

DOCS = Path(__file__).resolve().parents[2] / "docs"
_BLOCK = re.compile(r"```python\n(.*?)```(\n\n```text\n(.*?)```)?", re.DOTALL)


def run_page(name: str) -> dict[str, Any]:
    """Runs a page's blocks, compares what they print, and returns their namespace."""
    path = DOCS / name
    text = path.read_text(encoding="utf-8")
    namespace: dict[str, Any] = {"__name__": path.stem}
    accepted, differences = "", []
    end = 0
    for block in _BLOCK.finditer(text):
        line = text.count("\n", 0, block.start(1)) + 1
        printed = io.StringIO()
        # Lines of an error are those of the page.
        code = compile("\n" * (line - 1) + block[1], str(path), "exec", dont_inherit=True)
        with contextlib.redirect_stdout(printed):
            exec(code, namespace)
        output = printed.getvalue()
        if output != (block[3] or ""):
            differences.append(f"the block at line {line} of {name} prints:\n{output}")
        shown = f"\n\n```text\n{output}```" if output else ""
        accepted += text[end : block.start()] + f"```python\n{block[1]}```{shown}"
        end = block.end()
    if os.environ.get("DOCS_ACCEPT") == "1":
        path.write_text(accepted + text[end:], encoding="utf-8")
    else:
        assert not differences, "\n".join(differences)
    return namespace


@pytest.fixture(scope="module")
def scratch() -> dict[str, Any]:
    return run_page("dtr-from-scratch.md")


def record_of(page: dict[str, Any], layers: int, memory: int, name: str) -> list[tuple[str, str]]:
    """What the page's runtime does on the chain."""
    kind = page["WithComponents" if name == "h_dtr_eq" else "Runtime"]
    operators = page["chain"](layers)
    record: list[tuple[str, str]] = page["train"](
        operators, kind(operators, memory, page[name])
    ).record
    return record


def plan_of(program: Program, record: list[tuple[str, str]]) -> Plan:
    """A record of the page as a plan of the project."""
    operators = {o.name: o.id for o in program.operators}
    storages = {s.name: s.id for s in program.storages}
    steps: list[Step] = []
    for what, name in record:
        if name == f"g{len(program.operators) // 2}" and Boundary() not in steps:
            steps.append(Boundary())
        steps.append(Compute(operators[name]) if what == "compute" else Free(storages[name]))
    # The chain's last gradient is an output of the project's program, and is not freed there.
    assert steps.pop() == Free(storages["g1"])
    return Plan(tuple(steps), program.fingerprint, "docs")


CASES = [(8, 8), (8, 3), (16, 5), (32, 11), (32, 4)]


@pytest.mark.parametrize("heuristic", [HLRU(), HDTR(), HDTREq()], ids=lambda h: h.name)
@pytest.mark.parametrize(("layers", "memory"), CASES)
def test_the_page_computes_what_the_simulator_computes(
    scratch: dict[str, Any], layers: int, memory: int, heuristic: Heuristic
) -> None:
    program = training_chain(layers)
    found = simulate(ProgramIndex.of(program), memory, SimulatorOptions(heuristic=heuristic))
    expected = [program.operators[s.operator].name for s in found.steps if isinstance(s, Compute)]
    record = record_of(scratch, layers, memory, heuristic.name)
    assert [name for what, name in record if what == "compute"] == expected


@pytest.mark.parametrize(("layers", "memory"), CASES)
def test_the_referee_accepts_the_plans_of_the_page(
    scratch: dict[str, Any], layers: int, memory: int
) -> None:
    program = training_chain(layers)
    record = record_of(scratch, layers, memory, "h_dtr_eq")
    _, stats = replay(program, plan_of(program, record))
    peak, cost = scratch["replay"](scratch["chain"](layers), record)
    assert stats.peak_bytes == peak <= memory
    assert stats.cost_ns == cost


def test_a_wrong_output_is_noticed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(globals(), "DOCS", tmp_path)
    monkeypatch.delenv("DOCS_ACCEPT", raising=False)
    (tmp_path / "page.md").write_text("```python\nprint(1)\n```\n\n```text\n2\n```\n")
    with pytest.raises(AssertionError, match=r"line 2 of page.md prints:\n  1"):
        run_page("page.md")


def test_an_output_is_accepted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(globals(), "DOCS", tmp_path)
    monkeypatch.setenv("DOCS_ACCEPT", "1")
    page = tmp_path / "page.md"
    page.write_text("a\n\n```python\nx = 1\n```\n\nb\n\n```python\nprint(x)\n```\n\nc\n")
    assert run_page("page.md")["x"] == 1
    assert page.read_text().endswith("```python\nprint(x)\n```\n\n```text\n1\n```\n\nc\n")


def test_the_stages_of_the_pipeline_are_what_the_page_shows() -> None:
    page = run_page("pipeline.md")
    assert page["planned"].peak_bytes <= page["budget_bytes"] < page["timeline"].peak_bytes
    for run in page["executor_log"]():
        assert run.counted_bytes == run.predicted_bytes
