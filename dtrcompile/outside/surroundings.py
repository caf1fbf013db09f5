"""What a training step holds beside its graphs: optimizer state, averages, kept gradients.

With the option ``optimizer``, or ``reserve="optimizer"``, the budget is one for the whole step,
``optimizer.step()`` included.  The state of the optimizers, present and still to come, is there
while the graphs run, and comes off their budget; and inside of ``optimizer.step()`` parameters,
gradients, state and the step's temporaries have to be within the budget too.  What a step of an
optimizer holds is counted by `passes.optimizer_step`.

Gradients that an earlier backward left in ``.grad`` are seen whatever the options are: backward
makes new ones beside them.
"""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from dtrcompile.options import Options
from dtrcompile.outside.communication import (
    bucket_bytes,
    communication_bytes,
    shard_gradient_bytes,
    sharded_groups,
    shards,
)
from dtrcompile.passes.device.allocators import EXACT, allocator_of
from dtrcompile.passes.device.optimizer_step import (
    StepBytes,
    innermost,
    local,
    parameters_of,
    step_bytes,
    storage_bytes,
)
from dtrcompile.passes.errors import InfeasibleBudgetError
from dtrcompile.passes.untraced import untraced

KEPT = "gradients kept from an earlier backward"
_NONE_FOUND = (
    "no optimizer of this graph's parameters was found yet; it is looked for again when one takes"
    " its first step"
)
_TEMPORARIES = (
    "That is what the optimizer's own step holds, which no plan makes smaller. With foreach=False"
    " or fused=True an optimizer makes fewer temporary copies."
)


@dataclass(frozen=True, slots=True)
class SurroundingBytes:
    """Bytes that no graph holds.

    Attributes:
        resident: what is there while graphs run, state that is still to come included -> bytes.
        present_bytes: of `resident`, what exists already.
        kept_bytes: of `resident`, gradients that an earlier backward left.
        gradient_bytes: of all parameters that get a gradient.
        step_bytes: the most that a step of an optimizer holds beside the graphs' constants and
            results and the gradients; 0 where no optimizer is counted.
        first_step_bytes: the same of the next step alone, which may be the one that makes the
            state.
        step_name: of the step that holds the most.
        notes: for the report.
    """

    resident: Mapping[str, int] = field(default_factory=dict)
    present_bytes: int = 0
    kept_bytes: int = 0
    gradient_bytes: int = 0
    step_bytes: int = 0
    first_step_bytes: int = 0
    step_name: str = ""
    notes: tuple[str, ...] = ()

    @property
    def resident_bytes(self) -> int:
        """Comes off the graphs' budget."""
        return sum(self.resident.values())

    def with_kept(self, kept_bytes: int) -> SurroundingBytes:
        """The same with gradients that exist and are kept."""
        resident = {name: size for name, size in self.resident.items() if name != KEPT}
        if kept_bytes:
            resident[KEPT] = kept_bytes
        present_bytes = self.present_bytes - self.kept_bytes + kept_bytes
        return replace(self, resident=resident, present_bytes=present_bytes, kept_bytes=kept_bytes)

    def in_step_bytes(self, around_bytes: int) -> int:
        """The most that is held inside of ``optimizer.step()``; 0 where none is counted.

        Args:
            around_bytes: constants and results of the graphs.
        """
        return around_bytes + self.gradient_bytes + self.step_bytes if self.step_name else 0

    def in_first_step_bytes(self, around_bytes: int) -> int:
        """`in_step_bytes` of the next step alone."""
        return around_bytes + self.gradient_bytes + self.first_step_bytes if self.step_name else 0

    def whole_bytes(self, peak_bytes: int, around_bytes: int) -> int:
        """What the whole step holds if its graphs hold ``peak_bytes``; shares are of this.

        Gradients that are kept do not make a share larger: a step does not begin with them.
        """
        own_bytes = self.resident_bytes - self.kept_bytes
        return max(peak_bytes + own_bytes, self.in_step_bytes(around_bytes))

    def check(self, budget_bytes: int, around_bytes: int, graphs_need_bytes: int = 0) -> None:
        """Hold what is there inside of ``optimizer.step()`` to the budget.

        Args:
            graphs_need_bytes: the smallest budget of the graphs, which is above this one too.

        Raises:
            InfeasibleBudgetError: which names what it needs, if that is no less than the graphs
                need.
        """
        held_bytes = self.in_step_bytes(around_bytes)
        if held_bytes <= budget_bytes or held_bytes < graphs_need_bytes:
            return
        own = [*self.resident.items(), ("gradients", self.gradient_bytes)]
        raise InfeasibleBudgetError(
            budget_bytes,
            minimum_bytes=held_bytes,
            operator=self.step_name,
            largest=sorted(own, key=lambda item: (-item[1], item[0]))[:5],
            advice=_TEMPORARIES,
        )


