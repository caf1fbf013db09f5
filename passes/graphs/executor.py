"""The eager executor: runs an emitted graph call by call and counts bytes as it runs.

The reference for `emit`, not a fast way to train.  After each step of the plan it sums the sizes of
the storages that are really there, and keeps the sums beside what the referee predicted.

Counted are the values that the program knows as storages; values inside a cone live for one step
here and never exist under Inductor, so they are not.  Random numbers are drawn from the graph's
saved seeds, so that a recomputed dropout mask is the same mask; numbers differ from Inductor's.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import sympy
import torch
from torch import fx

from dtrcompile.passes.device.workspaces import without_unasked
from dtrcompile.passes.errors import VerificationError
from dtrcompile.passes.graphs.emit import free
from dtrcompile.passes.nodes import Role, extent_bytes, is_sequence, mark_of, role
from dtrcompile.passes.program.sizes import Sizes, at_sizes
from dtrcompile.passes.torch_private import below_views

prims = torch.ops.prims


@dataclass(frozen=True)
class ExecutorRecord:
    """One run of one graph.

    Attributes:
        phase: "forward", "backward" or "inference".
        steps: indices of the plan's steps at which bytes were counted.
        counted_bytes, predicted_bytes: one entry a step, equal where all is well.
        is_sized: whether the graph's symbolic sizes, if any, can be told from its inputs; without
            them there is no prediction for this run.
        mistraced: operators of the graph whose fake kernel reports another size than the real one
            allocates; where there is one, counted and predicted may differ by what it is off.
    """

    phase: str
    steps: tuple[int, ...]
    counted_bytes: tuple[int, ...]
    predicted_bytes: tuple[int, ...]
    is_sized: bool = True
    mistraced: tuple[str, ...] = ()


@dataclass(frozen=True)
class Predicted:
    """What the referee says of one graph's run.

    Attributes:
        during_bytes: plan step -> bytes held during it, workspace included.
        elsewhere_bytes: bytes of the program's storages that are resident throughout but are no
            input of this graph (inputs that only the other graph takes, forward's outputs).
    """

    during_bytes: Mapping[int, int]
    elsewhere_bytes: int


@dataclass
class _Log:
    lock: threading.Lock = field(default_factory=threading.Lock)
    records: deque[ExecutorRecord] = field(default_factory=lambda: deque(maxlen=256))


_LOG = _Log()


def executor_log() -> list[ExecutorRecord]:
    """The latest runs, oldest first (at most 256)."""
    with _LOG.lock:
        return list(_LOG.records)


def clear_executor_log() -> None:
    """Forget the runs so far."""
    with _LOG.lock:
        _LOG.records.clear()


def _seeded_random(
    size: Sequence[int], seed: torch.Tensor, mode: str, *, offset: int = 0
) -> torch.Tensor:
    generator = torch.Generator(device=seed.device)
    generator.manual_seed((int(seed.item()) + offset) % 2**63)
    draw: Callable[..., torch.Tensor] = getattr(torch, mode)
    return draw(list(size), generator=generator, device=seed.device)


def _seeded_randint(
    low: int, high: int, size: Sequence[int], seed: torch.Tensor, *, offset: int = 0
) -> torch.Tensor:
    generator = torch.Generator(device=seed.device)
    generator.manual_seed((int(seed.item()) + offset) % 2**63)
    return torch.randint(low, high, list(size), generator=generator, device=seed.device)


def _is_mistraced(node: fx.Node) -> bool:
    """Known disagreements between torch 2.13's fake and CPU kernels."""
    if str(node.target).startswith("aten._embedding_bag"):
        return True  # max_indices and bag_size, which backward receives, are shorter in the trace
    val = node.meta.get("val")
    # Clones the whole storage of a partial view, which the trace may not know.
    return (
        node.target in (torch.ops.aten.copy.default, torch.ops.aten.slice_scatter.default)
        and isinstance(val, torch.Tensor)
        and val.dtype.is_complex
    )


_OWN_KERNELS: dict[object, Callable[..., object]] = {
    prims.inductor_random.default: _seeded_random,
    prims.inductor_randint.default: _seeded_randint,
}


class EagerExecutor:
    """Callable with AOTAutograd's boxed convention: takes a list of inputs, clears it.

    Args:
        gm: an emitted graph, frees included.
        phase: for the records.
        predict: what is to be expected at the values of the graph's symbols; None: at the hints.
        constants: storage ids of constants, counted by extent as the program does.
    """

    def __init__(
        self,
        gm: fx.GraphModule,
        *,
        phase: str,
        predict: Callable[[Sizes | None], Predicted],
        constants: frozenset[int],
    ) -> None:
        # AOTAutograd's mark for "takes a list"; on the instance, where functools.wraps finds it.
        self._boxed_call = True
        self.gm = gm
        self.phase = phase
        self.predict = predict
        self.predicted: dict[Sizes | None, Predicted] = {}
        self.constants = constants
        self.nodes = list(gm.graph.nodes)
        self.symbols = _symbols(self.nodes)
        self.dies_at = self._last_uses()
        self.mistraced = tuple(n.name for n in self.nodes if _is_mistraced(n))

    def _last_uses(self) -> list[list[fx.Node]]:
        """For each node index, what is dropped after it: values that are no storage's owner."""
        last: dict[fx.Node, int] = {}
        for index, node in enumerate(self.nodes):
            last.setdefault(node, index)
            for n in node.all_input_nodes:
                last[n] = index
        dies: list[list[fx.Node]] = [[] for _ in self.nodes]
        for node, index in last.items():
            if mark_of(node).storage is None:
                dies[index].append(node)
        return dies

    def __call__(self, args: list[object]) -> tuple[object, ...]:
        env: dict[fx.Node, object] = {}
        sizes = self._sizes(args)
        if sizes not in self.predicted:
            self.predicted[sizes] = self.predict(sizes)
        predicted = self.predicted[sizes]
        inputs = args[::-1]
        args.clear()
        owners: dict[fx.Node, torch.Tensor] = {}
        tuples: dict[fx.Node, object] = {}
        steps: list[int] = []
        counted: list[int] = []
        result: tuple[object, ...] = ()
        for node in self.nodes:
            if node.op == "get_attr":
                env[node] = _attribute(self.gm, str(node.target))
                if isinstance(env[node], torch.Tensor) and mark_of(node).storage is not None:
                    owners[node] = env[node]  # type: ignore[assignment]
        for index, node in enumerate(self.nodes):
            if node.op == "placeholder":
                env[node] = inputs.pop()
            elif node.op == "get_attr":
                pass
            elif node.op == "output":
                result = tuple(fx.map_arg(tuple(node.args[0]), env.__getitem__))  # type: ignore[arg-type]
            elif node.target is free:
                for n in node.all_input_nodes:
                    if n not in env:
                        raise VerificationError(f"{n.name!r} is freed twice")
                    del env[n]
                    owners.pop(n, None)
            else:
                env[node] = self._call(node, env)
                if is_sequence(node) and role(node) is Role.KERNEL:
                    tuples[node] = env[node]
            if mark_of(node).storage is not None and node in env:
                owner = env[node]
                if isinstance(owner, torch.Tensor):  # else an effect's token, which has no bytes
                    owners[node] = owner
            step = mark_of(node).step
            ends_step = index + 1 == len(self.nodes) or (
                mark_of(self.nodes[index + 1]).step != step
            )
            if ends_step and step is not None and node.op == "call_function":
                if node.target is not free:
                    steps.append(step)
                    counted.append(predicted.elsewhere_bytes + self._count(owners, tuples, sizes))
                tuples.clear()
            for dead in self.dies_at[index]:
                env.pop(dead, None)
        _log(
            ExecutorRecord(
                self.phase,
                tuple(steps),
                tuple(counted),
                tuple(predicted.during_bytes[s] for s in steps),
                self.symbols is not None,
                self.mistraced,
            )
        )
        return result

    def _call(self, node: fx.Node, env: dict[fx.Node, object]) -> object:
        try:
            args = fx.map_arg(node.args, env.__getitem__)
            kwargs = fx.map_arg(node.kwargs, env.__getitem__)
        except KeyError as error:
            raise VerificationError(f"{node.name!r} uses {error}, which is freed") from error
        function = _OWN_KERNELS.get(node.target, node.target)
        assert callable(function)
        # A view among the results must not be one to autograd, which would forbid updating it.
        with torch.no_grad(), below_views():
            return without_unasked(function(*args, **kwargs), node.meta.get("val"))  # type: ignore[misc]

    def _sizes(self, args: Sequence[Any]) -> Sizes | None:
        """The values of the graph's symbols in this run; None where it has none."""
        if not self.symbols:
            return None
        return Sizes.of(
            {
                symbol: int(args[i] if dimension is None else args[i].shape[dimension])
                for symbol, (i, dimension) in self.symbols.items()
            }
        )

    def _count(
        self,
        owners: Mapping[fx.Node, torch.Tensor],
        tuples: Mapping[fx.Node, object],
        sizes: Sizes | None,
    ) -> int:
        total = 0
        seen: set[object] = set()
        constants: set[int] = set()
        for node, tensor in owners.items():
            s = mark_of(node).storage
            if s in self.constants:
                if s not in constants:
                    with at_sizes(sizes):
                        total += self.bytes_of_constant(node, tensor)
                constants.add(s)
                seen.add(_identity(tensor))
        for tensor in owners.values():
            if _identity(tensor) not in seen:
                seen.add(_identity(tensor))
                total += _own_bytes(tensor)
        for elements in tuples.values():
            for element in elements:  # type: ignore[attr-defined]
                if isinstance(element, torch.Tensor) and _identity(element) not in seen:
                    seen.add(_identity(element))
                    total += _own_bytes(element)
        return total

    @staticmethod
    def bytes_of_constant(node: fx.Node, tensor: torch.Tensor) -> int:
        """Bytes of an input as the program counts them (several may share a storage)."""
        size_bytes = mark_of(node).size_bytes
        return extent_bytes(tensor) if size_bytes is None else size_bytes


def _symbols(nodes: Sequence[fx.Node]) -> dict[sympy.Symbol, tuple[int, int | None]] | None:
    """Symbol -> the input that tells its value, and the dimension of it, if it is a tensor; None
    where some symbol is told by no input."""
    found: dict[sympy.Symbol, tuple[int, int | None]] = {}
    used: set[sympy.Symbol] = set()
    for i, node in enumerate(n for n in nodes if n.op == "placeholder"):
        val = node.meta.get("val")
        is_tensor = isinstance(val, torch.Tensor)
        for dimension, size in enumerate(val.shape if is_tensor else (val,)):
            if isinstance(size, torch.SymInt):
                used |= size.node.expr.free_symbols
                if isinstance(size.node.expr, sympy.Symbol):
                    found.setdefault(size.node.expr, (i, dimension if is_tensor else None))
    return found if used <= found.keys() else None


def _identity(tensor: torch.Tensor) -> object:
    return tensor.untyped_storage()._cdata if tensor.layout is torch.strided else id(tensor)


def _own_bytes(tensor: torch.Tensor) -> int:
    if tensor.layout is torch.strided:
        return int(tensor.untyped_storage().nbytes())
    return extent_bytes(tensor)


def _attribute(gm: fx.GraphModule, target: str) -> object:
    found: object = gm
    for name in target.split("."):
        found = getattr(found, name)
    return found


def _log(record: ExecutorRecord) -> None:
    with _LOG.lock:
        _LOG.records.append(record)
