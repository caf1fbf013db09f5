"""What runs between the compiled graphs and the loss, and what that holds.

A loss that is computed outside of the graphs runs as in eager PyTorch.  When its backward arrives
at a graph, its tensors are gone, but autograd's nodes are still there: they tell which operators
ran, in which order, on which sizes, and what each saved.  `loss_bytes` goes through them as PyTorch
did, forward and then backward, and counts at each operator

* what operators saved whose backward is still to come;
* gradients that wait for the backward of an operator;
* what the operator itself reads and makes, with the intermediate results of its formula.

Operators that need no gradient (on labels alone) leave no node, so this is an estimate.
"""

from __future__ import annotations

import math
import re
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from types import FrameType
from typing import Any, Final

import torch

from dtrcompile.passes.torch_private import keeps_graph

# What the formulas of autograd (derivatives.yaml) hold between the gradient that they read and the
# one that they make, in tensors of the operator's size; other operators have kernels of their own,
# which hold next to nothing (tests/unit/test_loss_bytes.py).
_BACKWARD_INTERMEDIATES: Final = {
    "AbsBackward0": 1.0,
    "AmaxBackward0": 1.5,
    "AminBackward0": 1.5,
    "Atan2Backward0": 3.0,
    "ClampBackward1": 0.5,
    "CosBackward0": 2.0,
    "CumsumBackward0": 2.0,
    "DivBackward0": 3.0,
    "ErfBackward0": 4.0,
    "LinalgVectorNormBackward0": 1.0,
    "Log1PBackward0": 1.0,
    "LogaddexpBackward0": 3.0,
    "LogsumexpBackward0": 2.0,
    "MaximumBackward0": 1.5,
    "MinimumBackward0": 1.5,
    "PowBackward0": 2.0,
    "PowBackward1": 5.0,
    "ProdBackward1": 1.5,
    "ReciprocalBackward0": 2.0,
    "RsqrtBackward0": 2.0,
    "SinBackward0": 1.0,
    "SoftMarginLossBackward0": 2.0,
    "SqrtBackward0": 1.0,
    "StdBackward0": 1.25,
    "VarBackward0": 1.25,
}
# What the operator itself holds while it runs: a loss is computed for each element before its mean.
_FORWARD_INTERMEDIATES: Final = {
    "BinaryCrossEntropyBackward0": 2.0,
    "BinaryCrossEntropyWithLogitsBackward0": 2.0,
    "MseLossBackward0": 2.0,
    "SmoothL1LossBackward0": 2.0,
    "HuberLossBackward0": 1.0,
    "LogsumexpBackward0": 1.0,
    "SoftMarginLossBackward0": 2.0,
}
# The mean or sum that these return is in a storage with room for a value for each element.
_UNTRIMMED: Final = frozenset(
    (
        "BinaryCrossEntropyBackward0",
        "MseLossBackward0",
        "SmoothL1LossBackward0",
        "SoftMarginLossBackward0",
    )
)
# Results and gradients of these are views of what they read.
_VIEWS: Final = re.compile(
    r"(Alias|Movedim|Permute|ReshapeAlias|Squeeze|T|Transpose|UnsafeView|Unsqueeze|View)Backward\d+"
)
# Results of these are views, but their gradients are not.
_VIEWS_FORWARD: Final = re.compile(
    r"(AsStrided|Diagonal|Expand|Narrow|Select|Slice|Split|SplitWithSizes|Unbind)Backward\d+"
)
# These hand the gradient that they read on to their first input, or to all.
_HANDS_ON_FIRST: Final = re.compile(r"SubBackward\d+")
_HANDS_ON_ALL: Final = re.compile(r"(Add|Clone)Backward\d+")
# The gradients that these make are views of one value for each element that was added up.
_EXPANDS: Final = re.compile(r"SumBackward\d+")
_SAVED = "_raw_saved_"
_RESULT = re.compile(r"(?:result|output|y)(\d*)")
# Saved tensors that are neither results nor what an earlier operator made.
_GIVEN = frozenset(
    (
        "bias",
        "grid",
        "index",
        "indices",
        "input_lengths",
        "log_alpha",
        "neg_log_likelihood",
        "running_mean",
        "running_var",
        "target",
        "target_lengths",
        "targets",
        "total_weight",
        "weight",
    )
)
# One byte for each element.
_MASKS = frozenset(("condition", "mask"))


@dataclass(frozen=True, slots=True)
class Moment:
    """While one operator runs, forward or backward.

    Attributes:
        held_bytes: above what the graph left, the graph's outputs left out.
        unread_bytes: of the graph's outputs, what no operator needs any more: gone, unless somebody
            else holds them.
    """

    held_bytes: int
    unread_bytes: int


@dataclass(frozen=True, slots=True)
class LossBytes:
    """About what is held between compiled graphs and the loss.

    Attributes:
        peak_bytes: the most, above what the graphs left.
        held_bytes: as long as backward runs: the loss and its gradient, which the caller and
            autograd hold.
    """

    peak_bytes: int = 0
    held_bytes: int = 0


