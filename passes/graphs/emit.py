"""Emission: a plan becomes a forward and a backward graph module.

Walks the plan's steps and copies, for each `Compute`, the operator's nodes into the graph of the
phase it runs in.  Uses refer to the newest copy of a storage; views are made again from it at each
step.  A recomputed copy is called ``<node>_remat<k>``; what was decided about a node stands in its
`nodes.Mark`: its step, its group, the storage that it owns.  Each `Free` becomes a call of `free`;
`lower_frees` takes them out again for Inductor, whose wrapper frees at the last use.  Each
`Offload` and `Prefetch` becomes a call of an operator of `device.host_copies`; compute waits for a
copy where the plan frees what was copied, or reads what came back.  What is on the host at the
boundary and comes back in backward is saved for it.

The outputs keep the partitioner's contract (torch ``_functorch/partitioners.py``,
``_extract_fwd_bwd_modules``): forward returns the user's outputs, then saved tensors with a version
check, those without, opaque objects, symbols; backward takes symbols, saved tensors, opaque
objects, then tangents and whatever else only backward receives (`saved`).
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from dtrcompile.passes.errors import CaptureError
from dtrcompile.passes.graphs.capture import Captured
from dtrcompile.passes.graphs.copy_nodes import add_offload, add_prefetch, add_wait
from dtrcompile.passes.graphs.modules import calls_of, output_arguments, placeholders
from dtrcompile.passes.graphs.saved import (
    fetched_in_backward,
    has_no_version_check,
    saved_for_backward,
)
from dtrcompile.passes.nodes import (
    Role,
    attribute,
    is_mutating,
    is_sequence,
    is_symbolic_number,
    is_tensor,
    mark,
    role,
    settled_number,
    value,
    view_base,
)
from dtrcompile.passes.program.plan import (
    Boundary,
    Compute,
    Free,
    Offload,
    Plan,
    Prefetch,
    Step,
    unknown_step,
)
from dtrcompile.passes.torch_private import (
    PythonReferenceAnalysis,
    SavedForBackwardsAOTOutput,
    SavedForBackwardsNoVcCheckAOTOutput,
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
    """Emit ``plan``, a plan of ``captured.program`` that the referee accepted."""
    steps = list(enumerate(plan.steps))
    boundary = next((i for i, s in steps if isinstance(s, Boundary)), len(steps))
    progress = _Progress()
    forward = _Graph(captured, progress)
    user_outputs = _emit_forward(forward, steps[:boundary])
    if captured.backward is None:
        forward.finish(captured.forward, user_outputs)
        return Emitted(forward.module(captured.forward), None)

    after = steps[boundary + 1 :]
    steps_after = [step for _, step in after]
    saved = saved_for_backward(
        captured, forward.owned.keys(), steps_after, is_tight=not plan.makes_copies
    )
    values = {original: forward.value(original) for original in saved.as_returned}
    on_host = {s: forward.on_host[s] for s in fetched_in_backward(steps_after)}
    saved_values = [*on_host.values(), *(values[original] for original in saved.as_returned)]
    out = forward.finish(captured.forward, [*user_outputs, *saved_values])
    _describe_outputs(out, captured, len(on_host) + len(saved.tensors), saved_values)

    backward = _Graph(captured, progress)
    for original in saved.numbers:
        backward.add_saved(original, values[original])
    for s, node in on_host.items():
        backward.add_on_host(s, node, is_leaving=s in forward.leaving)
    for original in (*saved.tensors, *saved.opaque):
        backward.add_saved(original, values[original])
    gradients = _emit_backward(backward, after)
    backward.finish(captured.backward, gradients)
    for node in backward.graph.nodes:
        if node.op in ("call_function", "get_attr"):
            node.meta["autograd_backward"] = True
    return Emitted(forward.module(captured.forward), backward.module(captured.backward))


def lower_frees(gm: fx.GraphModule) -> None:
    """Remove the explicit frees, in place."""
    for node in gm.graph.find_nodes(op="call_function", target=free):
        gm.graph.erase_node(node)
    gm.recompile()


def _emit_forward(g: _Graph, steps: Sequence[tuple[int, Step]]) -> list[object]:
    """Emit forward up to its user's outputs, which are returned."""
    captured = g.captured
    for node in placeholders(captured.forward):
        g.add_placeholder(node)
    g.add_numbers(captured.forward)
    for index, step in steps:
        g.add_step(index, step)
    g.wait_for(tuple(g.arriving))
    arguments = output_arguments(captured.forward)[: captured.num_fwd_outputs]
    return [g.result(a) for a in arguments]


