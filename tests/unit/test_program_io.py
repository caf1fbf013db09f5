"""Programs as files: round trip, and errors that say what is wrong."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from dtrcompile.passes.errors import ProgramError
from dtrcompile.passes.program.io import from_json, to_json
from dtrcompile.passes.program.program import StorageKind
from workloads.synthetic import training_chain, transformer


def test_round_trip() -> None:
    program = transformer(2)
    text = to_json(program)
    assert from_json(text) == program
    assert from_json(text).name == "transformer2"
    assert len(text.splitlines()) > len(program.operators)  # one a line, for diff


def test_storages_that_the_caller_gives_up_round_trip() -> None:
    program = training_chain(2)
    tangents = [s.id for s in program.storages if s.kind is StorageKind.TANGENT]
    assert tangents
    storages = tuple(replace(s, is_handed_on=s.id in tangents) for s in program.storages)
    program = replace(program, storages=storages)
    assert from_json(to_json(program)) == program


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
        (broken(storages={"handed_on": 1}), "storage 0: 'handed_on' is 1, not of bool"),
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
