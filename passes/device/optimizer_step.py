"""What ``optimizer.step()`` holds: the optimizer's own code, run on fake tensors.

An optimizer's state does not exist before its first step, and its temporaries (the lists of the
``foreach`` implementations, the squares of Adafactor) exist only inside one.  Neither is in any
compiled graph.  So a copy of the optimizer, its hyperparameters kept and its tensors replaced by
fake ones, takes its first steps here, and every storage that it allocates is counted until it dies.
The user's parameters, gradients and state are not touched: a real tensor that reaches an operator
raises.

Hyperparameters that are tensors, and counts of steps, are computed for real beside the fake ones,
because optimizers read them.  Other values that an optimizer reads (``param.norm().item()``) are
taken to be one; conditions on them are taken to be all true, then all false.

On the CPU, what an operator holds inside is measured, down to the eight bytes of a number that is
made a tensor; on CUDA, as for compiled graphs, that of library calls.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
import sys
import types
from collections import OrderedDict, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.weak import WeakTensorKeyDictionary

from dtrcompile.passes.device.allocators import EXACT, Allocator
from dtrcompile.passes.device.workspaces import measured_workspace_bytes, workspace_bytes
from dtrcompile.passes.errors import UnknownOptimizerError
from dtrcompile.passes.torch_private import (
    FakeTensor,
    FakeTensorMode,
    disable_modes,
    functorch_config,
    optimizer_module,
)

# Far enough for anything that begins after some steps (RAdam's sixth), and exact in float32.
_MANY_STEPS = 10_000_000
_PRIVATE_HOOKS = (
    "_optimizer_step_pre_hooks",
    "_optimizer_step_post_hooks",
)


@dataclass(frozen=True, slots=True)
class Request:
    """Memory that a step asks for, or gives back.

    Attributes:
        serial: of what is held; the same where it is given back.
        size_bytes: None where it is given back.
    """

    serial: int
    size_bytes: int | None


@dataclass(frozen=True, slots=True)
class StepBytes:
    """What an optimizer holds beside parameters and gradients.

    Attributes:
        state: name in the optimizer's state -> bytes, once there is all of it.
        present_bytes: of the state, what is there already.
        first_peak_bytes: the most that the next step allocates, new state included.
        later_peak_bytes: the same of any step after it, when all state is there.
        is_guess: a step branches on a value that is not known beforehand.
    """

    state: Mapping[str, int]
    present_bytes: int
    first_peak_bytes: int
    later_peak_bytes: int
    is_guess: bool = False

    @property
    def state_bytes(self) -> int:
        """All state, present and to come."""
        return sum(self.state.values())

    @property
    def most_bytes(self) -> int:
        """The most beside parameters and gradients in any step, state included."""
        return max(
            self.present_bytes + self.first_peak_bytes, self.state_bytes + self.later_peak_bytes
        )


def step_bytes(
    optimizer: torch.optim.Optimizer, device: torch.device, allocator: Allocator
) -> StepBytes:
    """Count what the optimizer's steps hold on ``device``, without taking one.

    Every parameter that requires a gradient is taken to have one.

    Raises:
        UnknownOptimizerError: if its ``step`` cannot be run on fake tensors.
    """
    first = _Run(optimizer, device, allocator, True).count()
    if not first.is_guess:
        return first
    second = _Run(optimizer, device, allocator, False).count()
    return StepBytes(
        first.state if first.state_bytes >= second.state_bytes else second.state,
        first.present_bytes,
        max(first.first_peak_bytes, second.first_peak_bytes),
        max(first.later_peak_bytes, second.later_peak_bytes),
        is_guess=True,
    )


def step_requests(
    optimizer: torch.optim.Optimizer, device: torch.device
) -> tuple[Sequence[Request], Sequence[Request]]:
    """What the allocator of ``device`` is asked for in the first step, and in any later one.

    Raises:
        UnknownOptimizerError: if its ``step`` cannot be run on fake tensors.
    """
    run = _Run(optimizer, device, EXACT, True)
    run.counting.records = True
    run.count()
    return tuple(run.requests[0]), tuple(run.requests[1])


def innermost(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """The optimizer that another, such as Accelerate's, wraps."""
    while isinstance(inner := vars(optimizer).get("optimizer"), torch.optim.Optimizer):
        optimizer = inner
    return optimizer


