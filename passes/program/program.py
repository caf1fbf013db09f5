"""The program: what planners see of one training step (or one inference pass).

A program is a straight line of operators over tensors, and tensors live in storages (Kirisame et
al., ICLR 2021, appendix C: "a storage is a buffer; tensors are views of it").  It is frozen, holds
no torch object, and is the same on every machine for the same graph.

Memory rules, which `replay.replay` enforces:

* a *constant* storage (parameter, buffer, input) is resident from the first step to the last; a
  tangent from the boundary to the last;
* any other storage is allocated when the operator that makes its root tensor runs, and is resident
  until a `plan.Free`;
* freeing a storage undefines all its tensors; a view must then be made again by its operator;
* forward outputs are resident from the boundary to the end, because the caller holds them;
  gradients (backward outputs) from their computation to the end;
* once an operator has overwritten a constant (`Operator.overwrites`), nothing reads it any more;
* no operator crosses a barrier (`Operator.is_barrier`) when it runs for the first time;
* what is *handed on* (`Storage.is_handed_on`) may be freed in backward: forward outputs that nobody
  holds any more when backward begins, and tangents that nobody else holds.
"""

from __future__ import annotations

import enum
import hashlib
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property

from dtrcompile.passes.errors import ProgramError


class Phase(enum.Enum):
    """Which graph an operator belongs to."""

    FORWARD = "forward"
    BACKWARD = "backward"


class StorageKind(enum.Enum):
    """What a storage is to the user; this decides its residency and its line in the report."""

    PARAMETER = "parameter"
    INPUT = "input"
    TANGENT = "tangent"
    INTERMEDIATE = "intermediate"
    OUTPUT = "output"
    GRADIENT = "gradient"


CONSTANT_KINDS = frozenset({StorageKind.PARAMETER, StorageKind.INPUT, StorageKind.TANGENT})


@dataclass(frozen=True, slots=True)
class Storage:
    """An allocation, which owns bytes.

    Attributes:
        id: index into `Program.storages`.
        name: unique, for people.
        size_bytes: at least 0.
        kind: see `StorageKind`.
        pinned: why it may not be evicted before its last use, or None if it may.
        is_handed_on: an output of forward that nobody holds any more when backward begins, or a
            tangent that nobody else holds, so that it is freed at its last use.
    """

    id: int
    name: str
    size_bytes: int
    kind: StorageKind = StorageKind.INTERMEDIATE
    pinned: str | None = None
    is_handed_on: bool = False

    @property
    def is_constant(self) -> bool:
        """Comes from outside: never computed, never freed."""
        return self.kind in CONSTANT_KINDS


@dataclass(frozen=True, slots=True)
class Tensor:
    """One view of a storage; ``producer`` is the operator that makes it, None for a constant's."""

    id: int
    name: str
    storage: int
    producer: int | None = None


@dataclass(frozen=True, slots=True)
class Operator:
    """One kernel.

    Attributes:
        id: index into `Program.operators`; the baseline runs them in this order.
        inputs, outputs: tensor ids.
        cost_ns: time of one run, at least 0.
        workspace_bytes: held only while it runs, beside inputs and outputs; negative, by at most
            the size of the outputs, if these are written over inputs that nothing reads later.
        not_recomputable: why it may run only once, or None if it may run again.
        overwrites: ids of the constant storages that this operator overwrites (a parameter that is
            updated): once it has run, no other operator may read the value that the program was
            given.
        is_barrier: whether all operators before it in the program run for the first time before it
            does, and all after it afterwards (it stands for what other programs do meanwhile).
    """

    id: int
    name: str
    phase: Phase
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    cost_ns: int
    workspace_bytes: int = 0
    not_recomputable: str | None = None
    overwrites: tuple[int, ...] = ()
    is_barrier: bool = False


