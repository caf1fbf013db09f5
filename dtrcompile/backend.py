"""The entry point: ``torch.compile(model, backend="dtr", options={"budget": "8GiB"})``."""

from __future__ import annotations

import contextlib
import functools
import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from typing import Any
from unittest import mock

import torch
from torch import fx, nn

from dtrcompile import artifacts
from dtrcompile.options import Options, defaults_used, forget_defaults_used
from dtrcompile.outside.surroundings import Beside
from dtrcompile.outside.uncompiled import forget, graph_break, listen
from dtrcompile.passes.device.allocators import EXACT, allocator_of
from dtrcompile.passes.device.costs import make_cost_model
from dtrcompile.passes.device.workspaces import unknown_workspaces
from dtrcompile.passes.errors import (
    InfeasibleBudgetError,
    OptionError,
    VerificationError,
    format_bytes,
)
from dtrcompile.passes.fitting.fit import (
    AMPLE,
    MemoryModel,
    Outcome,
    RefereeModel,
    Terms,
    constant_bytes,
    fit,
)
from dtrcompile.passes.fitting.inductor_model import InductorModel, ScheduleSizeModel
from dtrcompile.passes.fitting.measured import Measured
from dtrcompile.passes.graphs.capture import Captured, capture
from dtrcompile.passes.graphs.emit import lower_frees
from dtrcompile.passes.graphs.executor import EagerExecutor, Predicted
from dtrcompile.passes.graphs.modules import copied_module, output_arguments, placeholders
from dtrcompile.passes.graphs.recompute_tags import tag_scopes
from dtrcompile.passes.graphs.recurrent import unroll_recurrent
from dtrcompile.passes.graphs.regions import inline_regions
from dtrcompile.passes.inductor import LoweredStep, Wrapper, schedule_trace, trace
from dtrcompile.passes.inductor.guards import noting_guards
from dtrcompile.passes.inductor.patches import Purpose, applied
from dtrcompile.passes.inductor.step import device_of, is_planned, planned_config
from dtrcompile.passes.nodes import hint, mark_of
from dtrcompile.passes.planning.planners import make_planner
from dtrcompile.passes.program import io
from dtrcompile.passes.program.plan import Boundary
from dtrcompile.passes.program.program import StorageKind
from dtrcompile.passes.program.replay import replay
from dtrcompile.passes.program.sizes import Sizes, at_sizes
from dtrcompile.passes.torch_private import (
    CompiledFxGraph,
    CustomPartitionerFn,
    FakeTensorMode,
    TensorifyState,
    TracingContext,
    V,
    aot_autograd,
    compile_fx,
    compile_fx_inner,
    detect_fake_mode,
    functorch_config,
    inductor_config,
    joint_graph_passes,
    keeps_graph,
    list_mode_options,
    min_cut_rematerialization_partition,
    select_decomp_table,
    tracing,
)
from dtrcompile.probe import ProbedPlan, is_probing
from dtrcompile.report import CompileReport, add_report, next_graph_index, reports
from dtrcompile.source_hash import package_hash
from dtrcompile.steps.ledger import Ledger, forget_steps, ledger_of, more_graphs_follow
from dtrcompile.steps.planned import Assignment, Code, Planned, around_bytes
from dtrcompile.steps.shared_graph import Returned, SharedGraph
from dtrcompile.steps.step_peak import StepPeak
from dtrcompile.steps.symbols import Symbols

log = logging.getLogger("dtrcompile")

# What a report says of the compiled code.
VERIFIED = "verified: it holds what is promised"
NOT_YET = "not verified yet: the last graph of the step is still to be compiled"
UNVERIFIED = "not verified: "
COUNTED = "every byte is counted as it runs"

_UNSPLIT = (
    "above 1 MiB, blocks may be up to 1 MiB larger than tensors, and each counts as that; with"
    " PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True they are not"
)


def dtr(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    options: Mapping[str, Any] | None = None,
    mode: str | None = None,
) -> Callable[..., Any]:
    """Compile a Dynamo graph so that a step stays within a byte budget.

    Args:
        gm: the graph; owned by this function from here on.
        example_inputs: its inputs.
        options: see `dtrcompile.options.Options`.
        mode: Inductor's, as ``options={"inductor": {"mode": ...}}``.

    Raises:
        OptionError: for an unknown or unusable option.
        InfeasibleBudgetError: if no plan stays within the budget; names the smallest that does.
        UnknownOptimizerError: if an optimizer is to be counted and cannot.
    """
    if mode is not None and (options is None or isinstance(options, Mapping)):
        inductor = (options or {}).get("inductor") or {}
        options = {**(options or {}), "inductor": {"mode": mode, **inductor}}
    listen()
    parsed = Options.parse(options)
    shared = compile_graph(gm, example_inputs, parsed)
    defaults_used(shared.graph, options, parsed)
    return shared