def _emit_backward(g: _Graph, steps: Sequence[tuple[int, Step]]) -> list[object]:
    """Emit backward, which has its saved values, up to the gradients, which are returned."""
    captured = g.captured
    assert captured.backward is not None
    for node in placeholders(captured.backward):
        if node not in captured.same_value:
            g.add_placeholder(node)
    g.add_numbers(captured.backward)
    for index, step in steps:
        g.add_step(index, step)
    g.wait_for(tuple(g.arriving))
    return [g.result(a) for a in output_arguments(captured.backward)]


@dataclass
class _Progress:
    """How far emission has come, over both graphs.

    Attributes:
        step: of the plan; None between the steps.
        group: the latest; neighbouring steps of one cluster are one group.
        copies: how often each node of the default split was copied.
    """

    step: int | None = None
    group: int = -1
    copies: Counter[fx.Node] = field(default_factory=Counter)


@dataclass(frozen=True)
class _Run:
    """One run of an operator, or the making of a view that is returned.

    Attributes:
        members: the operator's nodes.
        made: views, and the tuples of multi-output kernels, which are not kept beyond the run: a
            view kept over a free would hold its storage.
    """

    members: frozenset[fx.Node] = frozenset()
    made: dict[fx.Node, fx.Node] = field(default_factory=dict)