def state_tensors(optimizer: torch.optim.Optimizer) -> Iterator[tuple[str, torch.Tensor]]:
    """Each tensor of the state, by the name that the optimizer gives it.

    What is not filed under a parameter has the name of its key.
    """
    for key, value in optimizer.state.items():
        if not isinstance(key, torch.Tensor):
            yield from ((str(key), t) for t in _tensors(value))
        elif isinstance(value, Mapping):
            for name, item in value.items():
                yield from ((str(name), t) for t in _tensors(item))
        else:
            yield from (("state", t) for t in _tensors(value))


def storage_bytes(
    named: Iterable[tuple[str, torch.Tensor]],
    device: torch.device,
    allocator: Allocator,
    seen: set[int] | None = None,
) -> dict[str, int]:
    """Name -> bytes of the storages on ``device``, each of which counts once.

    Args:
        seen: addresses of storages that were counted elsewhere; what is counted here joins them.
    """
    seen = set() if seen is None else seen
    sizes: dict[str, int] = {}
    for name, tensor in named:
        tensor = local(tensor)
        if not _is_on(tensor, device) or tensor.layout is not torch.strided:
            continue
        storage = tensor.untyped_storage()
        if storage._cdata not in seen:
            seen.add(storage._cdata)
            sizes[name] = sizes.get(name, 0) + allocator.block_bytes(storage.nbytes())
    return sizes


def local(tensor: torch.Tensor) -> torch.Tensor:
    """The part of a distributed tensor that is on this rank; any other as it is."""
    distributed = sys.modules.get("torch.distributed.tensor")
    if distributed is not None and isinstance(tensor, distributed.DTensor):
        return tensor.to_local().detach()
    return tensor


def _is_on(tensor: torch.Tensor, device: torch.device) -> bool:
    return tensor.device.type == device.type and (
        device.index is None or tensor.device.index == device.index
    )


def _tensors(value: object) -> list[torch.Tensor]:
    """Tensors in containers of any depth."""
    return [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, torch.Tensor)]


@contextlib.contextmanager
def as_outside_of_a_compilation(device: torch.device) -> Iterator[None]:
    """Where the user calls ``step``: optimizers take another way while they are compiled."""
    with (
        disable_modes(),
        torch.inference_mode(False),
        torch.autocast(device.type, enabled=False),
        mock.patch.object(torch.compiler, "_is_compiling_flag", False),
    ):
        yield