def compile_graph(
    gm: fx.GraphModule, example_inputs: Sequence[Any], options: Options
) -> SharedGraph:
    """As `dtr`, with options that were parsed."""
    inline_regions(gm)
    if torch.is_grad_enabled():
        unroll_recurrent(gm)
    ledger = Ledger(options) if is_probing() else ledger_of(options)
    symbols = Symbols.of_graph(gm)
    parameters = _parameters(gm)
    step_peak = ledger.step_peaks.of(parameters)
    device = _device_of(parameters, example_inputs)
    source = _Source(gm, example_inputs, options, symbols, step_peak, graph_break(gm))
    with ledger.surroundings.seeing(parameters, device, options):
        return SharedGraph(
            ledger,
            source.compile,
            more_graphs_follow(gm),
            graph=source.graph,
            symbols=symbols,
            step_peak=step_peak,
            parameters=parameters,
            received=_received_bytes(gm),
            returned=Returned() if symbols else _returned(gm),
        )


def _received_bytes(gm: fx.GraphModule) -> list[int]:
    """Of the inputs that were computed from what needs gradients, by another graph or outside."""
    inputs = (n.meta.get("example_value") for n in placeholders(gm))
    return [
        hint(v.untyped_storage().nbytes())
        for v in inputs
        if isinstance(v, torch.Tensor) and v.layout is torch.strided and not v.is_leaf
    ]


def _returned(gm: fx.GraphModule) -> Returned:
    """The outputs that the graph computes, where there will be a backward."""
    made = [
        v
        for n in output_arguments(gm)
        if isinstance(n, fx.Node)
        and n.op not in ("placeholder", "get_attr")
        and isinstance(v := n.meta.get("example_value"), torch.Tensor)
        and v.layout is torch.strided
    ]
    if not any(v.requires_grad for v in made):
        return Returned()
    storages = {s._cdata: hint(s.nbytes()) for s in (v.untyped_storage() for v in made)}
    has_loss = any(v.requires_grad and v.numel() == 1 for v in made)
    return Returned(sum(storages.values()), has_loss=has_loss)


def _reset() -> None:
    """``torch._dynamo.reset`` was called: all will be compiled again."""
    forget()
    forget_defaults_used()
    forget_steps()


dtr.reset = _reset  # type: ignore[attr-defined]
# From here on, because a model that Dynamo does not compile at all does not reach the backend.
listen()


def _device_of(parameters: Iterable[torch.Tensor], inputs: Iterable[object]) -> torch.device:
    for tensor in (*parameters, *inputs):
        if isinstance(tensor, torch.Tensor) and tensor.device.type not in ("cpu", "meta"):
            return tensor.device
    return torch.device("cpu")


def _parameters(gm: fx.GraphModule) -> list[nn.Parameter]:
    """The user's own parameters that a Dynamo graph reads, inputs or attributes of it."""
    found = list(gm.parameters())
    for node in placeholders(gm):
        argument = node.meta.get("grapharg")
        example = None if argument is None else argument.example
        if isinstance(example, nn.Parameter):
            found.append(example)
    return found


