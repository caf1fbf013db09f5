"""Checks emitted graphs against the default split and their plan, before anything runs them.

Independent of `emit`: only the finished graphs are read, and what emission noted down about a node
(`nodes.Mark`) is itself checked, since Inductor's order and the byte counts of the executor come
from it.  Three questions:

* *Is it the same step?*  Every value that the graphs compute has the number of one that the default
  split computes (`value_numbers`), what may run only once runs once and in order, and what is
  returned is what the default split returns.
* *Is it the plan?*  Which node has which storage follows from the numbers, who holds it alive from
  what is a view of what.  Storages come and go in the plan's order, and what is held after each
  step is what the referee says.
* *Is everything there when it is used?*  Nothing is used after its storage was freed, or before it
  has come back from the host; nothing is freed while it is copied.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from types import MappingProxyType

from torch import fx

from dtrcompile.passes.device.host_copies import offload, prefetch, wait_for_copy
from dtrcompile.passes.errors import CaptureError, VerificationError
from dtrcompile.passes.graphs.capture import Captured
from dtrcompile.passes.graphs.emit import Emitted, free
from dtrcompile.passes.graphs.modules import placeholders
from dtrcompile.passes.graphs.split import Split
from dtrcompile.passes.graphs.value_numbers import Numbered, ValueNumbers, is_owner
from dtrcompile.passes.nodes import Role, effect_of, is_tensor, mark_of, role
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
from dtrcompile.passes.program.program import StorageKind
from dtrcompile.passes.program.replay import MemoryTimeline

_NONE: Mapping[fx.Node, fx.Node] = MappingProxyType({})


class Verifier:
    """Compares emitted graphs with a default split, whose values are numbered once."""

    def __init__(self, captured: Captured) -> None:
        self.captured = captured
        self.numbers = ValueNumbers()
        split = Split.of(captured.forward, captured.backward, captured.num_fwd_outputs)
        updated = set(split.updated_after_forward)
        self.updated = frozenset(
            i for i, n in enumerate(placeholders(captured.forward)) if n in updated
        )
        self.wanted = self.numbers.number(split, self.updated, _places(captured))

    def verify(self, plan: Plan, timeline: MemoryTimeline, emitted: Emitted) -> None:
        """Check that the graphs compute what the default split computes, as the plan says.

        Raises:
            VerificationError: naming the node and the step.
        """
        try:
            made = Split.of(emitted.forward, emitted.backward, self.captured.num_fwd_outputs)
        except CaptureError as error:
            raise VerificationError(f"the emitted graphs do not go together: {error}") from error
        found = self.numbers.number(made, self.updated)
        _check_effects(self.wanted, found)
        _check_values(self.wanted, found)
        _check_memory(self.captured, plan.steps, timeline, emitted, self.wanted, found)


def verify_emitted(
    captured: Captured, plan: Plan, timeline: MemoryTimeline, emitted: Emitted
) -> None:
    """As `Verifier.verify`, for graphs of a default split of which no others are verified."""
    Verifier(captured).verify(plan, timeline, emitted)


def _places(captured: Captured) -> dict[fx.Node, int]:
    """Of each call with an effect, its place among them, in the program's order."""
    nodes = (
        node
        for operator in captured.operators
        for node in operator.nodes
        if role(node) is Role.KERNEL and effect_of(node) is not None
    )
    return {node: i for i, node in enumerate(nodes)}


def _check_effects(wanted: Numbered, found: Numbered) -> None:
    """What may run only once runs once, in its order and in its graph, on the same values."""
    for effect, original in zip(found.effects, wanted.effects, strict=False):
        name, expected = effect.node.name, original.node.name
        if effect.given != original.given:
            raise VerificationError(
                f"{name!r} runs where the default split runs {expected!r}, on other values or in"
                f" another order: {effect_of(effect.node)}"
            )
        if effect.is_backward != original.is_backward:
            raise VerificationError(f"{name!r} is in the other graph than {expected!r}")
    for effect in found.effects[len(wanted.effects) :]:
        raise VerificationError(
            f"{effect.node.name!r} runs again, but may run only once: {effect_of(effect.node)}"
        )
    for original in wanted.effects[len(found.effects) :]:
        raise VerificationError(f"{original.node.name!r} does not run")