NO_SURROUNDINGS = SurroundingBytes()


class KeptGradients:
    """The gradients that a graph's parameters have before it is called.

    Looked at before each call, so that is some nanoseconds for each parameter.
    """

    def __init__(self) -> None:
        # Which inputs are parameters never changes; which parameters those are may, if one graph
        # runs for several blocks of a model.
        self.inputs: list[tuple[int, int]] | None = None
        self.seen: dict[int, list[weakref.ref[torch.Tensor]]] = {}
        # What was there before the last call.
        self.last_bytes = 0

    def bytes_of(self, args: Sequence[Any]) -> int:
        """Bytes of the gradients that exist."""
        if self.inputs is None:
            self.inputs = [
                (i, a.numel() * a.element_size())
                for i, a in enumerate(args)
                if isinstance(a, nn.Parameter) and a.requires_grad
            ]
        if not self.inputs:
            return 0
        first = id(args[self.inputs[0][0]])
        if first not in self.seen:
            self.seen[first] = [weakref.ref(args[i]) for i, _ in self.inputs]
        return sum(size for i, size in self.inputs if args[i].grad is not None)

    def of(self, args: Sequence[Any]) -> list[torch.Tensor]:
        """The parameters among the inputs of a call."""
        return [args[i] for i, _ in self.inputs or ()]

    @property
    def are_gone(self) -> bool:
        """Whether the parameters that it was called with do not exist any more: so the model does
        not, and nobody will call the graph again, though Dynamo keeps it."""
        return bool(self.inputs) and not self.parameters()

    def parameters(self) -> list[torch.Tensor]:
        """All that it was called with, as far as they exist."""
        self.seen = {key: refs for key, refs in self.seen.items() if refs[0]() is not None}
        return [p for refs in self.seen.values() for ref in refs if (p := ref()) is not None]


class OptimizerSteps:
    """How many steps optimizers have taken since this was made."""

    def __init__(self) -> None:
        self.count = 0
        counter = weakref.ref(self)

        @untraced
        def hook(_optimizer: Optimizer, _args: object, _kwargs: object) -> None:
            if torch.compiler.is_compiling():  # an optimizer's step of the user's
                return
            steps = counter()
            if steps is not None:
                steps.count += 1

        weakref.finalize(self, register_optimizer_step_post_hook(hook).remove)