class _Source:
    """A Dynamo graph, and what it takes to compile it, also a second time."""

    def __init__(
        self,
        gm: fx.GraphModule,
        example_inputs: Sequence[Any],
        options: Options,
        symbols: Symbols,
        step_peak: StepPeak,
        note: str,
    ) -> None:
        self.options = options
        self.note = note
        self.symbols = symbols
        self.step_peak = step_peak
        self.graph = next_graph_index()
        self.context = TracingContext.try_get()
        # The first compilation's; later ones use a copy, because compilation changes the graph,
        # and fake inputs, because real ones would be held.
        self.first: tuple[fx.GraphModule, Sequence[Any]] | None = (gm, example_inputs)
        self.again = copied_module(gm)
        self.ambient = _Ambient.now()
        # Numbers that the graph holds as they are; Dynamo forgets which when it is done.
        self.fixed_numbers = frozenset(TensorifyState.force_specializations)
        # The graph's plans by their numbers.
        self.sessions: dict[int, _Session] = {}

    def compile(self, assignment: Assignment) -> Code:
        """Compile for an assignment."""
        sizes = assignment.sizes
        if sizes is None and self.symbols:
            sizes = self.symbols.sizes(self.symbols.hints())

        def session_of(may_guess: bool) -> _Session:
            return _Session(
                self.options,
                self.graph,
                replace(assignment, sizes=sizes),
                self.step_peak,
                may_guess=may_guess,
                note=self.note,
            )

        is_first = self.first is not None
        shape_env = None if is_first or not self.symbols else _shape_env(self.context)
        with noting_guards(shape_env) as guards:
            session = session_of(self.options.verify and not is_probing())
            function = self._compile(session)
            if session.guessed_wrong():
                session = session_of(False)
                function = self._compile(session)
        if assignment.number in self.sessions:
            self.sessions[assignment.number].is_replaced = True
        self.sessions[assignment.number] = session
        return Code(
            function,
            session.planned,
            session.restore,
            session.tell,
            session.assignment,
            tuple(guards),
        )

    def _compile(self, session: _Session) -> Callable[..., Any]:
        compiler = _compile_eager if self.options.compiler == "eager" else _compile_inductor
        if self.first is not None:
            gm, example_inputs = self.first
            self.first = None
            return compiler(gm, example_inputs, session)
        gm = copied_module(self.again)
        inputs = [n.meta.get("example_value") for n in placeholders(gm)]
        fixed_numbers = mock.patch.object(
            TensorifyState, "force_specializations", set(self.fixed_numbers)
        )
        with self.ambient.restored(), tracing(self.context), fixed_numbers:
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


# --- planning, the same for both compilers ------------------------------------------------------


