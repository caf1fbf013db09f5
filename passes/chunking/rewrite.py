"""A graph in which regions are computed in chunks."""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import fx

from dtrcompile.passes.chunking.regions import Region
from dtrcompile.passes.chunking.rows import Chunk, Rows, reshaped, rule_of, shape_of
from dtrcompile.passes.graphs.modules import module_like
from dtrcompile.passes.nodes import draws_random_numbers, is_mutating, value
from dtrcompile.passes.torch_private import FakeTensor

aten = torch.ops.aten

_LOW_PRECISION = (torch.float16, torch.bfloat16)


def chunked(gm: fx.GraphModule, regions: Sequence[tuple[Region, int]]) -> fx.GraphModule | None:
    """The same graph, with each region computed in so many chunks.

    Args:
        regions: of ``gm``, which have no operator in common, each with its number of chunks.

    Returns:
        None if the regions would have to wait for each other, or for what has to stay in its place
        (writing into a tensor, and drawing random numbers), or if a value would get other strides.
    """
    blocks = _in_order(gm.graph, regions)
    if blocks is None or not _keeps_effects(gm.graph, blocks):
        return None
    try:
        return _Writer(gm, regions).written(blocks)
    except _OtherLayout:
        return None


class _OtherLayout(Exception):
    """A value that is joined again would lie in memory in another way than before."""


# An operator outside, or what of a region can be computed chunk by chunk, one after the other.
_Block = tuple[Region | None, tuple[fx.Node, ...]]


def _in_order(graph: fx.Graph, regions: Sequence[tuple[Region, int]]) -> list[_Block] | None:
    """The blocks of the new graph; None if there is no such order."""
    block_of: dict[fx.Node, int] = {}
    blocks: list[tuple[Region | None, list[fx.Node]]] = []
    for region, _ in regions:
        by_stage: dict[int, int] = {}
        for node, stage in _stages(graph, region).items():
            if stage not in by_stage:
                by_stage[stage] = len(blocks)
                blocks.append((region, []))
            block_of[node] = by_stage[stage]
            blocks[by_stage[stage]][1].append(node)
    for node in graph.nodes:
        if node not in block_of:
            block_of[node] = len(blocks)
            blocks.append((None, [node]))
    place = {node: i for i, node in enumerate(graph.nodes)}
    return _sorted(blocks, block_of, [place[nodes[0]] for _, nodes in blocks])


def _stages(graph: fx.Graph, region: Region) -> dict[fx.Node, int]:
    """The operators of a region by stage.

    An operator that reads a whole value that is made of stage 0, on whatever way, is of stage 1.
    """
    inside = region.nodes
    stage: dict[fx.Node, int] = {}
    for node in graph.nodes:
        stage[node] = 0
        for operand in node.all_input_nodes:
            is_chunk = node in inside and operand in region.rows
            is_whole = operand in inside and not is_chunk
            stage[node] = max(stage[node], stage[operand] + is_whole)
    return {node: found for node, found in stage.items() if node in inside}


def _sorted(
    blocks: Sequence[tuple[Region | None, list[fx.Node]]],
    block_of: dict[fx.Node, int],
    priority: Sequence[int],
) -> list[_Block] | None:
    """In topological order, and otherwise as they are in the graph; None if there is a circle."""
    users: defaultdict[int, set[int]] = defaultdict(set)
    n_waiting = [0] * len(blocks)
    for node, block in block_of.items():
        for operand in node.all_input_nodes:
            before = block_of[operand]
            if before != block and block not in users[before]:
                users[before].add(block)
                n_waiting[block] += 1
    ready = [(priority[b], b) for b, n in enumerate(n_waiting) if n == 0]
    heapq.heapify(ready)
    found: list[_Block] = []
    while ready:
        _, block = heapq.heappop(ready)
        region, nodes = blocks[block]
        found.append((region, tuple(nodes)))
        for user in users[block]:
            n_waiting[user] -= 1
            if n_waiting[user] == 0:
                heapq.heappush(ready, (priority[user], user))
    return found if len(found) == len(blocks) else None


def _keeps_effects(graph: fx.Graph, blocks: Iterable[_Block]) -> bool:
    """Whether effects happen in the order of the graph, and after all that came before them."""
    place = {node: i for i, node in enumerate(graph.nodes)}
    latest = latest_effect = -1
    for _, nodes in blocks:
        for node in nodes:
            if place[node] < latest_effect or (is_mutating(node) and place[node] < latest):
                return False
            latest = max(latest, place[node])
            if is_mutating(node):
                latest_effect = place[node]
    draws = [place[n] for _, nodes in blocks for n in nodes if draws_random_numbers(n)]
    return draws == sorted(draws)


