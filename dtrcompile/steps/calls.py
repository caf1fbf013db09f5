"""The calls of a step's graphs: what each was given and returned, and who held it in backward.

Tensors are known by weak references to their storages; none is held.  Two storages are the same if
they are one object of PyTorch's, not if they have the same address: where the first is gone, or
emptied as FSDP empties gathered parameters, the allocator gives its address to the next.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Generic, Protocol, TypeGuard, TypeVar

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from dtrcompile.outside.loss import LossBytes, OutsideLoss
from dtrcompile.passes.device.allocators import EXACT, Allocator
from dtrcompile.passes.graphs.capture import ALL_HANDED_ON, NOTHING_HANDED_ON, HandedOn
from dtrcompile.passes.graphs.storage_sizes import viewed_storages
from dtrcompile.passes.nodes import extent_bytes
from dtrcompile.passes.torch_private import FakeTensor, storage_use_count, weak_storage_bytes
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
    """One call of a graph: identities of its tensors' storages, and their bytes.

    Attributes:
        inputs, outputs: bytes of storages by identity.
        views: of the storages of its inputs, the bytes that it was given, from the storage's first.
        parameters: inputs that gradients are accumulated for; bytes of these.
        before: calls of each graph that held what they saved.
        node: autograd's, of a call that awaits its backward.
        given: storages of its inputs by identity.
        storages: of what it returned; None for what is no tensor.
        has_gradient: of what it returned, whether autograd made it a part of its graph.
        live_outputs: indices of what was still held when its backward began.
        loss: what is held between it and the loss, above what it returned and nobody held any more;
            None where that is not known.
        holders: of the gradients that its backward was given.
        held_tangent_bytes: of these gradients, what somebody held when its backward was done; None
            before that.
        is_unused: its backward has not run; None where that is not known.
        outliving: of `inputs`, those that were still there when the next step began.
        emptied_in_forward, emptied_in_backward: inputs of the step whose storages had been emptied
            when it was made, and when its backward began; None where that was not seen.
    """

    graph: GraphT
    inputs: dict[int, int]
    parameters: dict[int, int]
    outputs: dict[int, int]
    before: Counter[int]
    awaits_backward: bool
    views: dict[int, set[range]] = field(default_factory=dict)
    node: weakref.ref[Any] | None = None
    given: dict[int, StorageWeakRef] = field(default_factory=dict)
    storages: Sequence[StorageWeakRef | None] = ()
    has_gradient: Sequence[bool] = ()
    live_outputs: frozenset[int] | None = None
    loss: LossBytes | None = None
    holders: tuple[int, ...] = ()
    held_tangent_bytes: int | None = None
    is_unused: bool | None = None
    outliving: frozenset[int] = frozenset()
    emptied_in_forward: frozenset[int] | None = None
    emptied_in_backward: frozenset[int] | None = None

    @staticmethod
    def of(
        graph: GraphT,
        args: Sequence[Any],
        result: Any,
        before: Counter[int],
        node: Any,
        gradient_bytes: Mapping[int, int] = {},
    ) -> Call[GraphT]:
        """Record what the graph was called with and what it returned.

        Args:
            gradient_bytes: of parameters, by their ``id``, whose gradients are kept in part.
        """
        results = result if isinstance(result, (tuple, list)) else (result,)
        leaves = [a for a in args if isinstance(a, torch.Tensor) and a.is_leaf]
        parameters = [a for a in leaves if a.requires_grad]
        allocator = EXACT if graph.planned is None else graph.planned.allocator
        tensors = list(filter(is_counted, args))
        inputs = {
            identity: allocator.block_bytes(size)
            for identity, size in viewed_storages(tensors, storage_identity).items()
        }
        accumulated, outputs = (_storages(values, allocator) for values in (parameters, results))
        for parameter in parameters:
            if id(parameter) in gradient_bytes:
                identity = storage_identity(parameter.untyped_storage())
                accumulated[identity] = gradient_bytes[id(parameter)]
        is_training = node is not None
        reference = weakref.ref(node) if is_training else None
        storages = [_storage_of(r) if is_counted(r) else None for r in results]
        given = {reference.cdata: reference for a in tensors for reference in [_storage_of(a)]}
        views: dict[int, set[range]] = {}
        for tensor in tensors:
            views.setdefault(storage_identity(tensor.untyped_storage()), set()).add(_view(tensor))
        return Call(
            graph,
            inputs,
            accumulated,
            outputs,
            before,
            is_training,
            views,
            reference,
            given,
            storages,
            [isinstance(r, torch.Tensor) and r.grad_fn is not None for r in results],
        )

    def see_next_step(self) -> None:
        """Another step begins: note which inputs still exist."""
        self.outliving = frozenset(filter(weak_storage_bytes, self.inputs))

    @property
    def has_live_results(self) -> bool:
        """Whether somebody holds something that it returned."""
        return any(s is not None and not s.expired() for s in self.storages)

    @property
    def live_bytes(self) -> int:
        """Of the outputs that were still held when its backward began, its inputs left out."""
        return self.bytes_of(self.live_outputs or ())

    def returned(self, indices: Iterable[int]) -> set[int]:
        """Storages of outputs."""
        return {s.cdata for i in indices if (s := self.storages[i]) is not None}

    def bytes_of(self, indices: Iterable[int]) -> int:
        """Of outputs, each storage once, without what the call was given."""
        counted = self.returned(indices) - self.inputs.keys()
        return sum(size for identity, size in self.outputs.items() if identity in counted)

    def gone_bytes(self, taken: set[int]) -> int:
        """Of the outputs that no call takes, those that nobody held when its backward began."""
        gone = self.returned(self.handed_on.outputs or ()) - taken
        return sum(size for identity, size in self.outputs.items() if identity in gone)

    def held_bytes(self, taken: set[int]) -> int:
        """Of the outputs that calls take, those that somebody held when its backward began."""
        held = self.returned(self.live_outputs or ()) & (taken - self.inputs.keys())
        return sum(size for identity, size in self.outputs.items() if identity in held)

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

    def expected(self, taken: set[int]) -> Call[GraphT]:
        """This call as its backward is expected to find it: nobody holds gradients, and the caller
        holds what it returned, is still there, and is not among ``taken``, unless it was seen."""
        live_outputs = self.live_outputs
        if live_outputs is None:
            live_outputs = frozenset(
                i
                for i, s in enumerate(self.storages)
                if s is not None and not s.expired() and s.cdata not in taken
            )
        return replace(self, live_outputs=live_outputs, held_tangent_bytes=0, is_unused=None)

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


def storage_identity(storage: torch.UntypedStorage) -> int:
    """Equal for the tensors that share a storage, as long as somebody refers to it, if weakly."""
    return int(storage._cdata)


def _storage_of(tensor: torch.Tensor) -> StorageWeakRef:
    return StorageWeakRef(tensor.untyped_storage())


def _view(tensor: torch.Tensor) -> range:
    """The bytes of its storage that a tensor has, its gaps included."""
    start = tensor.storage_offset() * tensor.element_size()
    return range(start, min(start + extent_bytes(tensor), tensor.untyped_storage().nbytes()))


def views_all(tensor: torch.Tensor) -> bool:
    """Whether a tensor has all the bytes of its storage, its gaps included."""
    return len(_view(tensor)) == tensor.untyped_storage().nbytes()


def input_bytes(calls: Iterable[tuple[Call[Any], Container[int]]]) -> dict[int, int]:
    """Identity -> bytes of the inputs of several calls.

    Several calls may be given views of one storage: the slices of a batch, or of a sequence.  What
    they view counts, each byte once.

    Args:
        calls: each with the identities of the inputs that count.
    """
    sizes: dict[int, int] = {}
    views: dict[int, set[range]] = {}
    for call, counted in calls:
        for identity, size_bytes in call.inputs.items():
            if identity in counted:
                sizes[identity] = size_bytes
                views.setdefault(identity, set()).update(call.views.get(identity, ()))
    return {identity: max(size, _union_bytes(views[identity])) for identity, size in sizes.items()}


def _union_bytes(views: Iterable[range]) -> int:
    union_bytes = covered = 0
    for view in sorted(views, key=lambda v: v.start):
        union_bytes += max(0, view.stop - max(view.start, covered))
        covered = max(covered, view.stop)
    return union_bytes


def _storages(values: Sequence[Any], allocator: Allocator) -> dict[int, int]:
    """Storages of tensors -> bytes; no tensor is held."""
    storages = (v.untyped_storage() for v in values if is_counted(v))
    return {storage_identity(s): allocator.block_bytes(s.nbytes()) for s in storages}


def is_counted(value: object) -> TypeGuard[torch.Tensor]:
    """Whether this has bytes of its own."""
    return (
        isinstance(value, torch.Tensor)
        and value.layout is torch.strided
        and not isinstance(value, FakeTensor)
    )


def emptied_now(calls: Iterable[Call[Any]]) -> frozenset[int]:
    """Inputs of calls whose storages are there, but were emptied.

    FSDP gathers the parameters of a module for its forward and again for its backward, and empties
    them (``resize_(0)``) in between.
    """
    return frozenset(
        identity
        for call in calls
        for identity, storage in call.given.items()
        if not storage.expired() and not weak_storage_bytes(identity)
    )


def external_bytes(
    calls: Sequence[Call[Any]],
    others: Sequence[Call[Any]] = (),
    emptied: frozenset[int] | None = None,
    without: Iterable[int] = (),
) -> int:
    """Inputs of all calls, each storage once, without what the calls hand on to one another.

    An input counts for the whole step, unless its storage is emptied in between.

    Args:
        others: calls of other forms of the step; of their inputs, those that outlived them.
        emptied: inputs that hold nothing at the moment that is asked for; of all moments that the
            calls saw, the one with the most bytes if it is None.
        without: storages that count elsewhere.
    """
    inputs = input_bytes([*((c, c.outliving) for c in others), *((c, c.inputs) for c in calls)])
    for identity in (*without, *(i for call in calls for i in call.outputs)):
        inputs.pop(identity, None)
    moments = [emptied] if emptied is not None else _emptied_at_moments(calls)
    gone_bytes = (sum(inputs.get(identity, 0) for identity in gone) for gone in moments)
    return sum(inputs.values()) - min(gone_bytes, default=0)


def _emptied_at_moments(calls: Sequence[Call[Any]]) -> Iterator[frozenset[int]]:
    """What was emptied at each moment that was seen; whatever ever is counts from its first call
    on."""
    seen = [gone for c in calls for gone in (c.emptied_in_forward, c.emptied_in_backward) if gone]
    ever = frozenset[int]().union(*seen)
    known: set[int] = set()
    for call in calls:
        known |= call.inputs.keys()
        if call.emptied_in_forward is not None:
            yield (call.emptied_in_forward | (ever - known)) - call.inputs.keys()
        if call.emptied_in_backward is not None:
            yield call.emptied_in_backward - call.inputs.keys()


def related(others: Sequence[Call[GraphT]], calls: Sequence[Call[GraphT]]) -> list[Call[GraphT]]:
    """Those of ``others`` that read a parameter which ``calls`` read too: of the same models."""
    parameters = {identity for call in calls for identity in call.parameters}
    return [call for call in others if parameters & call.parameters.keys()]
