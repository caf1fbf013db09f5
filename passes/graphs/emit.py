"""Emission: a plan becomes a forward and a backward graph module.

Walks the plan's steps and copies, for each `Compute`, the operator's nodes into the graph of the
phase it runs in.  Uses refer to the newest copy of a storage; views are made again from it at each
step.  A recomputed copy is called ``<node>_remat<k>``; what was decided about a node stands in its
`nodes.Mark`: its step, its group, the storage that it owns.  Each `Free` becomes a call of `free`;
`lower_frees` takes them out again for Inductor, whose wrapper frees at the last use.

The outputs keep the partitioner's contract (torch ``_functorch/partitioners.py``,
``_extract_fwd_bwd_modules``): forward returns the user's outputs, then saved tensors with a version
check, those without, opaque objects, symbols; backward takes symbols, saved tensors, opaque
objects, then tangents and whatever else only backward receives.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from dtrcompile.passes.errors import CaptureError
from dtrcompile.passes.graphs.capture import Captured
from dtrcompile.passes.graphs.modules import output_arguments
from dtrcompile.passes.nodes import (
    Role,
    attribute,
    is_mutating,
    is_sequence,
    is_tensor,
    mark,
    role,
    value,
    view_base,
)
from dtrcompile.passes.program.plan import Boundary, Compute, Free, Plan, Step, refuse_copies
from dtrcompile.passes.torch_private import (
    PythonReferenceAnalysis,
    SavedForBackwardsAOTOutput,
    SavedForBackwardsNoVcCheckAOTOutput,
    find_symbol_binding_fx_nodes,
    free_symbols,
    make_graph_module,
    sympy_interp,
)


def free(*_tensors: object) -> None:
    """Marks the end of a storage in an emitted graph; the eager executor drops it here."""


@dataclass(frozen=True)
class Emitted:
    """The two graphs of a plan; ``backward`` is None for inference."""

    forward: fx.GraphModule
    backward: fx.GraphModule | None


def emit(captured: Captured, plan: Plan) -> Emitted:
    """Emit ``plan``, a plan of ``captured.program`` that the referee accepted.

    Raises:
        UnsupportedPlanError: if it copies to the host.
    """
    refuse_copies(plan, "emit")
    return _Emitter(captured, plan).run()


def lower_frees(gm: fx.GraphModule) -> None:
    """Remove the explicit frees, in place."""
    for node in gm.graph.find_nodes(op="call_function", target=free):
        gm.graph.erase_node(node)
    gm.recompile()


class _Graph:
    """One graph under construction: what each original node is in it now."""

    def __init__(self) -> None:
        self.graph = fx.Graph()
        self.owned: dict[int, fx.Node] = {}  # storage -> its newest copy
        self.fixed: dict[fx.Node, fx.Node] = {}  # constants and scalars: one copy for all
        self.kernel: dict[fx.Node, fx.Node] = {}  # tuple-valued kernels: the newest call
        self.memo: dict[fx.Node, fx.Node] = {}  # unmaterialized values of the cluster being run
        self.memo_cluster = -1
        self.attributes: dict[str, Any] = {}  # what get_attr nodes refer to, by their targets


class _Emitter:
    def __init__(self, captured: Captured, plan: Plan) -> None:
        self.captured = captured
        self.program = captured.program
        self.plan = plan
        self.copies: dict[fx.Node, int] = {}
        self.step = -1
        self.group = -1
        self.operator_nodes = [frozenset(op.nodes) for op in captured.operators]
        # Constants of several inputs are counted by the program, not by one input's extent.
        self.shared = {
            s for node, s in captured.storage_of.items() if captured.storage_nodes[s] is not node
        }

    def run(self) -> Emitted:
        captured = self.captured
        steps = list(enumerate(self.plan.steps))
        boundary = next((i for i, s in steps if isinstance(s, Boundary)), len(steps))

        forward = _Graph()
        for node in captured.forward.graph.find_nodes(op="placeholder"):
            self._placeholder(forward, node, node)
        self._scalars(forward, captured.forward)
        for self.step, step in steps[:boundary]:
            self._emit_step(forward, step)
        self.step = -1

        user_outputs = output_arguments(captured.forward)[: captured.num_fwd_outputs]
        returned = [self._output(forward, a) for a in user_outputs]
        if captured.backward is None:
            out = self._finish(forward, captured.forward, returned)
            return Emitted(self._module(captured.forward, forward), None)

        tensors, scalars, opaque = self._saved(forward, steps[boundary + 1 :])
        saved_nodes = [forward_node for _, forward_node in (*tensors, *opaque, *scalars)]
        out = self._finish(forward, captured.forward, [*returned, *saved_nodes])
        _describe_outputs(out, captured, len(user_outputs), tensors, len(saved_nodes))

        backward = _Graph()
        for original, forward_node in (*scalars, *tensors, *opaque):
            placeholder = backward.graph.placeholder(forward_node.name)
            placeholder.meta = dict(forward_node.meta)
            mark(placeholder, step=None)
            if is_tensor(original) and original.op == "call_function":
                s = captured.storage_of[captured.owner(original)]
                mark(placeholder, storage=s)
                backward.owned[s] = placeholder
            else:
                backward.fixed[original] = placeholder
                self._mark_constant(placeholder, original)
        for node in captured.backward.graph.find_nodes(op="placeholder"):
            if node not in captured.same_value:
                self._placeholder(backward, node, node)
        self._scalars(backward, captured.backward)
        for self.step, step in steps[boundary + 1 :]:
            self._emit_step(backward, step)
        self.step = -1
        gradients = [self._output(backward, a) for a in output_arguments(captured.backward)]
        self._finish(backward, captured.backward, gradients)
        for node in backward.graph.nodes:
            if node.op in ("call_function", "get_attr"):
                node.meta["autograd_backward"] = True
        return Emitted(
            self._module(captured.forward, forward), self._module(captured.backward, backward)
        )

    # --- steps --------------------------------------------------------------------------------

    def _emit_step(self, g: _Graph, step: Step) -> None:
        if isinstance(step, Compute):
            self._compute(g, step.operator)
        elif isinstance(step, Free):
            owner = g.owned.pop(step.storage, None)
            if self.program.storages[step.storage].is_constant:  # a tangent that was handed on
                owner = g.fixed[self.captured.storage_nodes[step.storage]]
            if owner is not None:
                node = g.graph.call_function(free, (owner,))
                mark(node, step=self.step)

    def _compute(self, g: _Graph, o: int) -> None:
        operator = self.captured.operators[o]
        if operator.cluster != g.memo_cluster:
            g.memo, g.memo_cluster = {}, operator.cluster
            self.group += 1
        members = self.operator_nodes[o]
        step_local: dict[fx.Node, fx.Node] = {}
        outputs = set(operator.outputs)
        fresh = [n for n in outputs if self.captured.storage_of[n] not in g.owned]
        for node in operator.nodes:
            kind = role(node)
            if node in outputs:
                if node not in fresh and len(operator.outputs) > 1:
                    continue  # still resident: the duplicate of a multi-output operator
                copy = self._copy(g, node, members, step_local)
                s = self.captured.storage_of[node]
                mark(copy, storage=s)
                if role(node) in (Role.FUSED, Role.ITEM):
                    # Inductor would write a cheap loop into each of its readers, which keeps what
                    # the loop reads alive until the last of them.
                    mark(copy, is_buffer=True)
                g.owned[s] = copy
            elif kind is Role.VIEW or (kind is Role.ITEM and view_base(node) is not None):
                # A view kept over a free would hold its storage: made again at each step.
                step_local[node] = self._copy(g, node, members, step_local)
            elif kind is Role.KERNEL:
                copy = self._copy(g, node, members, step_local)
                if is_sequence(node):
                    step_local[node] = copy
                    g.kernel[node] = copy
                elif not is_tensor(node) or is_mutating(node):
                    # What was written into is there from now on, and is not written a second time.
                    g.fixed[node] = copy
                self._dependent_scalars(g, node, members)
            elif node not in g.memo:
                g.memo[node] = self._copy(g, node, members, step_local)

    def _copy(
        self,
        g: _Graph,
        node: fx.Node,
        members: frozenset[fx.Node],
        step_local: dict[fx.Node, fx.Node],
    ) -> fx.Node:
        def argument(n: fx.Node) -> Any:
            return self._value(g, n, members, step_local)

        args = fx.map_arg(node.args, argument)
        kwargs = fx.map_arg(node.kwargs, argument)
        k = self.copies.get(node, 0)
        self.copies[node] = k + 1
        copy = g.graph.create_node(
            node.op,
            node.target,
            args,
            kwargs,
            name=node.name if k == 0 else f"{node.name}_remat{k}",
            type_expr=node.type,
        )
        copy.meta = dict(node.meta)
        if self.step >= 0:  # not for numbers and for the views that are returned
            mark(copy, step=self.step, group=self.group)
        if k and role(node) in (Role.FUSED, Role.KERNEL):
            mark(copy, recomputes=node.name)
        return copy

    def _value(
        self,
        g: _Graph,
        n: fx.Node,
        members: frozenset[fx.Node] = frozenset(),
        step_local: dict[fx.Node, fx.Node] | None = None,
    ) -> Any:
        """The node in ``g`` that holds the value of original node ``n`` now, or a number that is
        settled."""
        n = self.captured.resolve(n)
        if step_local and n in step_local:
            return step_local[n]
        if n in self.captured.storage_of and n.op == "call_function":
            s = self.captured.storage_of[n]
            if s in g.owned:
                return g.owned[s]
            raise CaptureError(f"{n.name!r} is used at step {self.step}, where it is not in memory")
        if n in members and n in g.memo:
            return g.memo[n]
        if n in g.fixed:
            return g.fixed[n]
        if n in g.kernel:
            return g.kernel[n]
        if n.op == "get_attr":
            # Constants are there from the start: before the first step, not in the midst of one.
            first = next((m for m in g.graph.nodes if m.op == "call_function"), None)
            with g.graph.inserting_before(first) if first else contextlib.nullcontext():
                copy = g.graph.create_node("get_attr", self._attribute(g, n), name=n.name)
            copy.meta = dict(n.meta)
            self._mark_constant(copy, n)
            g.fixed[n] = copy
            return copy
        if n.op == "call_function" and view_base(n) is not None:
            copy = self._copy(g, n, members, {} if step_local is None else step_local)
            if step_local is not None:
                step_local[n] = copy
            return copy
        number = _settled(n)
        if number is not None:
            return number
        raise CaptureError(f"{n.name!r} is used at step {self.step} but was not emitted")

    def _attribute(self, g: _Graph, n: fx.Node) -> str:
        """What ``g`` calls the constant, or the graph of a higher-order operator, of a get_attr."""
        found = attribute(n)
        name = str(n.target)
        while g.attributes.setdefault(name, found) is not found:
            name += "_"  # backward has another of that name
        return name

    # --- what is not in the plan: placeholders, scalars, outputs --------------------------------

    def _placeholder(self, g: _Graph, original: fx.Node, source: fx.Node) -> None:
        node = g.graph.placeholder(source.name)
        node.meta = dict(source.meta)
        node.type = source.type
        self._mark_constant(node, original)
        g.fixed[original] = node

    def _mark_constant(self, node: fx.Node, original: fx.Node) -> None:
        if original in self.captured.storage_of:
            s = self.captured.storage_of[original]
            mark(node, storage=s)
            if self.captured.storage_nodes[s] is not original or s in self.shared:
                mark(node, size_bytes=self.program.storages[s].size_bytes)

    def _scalars(self, g: _Graph, gm: fx.GraphModule) -> None:
        """Emit numbers that depend only on inputs; the rest follow the operator they come from."""
        for node in _calls(gm.graph):
            self._emit_scalar(g, node)
            self._emit_from_symbols(g, node)
        for node in [n for n in gm.graph.nodes if n.op == "get_attr"]:
            if not is_tensor(node) and node.users:
                self._value(g, node)

    def _emit_scalar(self, g: _Graph, node: fx.Node) -> None:
        if role(node) is not Role.SCALAR or node in g.fixed:
            return
        inputs = [self.captured.resolve(n) for n in node.all_input_nodes]
        if all(n in g.fixed or n in g.kernel for n in inputs):
            g.fixed[node] = self._copy(g, node, frozenset(), {})
            return
        owners = [self.captured.owner(n) if is_tensor(n) else n for n in inputs]
        if all(
            n in g.fixed or n in g.kernel or self.captured.storage_of.get(n, -1) in g.owned
            for n in owners
        ):
            g.fixed[node] = self._copy(g, node, frozenset(), {})

    def _emit_from_symbols(self, g: _Graph, node: fx.Node) -> None:
        """Emit a size of something computed, which the inputs' sizes determine, without it."""
        val = value(node)
        if node in g.fixed or not isinstance(val, torch.types.py_sym_types):
            return
        symbols = {
            number.node.expr: n
            for n in g.fixed.values()
            if isinstance(number := value(n), torch.SymInt)
        }
        expression = val.node.expr
        if not expression.free_symbols or not expression.free_symbols <= symbols.keys():
            return  # a constant, or it depends on data
        present = len(g.graph.nodes)
        tracer = fx.proxy.GraphAppendingTracer(g.graph)
        values = {s: fx.Proxy(symbols[s], tracer) for s in expression.free_symbols}
        result = sympy_interp(PythonReferenceAnalysis, values, expression)
        assert isinstance(result, fx.Proxy), (node, expression)
        for made in list(g.graph.nodes)[present:]:
            args, kwargs = fx.map_arg((made.args, made.kwargs), value)
            made.meta["val"] = made.target(*args, **kwargs)
        g.fixed[node] = result.node

    def _dependent_scalars(self, g: _Graph, node: fx.Node, members: frozenset[fx.Node]) -> None:
        """Numbers computed from a kernel's results: emitted with its first run."""
        pending = list(node.users)
        while pending:
            user = pending.pop(0)
            if user in members:
                continue
            if user.op == "call_function" and role(user) is Role.SCALAR and user not in g.fixed:
                self._emit_scalar(g, user)
                if user in g.fixed:
                    pending.extend(user.users)

    def _output(self, g: _Graph, argument: object) -> object:
        if not isinstance(argument, fx.Node):
            return argument
        return self._value(g, argument, step_local={})

    def _finish(self, g: _Graph, original: fx.GraphModule, results: list[object]) -> fx.Node:
        (old,) = original.graph.find_nodes(op="output")
        out = g.graph.output(tuple(results))
        out.meta = dict(old.meta)
        if "output_stack_traces" in old.meta:
            out.meta["output_stack_traces"] = [
                r.meta.get("stack_trace") if isinstance(r, fx.Node) else None for r in results
            ]
        _drop_dead(g.graph)
        g.graph.lint()
        return out

    def _module(self, root: fx.GraphModule, g: _Graph) -> fx.GraphModule:
        gm = make_graph_module(g.attributes, g.graph)
        gm.training = root.training
        gm.meta = dict(root.meta)
        return gm

    # --- saved for backward ---------------------------------------------------------------------

    def _saved(
        self, forward: _Graph, steps: Iterable[tuple[int, Step]]
    ) -> tuple[
        list[tuple[fx.Node, fx.Node]], list[tuple[fx.Node, fx.Node]], list[tuple[fx.Node, fx.Node]]
    ]:
        """What backward receives from forward: (original, forward's node), by output group."""
        captured = self.captured
        assert captured.backward is not None
        bindings: Mapping[object, fx.Node] = find_symbol_binding_fx_nodes(captured.forward.graph)
        symbols: set[object] = set()
        needed: dict[fx.Node, None] = {}
        in_backward: set[int] = set()

        def need(n: fx.Node) -> None:
            n = captured.resolve(n)
            if n.op == "call_function" and n in captured.storage_of:
                if captured.storage_of[n] not in in_backward:
                    needed.setdefault(n)
            elif n.op == "placeholder":
                if n.graph is captured.forward.graph:
                    needed.setdefault(n)
            elif n.op == "call_function" and _settled(n) is None:
                kind = role(n)
                is_number = kind is Role.SCALAR or (kind is Role.KERNEL and not is_tensor(n))
                if is_number and n.graph is captured.forward.graph and not is_sequence(n):
                    needed.setdefault(n)
                    return
                found = _symbols(n)
                if kind is Role.SCALAR and found and found <= bindings.keys():
                    symbols.update(found)  # see `_emit_from_symbols`
                elif view_base(n) is not None or kind is Role.SCALAR:
                    for m in n.all_input_nodes:
                        need(m)

        # Backward's own scalars, first, as they are emitted whatever the plan says.
        for node in _calls(captured.backward.graph):
            if role(node) is Role.SCALAR:
                for n in map(captured.resolve, node.all_input_nodes):
                    if not is_tensor(n) and not is_sequence(n):
                        need(n)
        resident = set(forward.owned)
        for _, step in steps:
            if isinstance(step, Free):
                resident.discard(step.storage)
            if not isinstance(step, Compute):
                continue
            members = self.operator_nodes[step.operator]
            for node in captured.operators[step.operator].nodes:
                for n in node.all_input_nodes:
                    if captured.resolve(n) not in members:
                        need(n)
            made = {captured.storage_of[n] for n in captured.operators[step.operator].outputs}
            in_backward.update(made - resident)  # the others are a multi-output's duplicates
            resident |= made
        for argument in output_arguments(captured.backward):
            if isinstance(argument, fx.Node):
                need(argument)

        order = {n: i for i, n in enumerate(captured.forward.graph.nodes)}
        tensors: list[tuple[fx.Node, fx.Node]] = []
        scalars: list[tuple[fx.Node, fx.Node]] = []
        opaque: list[tuple[fx.Node, fx.Node]] = []
        for original in sorted(needed, key=order.__getitem__):
            emitted = self._value(forward, original)
            if is_tensor(original):
                tensors.append((original, emitted))
            elif isinstance(original.meta.get("val"), torch.types.py_sym_types):
                scalars.append((original, emitted))
            else:
                opaque.append((original, emitted))
        tensors.sort(key=lambda pair: _no_version_check(pair[1]))  # stable

        # Every symbol in the shape of a backward input must be bound by an input.
        bound = {original for original, _ in scalars}
        for original, _ in (*tensors, *scalars):
            symbols |= set(free_symbols(original.meta["val"]))
        for node in captured.backward.graph.find_nodes(op="placeholder"):
            if "val" in node.meta:
                symbols |= set(free_symbols(node.meta["val"]))
        extra = [
            bindings[s]
            for s in sorted(symbols, key=str)
            if s in bindings and bindings[s] not in bound
        ]
        binding = [(n, self._value(forward, n)) for n in extra]
        binding += [pair for pair in scalars if pair[0] in set(bindings.values())]
        derived = [pair for pair in scalars if pair[0] not in set(bindings.values())]
        return tensors, [*binding, *derived], opaque


