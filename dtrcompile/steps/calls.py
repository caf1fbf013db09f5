"""The calls of a step's graphs: what each was given and returned, and who held it in backward.

Tensors are known by the addresses of their storages and by weak references; none is held.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, Protocol, TypeGuard, TypeVar

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from dtrcompile.outside.loss import LossBytes, OutsideLoss
from dtrcompile.passes.device.allocators import EXACT, Allocator
from dtrcompile.passes.graphs.capture import ALL_HANDED_ON, NOTHING_HANDED_ON, HandedOn
from dtrcompile.passes.graphs.storage_sizes import viewed_storages
from dtrcompile.passes.torch_private import FakeTensor, storage_use_count
from dtrcompile.steps.autograd_nodes import PYTHONS_HOLD, are_unheld, saved_tensors, waits
from dtrcompile.steps.planned import Planned


class CalledGraph(Protocol):
    """What a call asks of its graph."""

    @property
    def planned(self) -> Planned | None:
        """What is known of the compiled graph."""


GraphT = TypeVar("GraphT", bound=CalledGraph)


@dataclass
class Call(Generic[GraphT]):
    """One call of a graph: addresses and bytes of its tensors.

    Attributes:
        parameters: inputs that gradients are accumulated for.
        before: calls of each graph that held what they saved.
        node: autograd's, of a call that awaits its backward.
        given: storages of its inputs by address.
        storages, addresses: of what it returned; None for what is no tensor.
        has_gradient: of what it returned, whether autograd made it a part of its graph.
        live_outputs: indices of what was still held when its backward began.
        loss: what is held between it and the loss, above what it returned and nobody held any more;
            None where that is not known.
        holders: of the gradients that its backward was given.
        held_tangent_bytes: of these gradients, what somebody held when its backward was done; None
            before that.
        is_unused: its backward has not run; None where that is not known.
        outliving: of `inputs`, those that were still there when the next step began.
    """

    graph: GraphT
    inputs: dict[int, int]
    parameters: dict[int, int]
    outputs: dict[int, int]
    before: Counter[int]
    awaits_backward: bool
    node: weakref.ref[Any] | None = None
    given: dict[int, StorageWeakRef] = field(default_factory=dict)
    storages: Sequence[StorageWeakRef | None] = ()
    addresses: Sequence[int] = ()
    has_gradient: Sequence[bool] = ()
    live_outputs: frozenset[int] | None = None
    loss: LossBytes | None = None
    holders: tuple[int, ...] = ()
    held_tangent_bytes: int | None = None
    is_unused: bool | None = None
    outliving: dict[int, int] = field(default_factory=dict)

    @staticmethod
    def of(
        graph: GraphT, args: Sequence[Any], result: Any, before: Counter[int], node: Any
    ) -> Call[GraphT]:
        """Record what the graph was called with and what it returned."""
        results = result if isinstance(result, (tuple, list)) else (result,)
        leaves = [a for a in args if isinstance(a, torch.Tensor) and a.is_leaf]
        parameters = [a for a in leaves if a.requires_grad]
        allocator = EXACT if graph.planned is None else graph.planned.allocator
        inputs = {
            address: allocator.block_bytes(size)
            for address, size in viewed_storages(filter(is_counted, args)).items()
        }
        accumulated, outputs = (_storages(values, allocator) for values in (parameters, results))
        is_training = node is not None
        reference = weakref.ref(node) if is_training else None
        storages = [StorageWeakRef(r.untyped_storage()) if is_counted(r) else None for r in results]
        given = {
            s.data_ptr(): StorageWeakRef(s)
            for a in args
            if is_counted(a)
            for s in [a.untyped_storage()]
        }
        addresses = [r.untyped_storage().data_ptr() if is_counted(r) else 0 for r in results]
        return Call(
            graph,
            inputs,
            accumulated,
            outputs,
            before,
            is_training,
            reference,
            given,
            storages,
            addresses,
            [isinstance(r, torch.Tensor) and r.grad_fn is not None for r in results],
        )

    def see_next_step(self) -> None:
        """Another step begins: note which inputs still exist."""
        self.outliving = {
            address: size
            for address, size in self.inputs.items()
            if address in self.given and not self.given[address].expired()
        }

    @property
    def has_live_results(self) -> bool:
        """Whether somebody holds something that it returned."""
        return any(s is not None and not s.expired() for s in self.storages)

    @property
    def live_bytes(self) -> int:
        """Of the outputs that were still held when its backward began, its inputs left out."""
        return self.bytes_of(self.live_outputs or ())

    def bytes_of(self, indices: Iterable[int]) -> int:
        """Of outputs, each storage once, without what the call was given."""
        addresses = {self.addresses[i] for i in indices} - self.inputs.keys()
        return sum(size for address, size in self.outputs.items() if address in addresses)

    def gone_bytes(self, taken: set[int]) -> int:
        """Of the outputs that no call takes, those that nobody held when its backward began."""
        gone = self.handed_on.outputs or frozenset()
        addresses = {self.addresses[i] for i in gone} - taken
        return sum(size for address, size in self.outputs.items() if address in addresses)

    def see_backward(self, holders: tuple[int, ...], node: Any, loss: OutsideLoss | None) -> None:
        """The backward of ``node`` begins; what the graph itself saved is not held by others.

        Args:
            loss: what runs between graphs and the loss.
        """
        counts = {
            i: storage_use_count(s.cdata)
            for i, s in enumerate(self.storages)
            if s is not None and not s.expired()
        }
        saved = saved_tensors(node) or ()
        own = Counter(t.untyped_storage()._cdata for t in saved if is_counted(t))
        del saved
        storages = {i: s.cdata for i, s in enumerate(self.storages) if s is not None}
        # Autograd saves a tensor of its own in place of an output with a gradient, so that saving
        # makes no cycle.  Of any other output it saves the tensor itself, which the caller may
        # hold too.
        self.live_outputs = frozenset(
            i
            for i, n in counts.items()
            if not self.has_gradient[i] or n > own[storages[i]] + PYTHONS_HOLD
        )
        self.holders = holders
        if loss is not None:
            self.loss = loss.without(self.gone_bytes(set()))

    @property
    def handed_on(self) -> HandedOn:
        """What nobody held in its backward."""
        if self.live_outputs is None:
            return NOTHING_HANDED_ON
        returned = {i for i, s in enumerate(self.storages) if s is not None}
        are_given = self.held_tangent_bytes == 0 and are_unheld(self.holders)
        return HandedOn(frozenset(returned - self.live_outputs), are_given)

    @property
    def kept_tangent_bytes(self) -> int:
        """Of the gradients that its backward was given, what is held beyond that.

        Before PyTorch 2.13 autograd holds all of them until backward returns, and no longer.
        """
        return (self.held_tangent_bytes or 0) if ALL_HANDED_ON.tangents else 0

    @property
    def is_done(self) -> bool:
        """Whether its backward has run."""
        return self.node is not None and not self.is_unused and not waits(self.node)


def _storages(values: Sequence[Any], allocator: Allocator) -> dict[int, int]:
    """Address -> bytes of the storages of tensors; no tensor is held."""
    return {
        v.untyped_storage().data_ptr(): allocator.block_bytes(v.untyped_storage().nbytes())
        for v in values
        if is_counted(v)
    }


def is_counted(value: object) -> TypeGuard[torch.Tensor]:
    """Whether this has bytes of its own."""
    return (
        isinstance(value, torch.Tensor)
        and value.layout is torch.strided
        and not isinstance(value, FakeTensor)
    )


def external_bytes(calls: Sequence[Call[Any]], others: Sequence[Call[Any]] = ()) -> int:
    """Inputs of all calls, each storage once, without what the calls hand on to one another.

    Args:
        others: calls of other forms of the step; of their inputs, those that outlived them.
    """
    inputs: dict[int, int] = {}
    for call in others:
        inputs.update(call.outliving)
    for call in calls:
        inputs.update(call.inputs)
    for call in calls:
        for address in call.outputs:
            inputs.pop(address, None)
    return sum(inputs.values())


def related(others: Sequence[Call[GraphT]], calls: Sequence[Call[GraphT]]) -> list[Call[GraphT]]:
    """Those of ``others`` that read a parameter which ``calls`` read too: of the same models."""
    parameters = {address for call in calls for address in call.parameters}
    return [call for call in others if parameters & call.parameters.keys()]
