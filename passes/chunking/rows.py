"""Which operators compute each row of a value from the same row of what they read.

A value's *rows* are the indices of one of its dimensions, or of several consecutive ones taken
together: the scores of tokens ``[batch, length, vocabulary]`` have ``batch * length`` rows.  The
table at the end has a rule for each operator.  An operator without one is not cut: what draws
random numbers, writes into what it is given, or is simply not known.  A rule never cuts what an
operator reduces, as a batch whose statistics are taken, except where sums over parts can be added.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from dtrcompile.passes.nodes import Role, packet, role, value
from dtrcompile.passes.torch_private import OpOverload

aten = torch.ops.aten
prims = torch.ops.prims


@dataclass(frozen=True, slots=True)
class Rows:
    """The dimensions ``start``, …, ``start + count - 1`` of a value, taken as one."""

    start: int
    count: int = 1

    @property
    def stop(self) -> int:
        """The first dimension after them."""
        return self.start + self.count

    def of(self, shape: Sequence[int]) -> tuple[int, ...]:
        """Their sizes."""
        return tuple(shape[self.start : self.stop])

    def number(self, shape: Sequence[int]) -> int:
        """How many rows a value of this shape has."""
        return math.prod(self.of(shape))

    def merged(self, shape: Sequence[int], n_rows: int) -> list[int]:
        """The shape of some of the rows."""
        return [*shape[: self.start], n_rows, *shape[self.stop :]]

    def dimension(self, dimension: int) -> int:
        """Where a dimension of the value is among those of some of its rows."""
        if dimension < self.start:
            return dimension
        return max(self.start, dimension - self.count + 1)


def shape_of(node: fx.Node) -> tuple[int, ...] | None:
    """Of a tensor, or of the first of several; None for anything else, and for symbolic sizes."""
    if packet(node) is aten.convolution_backward:
        # The first is the gradient of its input, which is None where nothing asks for it.
        _, node, *_ = node.args  # type: ignore[assignment]
    val = value(node)
    if isinstance(val, (tuple, list)) and val:
        val = val[0]
    if not isinstance(val, torch.Tensor):
        return None
    return tuple(val.shape) if all(isinstance(size, int) for size in val.shape) else None


# Operand -> its rows, of which a row of the result is made.  Other operands are read whole.
Cuts = Mapping[fx.Node, Rows]


class Chunk(ABC):
    """What a rule sees of the graph that it writes one chunk into.

    Attributes:
        n_rows: of the chunk.
        cuts: of the operator that is being written.
    """

    n_rows: int
    cuts: Cuts

    @abstractmethod
    def of(self, operand: fx.Node) -> fx.Node:
        """An operand: the rows of the chunk where it is cut, all of it where it is not."""

    @abstractmethod
    def call(self, target: Callable[..., Any], *args: Any, **kwargs: Any) -> fx.Node:
        """Add a call."""

    def mapped(self, arguments: Any) -> Any:
        """Arguments of a call with the operands of the chunk in them."""
        return fx.map_arg(arguments, self.of)


class Rule(ABC):
    """What one operator does with rows."""

    @abstractmethod
    def result(self, node: fx.Node, operand: fx.Node, rows: Rows) -> Rows | None:
        """The rows of the result that are made of these of an operand; None if there are none."""

    @abstractmethod
    def operands(self, node: fx.Node, rows: Rows) -> Cuts | None:
        """What the rows of the result are made of; None if they need more than rows."""

    def totals(self, node: fx.Node, operand: fx.Node, rows: Rows) -> Cuts | None:  # noqa: ARG002
        """The cuts of all operands where the result is a sum over these rows; None if it is not."""
        return None

    def write(self, node: fx.Node, rows: Rows | None, chunk: Chunk) -> fx.Node:  # noqa: ARG002
        """Write the operator for one chunk.

        Args:
            rows: of the result; None for a part of a total.
        """
        target: Any = node.target
        return chunk.call(target, *chunk.mapped(node.args), **chunk.mapped(node.kwargs))


def _shape(node: fx.Node) -> tuple[int, ...]:
    shape = shape_of(node)
    assert shape is not None
    return shape


class _Pointwise(Rule):
    """Elementwise with broadcasting, which aligns dimensions from the last one on."""

    def result(self, node: fx.Node, operand: fx.Node, rows: Rows) -> Rows | None:
        shape, own = _shape(node), _shape(operand)
        found = Rows(rows.start + len(shape) - len(own), rows.count)
        return found if found.of(shape) == rows.of(own) else None

    def operands(self, node: fx.Node, rows: Rows) -> Cuts | None:
        shape = _shape(node)
        found: dict[fx.Node, Rows] = {}
        for operand in _tensors(node):
            own = _shape(operand)
            shift = len(shape) - len(own)
            sizes = [own[d - shift] if d >= shift else 1 for d in range(rows.start, rows.stop)]
            if tuple(sizes) == rows.of(shape):
                found[operand] = Rows(rows.start - shift, rows.count)
            elif math.prod(sizes) != 1:
                return None
        return found

    def write(self, node: fx.Node, rows: Rows | None, chunk: Chunk) -> fx.Node:
        assert rows is not None
        shape = _shape(node)

        def given(operand: fx.Node) -> fx.Node:
            own = shape_of(operand)
            if operand in chunk.cuts or own is None or rows.count == 1:
                return chunk.of(operand)
            shift = len(shape) - len(own)
            if shift > rows.start:
                n_inside = max(0, rows.stop - max(shift, rows.start))
                return _viewed(chunk, operand, own[n_inside:])
            inside = Rows(rows.start - shift, rows.count)
            return _viewed(chunk, operand, inside.merged(own, 1))

        args, kwargs = fx.map_arg(node.args, given), fx.map_arg(node.kwargs, given)
        return chunk.call(node.target, *args, **kwargs)  # type: ignore[arg-type]


def _viewed(chunk: Chunk, operand: fx.Node, shape: Sequence[int]) -> fx.Node:
    """An operand that is read whole, without some dimensions of one element."""
    node = chunk.of(operand)
    return (
        node if tuple(shape) == _shape(operand) else chunk.call(aten.view.default, node, [*shape])
    )


class _Reshape(Rule):
    """Another shape for the same elements in the same order."""

    def result(self, node: fx.Node, operand: fx.Node, rows: Rows) -> Rows | None:
        return _same_rows(_shape(operand), rows, _shape(node))

    def operands(self, node: fx.Node, rows: Rows) -> Cuts | None:
        (operand,) = _tensors(node)
        found = _same_rows(_shape(node), rows, _shape(operand))
        return None if found is None else {operand: found}

    def write(self, node: fx.Node, rows: Rows | None, chunk: Chunk) -> fx.Node:
        assert rows is not None
        (operand,) = chunk.cuts
        shape = rows.merged(_shape(node), chunk.n_rows)
        return reshaped(chunk, chunk.of(operand), shape)


def reshaped(chunk: Chunk, node: fx.Node, shape: Sequence[int]) -> fx.Node:
    """As a view where its strides allow that, else as a copy."""
    if shape_of(node) == tuple(shape):
        return node
    if not can_view(value(node), shape):
        node = chunk.call(aten.clone.default, node, memory_format=torch.contiguous_format)
    return chunk.call(aten.view.default, node, [*shape])


def can_view(tensor: object, shape: Sequence[int]) -> bool:
    """Whether a tensor's strides allow for a view of this shape."""
    assert isinstance(tensor, torch.Tensor)
    try:
        tensor.view([*shape])
    except (RuntimeError, ValueError):
        return False
    return True


