"""Programs as files.

`to_json` and `from_json` round-trip.  The text has one storage, tensor and operator a line, so two
programs can be compared with ``diff``; ids are positions; an operator's phase follows from the
boundary::

    {"format": "dtrcompile-program 1", "name": "linear", "boundary": 1, "outputs": [2],
     "storages": [
      {"name": "x", "size_bytes": 64, "kind": "input"}, ...],
     "tensors": [
      {"name": "x", "storage": 0}, {"name": "y", "storage": 1, "producer": 0}, ...],
     "operators": [
      {"name": "mm", "inputs": [0], "outputs": [1], "cost_ns": 5}, ...]}

Optional keys: ``pinned`` and ``handed_on`` of a storage; ``workspace_bytes`` and
``not_recomputable`` of an operator (what they mean: `program.Storage`, `program.Operator`).
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from dtrcompile.passes.errors import ProgramError
from dtrcompile.passes.program.program import Operator, Phase, Program, Storage, StorageKind, Tensor

_FORMAT = "dtrcompile-program 1"


def to_json(program: Program) -> str:
    """The text form; `from_json` reads it back to an equal program."""

    def rows(items: Iterable[dict[str, object]]) -> str:
        return "[\n  " + ",\n  ".join(json.dumps(item) for item in items) + "]"

    storages = rows(
        {
            "name": s.name,
            "size_bytes": s.size_bytes,
            "kind": s.kind.value,
            **({} if s.pinned is None else {"pinned": s.pinned}),
            **({"handed_on": True} if s.is_handed_on else {}),
        }
        for s in program.storages
    )
    tensors = rows(
        {
            "name": t.name,
            "storage": t.storage,
            **({} if t.producer is None else {"producer": t.producer}),
        }
        for t in program.tensors
    )
    operators = rows(
        {
            "name": o.name,
            "inputs": o.inputs,
            "outputs": o.outputs,
            "cost_ns": o.cost_ns,
            **({"workspace_bytes": o.workspace_bytes} if o.workspace_bytes else {}),
            **({} if o.not_recomputable is None else {"not_recomputable": o.not_recomputable}),
            **({"overwrites": o.overwrites} if o.overwrites else {}),
            **({"is_barrier": True} if o.is_barrier else {}),
        }
        for o in program.operators
    )
    head = json.dumps(
        {
            "format": _FORMAT,
            "name": program.name,
            "boundary": program.boundary,
            "outputs": program.outputs,
        }
    )
    return (
        f'{head[:-1]},\n "storages": {storages},\n "tensors": {tensors},\n'
        f' "operators": {operators}}}\n'
    )


def from_json(text: str) -> Program:
    """Read the text form.

    Raises:
        ProgramError: saying which entry is wrong and how.
    """
    try:
        data = json.loads(text)
    except json.JSONDecodeError as error:
        raise ProgramError(f"not a JSON text: {error}") from error
    top = _Entry(data, "the program")
    if top.get("format", str) != _FORMAT:
        raise ProgramError(f"format is {top.get('format', str)!r}; this version reads {_FORMAT!r}")
    boundary = top.get("boundary", int, default=None)
    storages: list[Storage] = []
    kinds = {kind.value: kind for kind in StorageKind}
    for entry in top.entries("storages"):
        kind = entry.get("kind", str, default=StorageKind.INTERMEDIATE.value)
        if kind not in kinds:
            raise ProgramError(f"{entry.what}: unknown kind {kind!r}; allowed: {', '.join(kinds)}")
        storages.append(
            Storage(
                len(storages),
                entry.get("name", str),
                entry.get("size_bytes", int),
                kinds[kind],
                entry.get("pinned", str, default=None),
                entry.get("handed_on", bool, default=False),
            )
        )
    tensors: list[Tensor] = []
    for entry in top.entries("tensors"):
        tensors.append(
            Tensor(
                len(tensors),
                entry.get("name", str),
                entry.get("storage", int),
                entry.get("producer", int, default=None),
            )
        )
    operators: list[Operator] = []
    for entry in top.entries("operators"):
        index = len(operators)
        operators.append(
            Operator(
                index,
                entry.get("name", str),
                Phase.FORWARD if boundary is None or index < boundary else Phase.BACKWARD,
                entry.ids("inputs"),
                entry.ids("outputs"),
                entry.get("cost_ns", int),
                entry.get("workspace_bytes", int, default=0),
                entry.get("not_recomputable", str, default=None),
                entry.ids("overwrites", default=()),
                entry.get("is_barrier", bool, default=False),
            )
        )
    return Program(
        tuple(storages),
        tuple(tensors),
        tuple(operators),
        top.ids("outputs"),
        boundary,
        top.get("name", str, default="program"),
    )


_REQUIRED = object()


@dataclass(frozen=True, slots=True)
class _Entry:
    """A JSON object with typed access; ``what`` names it in errors."""

    data: Any
    what: str

    def __post_init__(self) -> None:
        if not isinstance(self.data, Mapping):
            raise ProgramError(f"{self.what} is not a JSON object: {self.data!r:.60}")

    def get(self, key: str, kind: type, default: object = _REQUIRED) -> Any:
        value = self.data.get(key, default)
        if value is _REQUIRED:
            raise ProgramError(f"{self.what} has no {key!r}")
        if value is default:
            return value
        if value is None and default is None:
            return None
        # A bool is an int to Python, but never one to us.
        if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
            raise ProgramError(f"{self.what}: {key!r} is {value!r:.60}, not of {kind.__name__}")
        return value

    def ids(self, key: str, default: object = _REQUIRED) -> tuple[int, ...]:
        values = self.get(key, list, default)
        for value in values:
            if not isinstance(value, int) or isinstance(value, bool):
                raise ProgramError(f"{self.what}: {key!r} holds {value!r:.60}, not an id")
        return tuple(values)

    def entries(self, key: str) -> list[_Entry]:
        return [
            _Entry(item, f"{key[:-1]} {index}") for index, item in enumerate(self.get(key, list))
        ]
