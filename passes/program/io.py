"""Programs as files: our own JSON, and two public formats to compare planners on.

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

`from_simrd_log` reads the operator logs of DTR's simulator (Kirisame et al., ICLR 2021, artifact),
`from_checkmate_json` the graphs of Checkmate's artifact (Jain et al., MLSys 2020).
"""

from __future__ import annotations

import gzip
import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
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

    def ids(self, key: str) -> tuple[int, ...]:
        values = self.get(key, list)
        for value in values:
            if not isinstance(value, int) or isinstance(value, bool):
                raise ProgramError(f"{self.what}: {key!r} holds {value!r:.60}, not an id")
        return tuple(values)

    def entries(self, key: str) -> list[_Entry]:
        return [
            _Entry(item, f"{key[:-1]} {index}") for index, item in enumerate(self.get(key, list))
        ]


def shared_data() -> Path | None:
    """The folder with the public graphs: ``$DTRCOMPILE_SHARED/data`` or ``../shared/data``.

    None where there is none; it is not part of the repository.
    """
    given = os.environ.get("DTRCOMPILE_SHARED")
    root = Path(given) if given else Path(__file__).resolve().parents[2] / "shared"
    data = root / "data"
    return data if data.is_dir() else None


@dataclass(slots=True)
class _Builder:
    """Collects a program operator by operator."""

    storages: list[Storage] = field(default_factory=list)
    tensors: list[Tensor] = field(default_factory=list)
    operators: list[Operator] = field(default_factory=list)

    def storage(self, name: str, size_bytes: int, kind: StorageKind) -> int:
        self.storages.append(Storage(len(self.storages), name, size_bytes, kind))
        return len(self.storages) - 1

    def tensor(self, name: str, storage: int, producer: int | None) -> int:
        self.tensors.append(Tensor(len(self.tensors), name, storage, producer))
        return len(self.tensors) - 1


@dataclass(frozen=True, slots=True)
class CheckmateReference:
    """What the file says of one budget; the optimum is None where the solver proved none.

    ``milp_s`` is how long the solver took on the machine that made the file.
    """

    budget_bytes: int
    milp_overhead: float | None
    milp_status: str
    milp_s: float | None
    lp_lower_bound: float | None
    simrd_overhead: dict[str, float]


def from_checkmate_json(path: Path) -> tuple[Program, tuple[CheckmateReference, ...]]:
    """A graph in the form of Checkmate's artifact, and the reference results beside it.

    Budgets there are for activations, so the program has no constants.  Nothing need be in memory
    at the end: an operator must run, its value may go.

    Raises:
        ProgramError: if the file is not of this form.
    """
    top = _Entry(_load_json(path), str(path))
    builder = _Builder()
    boundary: int | None = None
    for entry in top.entries("operators"):
        index = len(builder.operators)
        phase = entry.get("phase", str)
        if phase == "backward" and boundary is None:
            boundary = index
        name = f"{phase}{index}"
        storage = builder.storage(name, entry.get("size_bytes", int), StorageKind.INTERMEDIATE)
        output = builder.tensor(name, storage, index)
        builder.operators.append(
            Operator(
                index,
                name,
                Phase.FORWARD if boundary is None else Phase.BACKWARD,
                # One operator, one tensor, one storage: the ids are the same.
                entry.ids("inputs"),
                (output,),
                entry.get("cost", int),
            )
        )
    program = Program(
        tuple(builder.storages),
        tuple(builder.tensors),
        tuple(builder.operators),
        (),
        boundary,
        top.get("name", str, default=path.stem),
    )
    references = []
    for entry in top.entries("reference"):
        milp = _Entry(entry.get("milp", dict), f"{entry.what}: milp")
        status = milp.get("status", str)
        overhead = milp.get("overhead", float, default=None)
        runs = entry.get("simrd", dict)
        references.append(
            CheckmateReference(
                entry.get("budget_bytes", int),
                None if overhead is None or status == "infeasible" else float(overhead),
                status,
                milp.get("solve_s", float, default=None),
                entry.get("lp_lower_bound", float, default=None),
                {name: run["overhead"] for name, run in runs.items() if run["status"] == "ok"},
            )
        )
    return program, tuple(references)


def _load_json(path: Path) -> Any:
    try:
        return json.loads(path.read_text())
    except json.JSONDecodeError as error:
        raise ProgramError(f"{path}: not a JSON text: {error}") from error


def from_simrd_log(path: Path) -> Program:
    """An operator log of DTR's simulator (gzip, one JSON object a line).

    One straight program without a boundary.  In-place operators are read as copy-on-write;
    releases only say which tensors are left at the end: those are the outputs.

    Raises:
        ProgramError: if the file is not of this form.
    """
    with gzip.open(path, "rt") as lines:
        return _SimrdReader(path).read(lines)


def simrd_releases(path: Path) -> tuple[int, ...]:
    """When the user let go of each storage of `from_simrd_log`'s program.

    The id of the operator that ran before the last reference to any of its tensors was released,
    or the number of operators where one is held to the end.  A plan need not wait for it; the
    authors' simulator does.

    Raises:
        ProgramError: if the file is not of this form.
    """
    reader = _SimrdReader(path)
    with gzip.open(path, "rt") as lines:
        program = reader.read(lines)
    last = [-1] * len(program.storages)
    for tensor in program.tensors:
        held = reader.references.get(tensor.id, 0) > 0
        end = len(program.operators) if held else reader.released_after.get(tensor.id, -1)
        last[tensor.storage] = max(last[tensor.storage], end)
    return tuple(last)