def _same_rows(shape: Sequence[int], rows: Rows, other: Sequence[int]) -> Rows | None:
    """The rows of another shape that hold the same elements; None if there are none."""
    before, number = math.prod(shape[: rows.start]), rows.number(shape)
    start, found = 0, 1
    while start < len(other) and (found < before or (other[start] == 1 and number > 1)):
        found *= other[start]
        start += 1
    stop, inside = start, 1
    while stop < len(other) and inside < number:
        inside *= other[stop]
        stop += 1
    return Rows(start, stop - start) if (found, inside) == (before, number) else None


class _Permute(Rule):
    """Dimensions in another order."""

    def __init__(self, order: Callable[[fx.Node], list[int]]) -> None:
        self._order = order

    def result(self, node: fx.Node, operand: fx.Node, rows: Rows) -> Rows | None:  # noqa: ARG002
        order = self._order(node)
        return _consecutive([order.index(d) for d in range(rows.start, rows.stop)])

    def operands(self, node: fx.Node, rows: Rows) -> Cuts | None:
        (operand,) = _tensors(node)
        found = _consecutive(self._order(node)[rows.start : rows.stop])
        return None if found is None else {operand: found}

    def write(self, node: fx.Node, rows: Rows | None, chunk: Chunk) -> fx.Node:  # noqa: ARG002
        ((operand, own),) = chunk.cuts.items()
        merged = dict.fromkeys(own.dimension(d) for d in self._order(node))
        return chunk.call(aten.permute.default, chunk.of(operand), list(merged))