def _check_values(wanted: Numbered, found: Numbered) -> None:
    """All that is computed, and all that is returned, is what the default split computes."""
    if found.other_inputs != wanted.other_inputs:
        raise VerificationError(
            f"backward takes {found.other_inputs} inputs that forward does not return, the default"
            f" split's {wanted.other_inputs}"
        )
    known = set(wanted.computed.values())
    for node, number in found.computed.items():
        if number not in known:
            raise VerificationError(
                f"{node.name!r} computes what no node of the default split does: it is another"
                " operator, or is given other values"
            )
    returned = (
        ("output", wanted.outputs, found.outputs),
        ("gradient", wanted.gradients, found.gradients),
    )
    for what, expected, got in returned:
        if len(expected) != len(got):
            raise VerificationError(f"{len(got)} {what}s are returned in place of {len(expected)}")
        for i, (a, b) in enumerate(zip(expected, got, strict=True)):
            if a != b:
                raise VerificationError(f"{what} {i} is not the default split's")


def _check_memory(
    captured: Captured,
    steps: Sequence[Step],
    timeline: MemoryTimeline,
    emitted: Emitted,
    wanted: Numbered,
    found: Numbered,
) -> None:
    """Storages come and go as the plan says, and nothing is used when it is gone."""
    program = captured.program
    constants = {s.id for s in program.storages if s.is_constant} - program.handed_on
    tangents = {s.id for s in program.storages if s.kind is StorageKind.TANGENT}
    boundary = next((i for i, s in enumerate(steps) if isinstance(s, Boundary)), len(steps))
    names = _Storages(captured, wanted, found)
    forward = _Memory(names, steps[:boundary], 0, timeline, constants - tangents, {})
    forward.run(emitted.forward)
    if emitted.backward is None:
        return
    always = constants | program.held_in_backward
    received: dict[fx.Node, int] = {}
    for node in placeholders(emitted.backward):
        owner = found.owner[node]
        if owner in forward.live:
            received[owner] = forward.live[owner]
        elif owner is not node and owner.target is offload:
            continue
        elif owner is not node and owner.op == "call_function" and is_tensor(node):
            raise VerificationError(f"backward takes {node.name!r}, which is in no storage")
    after = steps[boundary + 1 :]
    on_host = {found.owner[node] for node in placeholders(emitted.backward)}
    leaving = {s: copy for s, copy in forward.leaving.items() if copy in on_host}
    backward = _Memory(names, after, boundary + 1, timeline, always, received, leaving)
    backward.run(emitted.backward)


class _Storages:
    """Which storage of the program a node of the emitted graphs owns, by its value's number."""

    def __init__(self, captured: Captured, wanted: Numbered, found: Numbered) -> None:
        self.captured = captured
        self.found = found
        self.by_number: dict[int, list[int]] = {}
        for node, s in captured.storage_of.items():
            self.by_number.setdefault(wanted.number[node], []).append(s)
        # Values that also exist inside of a kernel, where they have no storage.
        self.unowned = {
            number
            for node, number in wanted.number.items()
            if is_owner(node) and node not in captured.storage_of
        }

    def of(self, node: fx.Node) -> Collection[int]:
        """Storages of which the node may be a copy: several if they have one value."""
        if self.found.owner.get(node) is not node:
            return ()
        return self.by_number.get(self.found.number[node], ())

    def may_be_unowned(self, node: fx.Node) -> bool:
        """Whether the node may also be computed inside of a kernel."""
        return self.found.number[node] in self.unowned