@dataclass(frozen=True, slots=True)
class OutsideLoss:
    """What runs between compiled graphs and the loss.

    Attributes:
        moments: one for each operator, forward and backward.
        held_bytes: as of `LossBytes`.
    """

    moments: tuple[Moment, ...] = ()
    held_bytes: int = 0

    def without(self, gone_bytes: int) -> LossBytes:
        """Where nobody else holds so many bytes of the graph's outputs."""
        peaks = (m.held_bytes - min(gone_bytes, m.unread_bytes) for m in self.moments)
        return LossBytes(max(self.held_bytes, *peaks, 0), self.held_bytes)


def outside_loss(node: Any) -> OutsideLoss | None:
    """What ran between a graph whose backward begins and the loss.

    Args:
        node: the graph's autograd node.

    Returns:
        None where that cannot be told.
    """
    for _, roots in backward_calls():
        outside = nodes_outside(roots, node)
        if outside is not None:
            loss_bytes = sum(2 * output_bytes(n) for n in roots if n in outside)
            held_bytes = loss_bytes + sum(map(_untrimmed_bytes, outside))
            return OutsideLoss(tuple(_moments(outside, node, loss_bytes)), held_bytes)
    return None


def backward_calls() -> list[tuple[FrameType, list[Any]]]:
    """The calls of autograd's engine that run now, and the nodes that each starts from.

    Backward on a device other than the CPU runs in a thread of its own.
    """
    found = []
    # No variable may still refer to this function's own frame when it returns: the cycle would hold
    # the gradients that the frames below refer to.
    frames = list(sys._current_frames().values())
    while frames:
        frame = frames.pop(0)
        if frame.f_code.co_name == "_engine_run_backward":
            outputs = frame.f_locals.get("t_outputs", ())
            nodes = [o.grad_fn if isinstance(o, torch.Tensor) else o.node for o in outputs]
            found.append((frame, [n for n in nodes if n is not None]))
        if frame.f_back is not None:
            frames.insert(0, frame.f_back)
    return found


def given_bytes(frame: FrameType) -> int:
    """Of the gradients that a call of autograd's engine was given; a view counts what it views."""
    gradients, *_ = frame.f_locals.get("args") or [()]
    return sum(
        g.untyped_storage().nbytes()
        for g in gradients
        if isinstance(g, torch.Tensor) and g.layout is torch.strided
    )


def nodes_outside(roots: list[Any], node: Any) -> list[Any] | None:
    """Autograd's nodes from ``roots`` to the first compiled graphs; None if ``node`` is not among
    these."""
    outside: list[Any] = []
    is_reached = False
    pending, seen = list(roots), set(roots)
    while pending:
        found = pending.pop()
        if found is node:
            is_reached = True
        elif not _is_compiled(found):
            outside.append(found)
            for following, _ in found.next_functions:
                if following is not None and following not in seen:
                    seen.add(following)
                    pending.append(following)
    return outside if is_reached else None


def saves(node: Any) -> bool:
    """Whether an operator may keep tensors for backward."""
    return any(name.startswith(_SAVED) for name in dir(type(node)))


def output_bytes(node: Any) -> int:
    """Of all results of an operator."""
    return sum(_bytes_of(made) for made in node._input_metadata)


# --- the operators, one after the other -----------------------------------------------------------

# A value: the node that made it, and which of its results it is; or a mask that a node saved.
_Value = tuple[Any, int | str]


def _moments(outside: Iterable[Any], node: Any, loss_bytes: int = 0) -> Iterator[Moment]:
    """What is held while each operator runs.

    Args:
        loss_bytes: the loss and its gradient, which are always among it.
    """
    nodes = [n for n in outside if not hasattr(n, "variable")]
    nodes.sort(key=lambda n: n._sequence_nr())  # the order in which they ran
    saved = [frozenset(_saved_values(n)) for n in nodes]

    def own_bytes(values: Iterable[_Value]) -> int:
        """Without what compiled graphs returned, which is counted with them."""
        return sum(_size_of(v) for v in values if not _is_compiled(v[0]))

    held_bytes = loss_bytes
    users: Counter[_Value] = Counter()  # operators that saved a value, and still need it
    for n, values in zip(nodes, saved, strict=True):
        held_bytes += own_bytes(v for v in values if v not in users)
        users.update(values)
        running_bytes = own_bytes({*_inputs(n), *_results(n)} - users.keys())
        more_bytes = max(0, _intermediates(n, _FORWARD_INTERMEDIATES) - output_bytes(n))
        # (The caller's variables hold what the graph returned while the loss is computed.)
        yield Moment(held_bytes + running_bytes + more_bytes, 0)
        held_bytes += _untrimmed_bytes(n)
    read = {v for n in nodes for v in _inputs(n) if v[0] is node}
    unread_bytes = sum(_size_of(v) for v in read - users.keys())
    waiting: dict[_Value, int] = {}  # gradients, by what they are of
    are_kept = keeps_graph()
    for n, values in zip(reversed(nodes), reversed(saved), strict=True):
        read_bytes = sum(waiting.pop((n, k), 0) for k in range(len(n._input_metadata)))
        made = _gradients(n, read_bytes)
        running_bytes = read_bytes + sum(size for _, size, is_new in made if is_new)
        running_bytes += _intermediates(n, _BACKWARD_INTERMEDIATES)
        yield Moment(held_bytes + sum(waiting.values()) + running_bytes, unread_bytes)
        for value, size, _ in made:
            waiting[value] = max(size, waiting.get(value, 0))
        if are_kept:
            continue
        users.subtract(values)
        gone = {v for v in values if not users[v]}
        held_bytes -= own_bytes(gone)
        unread_bytes += sum(_size_of(v) for v in gone & read)