@dataclass
class _Session:
    """What one call of `dtr` knows, from the partitioner to the last graph compiled.

    Attributes:
        may_guess: at an ample budget the default split need not be measured before it is compiled.
        note: of the Dynamo graph, for the report.
        capture_s: seconds spent on the capture.
        is_over: what was compiled on a guess holds more than the budget.
        is_replaced: the graph was compiled again since, so its report is another's.
        around_bytes: of a training step, what is there when an optimizer steps.
        verification: whether the compiled code was held to the promise, for the report.
    """

    options: Options
    graph: int
    assignment: Assignment
    step_peak: StepPeak = field(default_factory=StepPeak)
    may_guess: bool = False
    note: str = ""
    capture_s: float = 0.0
    outcome: Outcome | None = None
    available_bytes: int | None = None
    graphs: list[fx.GraphModule] = field(default_factory=list)
    wrappers: list[Wrapper] = field(default_factory=list)
    is_over: bool = False
    is_replaced: bool = False
    around_bytes: int = 0
    verification: str = NOT_YET
    _planned: tuple[Outcome, Planned] | None = None

    def planned(self) -> Planned | None:
        """For the ledger; None where there was nothing to plan."""
        if self.outcome is None:
            return None
        if self._planned is None or self._planned[0] is not self.outcome:
            planned = Planned.of(self.outcome, self.assignment, self.available_bytes)
            planned = planned.handing_on(self.assignment.handed_on)
            self._planned = (self.outcome, planned)
        return self._planned[1]

    def terms(self, baseline: Measured) -> Terms:
        """What to keep to, where the default split holds ``baseline``."""
        trains = baseline.backward_peak_bytes > 0
        waits = self.step_peak.has_to_wait(self.options, trains=trains)
        if trains:
            self.step_peak.around_bytes = max(self.step_peak.around_bytes, self.around_bytes)
        budget_bytes = self.step_peak.budget_bytes(
            self.options,
            baseline.peak_bytes,
            self.available_bytes,
            trains=trains,
            beside=self.assignment.beside,
        )
        return self.assignment.terms(
            baseline, budget_bytes, waits=waits and self.assignment.budget_bytes is None
        )

    def check_optimizer_step(self, budget_bytes: int | None) -> None:
        """Hold what is there inside of ``optimizer.step()`` to the budget too.

        Raises:
            InfeasibleBudgetError: which names what it needs.
        """
        if budget_bytes is None or self.options.is_whole_peak or not self.around_bytes:
            return
        self.assignment.beside.check(budget_bytes, self.around_bytes)

    def tell(self, assignment: Assignment) -> None:
        """It was compiled for something else, and stays as it is."""
        if self.outcome is None or self.is_replaced:
            return
        own = self.assignment
        self.assignment = replace(assignment, sizes=own.sizes, number=own.number)
        budget_bytes = assignment.budget_bytes
        if budget_bytes is None:
            budget_bytes = self.outcome.budget_bytes
        self.outcome = replace(self.outcome, rest=assignment.rest, budget_bytes=budget_bytes)
        _report(self)

    def learn(self, baseline: Measured, *, is_guess: bool) -> None:
        """What was compiled on a guess is known now.

        Args:
            is_guess: backward's part of ``baseline`` still is.
        """
        assert self.outcome is not None
        rest, budget_bytes = self.outcome.rest, self.outcome.budget_bytes
        if self.options.is_whole_peak:
            budget_bytes = baseline.peak_bytes
        self.is_over = (
            budget_bytes is not None
            and baseline.peak_with(rest) > budget_bytes - rest.outside_bytes
        )
        if self.is_over:
            return  # forward is compiled again, backward is refused, as often as it is asked for
        if not is_guess:
            self.see(baseline)
        self.outcome = replace(
            self.outcome,
            baseline_measured=baseline,
            budget_bytes=budget_bytes,
            is_guess=is_guess,
        )
        _report(self)

    def verify(self, measured: Measured) -> None:
        """The compiled code was looked at, and is within the budget: it is what is promised now."""
        assert self.outcome is not None
        is_other = measured.peak_bytes != self.outcome.measured.peak_bytes
        if is_other:
            log.info(
                "the final schedule holds %s, not %s",
                format_bytes(measured.peak_bytes),
                format_bytes(self.outcome.measured.peak_bytes),
            )
            self.outcome = self.outcome.holding(measured)
        self.verification = VERIFIED
        _report(self, is_logged=is_other)

    def leave_unverified(self, why: str) -> None:
        """The compiled code cannot be looked at."""
        if self.outcome is not None and self.verification != UNVERIFIED + why:
            self.verification = UNVERIFIED + why
            _report(self, is_logged=False)

    def see(self, baseline: Measured) -> None:
        """What the default split holds is known: a share of it may be other graphs' budget."""
        if baseline.backward_peak_bytes and self.options.is_share:
            self.step_peak.see(baseline.peak_bytes)

    def keep_graph(self, measured: Measured) -> None:
        """The smallest peak was asked for, and a backward that keeps the graph holds more."""
        assert self.outcome is not None
        log.warning(
            "backward(retain_graph=True) holds %s, not %s: what forward saved must survive it. Set"
            " torch._functorch.config.donated_buffer = False before the model is compiled to have"
            " that planned.",
            format_bytes(measured.peak_bytes),
            format_bytes(self.outcome.measured.peak_bytes),
        )
        self.outcome = self.outcome.holding(measured)
        self.verification = VERIFIED
        _report(self)

    def restore(self) -> None:
        """What replaced it was no better."""
        self.is_replaced = False
        _report(self)

    def guessed_wrong(self) -> bool:
        """Whether the budget was not as ample as it looked, or forward could not be looked at."""
        outcome = self.outcome
        return self.is_over or (outcome is not None and outcome.is_guess and not self.wrappers)


_SESSION: ContextVar[_Session | None] = ContextVar("dtrcompile_session", default=None)


def _plan(
    session: _Session,
    forward: fx.GraphModule,
    backward: fx.GraphModule | None,
    *,
    num_fwd_outputs: int,
    static_input_indices: Iterable[int],
) -> Outcome:
    """Capture, plan, emit and report, at the sizes that the session is for."""
    with at_sizes(session.assignment.sizes):
        return _plan_here(
            session,
            forward,
            backward,
            num_fwd_outputs=num_fwd_outputs,
            static_input_indices=static_input_indices,
        )