class _Memory:
    """One emitted graph, run in mind.

    Attributes:
        steps: of the plan, those of this graph.
        first: index of the first of them.
        always: storages that are held throughout: constants, and what the caller holds.
        live: owner -> the storage that it is a copy of.
        leaving: owner -> its copy on the host, as long as nothing has waited for that.
        arriving: owners that were copied from the host, as long as nothing has waited for them.
    """

    def __init__(
        self,
        storages: _Storages,
        steps: Sequence[Step],
        first: int,
        timeline: MemoryTimeline,
        always: Collection[int],
        received: Mapping[fx.Node, int],
        leaving: Mapping[fx.Node, fx.Node] = _NONE,
    ) -> None:
        self.storages = storages
        self.program = storages.captured.program
        self.steps = steps
        self.first = first
        self.timeline = timeline
        self.always = frozenset(always)
        self.live = {node: s for node, s in received.items() if s not in self.always}
        self.present = set(self.live.values())
        self.freed: dict[fx.Node, int] = {}
        self.leaving = dict(leaving)
        self.arriving: set[fx.Node] = set()
        self.next = 0  # the next step, counted from ``first``
        self.missing: set[int] = set()  # what the step before it has yet to allocate
        self.marked = first  # the latest step that a node is marked with
        held = self.always | self.present
        self.live_bytes = sum(self.program.storages[s].size_bytes for s in held)

    def run(self, gm: fx.GraphModule) -> None:
        """Check all nodes in their order."""
        for node in gm.graph.nodes:
            self._check_uses(node)
            if node.op == "call_function":
                self._check_order_of_marks(node)
            if node.target is free:
                self._free(node)
            elif node.target is offload:
                self._offload(node)
            elif node.target is wait_for_copy:
                self._wait(node)
            elif node.op in ("placeholder", "get_attr"):
                self._constant(node)
            elif node.op == "call_function" and self.storages.of(node):
                self._allocate(node)
        self._end()

    # --- what a node does ---------------------------------------------------------------------

    def _check_uses(self, node: fx.Node) -> None:
        for n in node.all_input_nodes:
            owner = self.storages.found.owner[n]
            if owner in self.freed:
                raise VerificationError(
                    f"{node.name!r} uses {n.name!r}, freed at step {self.freed[owner]}"
                )
            if owner in self.arriving and node.target not in (wait_for_copy, offload):
                raise VerificationError(
                    f"{node.name!r} uses {n.name!r}, which has not come back from the host yet"
                )
        if node.target is prefetch:
            (given,) = node.all_input_nodes
            if self.storages.found.owner[given] in self.leaving.values():
                raise VerificationError(f"{node.name!r} uses a copy that is not complete yet")
            self.arriving.add(node)

    def _check_order_of_marks(self, node: fx.Node) -> None:
        step = mark_of(node).step
        if step is None:
            return
        if not self.marked <= step < self.first + len(self.steps):
            raise VerificationError(f"{node.name!r} is marked with step {step}, out of order")
        self.marked = step

    def _constant(self, node: fx.Node) -> None:
        """An input: of the graphs, or received from forward."""
        owner = self.storages.found.owner[node]
        candidates = [self.live[owner]] if owner in self.live else self.storages.of(node)
        marked = mark_of(node).storage
        if candidates and marked not in candidates:
            raise VerificationError(f"{node.name!r} is marked as storage {marked}, and is another")
        for s in candidates:
            if s not in self.always and s not in self.present:
                self._hold(node, s)

    def _allocate(self, node: fx.Node) -> None:
        """A call that owns a storage of the program, unless it is computed inside of a kernel."""
        candidates = self.storages.of(node)
        if self.missing.isdisjoint(candidates):
            index = self._next_event()
            wanted = set() if self.missing or index is None else self._allocated_by(index)
            if wanted.isdisjoint(candidates):
                # Where the caller holds it, it is a duplicate of a multi-output operator.
                is_held = not self.always.isdisjoint(candidates)
                if is_held or self.storages.may_be_unowned(node):
                    return
                name = self.program.storages[min(candidates)].name
                raise VerificationError(
                    f"{node.name!r} computes {name!r}, but {self._expected()}; the graph then holds"
                    " more than the plan says"
                )
            assert index is not None
            self.next, self.missing = index + 1, wanted
        mark, step = mark_of(node), self.first + self.next - 1
        possible = self.missing.intersection(candidates)
        s = mark.storage if mark.storage in possible else min(possible)
        if (mark.storage, mark.step) != (s, step):
            raise VerificationError(
                f"{node.name!r} is storage {s}, computed at step {step}, but is marked as storage"
                f" {mark.storage} and step {mark.step}"
            )
        self.missing.remove(s)
        self._hold(node, s)
        if not self.missing:
            self._compare_bytes(node)

    def _free(self, node: fx.Node) -> None:
        """An explicit free: of what is there, where the plan frees it."""
        (given,) = node.all_input_nodes
        owner = self.storages.found.owner[given]
        if owner not in self.live:
            raise VerificationError(f"{node.name!r} frees {given.name!r}, not in memory")
        if owner in self.leaving:
            raise VerificationError(f"{node.name!r} frees {given.name!r}, which is being copied")
        s = self.live.pop(owner)
        index = self._next_event()
        if self.missing or index is None or self.steps[index] != Free(s):
            raise VerificationError(
                f"{given.name!r} is freed, but {self._expected()}; the graph holds something else"
                " than the plan says"
            )
        step = self.first + index
        if mark_of(node).step != step:
            raise VerificationError(
                f"{given.name!r} is freed at step {step}, but is marked with {mark_of(node).step}"
            )
        self.next = index + 1
        self.present.remove(s)
        self.live_bytes -= self.program.storages[s].size_bytes
        self.freed[owner] = step
        self._compare_bytes(node)

    def _offload(self, node: fx.Node) -> None:
        """A copy to the host: of what is there, where the plan copies it."""
        (given,) = node.all_input_nodes
        s = self.live.get(self.storages.found.owner[given])
        step = mark_of(node).step
        if s is None or step is None or self.steps[step - self.first] != Offload(s):
            raise VerificationError(f"{node.name!r} copies {given.name!r} where the plan does not")
        self.leaving[self.storages.found.owner[given]] = node

    def _wait(self, node: fx.Node) -> None:
        """The end of a copy: of one from the host, or of one to it, whose source is there."""
        copy, *sources = (self.storages.found.owner[n] for n in node.all_input_nodes)
        if copy in self.arriving and not sources:
            self.arriving.remove(copy)
        elif len(sources) == 1 and self.leaving.get(sources[0]) is copy:
            del self.leaving[sources[0]]
        else:
            raise VerificationError(f"{node.name!r} waits for what is not copied")

    def _end(self) -> None:
        if self.arriving:
            names = ", ".join(sorted(repr(n.name) for n in self.arriving))
            raise VerificationError(f"the graph ends before {names} has come back from the host")
        if self.missing or self._next_event() is not None:
            raise VerificationError(
                f"the graph ends, but {self._expected()}; it does not hold what the plan says"
            )

    # --- the plan -----------------------------------------------------------------------------

    def _next_event(self) -> int | None:
        """The next step that changes what this graph holds."""
        for index in range(self.next, len(self.steps)):
            step = self.steps[index]
            match step:
                case Compute() | Prefetch():
                    changes = bool(self._allocated_by(index))
                case Free(s):
                    # Else an output that is handed on, and that backward does not take.
                    changes = s in self.present
                case Boundary() | Offload():
                    changes = False
                case _:
                    raise unknown_step(step)
            if changes:
                return index
        return None

    def _allocated_by(self, index: int) -> set[int]:
        """What a step has to allocate that is not there."""
        step = self.steps[index]
        if isinstance(step, Prefetch):
            return {step.storage} - self.present
        if not isinstance(step, Compute):
            return set()
        tensors = self.program.tensors
        outputs = {tensors[t].storage for t in self.program.operators[step.operator].outputs}
        return outputs - self.present - self.always

    def _hold(self, owner: fx.Node, s: int) -> None:
        self.live[owner] = s
        self.present.add(s)
        self.live_bytes += self.program.storages[s].size_bytes

    def _compare_bytes(self, node: fx.Node) -> None:
        step = self.first + self.next - 1
        expected = self.timeline.after_bytes[step]
        if self.live_bytes != expected:
            raise VerificationError(
                f"after step {step} ({node.name!r}) the graph holds {self.live_bytes} bytes,"
                f" the plan {expected}"
            )

    def _expected(self) -> str:
        """What the plan has next."""
        if self.missing:
            names = ", ".join(repr(self.program.storages[s].name) for s in sorted(self.missing))
            return f"step {self.first + self.next - 1} of the plan has yet to compute {names}"
        index = self._next_event()
        if index is None:
            return "nothing is left of the plan"
        return f"step {self.first + index} of the plan is {self.steps[index]}"
