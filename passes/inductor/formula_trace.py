"""A schedule's peaks as formulas: its wrappers are run once more, with symbols in place of sizes.

`FormulaLedger` counts as `schedule.Ledger` does, and keeps for each moment which terms are held.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import sympy
import torch
from torch.utils import _pytree as pytree

from dtrcompile.passes.device.workspaces import may_hold_workspace, workspace_bytes
from dtrcompile.passes.fitting.peak_formula import Measurable, Moment, Moments, Term
from dtrcompile.passes.inductor.trace import Allocation, Ledger
from dtrcompile.passes.nodes import expression, hint
from dtrcompile.passes.program.sizes import Sizes, at_sizes
from dtrcompile.passes.torch_private import FakeTensorMode


@dataclass
class FormulaLedger(Ledger):
    """Terms held at each moment of a run whose sizes are symbols.

    Attributes:
        base: terms that are resident throughout.
        tangents: terms that become resident at the boundary.
        forward, backward: all moments of each.
        boundary: when forward has returned.
        saved: what forward has saved then.
    """

    base: Moment = field(default_factory=dict)
    tangents: Moment = field(default_factory=dict)
    forward: list[Moment] = field(default_factory=list)
    backward: list[Moment] = field(default_factory=list)
    boundary: Moment = field(default_factory=dict)
    saved: Moment = field(default_factory=dict)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.term_of: dict[int, Term] = {}
        self.held: Counter[Term] = Counter(self.base)
        self.workspace: Term | None = None
        self.in_backward = False
        self._record("inputs")

    def add_base(self, size_bytes: int) -> None:
        self.held.update(self.tangents)
        super().add_base(size_bytes)

    @property
    def moments(self) -> Moments:
        """What was held in the run, moment by moment."""
        return Moments(self.forward, self.backward, self.boundary, self.saved)

    def _took(self, allocation: Allocation, storage: torch.UntypedStorage) -> None:
        term = self.term_of[allocation.serial] = expression(storage.nbytes())
        self.held[term] += 1

    def _gave(self, allocation: Allocation) -> None:
        term = self.term_of.pop(allocation.serial)
        self.held[term] -= 1
        if not self.held[term]:
            del self.held[term]

    def use(self, size_bytes: int, label: str) -> None:
        if self.workspace is None:
            self.workspace = sympy.Integer(size_bytes)
        super().use(size_bytes, label)
        self.workspace = None

    def use_workspace(
        self,
        func: object,
        args: Sequence[object],
        kwargs: Mapping[str, object],
        result: object,
        label: str,
    ) -> None:
        if not may_hold_workspace(func, args):
            return
        form = pytree.tree_map(_form, (tuple(args), dict(kwargs), result))

        def bytes_at(sizes: Sizes | None) -> int:
            with at_sizes(sizes), FakeTensorMode(allow_non_fake_inputs=True):
                fake_args, fake_kwargs, fake_result = pytree.tree_map(
                    _made, form, is_leaf=lambda leaf: isinstance(leaf, _TensorForm)
                )
                return workspace_bytes(func, fake_args, fake_kwargs, fake_result)

        self.workspace = Measurable(str(func), bytes_at)
        self.use(bytes_at(None), label)

    def end_forward(self, saved: set[int]) -> None:
        self.boundary = dict(self.held)
        self.saved = Counter(
            self.term_of[a.serial] for a in self.live.values() if a.serial in saved
        )
        self.in_backward = True

    def _record(self, label: str) -> None:
        moment = dict(self.held)
        if self.workspace is not None:
            moment[self.workspace] = moment.get(self.workspace, 0) + 1
        (self.backward if self.in_backward else self.forward).append(moment)
        super()._record(label)


@dataclass(frozen=True)
class _TensorForm:
    """What a fake tensor is made again from, at any sizes."""

    shape: tuple[int | torch.SymInt, ...]
    stride: tuple[int | torch.SymInt, ...]
    dtype: torch.dtype
    device: torch.device


def _form(leaf: Any) -> Any:
    if isinstance(leaf, torch.Tensor) and leaf.layout is torch.strided:
        return _TensorForm(tuple(leaf.shape), tuple(leaf.stride()), leaf.dtype, leaf.device)
    return leaf


def _made(leaf: Any) -> Any:
    if isinstance(leaf, _TensorForm):
        shape, stride = ([hint(size) for size in sizes] for sizes in (leaf.shape, leaf.stride))
        return torch.empty_strided(shape, stride, dtype=leaf.dtype, device=leaf.device)
    return hint(leaf) if isinstance(leaf, torch.SymInt) else leaf