def _consecutive(dimensions: list[int]) -> Rows | None:
    first = dimensions[0]
    in_order = dimensions == list(range(first, first + len(dimensions)))
    return Rows(first, len(dimensions)) if in_order else None


class _Expand(_Pointwise):
    """Broadcasting by itself."""

    def write(self, node: fx.Node, rows: Rows | None, chunk: Chunk) -> fx.Node:
        assert rows is not None
        shape = _shape(node)
        (operand,) = _tensors(node)
        own = _shape(operand)
        if operand in chunk.cuts:
            given = chunk.of(operand)
        else:
            padded = [1] * (len(shape) - len(own)) + list(own)
            given = _viewed(chunk, operand, rows.merged(padded, 1))
        return chunk.call(aten.expand.default, given, rows.merged(shape, chunk.n_rows))


class _Create(Rule):
    """One number everywhere."""

    def result(self, node: fx.Node, operand: fx.Node, rows: Rows) -> Rows | None:  # noqa: ARG002
        return None

    def operands(self, node: fx.Node, rows: Rows) -> Cuts | None:  # noqa: ARG002
        return {}

    def write(self, node: fx.Node, rows: Rows | None, chunk: Chunk) -> fx.Node:
        assert rows is not None
        _, *args = node.args
        shape = rows.merged(_shape(node), chunk.n_rows)
        return chunk.call(node.target, shape, *args, **node.kwargs)  # type: ignore[arg-type]


class _Dimension(Rule):
    """What works along other dimensions than the rows', which keep their places in all operands.

    Args:
        places: the positions of the arguments that are dimensions, or lists of them.
    """

    def __init__(self, *places: int) -> None:
        self._places = places

    def _dimensions(self, node: fx.Node) -> set[int]:
        n = max(len(_shape(operand)) for operand in _tensors(node))
        found: set[int] = set()
        for place in self._places:
            argument = node.args[place] if len(node.args) > place else 0
            found.update(d % n for d in _as_list(argument))
        return found

    def _is_free(self, node: fx.Node, rows: Rows) -> bool:
        return not self._dimensions(node) & set(range(rows.start, rows.stop))

    def result(self, node: fx.Node, operand: fx.Node, rows: Rows) -> Rows | None:
        same = all(rows.of(_shape(o)) == rows.of(_shape(operand)) for o in _tensors(node))
        return rows if same and self._is_free(node, rows) else None

    def operands(self, node: fx.Node, rows: Rows) -> Cuts | None:
        sizes = rows.of(_shape(node))
        tensors = _tensors(node)
        same = all(rows.of(_shape(o)) == sizes for o in tensors)
        return dict.fromkeys(tensors, rows) if same and self._is_free(node, rows) else None

    def write(self, node: fx.Node, rows: Rows | None, chunk: Chunk) -> fx.Node:  # noqa: ARG002
        own = next(iter(chunk.cuts.values()))
        n = max(len(_shape(operand)) for operand in _tensors(node))
        args = list(node.args)
        for place in self._places:
            if len(args) > place:
                args[place] = _like(
                    args[place], [own.dimension(d % n) for d in _as_list(args[place])]
                )
        return chunk.call(node.target, *chunk.mapped(args), **chunk.mapped(node.kwargs))  # type: ignore[arg-type]


def _as_list(argument: Any) -> list[int]:
    return [argument] if isinstance(argument, int) else list(argument or ())


def _like(argument: Any, dimensions: list[int]) -> Any:
    """Dimensions in the form that they were given in, each once."""
    return dimensions[0] if isinstance(argument, int) else list(dict.fromkeys(dimensions))


class _Select(_Dimension):
    """One index of a dimension, which is gone then."""

    def result(self, node: fx.Node, operand: fx.Node, rows: Rows) -> Rows | None:  # noqa: ARG002
        return _without(rows, self._dimensions(node)) if self._is_free(node, rows) else None

    def operands(self, node: fx.Node, rows: Rows) -> Cuts | None:
        (operand,) = _tensors(node)
        found = _with(rows, self._dimensions(node))
        is_same = found.of(_shape(operand)) == rows.of(_shape(node))
        return {operand: found} if is_same and self._is_free(node, found) else None


