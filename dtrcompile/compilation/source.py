"""A Dynamo graph, and what it takes to compile it, more than once if need be."""

from __future__ import annotations

import contextlib
import copy
import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import torch
from torch import fx

from dtrcompile.compilation.eager import compile_eager
from dtrcompile.compilation.inductor import compile_inductor
from dtrcompile.compilation.probing import ProbedPlan, is_probing, probing
from dtrcompile.compilation.session import Session, SessionState
from dtrcompile.options import Options
from dtrcompile.outside import watching
from dtrcompile.passes.errors import CaptureError
from dtrcompile.passes.fitting.fit import Outcome
from dtrcompile.passes.graphs.modules import copied_module, placeholders
from dtrcompile.passes.graphs.sources import input_source, readable_path
from dtrcompile.passes.inductor.guards import noting_guards
from dtrcompile.passes.torch_private import TensorifyState, TracingContext, tracing
from dtrcompile.report import next_graph_index
from dtrcompile.steps.planned import Assignment, Code, NextAssignment
from dtrcompile.steps.step_peak import StepPeak
from dtrcompile.steps.symbols import Symbols


class GraphSource:
    """A Dynamo graph, and what it takes to compile it, also a second time."""

    options: Options
    step_peak: StepPeak
    graph: int

    def __init__(
        self,
        gm: fx.GraphModule,
        example_inputs: Sequence[Any],
        symbols: Symbols,
        graph_break: str,
    ) -> None:
        self.graph_break = graph_break
        self.symbols = symbols
        self.context = TracingContext.try_get()
        # The first compilation's; later ones use a copy, because compilation changes the graph,
        # and fake inputs, because real ones would be held.
        self.first: tuple[fx.GraphModule, Sequence[Any]] | None = (gm, example_inputs)
        self.again = copied_module(gm)
        self.input_names = [readable_path(input_source(node)) for node in placeholders(gm)]
        self.ambient = _Ambient.now()
        # Numbers that the graph holds as they are; Dynamo forgets which when it is done.
        self.fixed_numbers = frozenset(TensorifyState.force_specializations)
        # The graph's plans by their numbers.
        self.sessions: dict[int, Session] = {}

    def under(self, options: Options, step_peak: StepPeak) -> GraphSource:
        """The same graph, to be compiled with options, with reports of its own."""
        source = copy.copy(self)
        self.first = None
        source.options, source.step_peak = options, step_peak
        source.graph, source.sessions = next_graph_index(), {}
        return source

    def compile(
        self, assignment: Assignment, next_assignment: NextAssignment | None = None
    ) -> Code:
        """Compile for an assignment.

        Args:
            next_assignment: what else may do, where no plan for the assignment is within the
                budget.  It need not be asked: code that is kept on disk is compiled for the
                assignment, or not at all.
        """
        watching.take_no_more_lines()
        sizes, step_peak = assignment.sizes, self.step_peak
        if sizes is not None:
            # A plan may be made for sizes that no call had: nothing is learned of the step.
            step_peak = replace(step_peak)
        elif self.symbols:
            sizes = self.symbols.sizes(self.symbols.hints())

        assignment = replace(assignment, sizes=sizes)
        may_estimate, may_load = self.options.verify and not is_probing(), True
        is_first = self.first is not None
        shape_env = None if is_first or not self.symbols else _shape_env(self.context)
        with noting_guards(shape_env) as guards:
            while True:
                session = Session(
                    self.options,
                    self.graph,
                    assignment,
                    step_peak,
                    may_estimate=may_estimate,
                    may_load=may_load,
                    graph_break=self.graph_break,
                    input_names=self.input_names,
                    plan_again=functools.partial(
                        self._planned_again, assignment, replace(step_peak)
                    ),
                    next_assignment=next_assignment,
                )
                function = self._compile(session)
                if session.state is SessionState.UNKNOWN:
                    may_load = False
                elif session.has_to_plan_after_all():
                    may_estimate = False
                else:
                    break
        self._make_current(session)
        return Code(
            function,
            session.planned,
            functools.partial(self._restore, session),
            session.change_assignment,
            session.assignment,
            tuple(guards),
        )

    def _make_current(self, session: Session) -> None:
        """The reports of its plan are this session's from here on."""
        number = session.assignment.number
        if number in self.sessions:
            self.sessions[number].is_replaced = True
        self.sessions[number] = session
        session.is_replaced = False

    def _restore(self, session: Session) -> None:
        """Go on with the code of a session, whatever has been compiled since."""
        self._make_current(session)
        if session.summary is not None:
            session.report()

    def _planned_again(self, assignment: Assignment, step_peak: StepPeak) -> Outcome:
        """What planning came to for an assignment, where code of an earlier process is used."""
        session = Session(self.options, self.graph, assignment, step_peak)
        try:
            with probing():
                self._compile(session)
        except ProbedPlan as planned:
            return planned.outcome
        raise CaptureError("code was loaded of a graph that computes nothing")

    def _compile(self, session: Session) -> Callable[..., Any]:
        compiler = compile_eager if self.options.compiler == "eager" else compile_inductor
        if self.first is not None:
            gm, example_inputs = self.first
            self.first = None
            return compiler(gm, example_inputs, session)
        gm = copied_module(self.again)
        inputs = [n.meta.get("example_value") for n in placeholders(gm)]
        fixed_numbers = mock.patch.object(
            TensorifyState, "force_specializations", set(self.fixed_numbers)
        )
        # A context of its own: backward is compiled when it first runs, with what AOTAutograd noted
        # of its forward there, such as the saved tensors whose memory backward may write over.
        context = copy.copy(self.context)
        with self.ambient.restored(), tracing(context), fixed_numbers:
            return compiler(gm, inputs, session)


def _shape_env(context: TracingContext | None) -> Any:
    mode = None if context is None else context.fake_mode
    return None if mode is None else mode.shape_env


@dataclass(frozen=True)
class _Ambient:
    """The modes around a compilation that decide what is traced."""

    grad: bool
    autocast: tuple[tuple[str, bool, torch.dtype], ...]

    @staticmethod
    def now() -> _Ambient:
        return _Ambient(
            torch.is_grad_enabled(),
            tuple(
                (device, torch.is_autocast_enabled(device), torch.get_autocast_dtype(device))
                for device in ("cpu", "cuda")
            ),
        )

    @contextlib.contextmanager
    def restored(self) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            stack.enter_context(torch.set_grad_enabled(self.grad))
            for device, enabled, dtype in self.autocast:
                if enabled or torch.is_autocast_enabled(device):
                    stack.enter_context(torch.autocast(device, dtype=dtype, enabled=enabled))
            yield