def _plan_here(
    session: _Session,
    forward: fx.GraphModule,
    backward: fx.GraphModule | None,
    *,
    num_fwd_outputs: int,
    static_input_indices: Iterable[int],
) -> Outcome:
    options = session.options
    is_inductor = options.compiler == "inductor"
    start = time.perf_counter()
    captured = capture(
        forward,
        backward,
        num_fwd_outputs=num_fwd_outputs,
        static_input_indices=static_input_indices,
        cost_model=make_cost_model(options.cost_model, _device(forward)),
        # The eager executor counts what it asks for.
        allocator=allocator_of(_device(forward)) if is_inductor else EXACT,
    )
    captured = captured.handing_on(session.assignment.handed_on)
    session.capture_s = time.perf_counter() - start
    planner = make_planner(options.planner, **options.planner_options())
    model: MemoryModel = (
        InductorModel(is_checked_later=session.may_guess) if is_inductor else RefereeModel()
    )
    session.available_bytes = _available_bytes(captured, session.assignment.beside)
    if backward is not None:
        session.around_bytes = around_bytes(captured.program)
    try:
        outcome = session.outcome = fit(
            captured,
            planner,
            session.terms,
            model,
            is_whole_peak=options.is_whole_peak,
            always_emit=not is_inductor,
        )
    except InfeasibleBudgetError as refusal:
        if refusal.minimum_bytes is not None:  # of the two minima, the larger one
            session.check_optimizer_step(refusal.minimum_bytes)
        raise
    session.check_optimizer_step(outcome.budget_bytes)
    if is_probing():
        raise ProbedPlan(outcome)
    if not outcome.is_guess:  # else when forward is compiled and known
        session.see(outcome.baseline_measured)
        _report(session)
    return outcome


def _device(gm: fx.GraphModule) -> torch.device:
    for node in gm.graph.nodes:
        val = node.meta.get("val")
        if isinstance(val, torch.Tensor) and val.device.type not in ("cpu", "meta"):
            return torch.device(val.device)
    return torch.device("cpu")


def _available_bytes(captured: Captured, beside: Beside) -> int | None:
    """What ``"auto"`` may take: free memory, this process's cache, and what the graphs hold."""
    device = device_of(captured)
    if device.type != "cuda":
        return None
    free_bytes, _ = torch.cuda.mem_get_info(device)
    cached_bytes = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    totals = constant_bytes(captured)
    held_bytes = totals[StorageKind.PARAMETER] + totals[StorageKind.INPUT]
    return int(free_bytes + cached_bytes + held_bytes + beside.present_bytes)


def _report(session: _Session, *, is_logged: bool = True) -> None:
    if session.is_replaced:
        return
    outcome, options = session.outcome, session.options
    assert outcome is not None
    beside, around = session.assignment.beside, session.around_bytes
    rest = session.assignment.rest
    captured = outcome.captured
    chosen = outcome.chosen
    guess = "ample budget: peaks are estimates until backward has run" if outcome.is_guess else ""
    waits = ""
    if session.step_peak.has_to_wait(options, trains=captured.backward is not None):
        waits = (
            f"{options.budget} is a share of a training step, and none was seen yet; until one is,"
            " this graph runs without a budget. To bound it all the same, give bytes"
        )
    unsplit = "" if captured.allocator.splits_all else _UNSPLIT
    plan, _, stats = outcome.baseline
    measured = outcome.baseline_measured
    if chosen is not None:
        plan, stats, measured = chosen.plan, chosen.stats, chosen.measured
    add_report(
        CompileReport(
            graph=session.graph,
            kind="inference" if captured.backward is None else "training",
            compiler=options.compiler,
            device=str(_device(captured.forward)),
            budget=str(options.budget),
            budget_bytes=outcome.budget_bytes,
            baseline_peak_bytes=outcome.baseline_measured.peak_bytes,
            promised_peak_bytes=measured.peak_bytes,
            planned_peak_bytes=stats.peak_bytes,
            promised_split=measured.split,
            saved_bytes=measured.saved_bytes,
            overhead=stats.overhead,
            operators=len(captured.program.operators),
            recomputed={captured.program.operators[o].name: n for o, n in stats.recomputed.items()},
            planner=plan.planner,
            planning_s=session.capture_s + outcome.planning_s,
            lowering_s=outcome.lowering_s,
            outside_bytes=outcome.rest.outside_bytes,
            step_peak_bytes=rest.outside_bytes + measured.peak_with(rest),
            baseline_step_peak_bytes=rest.outside_bytes + outcome.baseline_measured.peak_with(rest),
            verification=session.verification,
            beside=beside.resident,
            optimizer_step_bytes=beside.in_step_bytes(around) if around else 0,
            first_optimizer_step_bytes=beside.in_first_step_bytes(around) if around else 0,
            notes=tuple(
                note
                for note in (
                    session.assignment.note,
                    waits,
                    guess,
                    unsplit,
                    session.note,
                    *_unknown_workspaces(captured),
                    *beside.notes,
                )
                if note
            ),
            plan=session.assignment.number,
            sizes=str(session.assignment.sizes or ""),
            peak_formula=_formula_text(measured),
        ),
        is_logged=is_logged,
    )
    _leave_artifacts(session)