@dataclass(frozen=True)
class Program:
    """Operators in baseline order, the tensors between them, and what must be there at the end.

    Attributes:
        boundary: index of the first backward operator; None for a program without a backward.
        outputs: tensor ids that must be defined at the end.

    Raises:
        ProgramError: on construction, if a rule of the module docstring is broken.
    """

    storages: tuple[Storage, ...]
    tensors: tuple[Tensor, ...]
    operators: tuple[Operator, ...]
    outputs: tuple[int, ...]
    boundary: int | None = None
    name: str = field(default="program", compare=False)

    def __post_init__(self) -> None:
        _check(self)

    @cached_property
    def barriers(self) -> tuple[int, ...]:
        """Ids of the operators that are barriers."""
        return tuple(o.id for o in self.operators if o.is_barrier)

    @cached_property
    def root_tensor(self) -> tuple[int, ...]:
        """For each storage, the id of the tensor whose computation allocates it."""
        roots: dict[int, int] = {}
        for tensor in self.tensors:
            roots.setdefault(tensor.storage, tensor.id)
        return tuple(roots[s.id] for s in self.storages)

    @cached_property
    def tensors_of(self) -> tuple[tuple[int, ...], ...]:
        """For each storage, its tensors' ids, the root first."""
        tensors: list[list[int]] = [[] for _ in self.storages]
        for tensor in self.tensors:
            tensors[tensor.storage].append(tensor.id)
        return tuple(tuple(t) for t in tensors)

    @cached_property
    def held_from_boundary(self) -> frozenset[int]:
        """Storages of forward outputs: the caller may hold them until the end of backward."""
        if self.boundary is None:
            return frozenset()
        return frozenset(
            self.tensors[t].storage
            for t in self.outputs
            if (p := self.tensors[t].producer) is not None and p < self.boundary
        )

    @cached_property
    def handed_on(self) -> frozenset[int]:
        """Storages that the caller gives up: they are freed at their last use in backward."""
        return frozenset(s.id for s in self.storages if s.is_handed_on)

    @cached_property
    def held_in_backward(self) -> frozenset[int]:
        """Storages of forward outputs that the caller may hold until the end."""
        return self.held_from_boundary - self.handed_on

    @cached_property
    def output_storages(self) -> frozenset[int]:
        """Storages that are resident at the end, constants left out."""
        return frozenset(
            s for t in self.outputs if not self.storages[s := self.tensors[t].storage].is_constant
        )

    @cached_property
    def constant_bytes(self) -> int:
        """Bytes of parameters, buffers and inputs: resident all the time."""
        return sum(
            s.size_bytes
            for s in self.storages
            if s.is_constant and s.kind is not StorageKind.TANGENT
        )

    @cached_property
    def tangent_bytes(self) -> int:
        """Bytes of the gradients that backward is given."""
        return sum(s.size_bytes for s in self.storages if s.kind is StorageKind.TANGENT)

    @cached_property
    def cost_ns(self) -> int:
        """Cost of the baseline: each operator once."""
        return sum(op.cost_ns for op in self.operators)

    @cached_property
    def readers(self) -> tuple[tuple[int, ...], ...]:
        """For each storage, the ids of the operators that read a tensor of it, ascending."""
        readers: list[dict[int, None]] = [{} for _ in self.storages]
        for op in self.operators:
            for t in op.inputs:
                readers[self.tensors[t].storage][op.id] = None
        return tuple(tuple(r) for r in readers)

    @cached_property
    def last_reader(self) -> tuple[int, ...]:
        """For each storage, the last operator in baseline order that reads it; -1 for none."""
        return tuple(max(readers, default=-1) for readers in self.readers)

    @cached_property
    def fingerprint(self) -> str:
        """A hash of everything that planning depends on; names are left out."""
        digest = hashlib.sha256()
        for s in self.storages:
            handed_on = " handed on" if s.is_handed_on else ""
            digest.update(
                f"s {s.size_bytes} {s.kind.value} {s.pinned is not None}{handed_on}\n".encode()
            )
        for t in self.tensors:
            digest.update(f"t {t.storage} {t.producer}\n".encode())
        for o in self.operators:
            digest.update(
                f"o {o.phase.value} {o.inputs} {o.outputs} {o.cost_ns} {o.workspace_bytes}"
                f" {o.not_recomputable is not None}"
                f"{f' {o.overwrites}' if o.overwrites else ''}"
                f"{' barrier' if o.is_barrier else ''}\n".encode()
            )
        digest.update(f"{self.outputs} {self.boundary}".encode())
        return digest.hexdigest()[:16]