class Surroundings:
    """What lies beside the graphs of one ledger.

    Attributes:
        current: what is known now; graphs that were planned for less have to make room.
        changes: how often that changed.
    """

    def __init__(self, options: Options) -> None:
        self.options = options
        self.lock = threading.RLock()
        self.device = torch.device("cpu")
        self.given: dict[int, weakref.ref[Any]] = {}
        self.read: dict[int, weakref.ref[torch.Tensor]] = {}
        self.groups: list[weakref.ref[Any]] = []  # of parameters that FSDP2 shards
        self.current = NO_SURROUNDINGS
        self.changes = 0
        self.counted: weakref.WeakKeyDictionary[Optimizer, tuple[_Form, StepBytes]] = (
            weakref.WeakKeyDictionary()
        )

    @contextmanager
    def seeing(
        self, parameters: Iterable[torch.Tensor], device: torch.device, options: Options
    ) -> Iterator[None]:
        """Around the first compilation of a graph that reads these parameters.

        If that fails, nothing of it is remembered: it must not be in the way of other graphs.

        Args:
            options: the graph's; its optimizer may be another one than the ledger's first.

        Raises:
            UnknownOptimizerError: as `look`.
        """
        given = {id(o): weakref.ref(o) for o in options.optimizer.alive()}
        read = {id(p): weakref.ref(p) for p in parameters}
        with self.lock:
            # An address may be another object's by now.
            added_given = {k: r for k, r in given.items() if self.given.get(k) is not r}
            added_read = {k: r for k, r in read.items() if self.read.get(k) is not r}
            self.given |= given
            self.read |= read
            if device.type != "cpu":
                self.device = device
        try:
            self.look()
            yield
        except BaseException:
            with self.lock:
                self.given = {k: r for k, r in self.given.items() if k not in added_given}
                self.read = {k: r for k, r in self.read.items() if k not in added_read}
            raise

    def kept_bytes(self, parameters: Iterable[torch.Tensor]) -> int:
        """Bytes of the gradients of ``parameters`` that exist."""
        gradients = [("", p.grad) for p in parameters if p.grad is not None]
        return sum(storage_bytes(gradients, self.device, self.allocator).values())

    def shard_gradient_bytes(self) -> Mapping[int, int]:
        """``id`` of each whole parameter of a sharded model -> what is kept of its gradient."""
        groups = [group for ref in self.groups if (group := ref()) is not None]
        return shard_gradient_bytes(groups, self.allocator.block_bytes)

    def alive(self) -> list[torch.Tensor]:
        """Leaf tensors that graphs read."""
        found = [(key, t) for key, ref in list(self.read.items()) if (t := ref()) is not None]
        self.read = {key: self.read[key] for key, _ in found}
        return [t for _, t in found]

    @property
    def allocator(self) -> Any:
        """What a storage counts as, in the same way as for the graphs."""
        return EXACT if self.options.compiler == "eager" else allocator_of(self.device)

    def look(self) -> None:
        """Look for optimizers, modules and buffers, and count what they hold now.

        Raises:
            UnknownOptimizerError: if an optimizer's step cannot be counted.
        """
        with self.lock:
            found = self._found()
            if found != self.current:
                self.current = found
                self.changes += 1

    def _found(self) -> SurroundingBytes:
        read = self.alive()
        seen = {t.untyped_storage()._cdata for t in map(local, read) if _has_storage(t)}
        trained = {id(p): p for p in read if p.requires_grad and isinstance(p, nn.Parameter)}
        resident: dict[str, int] = {}
        notes: list[str] = []
        objects = [o for ref in self.given.values() if (o := ref()) is not None]
        optimizers = {id(o): o for o in map(innermost, _only(Optimizer, objects))}
        if self.options.finds_optimizers:
            found = self._optimizers_of(trained)
            optimizers.update({id(o): o for o in found})
            if not optimizers:
                notes.append(_NONE_FOUND)
        present_bytes = 0
        counts = []
        for optimizer in optimizers.values():
            name = type(optimizer).__name__
            others = [p for p in parameters_of(optimizer) if id(p) not in self.read]
            named = ((_name_of(p, trained.values(), name), p) for p in others)
            for label, size_bytes in self._bytes(named, seen).items():
                resident[label] = resident.get(label, 0) + size_bytes
                present_bytes += size_bytes
            trained.update({id(p): p for p in parameters_of(optimizer) if p.requires_grad})
            counted = self._count(optimizer)
            counts.append((name, counted))
            present_bytes += counted.present_bytes
            for key, size_bytes in counted.state.items():
                label = f"{name}'s {key}"
                resident[label] = resident.get(label, 0) + size_bytes
            if counted.is_guess:
                notes.append(f"what {name} holds depends on values; the most is counted")
        for module in _only(nn.Module, objects):
            label = type(module).__name__
            tensors = ((label, t) for t in [*module.parameters(), *module.buffers()])
            for label, size_bytes in self._bytes(tensors, seen).items():
                resident[label] = resident.get(label, 0) + size_bytes
                present_bytes += size_bytes
        groups = sharded_groups(self.read, self.device)
        self.groups = list(map(weakref.ref, groups))
        for label, size_bytes in self._bytes(shards(groups), seen).items():
            resident[label] = size_bytes
            present_bytes += size_bytes
        buckets = bucket_bytes(self.read, self.device, self.allocator.block_bytes)
        resident |= buckets
        present_bytes += sum(buckets.values())
        steady_bytes = sum(resident.values())
        name, step, first = max(
            (
                (
                    name,
                    steady_bytes - c.state_bytes + c.most_bytes,
                    steady_bytes - c.state_bytes + c.present_bytes + c.first_peak_bytes,
                )
                for name, c in counts
            ),
            key=lambda item: item[1],
            default=("", 0, 0),
        )
        # FSDP2's buffers come and go between the graphs, and none is left when an optimizer steps.
        resident |= communication_bytes(groups, self.read, self.allocator.block_bytes)
        return SurroundingBytes(
            resident,
            present_bytes,
            0,
            sum(map(self._gradient_bytes, trained.values())),
            step,
            first,
            f"{name}.step" if name else "",
            tuple(notes),
        )

    def _bytes(self, named: Iterable[tuple[str, torch.Tensor]], seen: set[int]) -> dict[str, int]:
        return storage_bytes(named, self.device, self.allocator, seen)

    def _gradient_bytes(self, parameter: torch.Tensor) -> int:
        part = local(parameter)
        if part.device.type != self.device.type:
            return 0
        size_bytes: int = self.allocator.block_bytes(part.numel() * part.element_size())
        return size_bytes

    def _count(self, optimizer: Optimizer) -> StepBytes:
        """Counted again only if it has other parameters or state than before."""
        form = self._form(optimizer)
        known = self.counted.get(optimizer)
        if known is None or known[0] != form:
            known = self.counted[optimizer] = (
                form,
                step_bytes(optimizer, self.device, self.allocator),
            )
        return known[1]

    def _optimizers_of(self, trained: Mapping[int, torch.Tensor]) -> list[Optimizer]:
        """Live optimizers of these parameters; where parameters are sharded, of any on the device.

        (The graphs of a sharded model read whole parameters, which no optimizer knows.)
        """
        live = [
            innermost(item)
            for item in gc.get_objects()
            if issubclass(type(item), Optimizer) and "param_groups" in vars(item)
        ]
        of_graphs = [o for o in live if any(id(p) in trained for p in parameters_of(o))]
        return of_graphs or [
            o
            for o in live
            if any(
                local(p) is not p and p.device.type == self.device.type for p in parameters_of(o)
            )
        ]

    def is_news(self, optimizer: Optimizer) -> bool:
        """Whether an optimizer that is about to step should have been counted, as it is now."""
        known = self.counted.get(optimizer)
        if known is not None:
            return known[0] != self._form(optimizer, known[0][1])
        if any(ref() is optimizer for ref in self.given.values()):
            return True
        read = {id(t) for t in self.alive()} if self.options.finds_optimizers else set()
        return any(id(p) in read for p in parameters_of(optimizer))

    def _form(self, optimizer: Optimizer, states: int | None = None) -> _Form:
        """What its bytes depend on, as far as that changes."""
        groups = tuple(len(group["params"]) for group in optimizer.param_groups)
        return groups, len(optimizer.state) if states is None else states, str(self.device)


_Form: TypeAlias = tuple[tuple[int, ...], int, str]


def before_steps(of: weakref.ref[Any], look: Callable[[Any, Optimizer], None]) -> None:
    """Call ``look(owner, optimizer)`` before each optimizer's steps, as long as its owner lives."""

    @untraced
    def hook(optimizer: Optimizer, _args: object, _kwargs: object) -> None:
        if torch.compiler.is_compiling():
            return
        owner = of()
        if owner is not None:
            look(owner, innermost(optimizer))

    handle = register_optimizer_step_pre_hook(hook)
    weakref.finalize(of(), handle.remove)


def _only(kind: Any, objects: Iterable[Any]) -> list[Any]:
    return [o for o in objects if isinstance(o, kind)]


def _has_storage(tensor: torch.Tensor) -> bool:
    return tensor.layout is torch.strided


def _name_of(parameter: torch.Tensor, read: Iterable[torch.Tensor], optimizer: str) -> str:
    """What a parameter of an optimizer is that no graph reads."""
    is_master = any(
        p.shape == parameter.shape and p.element_size() < parameter.element_size() for p in read
    )
    return "master weights" if is_master else f"other parameters of {optimizer}"