def _leave_artifacts(session: _Session) -> None:
    """For who asks, where the plan and the compiler's schedule differ."""
    outcome = session.outcome
    if outcome is None or not artifacts.are_wanted():
        return
    program, plan = outcome.captured.program, outcome.plan
    texts = {"program.json": io.to_json(program), "plan.txt": plan.to_text()}
    by_sizes = outcome.measured.by_sizes
    if isinstance(by_sizes, ScheduleSizeModel):
        with at_sizes(session.assignment.sizes):
            texts["schedule.json"] = schedule_trace.to_json(trace(by_sizes.lowered))
    number = f"-plan{session.assignment.number}" if session.assignment.number else ""
    name = f"graph{session.graph}{number}"
    for report in reports():
        if (report.graph, report.plan) == (session.graph, session.assignment.number):
            texts["report.txt"] = f"{report}\n"
    artifacts.leave(name, texts)


def _formula_text(measured: Measured) -> str:
    """The peak in the graph's symbols, "" where there are none."""
    formulas = None if measured.by_sizes is None else measured.by_sizes.formulas
    return "" if formulas is None else str(formulas)


def _unknown_workspaces(captured: Captured) -> list[str]:
    graphs = [g for g in (captured.forward, captured.backward) if g is not None]
    return [
        f"what {name} holds while it runs is not known and does not count, because it could not be"
        f" run on zeros ({why}); dtrcompile.declare_operator can say it"
        for name, why in unknown_workspaces(graphs).items()
    ]


# --- Inductor -----------------------------------------------------------------------------------


class DTRPartitioner(CustomPartitionerFn):
    """The hook: Inductor's joint graph in, forward and backward graphs out.

    Stateless and picklable, because Inductor makes it part of its cache keys.
    """

    def __init__(self, options: Options) -> None:
        self.options = options

    def __call__(
        self, gm: fx.GraphModule, joint_inputs: Sequence[object], **kwargs: Any
    ) -> tuple[fx.GraphModule, fx.GraphModule]:
        """Split ``gm`` by default, then replace the split by a plan's graphs if need be."""
        tag_scopes(gm)
        forward, backward = min_cut_rematerialization_partition(gm, joint_inputs, **kwargs)
        session = _SESSION.get() or _Session(self.options, next_graph_index(), Assignment())
        outcome = _plan(
            session,
            forward,
            backward,
            num_fwd_outputs=kwargs["num_fwd_outputs"],
            static_input_indices=kwargs.get("static_lifetime_input_indices") or (),
        )
        if outcome.chosen is None:
            return forward, backward
        emitted = outcome.chosen.emitted
        assert emitted.backward is not None
        lower_frees(emitted.forward)
        lower_frees(emitted.backward)
        return emitted.forward, emitted.backward

    def uuid(self) -> object:
        """Covers the package's source, every option, the devices there are and their allocator."""
        devices = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
        allocator = allocator_of(torch.device("cuda")) if devices else EXACT
        return (package_hash(), self.options.cache_key(), tuple(devices), repr(allocator))


def _compile_inductor(
    gm: fx.GraphModule, example_inputs: Sequence[Any], session: _Session
) -> Callable[..., Any]:
    options = session.options
    patches = _inductor_patches(options)
    patches["custom_partitioner_fn"] = DTRPartitioner(options)
    token = _SESSION.set(session)
    try:
        # AOTAutograd's own cache would skip the partitioner, and with it the plan and its report;
        # Inductor's code cache stays on.
        with functorch_config.patch(enable_autograd_cache=False):
            return compile_fx(  # type: ignore[no-any-return]
                gm,
                example_inputs,
                inner_compile=functools.partial(_inner_compile, session),
                config_patches=patches,
            )
    finally:
        _SESSION.reset(token)


def _inductor_patches(options: Options) -> dict[str, Any]:
    patches: dict[str, Any] = {}
    if options.inductor_mode is not None:
        patches.update(list_mode_options(options.inductor_mode))
    patches.update(options.inductor_patches)
    known = inductor_config.get_config_copy()
    for name in patches:
        if name.replace("-", "_") not in known:
            raise OptionError.unknown("Inductor setting", name, known)
    return {name.replace("-", "_"): value for name, value in patches.items()}