class _Reduce(_Dimension):
    """A reduction along some dimensions.

    Args:
        is_sum: a reduction over the rows as well is the sum of those of its chunks.
    """

    def __init__(self, *, is_sum: bool = False) -> None:
        super().__init__(1)
        self._is_sum = is_sum

    def _dimensions(self, node: fx.Node) -> set[int]:
        n = len(_shape(_tensors(node)[0]))
        argument = node.args[1] if len(node.args) > 1 else None
        return {d % n for d in _as_list(argument)} or set(range(n))

    def _keeps(self, node: fx.Node) -> bool:
        (operand,) = _tensors(node)
        return len(_shape(node)) == len(_shape(operand))

    def result(self, node: fx.Node, operand: fx.Node, rows: Rows) -> Rows | None:  # noqa: ARG002
        if not self._is_free(node, rows):
            return None
        return rows if self._keeps(node) else _without(rows, self._dimensions(node))

    def operands(self, node: fx.Node, rows: Rows) -> Cuts | None:
        (operand,) = _tensors(node)
        found = rows if self._keeps(node) else _with(rows, self._dimensions(node))
        is_same = found.of(_shape(operand)) == rows.of(_shape(node))
        return {operand: found} if is_same and self._is_free(node, found) else None

    def totals(self, node: fx.Node, operand: fx.Node, rows: Rows) -> Cuts | None:
        is_over = set(range(rows.start, rows.stop)) <= self._dimensions(node)
        return {operand: rows} if self._is_sum and is_over else None


class _Mean(_Reduce):
    """A mean; over the rows as well, it is a sum, divided by what the whole value has of them."""

    def __init__(self) -> None:
        super().__init__(is_sum=True)

    def write(self, node: fx.Node, rows: Rows | None, chunk: Chunk) -> fx.Node:
        if rows is not None:
            return super().write(node, rows, chunk)
        ((operand, own),) = chunk.cuts.items()
        shape, dimensions = _shape(operand), sorted(self._dimensions(node))
        merged = list(dict.fromkeys(map(own.dimension, dimensions)))
        arguments = chunk.of(operand), merged, self._keeps(node)
        total = chunk.call(aten.sum.dim_IntList, *arguments, dtype=node.kwargs.get("dtype"))
        return chunk.call(aten.div.Tensor, total, math.prod(shape[d] for d in dimensions))


def _without(rows: Rows, dimensions: set[int]) -> Rows:
    return Rows(rows.start - sum(d < rows.start for d in dimensions), rows.count)


def _with(rows: Rows, dimensions: set[int]) -> Rows:
    """The inverse of `_without`."""
    start = rows.start
    for d in sorted(dimensions):
        start += d <= start
    return Rows(start, rows.count)


class _Product(Rule):
    """Products of matrices, or of batches of them, perhaps added to something."""

    def __init__(self, *, is_batch: bool = False, is_added: bool = False) -> None:
        self._batch = int(is_batch)
        self._first = int(is_added)

    def _factors(self, node: fx.Node) -> tuple[fx.Node, fx.Node]:
        left, right = node.args[self._first : self._first + 2]
        assert isinstance(left, fx.Node) and isinstance(right, fx.Node)
        return left, right

    def result(self, node: fx.Node, operand: fx.Node, rows: Rows) -> Rows | None:
        left, right = self._factors(node)
        if left is right or rows.count > 1:
            return None
        place = rows.start - self._batch
        if place == -1 or (operand is left and place == 0) or (operand is right and place == 1):
            return rows
        return None

    def operands(self, node: fx.Node, rows: Rows) -> Cuts | None:
        left, right = self._factors(node)
        if left is right or rows.count > 1:
            return None
        place = rows.start - self._batch
        found = {o: rows for o, p in ((left, 0), (right, 1)) if place in (-1, p)}
        if self._first:
            added = node.args[0]
            assert isinstance(added, fx.Node)
            own = Rows(rows.start - len(_shape(node)) + len(_shape(added)))
            if own.start >= 0 and _shape(added)[own.start] != 1:
                if found.get(added, own) != own:
                    return None
                found[added] = own
        return found

    def totals(self, node: fx.Node, operand: fx.Node, rows: Rows) -> Cuts | None:
        left, right = self._factors(node)
        inner = {left: Rows(1 + self._batch), right: Rows(self._batch)}
        is_inner = left is not right and inner.get(operand) == rows
        return inner if is_inner and not self._first else None


