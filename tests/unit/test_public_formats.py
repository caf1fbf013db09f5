"""The public formats of programs: what is read, errors that say where, and our own form of it."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from dtrcompile.passes.errors import ProgramError
from dtrcompile.passes.planning.planners import keep_all
from dtrcompile.passes.program.io import from_json
from dtrcompile.passes.program.program import Phase
from dtrcompile.passes.program.replay import replay
from workloads import public_graphs
from workloads.public_graphs import (
    from_checkmate_json,
    from_simrd_log,
    main,
    shared_data,
    simrd_releases,
)

ROOT = Path(__file__).resolve().parents[2]

SIMRD = [
    {"INSTRUCTION": "CONSTANT", "NAME": "before"},
    {"INSTRUCTION": "ANNOTATE", "ANNOTATION": "START"},
    {"INSTRUCTION": "CONSTANT", "NAME": "w"},
    {"INSTRUCTION": "MEMORY", "NAME": "w", "MEMORY": "100"},
    {"INSTRUCTION": "CALL", "NAME": "mm", "ARGS": ["w"], "RESULT": ["a"], "TIME": "7"},
    {"INSTRUCTION": "MEMORY", "NAME": "a", "MEMORY": "10"},
    {"INSTRUCTION": "ALIAS", "NAME": "a", "ALIAS": "-1"},
    {"INSTRUCTION": "CALL", "NAME": "t", "ARGS": ["a"], "RESULT": ["v"], "TIME": "1"},
    {"INSTRUCTION": "MEMORY", "NAME": "v", "MEMORY": "10"},
    {"INSTRUCTION": "ALIAS", "NAME": "v", "ALIAS": "0"},
    {"INSTRUCTION": "ANNOTATE", "ANNOTATION": "BACKWARD"},
    {"INSTRUCTION": "MUTATE", "NAME": "add_", "ARGS": ["a", "w"], "MUTATE": [0], "TIME": "3"},
    {"INSTRUCTION": "COPY", "DST": "b", "SRC": "a"},
    {"INSTRUCTION": "RELEASE", "NAME": "a"},
    {"INSTRUCTION": "RELEASE", "NAME": "never"},
    {"INSTRUCTION": "CALL", "NAME": "mul", "ARGS": ["v", "b"], "RESULT": ["c"], "TIME": "5"},
    {"INSTRUCTION": "MEMORY", "NAME": "c", "MEMORY": "20"},
    {"INSTRUCTION": "ALIAS", "NAME": "c", "ALIAS": "-1"},
    {"INSTRUCTION": "RELEASE", "NAME": "v"},
    {"INSTRUCTION": "COPY_FROM", "DST": "c", "SRC": "b"},
]


def write_log(path: Path, entries: list[dict[str, Any]]) -> Path:
    with gzip.open(path, "wt") as lines:
        lines.writelines(json.dumps(entry) + "\n" for entry in entries)
    return path


def test_simrd_log(tmp_path: Path) -> None:
    program = from_simrd_log(write_log(tmp_path / "tiny.log.gz", SIMRD))
    assert program.name == "tiny"
    assert [o.name for o in program.operators] == ["mm0", "t1", "add_2", "mul3"]
    assert [(s.name, s.size_bytes, s.is_constant) for s in program.storages] == [
        ("w", 100, True),
        ("a", 10, False),
        ("a'", 10, False),  # the in-place operator, read as copy-on-write
        ("c", 20, False),
    ]
    assert program.tensors[2].storage == 1  # v is a view of a
    assert program.operators[3].inputs == (2, 3)  # v, and what a became
    # c gave its name away, so only the mutated a is referenced at the end, twice.
    assert program.outputs == (3,)
    assert program.cost_ns == 16


def test_simrd_errors_name_the_line(tmp_path: Path) -> None:
    bad = [*SIMRD, {"INSTRUCTION": "CALL", "NAME": "f", "ARGS": ["?"], "RESULT": [], "TIME": "1"}]
    with pytest.raises(ProgramError, match=f"line {len(bad)}"):
        from_simrd_log(write_log(tmp_path / "bad.log.gz", bad))
    with pytest.raises(ProgramError, match="unknown instruction 'JUMP'"):
        from_simrd_log(
            write_log(tmp_path / "bad.log.gz", [*SIMRD, {"INSTRUCTION": "JUMP", "NAME": "x"}])
        )


def test_checkmate_json(tmp_path: Path) -> None:
    path = tmp_path / "two.json"
    operators = [
        {"id": 0, "phase": "forward", "cost": 3, "size_bytes": 5, "inputs": []},
        {"id": 1, "phase": "loss", "cost": 1, "size_bytes": 1, "inputs": [0]},
        {"id": 2, "phase": "backward", "cost": 6, "size_bytes": 5, "inputs": [0, 1]},
    ]
    reference = {
        "budget_bytes": 11,
        "milp": {"status": "optimal", "overhead": 1.0},
        "lp_lower_bound": 1.0,
        "simrd": {"DTR": {"status": "ok", "overhead": 1.2}, "LRU": {"status": "OOM"}},
    }
    path.write_text(json.dumps({"name": "two", "operators": operators, "reference": [reference]}))
    program, (found,) = from_checkmate_json(path)
    assert program.boundary == 2
    assert [o.phase for o in program.operators] == [Phase.FORWARD, Phase.FORWARD, Phase.BACKWARD]
    assert program.outputs == ()
    assert replay(program, keep_all(program))[0].peak_bytes == 5 + 1 + 5
    assert (found.budget_bytes, found.milp_overhead) == (11, 1.0)
    assert found.simrd_overhead == {"DTR": 1.2}


def test_shared_data_is_found_by_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "data").mkdir()
    monkeypatch.setenv("DTRCOMPILE_SHARED", str(tmp_path))
    assert shared_data() == tmp_path / "data"
    monkeypatch.setenv("DTRCOMPILE_SHARED", str(tmp_path / "nowhere"))
    assert shared_data() is None


def test_shared_data_is_found_beside_the_repository(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("DTRCOMPILE_SHARED", raising=False)
    (tmp_path / "shared" / "data").mkdir(parents=True)
    relative = Path(public_graphs.__file__).resolve().relative_to(ROOT)
    monkeypatch.setattr(public_graphs, "__file__", str(tmp_path / "checkout" / relative))
    assert shared_data() == tmp_path / "shared" / "data"


def test_storages_are_released_where_python_let_go(tmp_path: Path) -> None:
    path = write_log(tmp_path / "tiny.log.gz", SIMRD)
    # mm0, t1, add_2, mul3.  w is held to the end; so is a', as b and as c.  v, a view of a, is let
    # go of after mul3, and c, which gave its name away, at that moment too.
    assert simrd_releases(path) == (4, 3, 4, 3)


def test_checkmate_errors_name_the_file(tmp_path: Path) -> None:
    path = tmp_path / "bad.json"
    for text, message in (
        ("{", "bad.json: not a JSON text"),
        ("[]", "bad.json: not a graph of Checkmate's"),
        ('{"operators": []}', "bad.json: not a graph of Checkmate's: KeyError.'reference'"),
        ('{"operators": [{"phase": "loss"}]}', "bad.json: not a graph of Checkmate's"),
    ):
        path.write_text(text, encoding="utf-8")
        with pytest.raises(ProgramError, match=message):
            from_checkmate_json(path)


def test_our_own_form_is_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write_log(tmp_path / "tiny.log.gz", SIMRD)
    assert main([str(path)]) == 0
    assert from_json(capsys.readouterr().out) == from_simrd_log(path)
