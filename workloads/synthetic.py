"""Programs made by a formula: unit chains and transformer-like training steps of any length."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from dtrcompile.passes.program.program import Operator, Phase, Program, Storage, StorageKind, Tensor


@dataclass(slots=True)
class ProgramBuilder:
    """Collects a program, one output storage at a time; `build` checks it."""

    storages: list[Storage] = field(default_factory=list)
    tensors: list[Tensor] = field(default_factory=list)
    operators: list[Operator] = field(default_factory=list)
    boundary: int | None = None

    def constant(
        self, name: str, size_bytes: int, kind: StorageKind = StorageKind.PARAMETER
    ) -> int:
        """A constant's tensor."""
        return self._tensor(name, self._storage(name, size_bytes, kind), None)

    def operator(
        self,
        name: str,
        inputs: list[int],
        sizes_bytes: list[int],
        cost_ns: int = 1,
        *,
        workspace_bytes: int = 0,
        not_recomputable: str | None = None,
        pinned: str | None = None,
        kind: StorageKind = StorageKind.INTERMEDIATE,
        overwrites: Sequence[int] = (),
        is_barrier: bool = False,
    ) -> list[int]:
        """Its output tensors, each in a storage of its own; ``overwrites`` are constants."""
        names = [name if len(sizes_bytes) == 1 else f"{name}.{k}" for k in range(len(sizes_bytes))]
        outputs = [
            self._tensor(n, self._storage(n, size, kind, pinned), len(self.operators))
            for n, size in zip(names, sizes_bytes, strict=True)
        ]
        self._operator(name, inputs, outputs, cost_ns, workspace_bytes, not_recomputable)
        if overwrites:
            written = tuple(self.tensors[t].storage for t in overwrites)
            self.operators[-1] = replace(self.operators[-1], overwrites=written)
        if is_barrier:
            self.operators[-1] = replace(self.operators[-1], is_barrier=True)
        return outputs

    def view(self, name: str, of: int, cost_ns: int = 0) -> int:
        """A view of a tensor's storage."""
        tensor = self._tensor(name, self.tensors[of].storage, len(self.operators))
        self._operator(name, [of], [tensor], cost_ns, 0, None)
        return tensor

    def begin_backward(self) -> None:
        """What follows is backward."""
        self.boundary = len(self.operators)

    def build(self, outputs: list[int], name: str = "program") -> Program:
        """The program."""
        return Program(
            tuple(self.storages),
            tuple(self.tensors),
            tuple(self.operators),
            tuple(outputs),
            self.boundary,
            name,
        )

    def _storage(
        self, name: str, size_bytes: int, kind: StorageKind, pinned: str | None = None
    ) -> int:
        self.storages.append(Storage(len(self.storages), name, size_bytes, kind, pinned))
        return self.storages[-1].id

    def _tensor(self, name: str, storage: int, producer: int | None) -> int:
        self.tensors.append(Tensor(len(self.tensors), name, storage, producer))
        return self.tensors[-1].id

    def _operator(
        self,
        name: str,
        inputs: list[int],
        outputs: list[int],
        cost_ns: int,
        workspace_bytes: int,
        not_recomputable: str | None,
    ) -> None:
        phase = Phase.FORWARD if self.boundary is None else Phase.BACKWARD
        self.operators.append(
            Operator(
                len(self.operators),
                name,
                phase,
                tuple(inputs),
                tuple(outputs),
                cost_ns,
                workspace_bytes,
                not_recomputable,
            )
        )


def training_chain(layers: int) -> Program:
    """The chain of the DTR paper's section 3: unit sizes, unit costs, forward and backward.

    f1 … fN; then gN … g1, where gi reads g(i+1) and f(i-1), as section 3 has it.  The input, the
    tangent and f0 have no bytes, so the budget counts tensors.
    """
    b = ProgramBuilder()
    x = b.constant("x", 0, StorageKind.INPUT)
    g = b.constant("dy", 0, StorageKind.TANGENT)
    forward = [x]
    for i in range(1, layers + 1):
        forward += b.operator(f"f{i}", [forward[-1]], [1])
    b.begin_backward()
    for i in range(layers, 0, -1):
        (g,) = b.operator(f"g{i}", [g, forward[i - 1]], [1])
    return b.build([g], f"chain{layers}")