class _Writer:
    """Writes the new graph.

    Attributes:
        whole: node -> what has its value in the new graph.
        chunks: node of a region -> what has each of its chunks.
    """

    def __init__(self, gm: fx.GraphModule, regions: Sequence[tuple[Region, int]]) -> None:
        self.gm = gm
        self.graph = fx.Graph()
        self.n_chunks = {id(region): n for region, n in regions}
        self.whole: dict[fx.Node, fx.Node] = {}
        self.chunks: dict[fx.Node, list[fx.Node]] = {}

    def written(self, blocks: Iterable[_Block]) -> fx.GraphModule:
        for region, nodes in blocks:
            if region is None:
                (node,) = nodes
                self.whole[node] = self.graph.node_copy(node, self.whole.__getitem__)
            else:
                self.write_chunks(region, nodes)
        self.graph.lint()
        return module_like(self.gm, self.graph, self.whole)

    def write_chunks(self, region: Region, nodes: Sequence[fx.Node]) -> None:
        """Write a block, and what of it is used whole."""
        size = -(-region.n_rows // self.n_chunks[id(region)])
        totals: dict[fx.Node, fx.Node] = {}
        for index, start in enumerate(range(0, region.n_rows, size)):
            n_rows = min(size, region.n_rows - start)
            chunk = _Chunk(self, region, index, start, n_rows)
            for node in nodes:
                written = chunk.written(node)
                if node in region.rows:
                    self.chunks.setdefault(node, []).append(written)
                else:
                    totals[node] = chunk.added(totals.get(node), written)
        for node, total in totals.items():
            self.whole[node] = self.finished(node, total)
        outputs = set(region.outputs())
        for node in nodes:
            if node in outputs:
                self.whole[node] = self.joined(node, region.rows[node])

    def finished(self, node: fx.Node, total: fx.Node) -> fx.Node:
        """A total in the type and shape of the operator that it is one of."""
        val = _tensor(node)
        if _tensor(total).dtype != val.dtype:
            total = self.call(node, torch.ops.prims.convert_element_type.default, total, val.dtype)
        if _tensor(total).shape != val.shape:  # dimensions of one element, in place of the rows
            total = self.call(node, aten.view.default, total, list(val.shape))
        return total

    def joined(self, node: fx.Node, rows: Rows) -> fx.Node:
        """The whole value of what was computed in chunks.

        Raises:
            _OtherLayout: if it cannot have the strides that it had.
        """
        val = _tensor(node)
        order = sorted(range(val.dim()), key=lambda d: (-val.stride(d), d))
        parts = self.chunks[node]
        # As it lies in memory, where the rows are one dimension after the other.
        merged = list(dict.fromkeys(map(rows.dimension, order)))
        if merged != sorted(merged):
            parts = [self.call(node, aten.permute.default, part, merged) for part in parts]
        whole = self.call(node, aten.cat.default, parts, merged.index(rows.start))
        if rows.count > 1:
            whole = self.call(node, aten.view.default, whole, [val.shape[d] for d in order])
        if order != sorted(order):
            back = [order.index(d) for d in range(val.dim())]
            whole = self.call(node, aten.permute.default, whole, back)
        if _layout(_tensor(whole)) != _layout(val):
            raise _OtherLayout
        return whole

    def call(self, like: fx.Node, target: Callable[..., Any], *args: Any, **kwargs: Any) -> fx.Node:
        """Add a call that is there for the sake of an operator of the old graph."""
        node = self.graph.create_node("call_function", target, args, kwargs, like.name)
        node.meta = {k: v for k, v in like.meta.items() if k not in ("val", "tensor_meta")}
        mode = _fake_mode(like)
        given_args, given_kwargs = fx.map_arg((args, kwargs), value)
        with mode:
            node.meta["val"] = target(*given_args, **given_kwargs)
        return node


class _Chunk(Chunk):
    """One chunk of a block."""

    def __init__(
        self, writer: _Writer, region: Region, index: int, start: int, n_rows: int
    ) -> None:
        self.writer = writer
        self.region = region
        self.index = index
        self.start = start
        self.n_rows = n_rows
        self.node: fx.Node | None = None
        self.cuts: dict[fx.Node, Rows] = {}
        self.sliced: dict[tuple[fx.Node, Rows], fx.Node] = {}

    def written(self, node: fx.Node) -> fx.Node:
        """One operator of the region."""
        rule = rule_of(node)
        assert rule is not None
        rows = self.region.rows.get(node)
        cuts = self.region.totals[node] if rows is None else rule.operands(node, rows)
        assert cuts is not None
        self.node, self.cuts = node, dict(cuts)
        return rule.write(node, rows, self)

    def of(self, operand: fx.Node) -> fx.Node:
        rows = self.cuts.get(operand)
        if rows is None:
            return self.writer.whole[operand]
        if operand in self.region.rows:
            return self.writer.chunks[operand][self.index]
        if (operand, rows) not in self.sliced:
            self.sliced[operand, rows] = self.slice(operand, rows)
        return self.sliced[operand, rows]

    def slice(self, operand: fx.Node, rows: Rows) -> fx.Node:
        """Some rows of a value that is there whole."""
        shape = shape_of(operand)
        assert shape is not None
        whole = self.writer.whole[operand]
        if rows.count > 1:
            whole = reshaped(self, whole, rows.merged(shape, rows.number(shape)))
        stop = self.start + self.n_rows
        return self.call(aten.slice.Tensor, whole, rows.start, self.start, stop)

    def added(self, total: fx.Node | None, part: fx.Node) -> fx.Node:
        """The total of the chunks up to this one.

        Low precision is added up in float32: it is rounded once more, not once for each chunk.
        """
        if _tensor(part).dtype in _LOW_PRECISION:
            part = self.call(torch.ops.prims.convert_element_type.default, part, torch.float32)
        return part if total is None else self.call(aten.add.Tensor, total, part)

    def call(self, target: Callable[..., Any], *args: Any, **kwargs: Any) -> fx.Node:
        assert self.node is not None
        return self.writer.call(self.node, target, *args, **kwargs)


def _tensor(node: fx.Node) -> torch.Tensor:
    val = value(node)
    assert isinstance(val, torch.Tensor)
    return val


def _layout(tensor: torch.Tensor) -> list[tuple[int, int]]:
    """Sizes and strides; a dimension of one element may have any stride."""
    sizes = zip(tensor.shape, tensor.stride(), strict=True)
    return [(size, stride if size > 1 else 1) for size, stride in sizes]


def _fake_mode(node: fx.Node) -> Any:
    val = value(node)
    tensors = val if isinstance(val, (tuple, list)) else [val]
    return next(t.fake_mode for t in tensors if isinstance(t, FakeTensor))