def _inner_compile(
    session: _Session, gm: fx.GraphModule, example_inputs: Sequence[Any], **kwargs: Any
) -> Any:
    """Stands in for Inductor's ``compile_fx_inner``: plans inference graphs, keeps plans' order."""
    if kwargs.get("is_inference", False):
        gm = _plan_inference(session, gm)
        lower_frees(gm)
    as_planned = planned_config() if is_planned(gm) else contextlib.nullcontext()
    with applied(Purpose.EVERY_COMPILATION), as_planned:
        compiled = compile_fx_inner(gm, example_inputs, **kwargs)
    is_backward = bool(kwargs.get("is_backward", False))
    if not session.options.verify:
        session.leave_unverified("the option 'verify' is off")
    elif isinstance(compiled, CompiledFxGraph):
        _check_final(session, gm, compiled, is_backward=is_backward)
    else:
        session.leave_unverified("Inductor returned no Python wrapper that could be run")
    return compiled


def _plan_inference(session: _Session, gm: fx.GraphModule) -> fx.GraphModule:
    context = TracingContext.try_get()
    static: Sequence[int] = ()
    if context is not None and context.fw_metadata is not None:
        static = context.fw_metadata.static_input_indices or ()
    outcome = _plan(
        session,
        gm,
        None,
        num_fwd_outputs=len(output_arguments(gm)),
        static_input_indices=static,
    )
    return gm if outcome.chosen is None else outcome.chosen.emitted.forward


def _check_final(
    session: _Session, gm: fx.GraphModule, compiled: CompiledFxGraph, *, is_backward: bool
) -> None:
    """Replay what was really compiled, cached or not, and hold it to the promise.

    Raises:
        VerificationError: if the final schedule holds more than the budget.
    """
    outcome = session.outcome
    if outcome is None:
        return
    captured = outcome.captured
    wrapper = replace(
        _lowered_before(outcome, is_backward=is_backward),
        source=compiled.source_code,
        constants=dict(compiled.constants or {}),
    )
    if is_backward:
        if not session.wrappers:
            session.leave_unverified("forward was not compiled in this process with backward")
            return
        del session.wrappers[1:], session.graphs[1:]  # one that was refused
    else:
        session.wrappers.clear()
        session.graphs.clear()
    session.wrappers.append(wrapper)
    session.graphs.append(gm)
    backward_follows = captured.backward is not None and not is_backward
    if backward_follows and not outcome.is_guess:
        return
    with at_sizes(session.assignment.sizes):
        backward = session.wrappers[1] if is_backward else None
        final = LoweredStep(captured, tuple(session.graphs), session.wrappers[0], backward)
        measured = replace(Measured.of(trace(final)), by_sizes=ScheduleSizeModel(final))
    if outcome.is_guess:
        if backward_follows:
            measured = measured.with_backward(outcome.baseline_measured)
        else:
            session.verification = VERIFIED
        session.learn(measured, is_guess=backward_follows)
        if is_backward and session.is_over:
            guess = outcome.baseline[2].peak_bytes
            raise VerificationError(
                f"Inductor's final schedule holds {measured.peak_bytes} bytes at"
                f" {measured.peak_at!r}, more than the budget. The budget looked ample beside an"
                f" estimate of {guess} bytes, so nothing was planned: pass one below"
                f" {AMPLE * guess} bytes, and the peak is measured before anything is compiled; and"
                " please report the model."
            )
        return
    peak_bytes = measured.peak_with(outcome.rest)
    promised = outcome.measured.peak_with(outcome.rest)
    budget_bytes = outcome.budget_bytes
    if budget_bytes is not None:
        budget_bytes -= outcome.rest.outside_bytes
    allowed = promised if budget_bytes is None else max(budget_bytes, promised)
    log.debug("final schedule %s, promised %s", format_bytes(peak_bytes), format_bytes(promised))
    if peak_bytes > allowed:
        if is_backward and keeps_graph():
            # Backward may not write over what forward saved, as it was planned to.
            if budget_bytes is None:
                session.keep_graph(measured)
                return
            raise VerificationError(
                f"backward(retain_graph=True) holds {peak_bytes} bytes at"
                f" {measured.peak_at!r}, more than the {allowed} promised: what forward saved must"
                " survive it. Set torch._functorch.config.donated_buffer = False before the model"
                " is compiled, and it is planned so."
            )
        raise VerificationError(
            f"Inductor's final schedule holds {peak_bytes} bytes at"
            f" {measured.peak_at!r}, more than the {allowed} promised. Lower the budget by"
            f" {peak_bytes - allowed} bytes, or pass options={{'verify': False}} to accept"
            " the overrun; and please report the model."
        )
    session.verify(measured)