def _check(program: Program) -> None:
    def fail(message: str) -> None:
        raise ProgramError(f"{program.name}: {message}")

    def check_ids(what: str, items: Iterable[Storage | Tensor | Operator]) -> None:
        for index, item in enumerate(items):
            if item.id != index:
                fail(f"{what} at index {index} has id {item.id}; ids are indices")

    check_ids("storage", program.storages)
    check_ids("tensor", program.tensors)
    check_ids("operator", program.operators)
    if program.boundary is not None and not 0 <= program.boundary <= len(program.operators):
        fail(f"boundary {program.boundary} is not an operator index")

    seen_storages: set[int] = set()
    for tensor in program.tensors:
        if not 0 <= tensor.storage < len(program.storages):
            fail(f"tensor {tensor.name!r} names storage {tensor.storage}, which does not exist")
        storage = program.storages[tensor.storage]
        if storage.size_bytes < 0:
            fail(f"storage {storage.name!r} has a negative size")
        if tensor.producer is None and not storage.is_constant:
            fail(f"tensor {tensor.name!r} of storage {storage.name!r} has no producer")
        if (
            tensor.storage not in seen_storages
            and storage.is_constant
            and tensor.producer is not None
        ):
            fail(f"constant storage {storage.name!r} is computed by an operator")
        seen_storages.add(tensor.storage)
    for storage in program.storages:
        if storage.id not in seen_storages:
            fail(f"storage {storage.name!r} has no tensor")

    produced: dict[int, int] = {}
    overwritten: dict[int, str] = {}
    for op in program.operators:
        if op.cost_ns < 0:
            fail(f"operator {op.name!r} has a negative cost")
        expected = (
            Phase.FORWARD
            if program.boundary is None or op.id < program.boundary
            else Phase.BACKWARD
        )
        if op.phase is not expected:
            fail(f"operator {op.name!r} is {op.phase.value} on the wrong side of the boundary")
        for t in op.inputs:
            if not 0 <= t < len(program.tensors):
                fail(f"operator {op.name!r} reads tensor {t}, which does not exist")
            tensor = program.tensors[t]
            if tensor.producer is not None and t not in produced:
                fail(f"operator {op.name!r} reads {tensor.name!r} before it is computed")
            if tensor.storage in overwritten:
                fail(
                    f"operator {op.name!r} reads {tensor.name!r}, which"
                    f" {overwritten[tensor.storage]!r} has overwritten"
                )
            if (
                program.storages[tensor.storage].kind is StorageKind.TANGENT
                and op.phase is Phase.FORWARD
            ):
                fail(f"forward operator {op.name!r} reads the tangent {tensor.name!r}")
        input_storages = {program.tensors[t].storage for t in op.inputs}
        for t in op.outputs:
            if not 0 <= t < len(program.tensors) or program.tensors[t].producer != op.id:
                fail(f"operator {op.name!r} does not produce its output {t}")
            if t in produced:
                fail(f"tensor {t} is produced twice")
            produced[t] = op.id
            is_root = program.root_tensor[program.tensors[t].storage] == t
            if not is_root and program.tensors[t].storage not in input_storages:
                fail(f"operator {op.name!r} makes a view of a storage that it does not read")
        for s in op.overwrites:
            if not 0 <= s < len(program.storages) or not program.storages[s].is_constant:
                fail(f"operator {op.name!r} overwrites {s}, which is no constant storage")
            if op.not_recomputable is None:
                fail(f"operator {op.name!r} overwrites a constant, so it may run only once")
            overwritten[s] = op.name
        made = {program.tensors[t].storage for t in op.outputs} - input_storages
        if op.workspace_bytes < -sum(program.storages[s].size_bytes for s in made):
            fail(f"operator {op.name!r} has a negative workspace, beyond what it writes")
    for tensor in program.tensors:
        if tensor.producer is not None and tensor.id not in produced:
            fail(f"tensor {tensor.name!r} is not an output of its producer")
    for t in program.outputs:
        if not 0 <= t < len(program.tensors):
            fail(f"output {t} does not exist")