class _Run:
    """A copy of an optimizer on fake tensors, that takes steps.

    Args:
        condition: what conditions on unknown values are taken to be.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        device: torch.device,
        allocator: Allocator,
        condition: bool,
    ) -> None:
        self.real = innermost(optimizer)
        self.device = device
        self.allocator = allocator
        # A foreign kernel that asks for an address is to be told that there is none.
        with functorch_config.patch(fake_tensor_allow_unsafe_data_ptr_access=False):
            self.mode = FakeTensorMode(allow_non_fake_inputs=False)
        self.values = WeakTensorKeyDictionary()
        self.requests: list[list[Request]] = []  # of each step, where they are recorded
        self.counting = _Counting(device, allocator, self.values, condition)

    def count(self) -> StepBytes:
        name = type(self.real).__name__
        try:
            with as_outside_of_a_compilation(self.device):
                return self._count()
        except UnknownOptimizerError:
            raise
        except Exception as error:
            text = f"{type(error).__name__}: {error}".split("\n", 1)[0]
            raise UnknownOptimizerError(name, text) from error

    def _count(self) -> StepBytes:
        present = storage_bytes(state_tensors(self.real), self.device, self.allocator)
        with torch.no_grad():
            copied = _Copy(self.mode, self.values, self.real)
            fake = copied.optimizer
        self.step(fake)
        first_peak_bytes = self.counting.peak_bytes
        state = self.state_of(fake)
        self.requests.append(self.counting.requests)
        self.step(fake)
        later_peak_bytes = self.counting.peak_bytes
        self.requests.append(self.counting.requests)
        self.skip_steps(fake)
        self.step(fake)
        later_peak_bytes = max(later_peak_bytes, self.counting.peak_bytes)
        return StepBytes(
            state,
            sum(present.values()),
            first_peak_bytes,
            later_peak_bytes,
            self.counting.is_guess,
        )

    def step(self, fake: torch.optim.Optimizer) -> None:
        """One step; its peak is then `counting`'s.

        The hooks around a step are the user's, so they are left out, and with them what turns
        gradients off.
        """
        step = inspect.unwrap(type(fake).step)
        self.counting.start()
        types_ = list(optimizer_module._foreach_supported_types)
        if all(type(p) in (*types_, FakeTensor) for p in parameters_of(self.real)):
            types_.append(FakeTensor)
        with (
            torch.set_grad_enabled(bool(fake.defaults.get("differentiable", False))),
            mock.patch.object(optimizer_module, "_foreach_supported_types", types_),
            mock.patch.object(self.mode, "cache_enabled", False),
            self.mode,
            self.counting,
        ):
            step(fake)
        for parameter in parameters_of(fake):  # some optimizers drop or replace gradients
            if parameter.requires_grad and parameter.grad is None:
                with self.mode:
                    parameter.grad = torch.empty_like(parameter)

    def state_of(self, fake: torch.optim.Optimizer) -> dict[str, int]:
        parameters = {p.untyped_storage()._cdata for p in parameters_of(fake)}
        return storage_bytes(state_tensors(fake), self.device, self.allocator, parameters)

    def skip_steps(self, fake: torch.optim.Optimizer) -> None:
        """Let the optimizer believe that it has taken many steps."""
        for value in fake.state.values():
            step = value.get("step") if isinstance(value, dict) else None
            if isinstance(step, torch.Tensor) and step in self.values:
                with torch.no_grad():
                    self.values[step].add_(_MANY_STEPS)
            elif isinstance(step, (int, float)):
                value["step"] = step + _MANY_STEPS


def parameters_of(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """All of its parameters, in order."""
    return [p for group in optimizer.param_groups for p in group["params"]]


class _Copy:
    """A copy of an optimizer whose tensors are fake.

    Attributes:
        optimizer: the copy.
    """

    def __init__(
        self, mode: FakeTensorMode, values: WeakTensorKeyDictionary, real: torch.optim.Optimizer
    ) -> None:
        self.mode = mode
        self.values = values
        self.fakes: dict[int, torch.Tensor] = {}
        for parameter in parameters_of(real):
            self.add_parameter(parameter)
        self.optimizer = self.copied(real)

    def add_parameter(self, parameter: torch.Tensor) -> None:
        fake = self.empty_like(local(parameter))
        if isinstance(parameter, torch.nn.Parameter):
            fake = torch.nn.Parameter(fake, requires_grad=parameter.requires_grad)
        else:
            fake.requires_grad_(parameter.requires_grad)
        if fake.requires_grad:
            with self.mode:
                fake.grad = torch.empty_like(fake)
        self.fakes[id(parameter)] = fake

    def copied(self, real: torch.optim.Optimizer) -> torch.optim.Optimizer:
        fake: torch.optim.Optimizer = object.__new__(type(real))
        for name, value in vars(real).items():
            if name in _PRIVATE_HOOKS:
                vars(fake)[name] = OrderedDict()
            elif isinstance(value, types.MethodType) and value.__self__ is real:
                vars(fake)[name] = types.MethodType(value.__func__, fake)
            elif name != "step":  # schedulers put a function around it that steps the real one
                vars(fake)[name] = self.value_of(value, name)
        return fake

    def value_of(self, value: Any, name: str) -> Any:
        """A copy with fake tensors.

        Raises:
            UnknownOptimizerError: for an object that cannot be copied.
        """
        match value:
            case torch.Tensor():
                return self.tensor_of(value)
            case defaultdict():
                copied: defaultdict[Any, Any] = defaultdict(value.default_factory)
                copied.update(self.items_of(value, name))
                return copied
            case dict():
                return type(value)(self.items_of(value, name))
            case list() | set() | frozenset():
                return type(value)(self.value_of(item, name) for item in value)
            case tuple():
                items = [self.value_of(item, name) for item in value]
                is_named = type(value) is not tuple
                return type(value)(*items) if is_named else tuple(items)
            case types.ModuleType() | type() | types.FunctionType() | functools.partial():
                return value
        try:
            return copy.deepcopy(value)
        except Exception as error:
            raise UnknownOptimizerError(
                type(value).__name__, f"its attribute {name!r} cannot be copied: {error}"
            ) from error

    def items_of(self, value: Mapping[Any, Any], name: str) -> Iterator[tuple[Any, Any]]:
        for key, item in value.items():
            key_copy = self.tensor_of(key) if isinstance(key, torch.Tensor) else key
            yield key_copy, self.value_of(item, key if isinstance(key, str) else name)

    def tensor_of(self, real: torch.Tensor) -> torch.Tensor:
        if id(real) not in self.fakes:
            of_rank = local(real)
            fake = self.empty_like(of_rank)
            if real.requires_grad and real.is_leaf:
                fake.requires_grad_()
            if of_rank.numel() == 1:
                self.values[fake] = of_rank.detach().cpu().clone()
            self.fakes[id(real)] = fake
        return self.fakes[id(real)]

    def empty_like(self, real: torch.Tensor) -> torch.Tensor:
        known = (torch.Tensor, torch.nn.Parameter, FakeTensor)
        if type(real) not in known or real.layout != torch.strided:
            raise UnknownOptimizerError(
                "the optimizer", f"it holds a tensor of type {type(real).__name__}, {real.layout}"
            )
        with self.mode:
            return torch.empty_strided(
                real.shape, real.stride(), dtype=real.dtype, device=real.device
            )


class _Counting(TorchDispatchMode):
    """Counts live storages over a step, each from its allocation to its end.

    Attributes:
        peak_bytes: the most since `start`, above what was live then.
        is_guess: a value was read that is not known.
        records: each request is recorded, in the order in which the allocator gets it.
        requests: since `start`; what is then still there belongs to the state.
    """

    def __init__(
        self,
        device: torch.device,
        allocator: Allocator,
        values: WeakTensorKeyDictionary,
        condition: bool,
    ) -> None:
        super().__init__()
        self.device = device
        self.allocator = allocator
        self.values = values
        self.condition = condition
        self.is_guess = False
        self.known: dict[int, StorageWeakRef] = {}
        self.live: dict[int, tuple[StorageWeakRef, int]] = {}
        self.live_bytes = self.peak_bytes = 0
        self.records = False
        self.requests: list[Request] = []
        self._serials: dict[int, int] = {}

    def start(self) -> None:
        """A step begins; what is there counts no more."""
        self.drop_dead()
        self.known.update({key: ref for key, (ref, _) in self.live.items()})
        self.known = {key: ref for key, ref in self.known.items() if not ref.expired()}
        self.live.clear()
        self.live_bytes = self.peak_bytes = 0
        self.requests = []
        self._serials.clear()

    def drop_dead(self) -> None:
        for key in [key for key, (ref, _) in self.live.items() if ref.expired()]:
            self.drop(key)

    def drop(self, key: int) -> None:
        self.live_bytes -= self.live.pop(key)[1]
        if self.records:
            self.requests.append(Request(self._serials.pop(key), None))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.ops.aten._local_scalar_dense.default:
            return self.value_of(args[0])
        given = _tensors((args, kwargs))
        for tensor in given:
            self.remember(tensor)
        # What only writes over its arguments allocates nothing that outlives it; fused kernels
        # have no fake ones.
        result = func(*args, **kwargs) if func._schema.returns else None
        for tensor in _tensors(result):
            self.allocate(tensor)
        inside_bytes = self.workspace(func, args, kwargs, result)
        if inside_bytes:
            self.use(inside_bytes)
        self.follow(func, args, kwargs, given, result)
        return result

    def remember(self, tensor: torch.Tensor) -> None:
        """An argument that was not allocated here was there before."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self.live and not self.live[key][0].expired():
            return
        self.known[key] = StorageWeakRef(storage)

    def allocate(self, tensor: torch.Tensor) -> None:
        if not _is_on(tensor, self.device) or tensor.layout is not torch.strided:
            return
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self.known:
            if not self.known[key].expired():
                return
            del self.known[key]
        if key in self.live:
            if not self.live[key][0].expired():
                return
            self.drop(key)
        size_bytes = self.allocator.block_bytes(storage.nbytes())
        self.live[key] = (StorageWeakRef(storage), size_bytes)
        self.live_bytes += size_bytes
        if self.records:
            self.drop_dead()
            self._serials[key] = len(self.requests)
            self.requests.append(Request(len(self.requests), storage.nbytes()))
        self.use(0)

    def use(self, size_bytes: int) -> None:
        """Look at what is live, with ``size_bytes`` more; the dead are dropped if that matters."""
        if self.live_bytes + size_bytes > self.peak_bytes:
            self.drop_dead()
            self.peak_bytes = max(self.peak_bytes, self.live_bytes + size_bytes)

    def workspace(
        self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any
    ) -> int:
        """What an operator holds inside, beside what it takes and returns."""
        if self.device.type != "cpu":
            is_list = "_foreach_" in func._schema.name or not func._schema.returns
            return 0 if is_list else workspace_bytes(func, args, kwargs, result)
        if any(isinstance(arg, (list, tuple)) and _tensors(arg) for arg in args):
            singles = _one_by_one(args, result)
            return max(
                (measured_workspace_bytes(func, a, kwargs, r) for a, r in singles), default=0
            )
        return measured_workspace_bytes(func, args, kwargs, result)

    # Numbers that the optimizer reads

    def follow(
        self,
        func: Any,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        given: Sequence[torch.Tensor],
        result: Any,
    ) -> None:
        """Compute for real what follows from known numbers alone; forget what does not."""
        results = _tensors(result)
        known = [t for t in given if t in self.values or not isinstance(t, FakeTensor)]
        is_small = all(t.numel() == 1 for t in results)
        if not is_small or len(known) < len(given) or not (given or results):
            for argument, value in zip(func._schema.arguments, args, strict=False):
                if argument.alias_info is not None and argument.alias_info.is_write:
                    for tensor in _tensors(value):
                        self.values.pop(tensor, None)
            return
        real_args, real_kwargs = pytree.tree_map(self.real_of, (tuple(args), dict(kwargs)))
        with disable_modes(), torch.no_grad():
            computed = _tensors(func(*real_args, **real_kwargs))
            # (What is lifted may be a constant of the optimizer's own.)
            computed = [t.clone() for t in computed] if func in _LIFTS else computed
        for fake, real in zip(results, computed, strict=True):
            if fake not in self.values:
                self.values[fake] = real

    def real_of(self, leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor):
            return self.values.get(leaf, leaf)
        return torch.device("cpu") if isinstance(leaf, torch.device) else leaf

    def value_of(self, tensor: torch.Tensor) -> Any:
        value = self.values.get(tensor)
        if value is not None:
            with disable_modes():
                return value.item()
        self.is_guess = True
        if tensor.dtype is torch.bool:
            return self.condition
        return 1.0 if tensor.dtype.is_floating_point else 1


_LIFTS = (torch.ops.aten.lift_fresh.default, torch.ops.aten.lift_fresh_copy.default)


def _one_by_one(args: Sequence[Any], result: Any) -> list[tuple[tuple[Any, ...], Any]]:
    """The arguments of an operator on lists, one tensor of each list at a time, each form once."""
    lengths = [len(a) for a in args if isinstance(a, (list, tuple)) and _tensors(a)]
    length = max(lengths, default=0)
    singles: dict[object, tuple[tuple[Any, ...], Any]] = {}
    for i in range(length):

        def pick(value: Any, i: int = i) -> Any:
            if isinstance(value, (list, tuple)) and len(value) == length:
                return [value[i]]
            # Scalars, one for each, may be one tensor.
            is_scalars = isinstance(value, torch.Tensor) and value.shape == (length,)
            return value[i : i + 1] if is_scalars else value

        picked = tuple(pick(a) for a in args)
        form = tuple((t.shape, t.stride(), t.dtype) for t in _tensors(picked))
        singles.setdefault(form, (picked, pick(result)))
    return list(singles.values())