def _gradients(node: Any, read_bytes: int) -> list[tuple[_Value, int, bool]]:
    """The gradients that an operator makes: whose, how many bytes, and whether they are new.

    Those of parameters are counted elsewhere.
    """
    name = str(node.name())
    made: list[tuple[_Value, int, bool]] = []
    for k, maker, i in _makers(node):
        size = _bytes_of(maker._input_metadata[i])
        is_same = size >= read_bytes  # else it is added up over what was broadcast
        hands_on = _HANDS_ON_ALL.fullmatch(name) or (k == 0 and _HANDS_ON_FIRST.fullmatch(name))
        if _EXPANDS.fullmatch(name):
            made.append(((maker, i), 0, True))
        elif _VIEWS.fullmatch(name) or (hands_on and is_same):
            made.append(((maker, i), read_bytes if not made else 0, False))
        else:
            made.append(((maker, i), size, True))
    return made


def _untrimmed_bytes(node: Any) -> int:
    """What a result holds above its own size."""
    if str(node.name()) not in _UNTRIMMED:
        return 0
    return max(0, _input_bytes(node) - output_bytes(node))


def _intermediates(node: Any, table: dict[str, float]) -> int:
    count = table.get(str(node.name()), 0.0)
    return math.ceil(count * max(_input_bytes(node), output_bytes(node)))


def _saved_values(node: Any) -> Iterator[_Value]:
    """What an operator saved of what was computed with gradients."""
    if _is_view(node):
        return
    names = [n.removeprefix(_SAVED) for n in dir(type(node)) if n.startswith(_SAVED)]
    inputs = list(_inputs(node, is_product=str(node.name()).startswith("MulBackward")))
    for name in names:
        result = _RESULT.fullmatch(name)
        if result:
            index = int(result[1] or 0)
            if index < len(node._input_metadata):
                yield node, index
            elif str(node.name()).startswith("NativeDropout"):
                yield node, "mask"
        elif name in _MASKS:
            yield node, "mask"
        elif name not in _GIVEN:
            yield from inputs


def _inputs(node: Any, *, is_product: bool = False) -> Iterator[_Value]:
    """What an operator read of what was computed with gradients, views resolved.

    Args:
        is_product: only what is saved if it is a product: a factor whose other needs a gradient.
    """
    edges = node.next_functions
    for k, maker, i in _makers(node):
        if not is_product or any(other is not None for other, _ in edges[:k] + edges[k + 1 :]):
            yield _owner(maker, i)


def _results(node: Any) -> Iterator[_Value]:
    if not _is_view(node):
        yield from ((node, k) for k in range(len(node._input_metadata)))


def _owner(node: Any, index: int) -> _Value:
    """What a value is a view of."""
    while _is_view(node):
        maker, i = node.next_functions[0]
        if maker is None or hasattr(maker, "variable"):
            break
        node, index = maker, i
    return node, index


def _is_view(node: Any) -> bool:
    """Whether the results of an operator are views of what it read."""
    name = str(node.name())
    return bool(_VIEWS.fullmatch(name) or _VIEWS_FORWARD.fullmatch(name))


def _size_of(value: _Value) -> int:
    node, index = value
    if index == "mask":
        return sum(math.prod(int(s) for s in made.shape) for made in node._input_metadata)
    return _bytes_of(node._input_metadata[index])


def _is_compiled(node: Any) -> bool:
    return str(node.name()).startswith("CompiledFunction")


def _input_bytes(node: Any) -> int:
    """Of the inputs that gradients are computed for, parameters left out."""
    return sum(_bytes_of(maker._input_metadata[i]) for _, maker, i in _makers(node))


def _makers(node: Any) -> Iterator[tuple[int, Any, int]]:
    """Of each input that was computed with gradients: its place, its operator, which result."""
    for k, (maker, i) in enumerate(node.next_functions):
        if maker is not None and not hasattr(maker, "variable"):
            yield k, maker, i


def _bytes_of(made: Any) -> int:
    if made.is_nested_tensor:
        return 0
    return math.prod(int(size) for size in made.shape) * int(made.dtype.itemsize)