def _symbols(number: fx.Node) -> set[object]:
    """The symbols of a size's expression."""
    val = value(number)
    return set(free_symbols(val)) if isinstance(val, torch.types.py_sym_types) else set()


def _calls(graph: fx.Graph) -> list[fx.Node]:
    return [n for n in graph.nodes if n.op == "call_function"]


def _no_version_check(node: fx.Node) -> bool:
    return bool(node.meta.get("saved_tensor_with_no_vc_check", False))


def _describe_outputs(
    out: fx.Node,
    captured: Captured,
    num_user_outputs: int,
    tensors: list[tuple[fx.Node, fx.Node]],
    num_saved: int,
) -> None:
    """Set the descriptions that AOTAutograd keeps on the forward's output node."""
    (old,) = captured.forward.graph.find_nodes(op="output")
    if "desc" not in old.meta:
        return
    descriptions = list(old.meta["desc"])[:num_user_outputs]
    for i in range(num_saved):
        unchecked = i < len(tensors) and _no_version_check(tensors[i][1])
        kind: Callable[[int], object] = (
            SavedForBackwardsNoVcCheckAOTOutput if unchecked else SavedForBackwardsAOTOutput
        )
        descriptions.append(kind(i))
    out.meta["desc"] = descriptions


def _settled(n: fx.Node) -> int | float | None:
    """A number that is known while graphs are made, such as a size that a guard has fixed."""
    if n.op != "call_function" or role(n) is not Role.SCALAR:
        return None
    val = value(n)
    if isinstance(val, torch.SymInt) and val.node.expr.is_Integer:
        return int(val.node.expr)
    return val if isinstance(val, (int, float)) else None


def _drop_dead(graph: fx.Graph) -> None:
    """Remove unused views and numbers that emission made in advance; effects stay."""
    for node in reversed(list(graph.nodes)):
        if node.op == "call_function" and not node.users and node.target is not free:
            if role(node) in (Role.VIEW, Role.SCALAR, Role.ITEM, Role.FUSED):
                graph.erase_node(node)
        elif node.op == "get_attr" and not node.users:
            graph.erase_node(node)


def count_nodes(gm: fx.GraphModule) -> int:
    """Number of calls in a module, frees left out."""
    return sum(n.op == "call_function" and n.target is not free for n in gm.graph.nodes)
