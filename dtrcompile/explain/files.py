"""An explanation as JSON: one object, described in ``docs/explain.md``."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields
from typing import Any

from dtrcompile.explain.explained import (
    Explained,
    ExplainedOperator,
    ExplainedTensor,
    Fate,
    ModuleAccount,
    ScheduledBuffer,
    Stay,
)
from dtrcompile.passes.errors import ProgramError
from dtrcompile.passes.program.sources import Frame

FORMAT = "dtrcompile-explanation 1"
_PLAIN = (
    "title",
    "facts",
    "peak_bytes",
    "planned_peak_bytes",
    "baseline_peak_bytes",
    "runs",
    "boundary",
    "peak_run",
    "moments",
    "peak_moment",
    "boundary_moment",
)


def to_json(found: Explained) -> str:
    """The text form; each stack of frames is written once, and named by its index."""
    stacks: dict[tuple[Frame, ...], int] = {}
    operators = []
    for operator in found.operators:
        entry = _entry(operator)
        entry["stack"] = stacks.setdefault(operator.frames, len(stacks))
        del entry["frames"]
        operators.append(entry)
    tensors = []
    for tensor in found.tensors:
        entry = _entry(tensor)
        entry["fate"] = tensor.fate.value
        entry["stays"] = [[stay.first, stay.last] for stay in tensor.stays]
        tensors.append(entry)
    rows: dict[str, list[Any]] = {
        "stacks": [[asdict(frame) for frame in stack] for stack in stacks],
        "operators": operators,
        "tensors": tensors,
        "modules": [_entry(account) for account in found.modules],
        "buffers": [_entry(buffer) for buffer in found.buffers],
    }
    head = {"format": FORMAT, **{name: getattr(found, name) for name in _PLAIN}}
    parts = [json.dumps(head, ensure_ascii=False)[1:-1]]
    for name, entries in rows.items():
        lines = ",\n  ".join(json.dumps(entry, ensure_ascii=False) for entry in entries)
        parts.append(f'"{name}": [\n  {lines}]')
    return "{" + ",\n".join(parts) + "}\n"


def from_json(text: str) -> Explained:
    """What `to_json` wrote.

    Raises:
        ProgramError: if it is something else.
    """
    try:
        data = json.loads(text)
        if data["format"] != FORMAT:
            raise ProgramError(f"the format is {data['format']!r}; this reads {FORMAT!r}.")
        stacks = [tuple(Frame(**frame) for frame in stack) for stack in data["stacks"]]
        return Explained(
            **{name: _frozen(data[name]) for name in _PLAIN},
            operators=tuple(_operator(entry, stacks) for entry in data["operators"]),
            tensors=tuple(_tensor(entry) for entry in data["tensors"]),
            modules=tuple(ModuleAccount(**entry) for entry in data["modules"]),
            buffers=tuple(ScheduledBuffer(**entry) for entry in data["buffers"]),
        )
    except (ValueError, KeyError, TypeError, IndexError) as error:
        found = f"there is no {error}" if isinstance(error, KeyError) else str(error)
        raise ProgramError(
            "not an explanation that dtrcompile wrote (DTRCOMPILE_ARTIFACTS writes"
            f" graph*-explanation.json): {found}"
        ) from error


def _entry(row: Any) -> dict[str, Any]:
    """As `dataclasses.asdict`, without copying what is in it."""
    return {f.name: getattr(row, f.name) for f in fields(row)}


def _frozen(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def _operator(entry: Mapping[str, Any], stacks: Sequence[tuple[Frame, ...]]) -> ExplainedOperator:
    rest = {name: value for name, value in entry.items() if name != "stack"}
    return ExplainedOperator(**rest, frames=stacks[entry["stack"]])


def _tensor(entry: Mapping[str, Any]) -> ExplainedTensor:
    made = {
        "shape": tuple(entry["shape"]),
        "fate": Fate(entry["fate"]),
        "stays": tuple(Stay(first, last) for first, last in entry["stays"]),
    }
    return ExplainedTensor(**{**entry, **made})