class _SimrdReader:
    def __init__(self, path: Path) -> None:
        self.path = path
        self.builder = _Builder()
        self.tensor_of: dict[str, int] = {}
        self.references: dict[int, int] = {}
        self.released_after: dict[int, int] = {}
        # An operator is complete when MEMORY and ALIAS of all its results have been read.
        self.awaiting: dict[str, int] = {}
        self.size_of: dict[str, int] = {}
        self.operator_inputs: tuple[int, ...] = ()
        self.operator_outputs: list[int] = []
        self.pending: tuple[str, int] | None = None

    def read(self, lines: Iterable[str]) -> Program:
        started = False
        for number, line in enumerate(lines, start=1):
            try:
                entry = json.loads(line)
                if not started:
                    started = entry.get("ANNOTATION") == "START"
                    continue
                self.instruction(entry)
            except (json.JSONDecodeError, KeyError, ValueError, IndexError, TypeError) as error:
                raise ProgramError(f"{self.path}, line {number}: {error!r}: {line:.80}") from error
        builder = self.builder
        outputs = tuple(
            t
            for t in sorted(t for t, count in self.references.items() if count > 0)
            if not builder.storages[builder.tensors[t].storage].is_constant
        )
        return Program(
            tuple(builder.storages),
            tuple(builder.tensors),
            tuple(builder.operators),
            outputs,
            None,
            self.path.name.split(".")[0],
        )

    def instruction(self, entry: dict[str, Any]) -> None:
        match entry["INSTRUCTION"]:
            case "CONSTANT":
                storage = self.builder.storage(entry["NAME"], 0, StorageKind.PARAMETER)
                self.bind(entry["NAME"], self.builder.tensor(entry["NAME"], storage, None))
            case "MEMORY":
                self.memory(entry["NAME"], int(entry["MEMORY"]))
            case "ALIAS":
                self.alias(entry["NAME"], int(entry["ALIAS"]))
            case "CALL":
                self.pending = (entry["NAME"], int(entry["TIME"]))
                self.operator_inputs = tuple(self.tensor_of[a] for a in entry["ARGS"])
                self.operator_outputs = []
                self.awaiting = dict.fromkeys(entry["RESULT"], 0)
                if not self.awaiting:
                    self.finish_operator()
            case "MUTATE":
                self.mutate(entry["NAME"], entry["ARGS"], entry["MUTATE"], int(entry["TIME"]))
            case "COPY":
                self.bind(entry["DST"], self.tensor_of[entry["SRC"]])
            case "COPY_FROM":
                source = self.tensor_of[entry["SRC"]]
                self.release(entry["DST"])
                self.bind(entry["DST"], source)
            case "RELEASE":
                if entry["NAME"] in self.tensor_of:
                    self.release(entry["NAME"])
            case "ANNOTATE":
                pass
            case other:
                raise ValueError(f"unknown instruction {other!r}")

    def bind(self, name: str, tensor: int) -> None:
        self.tensor_of[name] = tensor
        self.references[tensor] = self.references.get(tensor, 0) + 1

    def release(self, name: str) -> None:
        tensor = self.tensor_of.pop(name)
        self.references[tensor] -= 1
        self.released_after[tensor] = len(self.builder.operators) - 1

    def memory(self, name: str, size_bytes: int) -> None:
        if name in self.awaiting:
            self.size_of[name] = size_bytes
            return
        # A constant's size follows its name.
        storage = self.builder.tensors[self.tensor_of[name]].storage
        old = self.builder.storages[storage]
        self.builder.storages[storage] = Storage(storage, old.name, size_bytes, old.kind)

    def alias(self, name: str, argument: int) -> None:
        if argument < 0:
            storage = self.builder.storage(name, self.size_of.pop(name), StorageKind.INTERMEDIATE)
        else:
            storage = self.builder.tensors[self.operator_inputs[argument]].storage
        tensor = self.builder.tensor(name, storage, len(self.builder.operators))
        self.operator_outputs.append(tensor)
        self.bind(name, tensor)
        del self.awaiting[name]
        if not self.awaiting:
            self.finish_operator()

    def mutate(self, name: str, args: list[str], mutated: list[int], cost_ns: int) -> None:
        builder = self.builder
        self.pending = (name, cost_ns)
        self.operator_inputs = tuple(self.tensor_of[a] for a in args)
        self.operator_outputs = []
        new: list[tuple[str, int]] = []
        for index in mutated:
            old = builder.tensors[self.operator_inputs[index]]
            size_bytes = builder.storages[old.storage].size_bytes
            storage = builder.storage(f"{args[index]}'", size_bytes, StorageKind.INTERMEDIATE)
            tensor = builder.tensor(f"{args[index]}'", storage, len(builder.operators))
            self.operator_outputs.append(tensor)
            new.append((args[index], tensor))
        self.finish_operator()
        for argument, tensor in new:
            self.release(argument)
            self.bind(argument, tensor)

    def finish_operator(self) -> None:
        assert self.pending is not None
        name, cost_ns = self.pending
        index = len(self.builder.operators)
        self.builder.operators.append(
            Operator(
                index,
                f"{name}{index}",
                Phase.FORWARD,
                self.operator_inputs,
                tuple(self.operator_outputs),
                cost_ns,
            )
        )