class _Samples(Rule):
    """What treats each sample of a batch, which its first dimension counts, by itself.

    Args:
        places: the positions of the arguments that are batches.
        size_place: the position of the argument that is the size of the result, batch included.
    """

    def __init__(self, *places: int, size_place: int | None = None) -> None:
        self._places = places
        self._size_place = size_place

    def result(self, node: fx.Node, operand: fx.Node, rows: Rows) -> Rows | None:
        return rows if operand in (self.operands(node, rows) or ()) else None

    def operands(self, node: fx.Node, rows: Rows) -> Cuts | None:
        batches = [node.args[place] for place in self._places]
        whole: list[fx.Node] = []
        fx.map_arg([a for i, a in enumerate(node.args) if i not in self._places], whole.append)
        is_read_whole = not set(batches).isdisjoint(whole)
        return None if rows != Rows(0) or is_read_whole else dict.fromkeys(batches, rows)

    def write(self, node: fx.Node, rows: Rows | None, chunk: Chunk) -> fx.Node:
        if self._size_place is None:
            return super().write(node, rows, chunk)
        args = list(chunk.mapped(node.args))
        args[self._size_place] = [chunk.n_rows, *args[self._size_place][1:]]
        return chunk.call(node.target, *args, **node.kwargs)  # type: ignore[arg-type]


class _Index(_Samples):
    """Elements of each sample by indices along consecutive dimensions, as resampling has them."""

    def operands(self, node: fx.Node, rows: Rows) -> Cuts | None:
        # Where they are not consecutive, the dimensions of the indices come first in the result.
        indexed = _indexed(node)
        is_behind = bool(indexed) and indexed == list(range(max(1, indexed[0]), indexed[-1] + 1))
        return super().operands(node, rows) if is_behind else None


class _IndexPut(_Index):
    """Writes such elements, which have to be there for each index: none is broadcast."""

    def operands(self, node: fx.Node, rows: Rows) -> Cuts | None:
        cuts = super().operands(node, rows)
        if cuts is None:
            return None
        into, indices, values = node.args[:3]
        assert isinstance(into, fx.Node) and isinstance(values, fx.Node)
        indexed, shape = _indexed(node), _shape(into)
        shapes = [_shape(i) for i in indices if isinstance(i, fx.Node)]  # type: ignore[union-attr]
        inside = torch.broadcast_shapes(*shapes)
        whole = (*shape[: indexed[0]], *inside, *shape[indexed[-1] + 1 :])
        return cuts if _shape(values) == whole else None


def _indexed(node: fx.Node) -> list[int]:
    """The dimensions that have indices."""
    indices = node.args[1]
    assert isinstance(indices, (tuple, list))
    return [d for d, index in enumerate(indices) if index is not None]


class _Pad(Rule):
    """More elements around, along other dimensions than the one of the rows."""

    def result(self, node: fx.Node, operand: fx.Node, rows: Rows) -> Rows | None:  # noqa: ARG002
        return rows if self._is_free(node, rows) else None

    def operands(self, node: fx.Node, rows: Rows) -> Cuts | None:
        return {node.all_input_nodes[0]: rows} if self._is_free(node, rows) else None

    def _is_free(self, node: fx.Node, rows: Rows) -> bool:
        amounts = node.args[1]  # two for each dimension, from the last one on
        assert isinstance(amounts, (tuple, list))
        place = 2 * (len(_shape(node)) - 1 - rows.start)
        return rows.count == 1 and not any(amounts[place : place + 2])


class _Item(Rule):
    """One of the tensors that an operator returns: its rows, or a sum over them."""

    def result(self, node: fx.Node, operand: fx.Node, rows: Rows) -> Rows | None:
        is_same = _shape(node) == _shape(operand) and not _is_weight_gradient(node)
        return rows if is_same else None

    def operands(self, node: fx.Node, rows: Rows) -> Cuts | None:
        (operand,) = node.all_input_nodes
        return None if self.result(node, operand, rows) is None else {operand: rows}

    def totals(self, node: fx.Node, operand: fx.Node, rows: Rows) -> Cuts | None:
        return {operand: rows} if _is_weight_gradient(node) else None


def _is_weight_gradient(node: fx.Node) -> bool:
    """Whether an item is the gradient of a convolution's weight or bias, which samples share."""
    source, index = node.args
    assert isinstance(source, fx.Node)
    return packet(source) is aten.convolution_backward and index in (1, 2)


