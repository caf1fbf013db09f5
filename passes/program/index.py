"""A program's adjacency in plain lists, built once and shared by all candidates of a planner.

`program.Program` is for reading; the simulator asks the same few questions a hundred thousand
times, and a tuple of frozen objects is the slow way to answer them.  Constants are left out
everywhere: they are always in memory.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate

from dtrcompile.passes.program.program import Program

NEVER = 1 << 60
"""A position after every other: there is no next use."""


@dataclass(frozen=True, slots=True)
class ProgramIndex:
    """See the module docstring.  "Position" p is operator p; the end is position ``n_operators``.

    Attributes:
        size_bytes, cost_ns: for each storage; cost is that of all operators that make its tensors.
        operator_cost_ns, workspace_bytes, runs_once: for each operator.
        inputs, input_storages: for each operator, what it reads, without constants.
        outputs: for each operator, the tensors it makes, without those of constants.
        roots: for each operator, the storages that it allocates.
        producer, storage_of: for each tensor.
        tensors_of: for each storage, without those of constants.
        parents, children: for each storage, those that it is computed from, and their inverse.
        view_children: storages of which a view (not the root) reads this storage.
        uses: for each storage, the positions at which it must be in memory, ascending: readers,
            the boundary for forward outputs, the end for outputs.
        makes_once: for each storage, whether an operator that makes it may not run again.
        pinned_until: for each storage, the position of its last reader if it is pinned, else -1.
        time_ns: baseline clock at each position, strictly increasing, one more for the end.
        boundary_outputs: tensors that must be defined at the boundary.
        end_outputs: tensors that must be defined at the end.
        tangent_bytes: what the boundary adds.
    """

    program: Program
    n_operators: int
    n_storages: int
    size_bytes: list[int]
    cost_ns: list[int]
    operator_cost_ns: list[int]
    workspace_bytes: list[int]
    runs_once: list[bool]
    inputs: list[tuple[int, ...]]
    input_storages: list[tuple[int, ...]]
    outputs: list[tuple[int, ...]]
    roots: list[tuple[int, ...]]
    producer: list[int]
    storage_of: list[int]
    tensors_of: list[tuple[int, ...]]
    parents: list[tuple[int, ...]]
    children: list[tuple[int, ...]]
    view_children: list[tuple[int, ...]]
    uses: list[tuple[int, ...]]
    makes_once: list[bool]
    pinned_until: list[int]
    time_ns: list[float]
    boundary_outputs: tuple[int, ...]
    end_outputs: tuple[int, ...]
    tangent_bytes: int

    @staticmethod
    def of(program: Program) -> ProgramIndex:
        """Build it, in time linear in the program."""
        storages, tensors, operators = program.storages, program.tensors, program.operators
        n = len(operators)
        constant = [s.is_constant for s in storages]
        storage_of = [t.storage for t in tensors]

        inputs = [tuple(t for t in op.inputs if not constant[storage_of[t]]) for op in operators]
        outputs = [tuple(t for t in op.outputs if not constant[storage_of[t]]) for op in operators]
        root_tensor = program.root_tensor
        roots = [
            tuple(s for t in op.outputs if root_tensor[s := storage_of[t]] == t and not constant[s])
            for op in operators
        ]

        parents: list[dict[int, None]] = [{} for _ in storages]
        view_parents: list[dict[int, None]] = [{} for _ in storages]
        makers: list[dict[int, None]] = [{} for _ in storages]
        makes_once = [False] * len(storages)
        for op in operators:
            for t in outputs[op.id]:
                s = storage_of[t]
                makers[s][op.id] = None
                makes_once[s] |= op.not_recomputable is not None
                for u in inputs[op.id]:
                    p = storage_of[u]
                    if p != s:
                        parents[s][p] = None
                        if root_tensor[s] != t:
                            view_parents[s][p] = None
        children: list[list[int]] = [[] for _ in storages]
        view_children: list[list[int]] = [[] for _ in storages]
        for s, ps in enumerate(parents):
            for p in ps:
                children[p].append(s)
            for p in view_parents[s]:
                view_children[p].append(s)

        uses: list[list[int]] = [list(r) for r in program.readers]
        held = program.held_from_boundary
        for s in sorted(held):
            assert program.boundary is not None
            uses[s] = sorted({*uses[s], program.boundary, n})
        for s in program.output_storages - held:
            uses[s].append(n)

        # Operators without cost (views) must still be apart in time: distances divide.
        tick = max(program.cost_ns, 1) / max(n, 1) * 1e-3
        return ProgramIndex(
            program=program,
            n_operators=n,
            n_storages=len(storages),
            size_bytes=[s.size_bytes for s in storages],
            cost_ns=[sum(operators[o].cost_ns for o in ms) for ms in makers],
            operator_cost_ns=[op.cost_ns for op in operators],
            workspace_bytes=[op.workspace_bytes for op in operators],
            runs_once=[op.not_recomputable is not None for op in operators],
            inputs=inputs,
            input_storages=[tuple(dict.fromkeys(storage_of[t] for t in ts)) for ts in inputs],
            outputs=outputs,
            roots=roots,
            producer=[-1 if t.producer is None else t.producer for t in tensors],
            storage_of=storage_of,
            tensors_of=[() if constant[s] else ts for s, ts in enumerate(program.tensors_of)],
            parents=[tuple(p) for p in parents],
            children=[tuple(c) for c in children],
            view_children=[tuple(c) for c in view_children],
            uses=[() if constant[s] else tuple(u) for s, u in enumerate(uses)],
            makes_once=makes_once,
            pinned_until=[-1 if s.pinned is None else program.last_reader[s.id] for s in storages],
            time_ns=list(accumulate((op.cost_ns + tick for op in operators), initial=0.0)),
            boundary_outputs=tuple(
                t
                for t in program.outputs
                if program.boundary is not None
                and storage_of[t] in held
                and not constant[storage_of[t]]
                and tensors[t].producer is not None
                and (tensors[t].producer or 0) < program.boundary
            ),
            end_outputs=tuple(t for t in program.outputs if not constant[storage_of[t]]),
            tangent_bytes=program.tangent_bytes,
        )
