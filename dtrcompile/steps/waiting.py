"""A call whose backward is still to come: what it holds, and how it releases that.

A graph that is met later in a step may find no room beside what earlier calls saved.  A waiting
call can then give up its saved tensors: its backward computes them again, by whatever its graph is
compiled to by then, from the arguments of the call.  That is what `torch.utils.checkpoint` does
with a region, decided after the region has run.

Autograd asks the node of a call for its ``apply`` or ``apply_boxed``, so a node of its own is what
is given another backward; nothing is put between the user's tensors, and a call that keeps what it
saved runs as if nothing had been here.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from dtrcompile.outside.loss import outside_loss
from dtrcompile.passes.errors import ChangedInputError
from dtrcompile.passes.torch_private import FakeTensor, keeps_graph, storage_use_count
from dtrcompile.passes.untraced import untraced
from dtrcompile.steps.autograd_nodes import (
    PYTHONS_HOLD,
    backward_node,
    held_edges,
    holders_of,
    saved_tensors,
    storages_of,
)
from dtrcompile.steps.calls import Call, storage_identity
from dtrcompile.steps.planned import Code, Planned

# Autograd's node calls one of them, which one depends on the release.
_BACKWARDS = ("apply", "apply_boxed")
# A saved tensor's storage is held by the tensor, too.
_NOBODY_ELSE = PYTHONS_HOLD + 1


@dataclass(frozen=True)
class Arguments:
    """What a graph was called with, so that it can be called again.

    Attributes:
        values: in order; of a tensor that is no leaf, a detached one.
        need_gradients: whether each is a tensor that did.
        versions: of each tensor when the graph was called; None for what is no tensor.
        random_states: of the generators by device, the CPU's by None; as bytes, because a tensor
            would count against the budget.  None where the graph draws no random numbers.
    """

    values: tuple[Any, ...]
    need_gradients: tuple[bool, ...]
    versions: tuple[int | None, ...]
    random_states: dict[int | None, bytes] | None

    @staticmethod
    def of(args: Sequence[Any], *, draws: bool) -> Arguments | None:
        """Before the call; None where a tensor has no version that tells whether it was changed."""
        tensors = [a for a in args if isinstance(a, torch.Tensor)]
        if any(a.is_inference() or isinstance(a, FakeTensor) for a in tensors):
            return None
        return Arguments(
            tuple(a.detach() if isinstance(a, torch.Tensor) and not a.is_leaf else a for a in args),
            tuple(isinstance(a, torch.Tensor) and a.requires_grad for a in args),
            _versions(args),
            _random_states(_cuda_devices(tensors)) if draws else None,
        )

    def are_unchanged(self) -> bool:
        """Whether no tensor was written into since."""
        return _versions(self.values) == self.versions

    def fresh(self) -> list[Any]:
        """Leaves with the same values, for another call."""
        return [
            v.detach().requires_grad_(needs) if isinstance(v, torch.Tensor) else v
            for v, needs in zip(self.values, self.need_gradients, strict=True)
        ]

    @contextlib.contextmanager
    def drawing_again(self) -> Iterator[None]:
        """With the generators in the states that they had, and back afterwards."""
        if self.random_states is None:
            yield
            return
        states, before = (
            self.random_states,
            _random_states(d for d in self.random_states if d is not None),
        )
        _set_random_states(states)
        try:
            yield
        finally:
            _set_random_states(before)


class GraphOfCall(Protocol):
    """What a call that waits asks of its graph."""

    @property
    def code(self) -> Code:
        """What the graph is compiled to by now."""

    @property
    def is_recorded(self) -> bool:
        """Whether the step that runs is recorded."""

    def collect_garbage(self) -> None:
        """Before it is seen what the caller still holds: drop what only cycles hold."""

    def before_backward(self, waiting: Waiting) -> None:
        """The backward of a call is about to run.

        Raises:
            InfeasibleBudgetError: if there is no room for it.
        """


class Waiting:
    """A call of a graph whose backward is still to come.

    Attributes:
        planned: what it ran with; None if it holds nothing, because hooks took what it saved.
        call: its entry in the step, where the step is recorded.
        is_released: it has released what it saved, so that backward computes it again.
    """

    def __init__(
        self,
        graph: GraphOfCall,
        planned: Planned | None,
        node: Any,
        arguments: Arguments | None = None,
        call: Call[Any] | None = None,
    ) -> None:
        self.graph = weakref.ref(graph)
        self.planned = planned
        self.node = weakref.ref(node)
        self.arguments = arguments
        self.call = call
        self.is_released = False
        self._code: Callable[..., Any] | None = None
        if planned is not None and (call is not None or arguments is not None):
            if call is not None:
                call.is_unused = True
            for name in _BACKWARDS:
                if hasattr(type(node), name):
                    setattr(node, name, functools.partial(_run_backward, self, name))

    @property
    def kept_bytes(self) -> int:
        """What it holds: saved tensors and outputs."""
        if self.planned is None:
            return 0
        return self.planned.returned_bytes if self.is_released else self.planned.chosen.kept_bytes

    def release_saved(self) -> bool:
        """Release what it saved; whether it did.

        Not where the call changed an input, because it would be changed once more, or where what
        was saved is not there any more.
        """
        node, graph, arguments = self.node(), self.graph(), self.arguments
        if self.is_released or node is None or graph is None or self.planned is None:
            return self.is_released
        if (
            arguments is None
            or not self.planned.graph.can_run_again
            or not arguments.are_unchanged()
        ):
            return False
        saved = saved_tensors(node)
        if saved is None:
            return False  # its backward has run
        self.is_released = True
        self._code = graph.code.function  # in case that the graph is gone by then
        self.free(saved, arguments)
        return True

    def free(self, saved: Sequence[torch.Tensor], arguments: Arguments) -> None:
        """Free what was saved, as far as nobody else holds it.

        An output may be with the caller until its backward begins; then that has been seen.
        """
        held, given_up = _storages(arguments.values), set()
        if self.call is not None:
            live = self.call.live_outputs
            outputs = self.call.outputs.keys()
            held |= outputs if live is None else self.call.returned(live)
            given_up = outputs - held
        for tensor in saved:
            storage = tensor.untyped_storage()
            identity = storage_identity(storage)
            if identity in held or not storage.resizable():
                continue
            # (Autograd unpacks an output that it saved as another tensor, which holds it too.)
            if identity in given_up or storage_use_count(storage._cdata) <= _NOBODY_ELSE:
                storage.resize_(0)

    def compute_again(self) -> tuple[Any, object]:
        """The node of another call with the same arguments, and what keeps it alive.

        Raises:
            ChangedInputError: if one of them was written into since.
        """
        arguments, graph, node = self.arguments, self.graph(), self.node()
        assert arguments is not None
        if not arguments.are_unchanged():
            raise ChangedInputError
        if node is not None:
            self.free(saved_tensors(node) or (), arguments)
        function = self._code if graph is None else graph.code.function
        assert function is not None
        with torch.enable_grad(), arguments.drawing_again():
            result = function(*arguments.fresh())
            return backward_node(result), held_edges(result)


@untraced
def _run_backward(waiting: Waiting, name: str, *gradients: Any) -> Any:
    """Stands in for the method ``name`` of a waiting call's node."""
    node, graph, call = waiting.node(), waiting.graph(), waiting.call
    tangents: list[tuple[StorageWeakRef, int]] = []
    if call is not None:
        call.is_unused = False
        if graph is not None:
            graph.collect_garbage()
        # What the loss holds is asked of steps that are looked at, not of every step.
        is_recorded = graph is not None and graph.is_recorded
        call.see_backward(holders_of(gradients), node, outside_loss(node) if is_recorded else None)
        tangents = storages_of(gradients)
    if graph is not None:
        graph.before_backward(waiting)
    if waiting.is_released:
        node, _edges = waiting.compute_again()
    result = getattr(type(node), name)(node, *gradients)
    if call is not None:
        call.held_tangent_bytes = sum(n for storage, n in tangents if not storage.expired())
    if not keeps_graph():
        waiting.arguments = None
    return result


def _versions(values: Sequence[Any]) -> tuple[int | None, ...]:
    return tuple(v._version if isinstance(v, torch.Tensor) else None for v in values)


def _storages(values: Sequence[Any]) -> set[int]:
    return {
        storage_identity(v.untyped_storage())
        for v in values
        if isinstance(v, torch.Tensor) and v.layout is torch.strided
    }


def _random_states(devices: Iterable[int]) -> dict[int | None, bytes]:
    states: dict[int | None, bytes] = {None: torch.get_rng_state().numpy().tobytes()}
    for device in devices:
        states[device] = torch.cuda.get_rng_state(device).numpy().tobytes()
    return states


def _set_random_states(states: Mapping[int | None, bytes]) -> None:
    for device, state in states.items():
        tensor = torch.frombuffer(bytearray(state), dtype=torch.uint8)
        if device is None:
            torch.set_rng_state(tensor)
        else:
            torch.cuda.set_rng_state(tensor, device)


def _cuda_devices(tensors: Iterable[torch.Tensor]) -> list[int]:
    found = {t.device.index for t in tensors if t.is_cuda and t.device.index is not None}
    return sorted(found)