def _tensors(node: fx.Node) -> list[fx.Node]:
    return [n for n in node.all_input_nodes if shape_of(n) is not None]


def _given_order(node: fx.Node) -> list[int]:
    order = node.args[1]
    assert isinstance(order, (tuple, list))
    return [int(d) % len(order) for d in order]  # type: ignore[arg-type]


def _transposed_order(node: fx.Node) -> list[int]:
    n = len(_shape(node))
    order = list(range(n))
    first, second = (int(d) % n for d in node.args[1:3])  # type: ignore[arg-type]
    order[first], order[second] = order[second], order[first]
    return order


_POINTWISE, _RESHAPE = _Pointwise(), _Reshape()
_RULES: dict[object, Rule] = {
    **dict.fromkeys((aten.view, aten._unsafe_view, aten.squeeze, aten.unsqueeze), _RESHAPE),
    aten.permute: _Permute(_given_order),
    aten.transpose: _Permute(_transposed_order),
    aten.t: _Permute(lambda node: list(range(len(_shape(node))))[::-1]),
    aten.expand: _Expand(),
    **dict.fromkeys((aten.full, aten.zeros, aten.ones), _Create()),
    aten.sum: _Reduce(is_sum=True),
    aten.mean: _Mean(),
    **dict.fromkeys((aten.amax, aten.amin, aten.var_mean, aten.logsumexp), _Reduce()),
    **dict.fromkeys((aten.any, aten.all, aten.prod, aten.argmax, aten.argmin), _Reduce()),
    **dict.fromkeys((aten.gather, aten.scatter, aten.slice), _Dimension(1)),
    **dict.fromkeys((aten.cat, aten.cumsum, aten.flip), _Dimension(1)),
    aten.select: _Select(1),
    aten.mm: _Product(),
    aten.addmm: _Product(is_added=True),
    aten.bmm: _Product(is_batch=True),
    aten.baddbmm: _Product(is_batch=True, is_added=True),
    aten.convolution: _Samples(0),
    aten.convolution_backward: _Samples(0, 1),
    **dict.fromkeys((aten.avg_pool2d, aten.avg_pool3d, aten._adaptive_avg_pool2d), _Samples(0)),
    **dict.fromkeys((aten.avg_pool2d_backward, aten.avg_pool3d_backward), _Samples(0, 1)),
    aten._adaptive_avg_pool2d_backward: _Samples(0, 1),
    aten.max_pool2d_with_indices: _Samples(0),
    prims._low_memory_max_pool_with_offsets: _Samples(0),
    prims._low_memory_max_pool_offsets_to_indices: _Samples(0),
    **dict.fromkeys((aten.upsample_bilinear2d, aten.upsample_bicubic2d), _Samples(0)),
    aten.upsample_nearest2d_backward: _Samples(0, size_place=2),
    aten.upsample_bilinear2d_backward: _Samples(0, size_place=2),
    aten.upsample_bicubic2d_backward: _Samples(0, size_place=2),
    aten.constant_pad_nd: _Pad(),
    **dict.fromkeys((aten.index, aten._unsafe_index), _Index(0)),
    **dict.fromkeys((aten.index_put, aten._unsafe_index_put), _IndexPut(0, 2)),
}


def rule_of(node: fx.Node) -> Rule | None:
    """The rule of an operator; None if it is not cut."""
    if node.op != "call_function" or any(shape_of(n) is None for n in _values(node)):
        return None
    if role(node) is Role.ITEM:
        return _Item()
    if not isinstance(node.target, OpOverload) or node.target._schema.is_mutable:
        return None
    if torch.Tag.nondeterministic_seeded in node.target.tags or "dim" in node.kwargs:
        return None
    found = _RULES.get(packet(node))
    if found is None and _is_pointwise(node):
        return _POINTWISE
    return found


def _values(node: fx.Node) -> Iterable[fx.Node]:
    return (node, *node.all_input_nodes)


def _is_pointwise(node: fx.Node) -> bool:
    assert isinstance(node.target, OpOverload)
    is_known = torch.Tag.pointwise in node.target.tags or packet(node) in _POINTWISE_PACKETS
    return is_known and isinstance(value(node), torch.Tensor)


# Pointwise though they carry no tag of it.
_POINTWISE_PACKETS = frozenset({aten.clone, prims.convert_element_type, prims.fma})
