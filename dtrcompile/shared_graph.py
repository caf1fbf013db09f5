"""A compiled graph that can be compiled again, with what it was told and what is known of it."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import fx

from dtrcompile.passes.allocators import Allocator
from dtrcompile.passes.capture import Captured, output_arguments
from dtrcompile.passes.errors import InfeasibleBudgetError
from dtrcompile.passes.measured import Measured
from dtrcompile.passes.pipeline import Outcome, Terms, placeholders
from dtrcompile.passes.plan import Plan
from dtrcompile.passes.program import Program, StorageKind
from dtrcompile.passes.replay import PlanStats, replay
from dtrcompile.passes.sharing import GraphBytes, Rest, without_rest
from dtrcompile.passes.torch_private import top_saved_tensors_hooks

if TYPE_CHECKING:
    from dtrcompile.ledger import Ledger

# A graph that others follow keeps its default split in the first step if that takes no more than
# this part of what is left, so that an ample budget costs no second compile.
_SMALL = 1 / 8

_SERIALS = itertools.count()


@dataclass(frozen=True, slots=True)
class Assignment:
    """What a graph was told when it was last compiled.

    Attributes:
        budget_bytes: of the step, None: resolve the options' for this graph.
        rest: the other graphs, as far as they are known.
        more_follow: other graphs will run between this one's forward and backward, which ones is
            not known yet.
        is_share_of_unknown: the budget is a share of the whole step's peak, which is not known yet.
        note: for the report.
    """

    budget_bytes: int | None = None
    rest: Rest = field(default_factory=Rest)
    more_follow: bool = False
    is_share_of_unknown: bool = False
    note: str = ""

    def terms(self, measured: Measured, budget_bytes: int | None) -> Terms:
        """The terms of a graph whose default split holds ``measured``.

        Args:
            budget_bytes: what the options come to for this graph; None for the smallest.
        """
        if self.budget_bytes is not None:
            budget_bytes = self.budget_bytes
        more_follow = self.more_follow and measured.backward_peak_bytes > 0  # else it saves nothing
        if self.is_share_of_unknown:
            return Terms(None, more_follow=more_follow)
        own_bytes = measured.peak_bytes - _constants(measured)
        if is_small(own_bytes, budget_bytes, self.rest.outside_bytes):
            more_follow = False
        return Terms(budget_bytes, self.rest, more_follow)


def is_small(own_bytes: int, budget_bytes: int | None, outside_bytes: int) -> bool:
    """Whether a graph need not be made smaller yet, though others follow."""
    return budget_bytes is not None and own_bytes <= _SMALL * (budget_bytes - outside_bytes)


def _constants(measured: Measured) -> int:
    return measured.split.get("parameters", 0) + measured.split.get("inputs", 0)


@dataclass(frozen=True)
class Planned:
    """What the ledger knows of a compiled graph."""

    program: Program
    assignment: Assignment
    available_bytes: int | None
    baseline: GraphBytes
    chosen: GraphBytes
    is_default: bool
    saves_least: bool
    allocator: Allocator

    @staticmethod
    def of(outcome: Outcome, assignment: Assignment, available_bytes: int | None) -> Planned:
        """From what the compilation found."""
        captured = outcome.captured
        constant_bytes = captured.program.constant_bytes
        gradient_bytes = _parameter_gradient_bytes(captured)
        return Planned(
            captured.program,
            assignment,
            available_bytes,
            outcome.baseline_measured.graph_bytes(constant_bytes, gradient_bytes),
            outcome.measured.graph_bytes(constant_bytes, gradient_bytes),
            outcome.chosen is None,
            outcome.saves_least,
            captured.allocator,
        )

    def stats_of(self, plan: Plan) -> PlanStats:
        """Of another plan, made of the program with the rest of a step."""
        return replay(self.program, without_rest(plan, self.program))[1]

    def planned_bytes(self, stats: PlanStats) -> GraphBytes:
        """What a plan holds."""
        return GraphBytes(
            self.program.constant_bytes,
            stats.forward_peak_bytes,
            stats.backward_peak_bytes,
            stats.boundary_bytes,
            self.chosen.gradient_bytes,
        )


def _parameter_gradient_bytes(captured: Captured) -> int:
    """Bytes of the gradients that stay after backward: those of parameters."""
    if captured.backward is None:
        return 0
    program = captured.program
    # Backward returns one gradient for each input of forward.
    storages = {
        captured.storage_of.get(captured.owner(gradient))
        for primal, gradient in zip(
            placeholders(captured.forward), output_arguments(captured.backward), strict=False
        )
        if isinstance(gradient, fx.Node)
        and (s := captured.storage_of.get(primal)) is not None
        and program.storages[s].kind is StorageKind.PARAMETER
    }
    return sum(program.storages[s].size_bytes for s in storages if s is not None)


@dataclass(frozen=True)
class Code:
    """A compiled graph.

    Attributes:
        function: to call.
        what_is_known: tells what is known of it: more when its backward was compiled too.
        restore: makes its report the graph's again, after what was compiled since.
    """

    function: Callable[..., Any]
    what_is_known: Callable[[], Planned | None]
    restore: Callable[[], None]


Compile = Callable[[Assignment], Code]


class SharedGraph:
    """The callable that Dynamo runs: a compiled graph that can be compiled again."""

    def __init__(self, ledger: Ledger, compile_with: Compile, more_follow: bool) -> None:
        self.ledger = ledger
        self.serial = next(_SERIALS)
        self.compile_with = compile_with
        # Autograd nodes of calls whose backward may be still to come -> what these calls ran with;
        # None for those that hold nothing, because hooks took what they saved.
        self.waiting: dict[weakref.ref[Any], Planned | None] = {}
        # Of the step that this graph is one of: it must not run over its budget later on.
        self.refusal: InfeasibleBudgetError | None = None
        assignment = ledger.first_assignment(more_follow or ledger.options.several_graphs)
        # Calls, by graph, that the plan knows to wait for their backward when this graph is called.
        self.foreseen = ledger.holding_calls()
        try:
            with ledger.advising():
                self.code = compile_with(assignment)
        except BaseException:
            ledger.abandon_step()
            raise
        ledger.add(self)

    @property
    def planned(self) -> Planned | None:
        """What is known of the compiled graph; None where there was nothing to plan."""
        return self.code.what_is_known()

    def __call__(self, *args: Any) -> Any:
        ledger = self.ledger
        before = ledger.before_call(self)
        if self.refusal is not None:
            raise self.refusal
        # A checkpointed region, or what is saved elsewhere.
        is_hooked = top_saved_tensors_hooks(True) is not None
        result = self.code.function(*args)
        node = _backward_node(result)
        if node is not None:
            planned = None if is_hooked else self.planned
            self.waiting[weakref.ref(node, self._forget)] = planned
        if ledger.observing:
            ledger.after_call(self, args, result, before, awaits_backward=node is not None)
        return result

    def _forget(self, node: weakref.ref[Any]) -> None:
        self.waiting.pop(node, None)

    def compile_again(self, assignment: Assignment) -> None:
        """Replace the compiled code; used from the next call on.

        Raises:
            InfeasibleBudgetError: then the old code stays.
        """
        self.code = self.compile_with(assignment)

    def use(self, code: Code) -> None:
        """Go back to what it was compiled to earlier."""
        self.code = code
        code.restore()

    def waits(self) -> bool:
        """Whether the backward of any of its calls is still to come."""
        return any(_waits(n) for n in list(self.waiting))

    def drop_done(self) -> None:
        """Forget the calls whose backward has run, though somebody holds their result."""
        for node in [n for n in list(self.waiting) if not _waits(n)]:
            self._forget(node)


def _backward_node(result: Any) -> Any:
    """The autograd node of a compiled graph's outputs, None without one."""
    if not torch.is_grad_enabled():
        return None
    for output in result if isinstance(result, (tuple, list)) else (result,):
        node = output.grad_fn if isinstance(output, torch.Tensor) else None
        # An output that is a view is made from the compiled function's by autograd.  Asked of the
        # type, because reading the attribute unpacks what was saved, or raises if it is gone.
        while node is not None and not hasattr(type(node), "saved_tensors"):
            node = node.next_functions[0][0] if node.next_functions else None
        if node is not None:
            return node
    return None


def _waits(reference: weakref.ref[Any]) -> bool:
    """Whether a node still holds its saved tensors: it lives, and backward has not run."""
    node = reference()
    if node is None:
        return False
    try:
        # (``saved_tensors`` would unpack them, and so compute a checkpointed block again.)
        return node._raw_saved_tensors is not None
    except RuntimeError:
        return False
