"""Which operators of a graph can be computed in chunks, so that one large value never is whole."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import fx

from dtrcompile.passes.chunking.rows import Cuts, Rows, rule_of, shape_of
from dtrcompile.passes.nodes import Role, is_sequence, owner, role, tensor_values, value

log = logging.getLogger("dtrcompile")

# A value of at least this share of the seed's bytes, made from the same rows, is cut as well.
_LARGE_SHARE = 1 / 2
# An operand of at least this share of the seed's elements is computed in chunks if it can be, not
# whole: masks, of a byte for each element, above all.
_LARGE_OPERAND_SHARE = 1 / 2


@dataclass(frozen=True)
class Region:
    """Operators that are computed in chunks.

    Attributes:
        seed: the value for whose sake that is done.
        n_rows: of every value in the region.
        rows: operator -> the rows of its result, in the order of the graph.
        totals: operator -> the rows of its operands, where its result is a sum over them.
    """

    seed: fx.Node
    n_rows: int
    rows: Mapping[fx.Node, Rows]
    totals: Mapping[fx.Node, Mapping[fx.Node, Rows]]

    @property
    def nodes(self) -> set[fx.Node]:
        """All operators that are computed in chunks."""
        return {*self.rows, *self.totals}

    def outputs(self) -> list[fx.Node]:
        """What is used whole outside, of the values that are cut."""
        inside = self.nodes
        return [n for n in self.rows if any(user not in inside for user in n.users)]


@dataclass(frozen=True)
class Refused:
    """Why a value cannot be computed in chunks.

    Attributes:
        by: the operator that needs all of it, or of what is made from its rows, at once.
        whole: what that operator reads.
    """

    seed: fx.Node
    by: fx.Node | None
    whole: fx.Node | None = None

    def __str__(self) -> str:
        if self.by is None:
            return f"{self.seed.name} has no rows that are independent of each other"
        return f"{self.by.name} reads all of {self.seed.name} at once"


def regions_of(gm: fx.GraphModule, least_bytes: int) -> tuple[list[Region], list[Refused]]:
    """Regions around all values of some size that can be computed in chunks, the largest first.

    Returns:
        regions, which have no operator in common, and values around which there is none.
    """
    found: list[Region] = []
    refused: list[Refused] = []
    taken: set[fx.Node] = set()
    seeds = [n for n in gm.graph.nodes if _may_be_seed(n) and bytes_of(n) >= least_bytes]
    for seed in sorted(seeds, key=lambda n: -bytes_of(n)):
        if seed in taken:
            continue
        region = region_of(seed)
        if isinstance(region, Refused):
            log.debug("not in chunks: %s", region)
            refused.append(region)
        elif not taken & region.nodes:
            found.append(region)
            taken |= region.nodes
    return found, refused


def _may_be_seed(node: fx.Node) -> bool:
    return rule_of(node) is not None and role(node) not in (Role.VIEW, Role.ITEM)


def region_of(seed: fx.Node) -> Region | Refused:
    """The operators around a value that can be computed in chunks, along its first dimension that
    allows it."""
    refused = Refused(seed, None)
    for rows in _possible_rows(seed):
        found = _Finder(seed, rows).region()
        if isinstance(found, Region):
            return found
        if refused.by is None:
            refused = found
    return refused


def _possible_rows(seed: fx.Node) -> Iterator[Rows]:
    rule, shape = rule_of(seed), shape_of(seed)
    if rule is None or shape is None:
        return
    for dimension, size in enumerate(shape):
        if size > 1 and rule.operands(seed, Rows(dimension)) is not None:
            yield Rows(dimension)


def bytes_of(node: fx.Node) -> int:
    """Of what a node's value is stored in, as far as a node tells; a view's is its base's."""
    tensors = (t for t in tensor_values(owner(node)) if isinstance(t.numel(), int))
    return sum(t.numel() * t.element_size() for t in tensors)


