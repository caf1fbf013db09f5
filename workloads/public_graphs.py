"""Two public formats of programs, to compare planners on, and where files in them are found.

`from_simrd_log` reads the operator logs of DTR's simulator (Kirisame et al., ICLR 2021, artifact),
`from_checkmate_json` the graphs of Checkmate's artifact (Jain et al., MLSys 2020).  The package
reads its own format alone (`program.io`), and so does ``python -m dtrcompile plan``;

    python -m workloads.public_graphs resnet32.log.gz > resnet32.json

writes either of these in it.
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dtrcompile.passes.errors import ProgramError
from dtrcompile.passes.program.io import to_json
from dtrcompile.passes.program.program import Operator, Phase, Program, Storage, StorageKind, Tensor
from workloads.synthetic import ProgramBuilder


def shared_data() -> Path | None:
    """The folder with the public graphs: ``$DTRCOMPILE_SHARED/data`` or ``../shared/data``.

    None where there is none; it is not part of the repository.
    """
    given = os.environ.get("DTRCOMPILE_SHARED")
    root = Path(given) if given else Path(__file__).resolve().parents[2] / "shared"
    data = root / "data"
    return data if data.is_dir() else None


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
    try:
        return _read_checkmate(json.loads(path.read_text(encoding="utf-8")), path.stem)
    except json.JSONDecodeError as error:
        raise ProgramError(f"{path}: not a JSON text: {error}") from error
    except (KeyError, TypeError, AttributeError) as error:
        raise ProgramError(f"{path}: not a graph of Checkmate's: {error!r}") from error


def _read_checkmate(
    data: Mapping[str, Any], name: str
) -> tuple[Program, tuple[CheckmateReference, ...]]:
    b = ProgramBuilder()
    for entry in data["operators"]:
        phase = entry["phase"]
        if phase == "backward" and b.boundary is None:
            b.begin_backward()
        # One operator, one tensor, one storage: the ids are the same.
        label = f"{phase}{len(b.operators)}"
        b.operator(label, entry["inputs"], [entry["size_bytes"]], entry["cost"])
    references = []
    for entry in data["reference"]:
        milp = entry["milp"]
        overhead = None if milp["status"] == "infeasible" else milp.get("overhead")
        references.append(
            CheckmateReference(
                entry["budget_bytes"],
                None if overhead is None else float(overhead),
                milp["status"],
                milp.get("solve_s"),
                entry.get("lp_lower_bound"),
                {n: run["overhead"] for n, run in entry["simrd"].items() if run["status"] == "ok"},
            )
        )
    return b.build([], data.get("name", name)), tuple(references)


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


def main(argv: Sequence[str] | None = None) -> int:
    """Command line."""
    parser = argparse.ArgumentParser(
        "python -m workloads.public_graphs", description=(__doc__ or "").split("\n\n")[0]
    )
    parser.add_argument("path", type=Path, help="a log of simrd (.gz) or a graph of Checkmate's")
    path = parser.parse_args(argv).path
    program = from_simrd_log(path) if path.suffix == ".gz" else from_checkmate_json(path)[0]
    print(to_json(program), end="")
    return 0


if __name__ == "__main__":
    sys.exit(main())
