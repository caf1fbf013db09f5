"""What is replaced in Inductor while a graph is lowered only to read its wrapper.

Nothing of it changes the wrapper: Inductor stops once that is written, and what only its kernels
need is left out on the way.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import fx

from dtrcompile.passes.inductor.plan_order import late_bytes_of
from dtrcompile.passes.nodes import draws_random_numbers, mark_of
from dtrcompile.passes.torch_private import (
    CppKernel,
    CppVecKernel,
    ExternKernel,
    MutationLayoutSHOULDREMOVE,
    SchedulerNode,
    TritonKernel,
    V,
    inductor_prims,
)

aten = torch.ops.aten
_SCATTERS = frozenset(
    {
        aten.index_put.default,
        aten.index_put_.default,
        aten._unsafe_index_put.default,
        aten._unsafe_masked_index_put_accumulate.default,
        inductor_prims._unsafe_index_put_,
    }
)


@dataclass(frozen=True)
class Wrapper:
    """The Python wrapper that Inductor wrote for one graph.

    Attributes:
        constants: what it refers to.
        steps: buffer -> the step of the plan that it belongs to; empty for a default split's.
        operators: buffer -> the operator of the program that it belongs to, of library calls.
        makers: buffer -> the operator of the program whose storage it is.
        written_over: operators whose result Inductor writes over an input.
        draws: operators that draw random numbers, as they follow each other.
        late_bytes: buffer -> what the plan has freed before it is computed, and is freed later.
        key: under which it may be kept on disk; None: it may not.
    """

    source: str
    constants: Mapping[str, torch.Tensor]
    steps: Mapping[str, int] = field(default_factory=dict)
    operators: Mapping[str, int] = field(default_factory=dict)
    makers: Mapping[str, int] = field(default_factory=dict)
    written_over: frozenset[int] = frozenset()
    draws: tuple[int, ...] = ()
    late_bytes: Mapping[str, int] = field(default_factory=dict)
    key: str | None = None

    def entry(self) -> dict[str, Any]:
        """All but the constants, as JSON can hold it."""
        return {
            "source": self.source,
            "steps": dict(self.steps),
            "operators": dict(self.operators),
            "makers": dict(self.makers),
            "written_over": sorted(self.written_over),
            "draws": list(self.draws),
            "late_bytes": dict(self.late_bytes),
        }

    @staticmethod
    def of_entry(entry: Mapping[str, Any]) -> Wrapper:
        """What `entry` gave, of a wrapper without constants; it need not be kept again."""
        return Wrapper(
            entry["source"],
            {},
            entry["steps"],
            entry["operators"],
            entry["makers"],
            frozenset(entry["written_over"]),
            tuple(entry["draws"]),
            entry["late_bytes"],
        )


class Lowered(BaseException):
    """Thrown out of Inductor once the wrapper is written; not an error, so not wrapped as one."""

    def __init__(self, wrapper: Wrapper) -> None:
        super().__init__()
        self.wrapper = wrapper


def stop_before_compiling(graph: Any) -> Any:
    """In place of ``GraphLowering.compile_to_module``: writes the wrapper, and compiles nothing."""
    code, _ = graph.codegen()
    raise Lowered(wrapper_of(graph, getattr(code, "value", code)))


def wrapper_of(graph: Any, source: str) -> Wrapper:
    """What Inductor's ``GraphLowering`` knows of the wrapper that it wrote."""
    steps, operators, makers = (
        _of_buffers(graph, field) for field in ("step", "operator", "output_of")
    )
    return Wrapper(
        source,
        dict(graph.constants),
        steps,
        operators,
        makers,
        _written_over(graph, makers),
        _draws(graph),
        late_bytes_of(graph),
    )


def _of_buffers(graph: Any, field_name: str) -> dict[str, int]:
    """Which step or operator each buffer was lowered from: its latest origin's.

    Args:
        field_name: of `Mark`.
    """
    found = {}
    for name, buffer in graph.name_to_buffer.items():
        of_origins = [
            value for n in buffer.origins if (value := getattr(mark_of(n), field_name)) is not None
        ]
        if of_origins:
            found[name] = max(of_origins)
    return found


def _written_over(graph: Any, makers: Mapping[str, int]) -> frozenset[int]:
    """Operators whose result takes the place of an input that is read for the last time."""
    reusing = {makers[name] for name in graph.wrapper_code.reuses if name in makers}
    return frozenset(reusing | _scattered_in_place(graph, makers))


def _scattered_in_place(graph: Any, makers: Mapping[str, int]) -> set[int]:
    """Operators that add rows to a tensor which has no buffer beside that of the result.

    Either it is made in the result's place (zeros, or any other loop), or Inductor's reinplacing
    pass gave its buffer to the result.
    """
    own: Counter[int] = Counter()
    scatters: dict[int, fx.Node] = {}
    for name, buffer in graph.name_to_buffer.items():
        operator = makers.get(name)
        if operator is None:
            continue
        if not isinstance(buffer.get_output_spec(), MutationLayoutSHOULDREMOVE):
            own[operator] += 1
            continue
        for node in buffer.get_origins():
            if node.target in _SCATTERS and mark_of(node).output_of == operator:
                scatters[operator] = node
    found = set()
    for operator, node in scatters.items():
        base = mark_of(node.args[0]).output_of
        if base not in (None, operator) and own[base] + own[operator] <= 1:
            found.add(operator)
    return found


def _draws(graph: Any) -> tuple[int, ...]:
    """Operators that draw random numbers, in the order in which the scheduler put their calls."""
    scheduled = (snode for node in graph.scheduler.nodes for snode in node.get_nodes())
    calls = (snode.node for snode in scheduled if isinstance(snode.node, ExternKernel))
    drawn = (n for call in calls for n in call.get_origins() if draws_random_numbers(n))
    operators = (mark_of(n).operator for n in drawn)
    return tuple(dict.fromkeys(o for o in operators if o is not None))


def codegen_names_only(node: Any, index_vars: Any) -> None:
    """Inductor's ``SchedulerNode.codegen`` as far as the wrapper depends on it.

    A kernel decides which buffers are needed and which are updated in place by the names that it
    reads and writes: indices are left as they are, and no bounds are looked for.  C++ kernels have
    a scalar form, which comes first, and vectorized ones.  These change nothing of that, and stay
    empty.  (Their tiling is still searched: loops that share their outer level keep buffers local
    only if it agrees.)
    """
    if isinstance(V.kernel, CppVecKernel):
        return
    if not isinstance(V.kernel, (CppKernel, TritonKernel)):
        _CODEGEN(node, index_vars)
        return
    body = node._body
    with (
        mock.patch.object(body, "bounds", lambda: _NO_BOUNDS),
        V.kernel.set_current_node(node),
    ):
        body(*index_vars)


_CODEGEN = SchedulerNode.codegen
_NO_BOUNDS = SimpleNamespace(get_bounds=dict)