def unit_chain(layers: int) -> Program:
    """The chain of Checkmate's graphs: f1 … fN, a loss, then gN … g1, where gi reads fi.

    As `training_chain`, but the first gradient (the loss) takes a byte as all others do, and every
    forward value is read.  Then Griewank's formula is exact: backward holds a gradient, the one
    made from it and the state, and each snapshot takes one byte.
    """
    b = ProgramBuilder()
    forward = b.operator("f1", [], [1])
    for i in range(2, layers + 1):
        forward += b.operator(f"f{i}", [forward[-1]], [1])
    (g,) = b.operator("loss", [forward[-1]], [1])
    b.begin_backward()
    for i in range(layers, 0, -1):
        (g,) = b.operator(f"g{i}", [g, forward[i - 1]], [1])
    return b.build([g], f"unit{layers}")


def transformer(layers: int, width_bytes: int = 1024) -> Program:
    """A transformer's training step, 22 operators a layer: matrix products, attention with two
    outputs, norms, a GELU; weights' gradients are outputs."""
    b = ProgramBuilder()
    a = width_bytes
    x = b.constant("x", a, StorageKind.INPUT)
    dy = b.constant("dy", a, StorageKind.TANGENT)
    weights = [
        [b.constant(f"{n}.{layer}", a // 16) for n in ("wqkv", "wproj", "wfc1", "wfc2")]
        for layer in range(layers)
    ]
    saved = []
    for layer, (wqkv, wproj, wfc1, wfc2) in enumerate(weights):
        n1, m1 = b.operator(f"ln1.{layer}", [x], [a, a // 64], 5)
        (qkv,) = b.operator(f"qkv.{layer}", [n1, wqkv], [3 * a], 100)
        at, lse = b.operator(f"attention.{layer}", [qkv], [a, a // 32], 150)
        (pr,) = b.operator(f"proj.{layer}", [at, wproj], [a], 40)
        (x1,) = b.operator(f"add1.{layer}", [x, pr], [a], 3)
        n2, m2 = b.operator(f"ln2.{layer}", [x1], [a, a // 64], 5)
        (h,) = b.operator(f"fc1.{layer}", [n2, wfc1], [4 * a], 130)
        (ge,) = b.operator(f"gelu.{layer}", [h], [4 * a], 12)
        (o,) = b.operator(f"fc2.{layer}", [ge, wfc2], [a], 130)
        (x2,) = b.operator(f"add2.{layer}", [x1, o], [a], 3)
        saved.append((x, n1, m1, qkv, at, lse, x1, n2, m2, h, ge))
        x = x2
    outputs = [x]
    b.begin_backward()
    gradient = StorageKind.GRADIENT
    for layer in reversed(range(layers)):
        wqkv, wproj, wfc1, wfc2 = weights[layer]
        x0, n1, m1, qkv, at, lse, x1, n2, m2, h, ge = saved[layer]
        (dge,) = b.operator(f"dfc2.{layer}", [dy, wfc2], [4 * a], 130)
        outputs += b.operator(f"dwfc2.{layer}", [dy, ge], [a // 16], 130, kind=gradient)
        (dh,) = b.operator(f"dgelu.{layer}", [dge, h], [4 * a], 15)
        (dn2,) = b.operator(f"dfc1.{layer}", [dh, wfc1], [a], 130)
        outputs += b.operator(f"dwfc1.{layer}", [dh, n2], [a // 16], 130, kind=gradient)
        (dx1,) = b.operator(f"dln2.{layer}", [dn2, x1, m2, dy], [a], 8)
        (dat,) = b.operator(f"dproj.{layer}", [dx1, wproj], [a], 40)
        outputs += b.operator(f"dwproj.{layer}", [dx1, at], [a // 16], 40, kind=gradient)
        (dqkv,) = b.operator(f"dattention.{layer}", [dat, qkv, at, lse], [3 * a], 300)
        (dn1,) = b.operator(f"dqkv.{layer}", [dqkv, wqkv], [a], 100)
        outputs += b.operator(f"dwqkv.{layer}", [dqkv, n1], [a // 16], 100, kind=gradient)
        (dy,) = b.operator(f"dln1.{layer}", [dn1, x0, m1, dx1], [a], 8)
    return b.build(outputs, f"transformer{layers}")
