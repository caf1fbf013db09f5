"""Programs as files: round trip, errors that say what is wrong, the public formats."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from dtrcompile.passes.errors import ProgramError
from dtrcompile.passes.planning.planners import keep_all
from dtrcompile.passes.program.io import (
    from_checkmate_json,
    from_json,
    from_simrd_log,
    shared_data,
    to_json,
)
from dtrcompile.passes.program.program import Phase
from dtrcompile.passes.program.replay import replay
from workloads.synthetic import training_chain, transformer


def test_round_trip() -> None:
    program = transformer(2)
    text = to_json(program)
    assert from_json(text) == program
    assert from_json(text).name == "transformer2"
    assert len(text.splitlines()) > len(program.operators)  # one a line, for diff


def broken(**changes: Any) -> str:
    data = json.loads(to_json(training_chain(2)))
    for key, value in changes.items():
        if value is None:
            del data[key]
        elif isinstance(value, dict):
            data[key][0].update(value)
        else:
            data[key] = value
    return json.dumps(data)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "not a JSON text"),
        ("[]", "not a JSON object"),
        (broken(format="dtrcompile-program 9"), "this version reads"),
        (broken(storages=None), "has no 'storages'"),
        (broken(storages={"kind": "weight"}), "storage 0: unknown kind 'weight'; allowed: param"),
        (broken(storages={"size_bytes": "8"}), "storage 0: 'size_bytes' is '8', not of int"),
        (broken(storages={"size_bytes": -8}), "negative size"),
        (broken(tensors={"storage": True}), "tensor 0: 'storage' is True"),
        (broken(operators={"inputs": ["x"]}), "operator 0: 'inputs' holds 'x', not an id"),
        (broken(operators={"inputs": [99]}), "reads tensor 99, which does not exist"),
        (broken(boundary=99), "boundary 99 is not an operator index"),
        (broken(outputs=7), "'outputs' is 7, not of list"),
    ],
)
def test_errors(text: str, message: str) -> None:
    with pytest.raises(ProgramError, match=message):
        from_json(text)


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