class _Finder:
    """Looks for the region of one value, cut at some rows.

    Attributes:
        roots: what is cut to begin with: the seed, and large operands of what is made from it.
        cut: what can be made from rows of the roots, in the order of the graph.
        totals: what can be made by adding up over these rows.
        large: what is worth to be cut, of that.
        border: operands that could be cut, but are needed whole anyway.
    """

    def __init__(self, seed: fx.Node, rows: Rows) -> None:
        self.seed = seed
        self.least_bytes = bytes_of(seed) * _LARGE_SHARE
        self.least_elements = _elements(seed) * _LARGE_OPERAND_SHARE
        self.places = {node: place for place, node in enumerate(seed.graph.nodes)}
        self.roots: dict[fx.Node, Rows] = {seed: rows}
        self.cut: dict[fx.Node, Rows] = {}
        self.totals: dict[fx.Node, Cuts] = {}
        self.large: set[fx.Node] = set()
        self.border: set[fx.Node] = set()

    def region(self) -> Region | Refused:
        """The region, or who needs the seed whole."""
        while True:
            self.follow_rows()
            inside = self.needed()
            roots = self.large_operands(inside)
            if roots:
                self.roots.update(roots)
                continue
            region = self.region_of(inside)
            for node in region.outputs():
                if node is self.seed or (node not in self.roots and self.is_large(node)):
                    users = [user for user in node.users if user not in region.nodes]
                    return Refused(self.seed, min(users, key=self.places.__getitem__), node)
            whole = self.roots.keys() & set(region.outputs())
            if not whole:
                by = _reads_more_than_rows(region)
                return region if by is None else Refused(self.seed, by)
            self.border.update(whole)
            for node in whole:
                del self.roots[node]

    def region_of(self, inside: set[fx.Node]) -> Region:
        shape = shape_of(self.seed)
        assert shape is not None
        # All elements of a sequence are inside, since nothing outside can be given the sequence.
        read = self.large | {n for n in inside if is_sequence(n)}
        return Region(
            self.seed,
            self.roots[self.seed].number(shape),
            {n: rows for n, rows in self.cut.items() if n in inside},
            {n: cuts for n, cuts in self.totals.items() if read & set(cuts)},
        )

    def follow_rows(self) -> None:
        """From the roots on, as far as rows are made from rows."""
        self.cut, self.totals = {}, {}
        for node in self.places:
            if node in self.roots:
                self.cut[node] = self.roots[node]
                continue
            given = [o for o in node.all_input_nodes if o in self.cut]
            rule = rule_of(node) if given else None
            if rule is None:
                continue
            rows = rule.result(node, given[0], self.cut[given[0]])
            if rows is not None and self.are_cut_for(rule.operands(node, rows), node):
                self.cut[node] = rows
                continue
            totals = rule.totals(node, given[0], self.cut[given[0]])
            if totals is not None and self.are_cut_for(totals, node):
                self.totals[node] = totals

    def are_cut_for(self, cuts: Cuts | None, node: fx.Node) -> bool:
        """Whether those operands of a node that are cut already are cut as it needs them."""
        given = [o for o in node.all_input_nodes if o in self.cut]
        return cuts is not None and all(cuts.get(o) == self.cut[o] for o in given)

    def is_large(self, node: fx.Node) -> bool:
        """Whether a value is worth to be cut."""
        return bytes_of(node) >= self.least_bytes

    def needed(self) -> set[fx.Node]:
        """The large values, what reads them, and what lies between them.

        A product of matrices whose result is not large ends the region.
        """
        self.large = set()
        reached: list[fx.Node] = []
        goes_on: set[fx.Node] = set()
        for node in self.cut:
            if node not in self.roots and not goes_on.intersection(node.all_input_nodes):
                continue
            reached.append(node)
            if node in self.border:
                continue
            is_large = self.is_large(node)
            if is_large:
                self.large.add(node)
            if is_large or role(node) is not Role.KERNEL:
                goes_on.add(node)
        found = {*self.large, *self.roots}
        for node in reversed(reached):
            if node not in self.border and any(user in found for user in node.users):
                found.add(node)
        found |= {n for n in reached if self.large.intersection(n.all_input_nodes)}
        items = (user for n in found if is_sequence(n) for user in n.users)
        return found | {user for user in items if user in self.cut}

    def large_operands(self, inside: set[fx.Node]) -> dict[fx.Node, Rows]:
        """Operands outside that are large, and can be computed in chunks, too."""
        wanted: dict[fx.Node, set[Rows]] = {}
        for node in inside:
            rule = rule_of(node)
            cuts = None if rule is None else rule.operands(node, self.cut[node])
            for operand, rows in (cuts or {}).items():
                if operand not in self.cut and operand not in self.border:
                    wanted.setdefault(operand, set()).add(rows)
        return {
            operand: next(iter(rows))
            for operand, rows in wanted.items()
            if len(rows) == 1 and self.may_cut(operand, *rows)
        }

    def may_cut(self, operand: fx.Node, rows: Rows) -> bool:
        """Whether an operand that nothing in the region gives is large, and can be cut so."""
        rule = rule_of(operand)
        if rule is None or role(operand) is Role.ITEM:
            return False
        is_large = _elements(operand) >= self.least_elements
        return is_large and rule.operands(operand, rows) is not None


def _reads_more_than_rows(region: Region) -> fx.Node | None:
    """An operator that would need more of the region than the rows of one chunk; None: a proof that
    there is none."""
    for node in region.nodes:
        rule = rule_of(node)
        if rule is None:
            return node
        cuts = (
            region.totals[node] if node in region.totals else rule.operands(node, region.rows[node])
        )
        inside = region.nodes.intersection(node.all_input_nodes)
        if cuts is None or any(cuts.get(o) != region.rows.get(o, _NO_ROWS) for o in inside):
            return node
        # Its elements are joined, if they are used whole, and not what holds them.
        if is_sequence(node) and any(user not in region.nodes for user in node.users):
            return node
    return None


_NO_ROWS = Rows(-1)  # of a total, which nothing in its region may read


def _elements(node: fx.Node) -> int:
    val = value(node)
    return val.numel() if isinstance(val, torch.Tensor) else 0