class _Graph:
    """One graph under construction: what each node of the default split is in it now.

    A value is looked for in the order of how long it lives: what the run at hand made, the storages
    that are in memory, what the cluster at hand computed without a storage, and what stays for all
    of the graph.  What is not found is made, if it is a constant, a view or a number.

    Attributes:
        owned: storage -> its newest copy.
        unowned: unmaterialized values of the cluster that is being run.
        fixed: constants and numbers: one copy for all.
        kernel: tuple-valued kernels: the newest call.
        attributes: what get_attr nodes refer to, by their targets.
        on_host: storage -> its copy on the host.
        leaving: storages whose copy to the host nothing has waited for.
        arriving: storages whose copy from the host nothing has waited for.
    """

    def __init__(self, captured: Captured, progress: _Progress) -> None:
        self.captured = captured
        self.progress = progress
        self.graph = fx.Graph()
        self.owned: dict[int, fx.Node] = {}
        self.unowned: dict[fx.Node, fx.Node] = {}
        self.cluster = -1
        self.fixed: dict[fx.Node, fx.Node] = {}
        self.kernel: dict[fx.Node, fx.Node] = {}
        self.attributes: dict[str, Any] = {}
        self.on_host: dict[int, fx.Node] = {}
        self.leaving: set[int] = set()
        self.arriving: set[int] = set()

    # --- steps --------------------------------------------------------------------------------

    def add_step(self, index: int, step: Step) -> None:
        """Emit one step of the plan."""
        self.progress.step = index
        match step:
            case Compute(o):
                self._compute(o)
            case Free(s):
                self._free(s)
            case Offload(s):
                owner = self._owner(s)
                assert owner is not None  # the referee has seen it in memory
                self.on_host[s] = add_offload(self.graph, owner, index)
                self.leaving.add(s)
            case Prefetch(s):
                self._prefetch(s)
            case Boundary():
                raise AssertionError("a boundary is between the graphs")
            case _:
                raise unknown_step(step)
        self.progress.step = None

    def _owner(self, s: int) -> fx.Node | None:
        """What holds a storage that the plan frees or copies; None if this graph does not."""
        if self.captured.program.storages[s].is_constant:  # a tangent that was handed on
            return self.fixed[self.captured.storage_nodes[s]]
        return self.owned.get(s)

    def _free(self, s: int) -> None:
        owner = self._owner(s)
        self.wait_for((s,))
        if s in self.leaving and owner is not None:
            add_wait(self.graph, self.on_host[s], owner, self.progress.step)
            self.leaving.remove(s)
        self.owned.pop(s, None)
        if owner is not None:
            mark(self.graph.call_function(free, (owner,)), step=self.progress.step)

    def _prefetch(self, s: int) -> None:
        original = self.captured.storage_nodes[s]
        node = add_prefetch(self.graph, self.on_host[s], original, self.progress.step)
        if self.captured.program.storages[s].is_constant:
            self._fix(original, node)
        else:
            mark(node, storage=s)
            self.owned[s] = node
        self.arriving.add(s)

    def wait_for(self, storages: Iterable[int]) -> None:
        """Let those that come back from the host be there from now on."""
        for s in sorted(self.arriving.intersection(storages)):
            owner = self._owner(s)
            assert owner is not None
            add_wait(self.graph, owner, None, self.progress.step)
            self.arriving.remove(s)

    def _compute(self, o: int) -> None:
        operator = self.captured.operators[o]
        if operator.cluster != self.cluster:
            self.unowned, self.cluster = {}, operator.cluster
            self.progress.group += 1
        program = self.captured.program
        self.wait_for(program.tensors[t].storage for t in program.operators[o].inputs)
        run = _Run(frozenset(operator.nodes))
        outputs = {n: self.captured.storage_of[n] for n in operator.outputs}
        # Of several outputs, those that are still resident are not made a second time.
        duplicates = {n for n, s in outputs.items() if s in self.owned and len(outputs) > 1}
        for node in operator.nodes:
            kind = role(node)
            if node in outputs:
                if node not in duplicates:
                    self._add_owner(node, run)
            elif kind is Role.VIEW or (kind is Role.ITEM and view_base(node) is not None):
                run.made[node] = self._copy(node, run)
            elif kind is Role.KERNEL:
                self._add_kernel(node, run)
            elif node not in self.unowned:
                self.unowned[node] = self._copy(node, run)

    def _add_owner(self, node: fx.Node, run: _Run) -> None:
        """Add a node that owns a storage."""
        copy = self._copy(node, run)
        s = self.captured.storage_of[node]
        mark(copy, storage=s)
        if role(node) in (Role.FUSED, Role.ITEM):
            # Inductor would write a cheap loop into each of its readers, which keeps what the loop
            # reads alive until the last of them.
            mark(copy, is_buffer=True)
        self.owned[s] = copy

    def _add_kernel(self, node: fx.Node, run: _Run) -> None:
        """Add a kernel that owns nothing itself: of several outputs, of a number, or an effect."""
        copy = self._copy(node, run)
        if is_sequence(node):
            run.made[node] = self.kernel[node] = copy
        elif not is_tensor(node) or is_mutating(node):
            # What was written into is there from now on, and is not written a second time.
            self.fixed[node] = copy
        self._add_numbers_of(node, run)

    def _copy(self, node: fx.Node, run: _Run) -> fx.Node:
        """Copy a call, with what its arguments are now."""
        args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: self._value(n, run))
        k = self.progress.copies[node]
        self.progress.copies[node] += 1
        copy = self.graph.create_node(
            node.op,
            node.target,
            args,
            kwargs,
            name=node.name if k == 0 else f"{node.name}_remat{k}",
            type_expr=node.type,
        )
        copy.meta = dict(node.meta)
        if self.progress.step is not None:  # not for numbers and for the views that are returned
            mark(copy, step=self.progress.step, group=self.progress.group)
        if k and role(node) in (Role.FUSED, Role.KERNEL):
            mark(copy, recomputes=node.name)
        return copy

    # --- values -------------------------------------------------------------------------------

    def value(self, n: fx.Node) -> Any:
        """The node that holds the value of a node of the default split now, or a settled number.

        Raises:
            CaptureError: if it is not in memory.
        """
        return self._value(n, _Run())

    def _value(self, n: fx.Node, run: _Run) -> Any:
        n = self.captured.resolve(n)
        found = self._present(n, run)
        return self._made(n, run) if found is None else found

    def _present(self, n: fx.Node, run: _Run) -> fx.Node | None:
        if n in run.made:
            return run.made[n]
        if n.op == "call_function" and n in self.captured.storage_of:
            return self.owned.get(self.captured.storage_of[n])
        if n in run.members and n in self.unowned:
            return self.unowned[n]
        return self.fixed[n] if n in self.fixed else self.kernel.get(n)

    def _made(self, n: fx.Node, run: _Run) -> Any:
        """Make what is there for the asking."""
        if n.op == "get_attr":
            return self._add_attribute(n)
        if view_base(n) is not None:
            run.made[n] = self._copy(n, run)
            return run.made[n]
        number = settled_number(n)
        if number is None:
            at = f"at step {self.progress.step}"
            raise CaptureError(f"{n.name!r} is used {at}, where it is not in memory")
        return number

    def _add_attribute(self, n: fx.Node) -> fx.Node:
        """Add a constant, or the graph of a higher-order operator."""
        found = attribute(n)
        target = str(n.target)
        while self.attributes.setdefault(target, found) is not found:
            target += "_"  # backward has another of that name
        # It is there from the start: before the first step, not in the midst of one.
        first = next((m for m in self.graph.nodes if m.op == "call_function"), None)
        with self.graph.inserting_before(first) if first else contextlib.nullcontext():
            copy = self.graph.create_node("get_attr", target, name=n.name)
        copy.meta = dict(n.meta)
        self._fix(n, copy)
        return copy

    # --- what is not in the plan: inputs, numbers, results ------------------------------------

    def _fix(self, original: fx.Node, node: fx.Node) -> None:
        """Say that a node stands for a constant from now on."""
        self.fixed[original] = node
        s = self.captured.storage_of.get(original)
        if s is not None:
            mark(node, storage=s)
            if s in self.captured.shared_constants:
                # Counted by the program, not by one input's extent.
                mark(node, size_bytes=self.captured.program.storages[s].size_bytes)

    def add_placeholder(self, original: fx.Node) -> None:
        """Add an input of the default split's."""
        node = self.graph.placeholder(original.name)
        node.meta = dict(original.meta)
        node.type = original.type
        self._fix(original, node)

    def add_saved(self, original: fx.Node, source: fx.Node) -> None:
        """Add an input for what forward saves: ``source``, which is ``original`` there."""
        node = self.graph.placeholder(source.name)
        node.meta = dict(source.meta)
        mark(node, step=None)
        if is_tensor(original) and original.op == "call_function":
            s = self.captured.storage_of[self.captured.owner(original)]
            mark(node, storage=s)
            self.owned[s] = node
        else:
            self._fix(original, node)

    def add_on_host(self, s: int, source: fx.Node, *, is_leaving: bool) -> None:
        """Add an input for what forward copied to the host, or still copies: ``source`` there."""
        node = self.graph.placeholder(source.name)
        node.meta = dict(source.meta)
        mark(node, step=None)
        self.on_host[s] = node
        if is_leaving:
            self.leaving.add(s)

    def add_numbers(self, gm: fx.GraphModule) -> None:
        """Add numbers that depend only on inputs; the rest follow the operator they come from."""
        for node in calls_of(gm):
            self._add_number(node)
            self._add_from_symbols(node)
        for node in gm.graph.find_nodes(op="get_attr"):
            if not is_tensor(node) and node.users:
                self.value(node)

    def _add_number(self, node: fx.Node) -> None:
        """Add a number if all is there that it is computed from."""
        if role(node) is not Role.SCALAR or node in self.fixed:
            return
        if all(map(self._is_there, node.all_input_nodes)):
            self.fixed[node] = self._copy(node, _Run())

    def _is_there(self, n: fx.Node) -> bool:
        n = self.captured.resolve(n)
        if n in self.fixed or n in self.kernel:
            return True
        n = self.captured.owner(n) if is_tensor(n) else n
        s = self.captured.storage_of.get(n)
        return n in self.fixed or n in self.kernel or s in self.owned

    def _add_from_symbols(self, node: fx.Node) -> None:
        """Add a size of something computed, which the inputs' sizes determine, without it."""
        if node in self.fixed or not is_symbolic_number(node):
            return
        symbols = {
            size.node.expr: n
            for n in self.fixed.values()
            if isinstance(size := value(n), torch.SymInt)
        }
        number: Any = value(node)
        expression = number.node.expr
        if not expression.free_symbols or not expression.free_symbols <= symbols.keys():
            return  # a constant, or it depends on data
        present = len(self.graph.nodes)
        tracer = fx.proxy.GraphAppendingTracer(self.graph)
        values = {s: fx.Proxy(symbols[s], tracer) for s in expression.free_symbols}
        result = sympy_interp(PythonReferenceAnalysis, values, expression)
        assert isinstance(result, fx.Proxy), (node, expression)
        for made in list(self.graph.nodes)[present:]:
            args, kwargs = fx.map_arg((made.args, made.kwargs), value)
            made.meta["val"] = made.target(*args, **kwargs)
        self.fixed[node] = result.node

    def _add_numbers_of(self, node: fx.Node, run: _Run) -> None:
        """Add numbers computed from a kernel's results, with its first run."""
        pending = list(node.users)
        while pending:
            user = pending.pop(0)
            if user in run.members or user.op != "call_function" or user in self.fixed:
                continue
            self._add_number(user)
            if user in self.fixed:
                pending.extend(user.users)

    def result(self, argument: object) -> object:
        """What the graph returns for what the default split returns."""
        return self.value(argument) if isinstance(argument, fx.Node) else argument

    def finish(self, original: fx.GraphModule, results: list[object]) -> fx.Node:
        """End the graph, as the default split's ends."""
        (old,) = original.graph.find_nodes(op="output")
        out = self.graph.output(tuple(results))
        out.meta = dict(old.meta)
        if "output_stack_traces" in old.meta:
            out.meta["output_stack_traces"] = [
                r.meta.get("stack_trace") if isinstance(r, fx.Node) else None for r in results
            ]
        _drop_dead(self.graph)
        self.graph.lint()
        return out

    def module(self, root: fx.GraphModule) -> fx.GraphModule:
        """The finished graph as a module like the default split's."""
        gm = make_graph_module(self.attributes, self.graph)
        gm.training = root.training
        gm.meta = dict(root.meta)
        return gm


def _describe_outputs(
    out: fx.Node, captured: Captured, n_tensors: int, saved_values: Sequence[fx.Node]
) -> None:
    """Set the descriptions that AOTAutograd keeps on the forward's output node.

    Args:
        n_tensors: how many of the values that are saved are tensors, the first.
    """
    if "desc" not in out.meta:
        return
    descriptions = list(out.meta["desc"])[: captured.num_fwd_outputs]
    for i, node in enumerate(saved_values):
        unchecked = i < n_tensors and has_no_version_check(node)
        kind: Callable[[int], object] = (
            SavedForBackwardsNoVcCheckAOTOutput if unchecked else SavedForBackwardsAOTOutput
        )
        descriptions.append(kind(i))
    out.meta["desc"] = descriptions


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