def _lowered_before(outcome: Outcome, *, is_backward: bool) -> Wrapper:
    """What was read while the graph was planned, which tells what each buffer belongs to."""
    by_sizes = outcome.measured.by_sizes
    found = None
    if isinstance(by_sizes, ScheduleSizeModel):
        found = by_sizes.lowered.backward if is_backward else by_sizes.lowered.forward
    return Wrapper("", {}) if found is None else found


# --- the eager executor ---------------------------------------------------------------------------


def _compile_eager(
    gm: fx.GraphModule, example_inputs: Sequence[Any], session: _Session
) -> Callable[..., Any]:
    options = session.options
    session.verification = COUNTED

    def partition(
        joint: fx.GraphModule, joint_inputs: Sequence[object], **kwargs: Any
    ) -> tuple[fx.GraphModule, fx.GraphModule]:
        joint = joint_graph_passes(joint)
        tag_scopes(joint)
        forward, backward = min_cut_rematerialization_partition(
            joint, joint_inputs, compiler="inductor", **kwargs
        )
        outcome = _plan(
            session,
            forward,
            backward,
            num_fwd_outputs=kwargs["num_fwd_outputs"],
            static_input_indices=kwargs.get("static_lifetime_input_indices") or (),
        )
        assert outcome.chosen is not None
        emitted = outcome.chosen.emitted
        assert emitted.backward is not None
        return emitted.forward, emitted.backward

    def compile_phase(phase: str, module: fx.GraphModule, _inputs: Sequence[Any]) -> Any:
        return _executor(session, module, phase)

    def compile_inference(module: fx.GraphModule, inputs: Sequence[Any]) -> Any:
        module = joint_graph_passes(module)
        return compile_phase("inference", _plan_inference(session, module), inputs)

    fake_mode = detect_fake_mode(example_inputs) or FakeTensorMode(allow_non_fake_inputs=True)
    with (
        V.set_fake_mode(fake_mode),
        inductor_config.patch(_inductor_patches(options)),
        functorch_config.patch(enable_autograd_cache=False),
    ):
        return aot_autograd(  # type: ignore[no-any-return]
            fw_compiler=functools.partial(compile_phase, "forward"),
            bw_compiler=functools.partial(compile_phase, "backward"),
            inference_compiler=compile_inference,
            decompositions=select_decomp_table(),
            partition_fn=partition,
            keep_inference_input_mutations=True,
        )(gm, example_inputs)


def _executor(session: _Session, module: fx.GraphModule, phase: str) -> EagerExecutor:
    outcome = session.outcome
    assert outcome is not None and outcome.chosen is not None
    captured, candidate = outcome.captured, outcome.chosen
    program = captured.program
    constants = {
        s.id
        for s in program.storages
        if s.is_constant and (phase == "backward" or s.kind is not StorageKind.TANGENT)
    }
    here = {
        storage
        for n in module.graph.nodes
        if n.op in ("placeholder", "get_attr") and (storage := mark_of(n).storage) is not None
    }
    elsewhere = constants - here
    if phase == "backward":
        elsewhere |= program.held_in_backward - here
    steps = candidate.plan.steps
    boundary = next((i for i, s in enumerate(steps) if isinstance(s, Boundary)), len(steps))
    is_backward = phase == "backward"

    def predict(sizes: Sizes | None) -> Predicted:
        """What the referee says at these sizes."""
        with at_sizes(session.assignment.sizes if sizes is None else sizes):
            sized = captured.resized()
        plan = replace(candidate.plan, program=sized.fingerprint)
        during = enumerate(replay(sized, plan)[0].during_bytes)
        return Predicted(
            {i: b for i, b in during if (i > boundary) == is_backward},
            sum(sized.storages[s].size_bytes for s in elsewhere),
        )

    return EagerExecutor(module, phase=phase, predict=predict, constants=frozenset(constants))
