"""Compiling with Inductor, within a plan, and the check of what was really compiled."""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from dtrcompile.compilation.kept_code import KeptCode
from dtrcompile.compilation.one_graph import asked_for, asking_for, compile_graph
from dtrcompile.compilation.planning import Joint, plan_inference, plan_step
from dtrcompile.compilation.session import CURRENT, Session, SessionState
from dtrcompile.compilation.settings import inductor_patches
from dtrcompile.options import Options
from dtrcompile.passes.device.allocators import EXACT, allocator_of
from dtrcompile.passes.errors import VerificationError, format_bytes
from dtrcompile.passes.fitting.fit import Outcome
from dtrcompile.passes.fitting.inductor_model import ScheduleSizeModel
from dtrcompile.passes.fitting.measured import Measured
from dtrcompile.passes.fitting.progress import CHECK
from dtrcompile.passes.fitting.settings import AMPLE
from dtrcompile.passes.graphs.default_split import default_split
from dtrcompile.passes.graphs.emit import lower_frees
from dtrcompile.passes.graphs.modules import copied_module
from dtrcompile.passes.graphs.recompute_tags import tag_scopes
from dtrcompile.passes.inductor import LoweredStep, Wrapper, trace
from dtrcompile.passes.inductor.bug_fixes import write_out_alpha
from dtrcompile.passes.inductor.compiled_beside import CompiledBeside
from dtrcompile.passes.inductor.loaded_code import noting_code
from dtrcompile.passes.inductor.patches import Purpose, applied
from dtrcompile.passes.inductor.step import begin_backward
from dtrcompile.passes.inductor.vector_instructions import compile_checks_beforehand
from dtrcompile.passes.program.sizes import at_sizes
from dtrcompile.passes.torch_private import (
    BypassAOTAutogradCache,
    CompiledFxGraph,
    CustomPartitionerFn,
    compile_fx,
    dynamo_timed,
    functorch_config,
    keeps_graph,
)
from dtrcompile.report import next_graph_index
from dtrcompile.source_hash import package_hash
from dtrcompile.steps.planned import Assignment

log = logging.getLogger("dtrcompile")


class DTRPartitioner(CustomPartitionerFn):
    """The hook: Inductor's joint graph in, forward and backward graphs out.

    Picklable, because PyTorch's caches make its `uuid` part of their keys.
    """

    def __init__(self, options: Options) -> None:
        self.options = options

    def __call__(
        self, gm: fx.GraphModule, joint_inputs: Sequence[object], **kwargs: Any
    ) -> tuple[fx.GraphModule, fx.GraphModule]:
        """Split ``gm`` by default, then replace the split by a plan's graphs if need be."""
        tag_scopes(gm)
        write_out_alpha(gm)

        def split(joint: fx.GraphModule) -> tuple[fx.GraphModule, fx.GraphModule]:
            return default_split(joint, joint_inputs, **kwargs)

        forward, backward = split(gm)
        session = CURRENT.get() or Session(self.options, next_graph_index(), Assignment())
        outcome = plan_step(
            session,
            forward,
            backward,
            num_fwd_outputs=kwargs["num_fwd_outputs"],
            static_input_indices=kwargs.get("static_lifetime_input_indices") or (),
            joint=Joint(gm, split),
        )
        if outcome.chosen is not None:
            emitted = outcome.chosen.emitted
            assert emitted.backward is not None
            forward, backward = emitted.forward, emitted.backward
            lower_frees(forward)
            lower_frees(backward)
        # AOTAutograd's cache takes what is known of the nodes off the graph that it is given, and
        # what is held under other circumstances is still counted from it.
        return forward, backward if session.kept is None else copied_module(backward)

    def uuid(self) -> object:
        """Covers the package's source, every option, the devices there are and their allocator.

        And what the question depends on that is asked: AOTAutograd's cache asks before anything is
        planned, so all that a plan depends on (`KeptCode.key`), Inductor's for graphs that are
        planned, so what is not in their text: the plan's marks on their nodes, and which inputs
        backward may write over.

        Raises:
            BypassAOTAutogradCache: if AOTAutograd's cache asks and is not to be used.  Its setting
                alone does not switch it off where ``TORCHINDUCTOR_AUTOGRAD_CACHE`` is 1.
        """
        asked = asked_for()
        if asked is None:
            raise BypassAOTAutogradCache("plans and reports are not kept of this graph")
        devices = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
        allocator = allocator_of(torch.device("cuda")) if devices else EXACT
        return (
            package_hash(),
            self.options.cache_key(),
            tuple(devices),
            repr(allocator),
            asked,
        )


def compile_inductor(
    gm: fx.GraphModule, example_inputs: Sequence[Any], session: Session
) -> Callable[..., Any]:
    """Compile a Dynamo graph with Inductor, which asks `DTRPartitioner` for its graphs."""
    start = time.perf_counter()
    options = session.options
    session.kept = kept = KeptCode.of(
        gm,
        example_inputs,
        options,
        session.assignment,
        session.step_peak,
        may_estimate=session.may_estimate,
    )
    if kept is not None and (refusal := kept.refusal) is not None:
        session.know_around(kept.around_bytes)
        raise refusal
    if kept is not None and kept.was_too_large:
        session.state = SessionState.TOO_LARGE
        return _not_compiled
    patches = inductor_patches(options)
    if (kept is None or kept.entry is None) and _is_on_cpu(example_inputs):
        compile_checks_beforehand()
    patches["custom_partitioner_fn"] = DTRPartitioner(options)
    # AOTAutograd's cache skips the partitioner, and with it the plan and its report, so it may be
    # asked only where these are kept as well.
    is_asked = kept is not None and not kept.is_useless and session.may_load
    token = CURRENT.set(session)
    try:
        with (
            functorch_config.patch(enable_autograd_cache=is_asked),
            asking_for(kept.key if kept is not None and is_asked else None),
            noting_code() as sources,
            applied(Purpose.EVERY_COMPILATION),  # the cache loads code, which compiles kernels
        ):
            function = compile_fx(
                gm,
                example_inputs,
                inner_compile=functools.partial(_inner_compile, session),
                config_patches=patches,
            )
    finally:
        CURRENT.reset(token)
    if is_asked and session.outcome is None:  # neither the partitioner nor `_inner_compile` ran
        session.take_up(sources, start)
    return function  # type: ignore[no-any-return]


def _is_on_cpu(example_inputs: Sequence[Any]) -> bool:
    tensors = [v for v in example_inputs if isinstance(v, torch.Tensor)]
    return all(tensor.device.type == "cpu" for tensor in tensors)


def _not_compiled(*_args: Any) -> Any:
    raise AssertionError("this was to be compiled anew")


def _inner_compile(
    session: Session, gm: fx.GraphModule, example_inputs: Sequence[Any], **kwargs: Any
) -> Any:
    """Stands in for Inductor's ``compile_fx_inner``: plans inference graphs, keeps plans' order."""
    if kwargs.get("is_inference", False):
        write_out_alpha(gm)
        gm = plan_inference(session, gm)
        lower_frees(gm)
    is_backward = bool(kwargs.get("is_backward", False))
    if not is_backward and session.outcome is not None:
        session.compiling = _compiling(session.outcome)
    process = session.compiling[is_backward]
    if process is not None:
        process.wait_for(gm, example_inputs, kwargs)
    compiled = compile_graph(gm, example_inputs, **kwargs)
    if session.outcome is not None and not session.outcome.is_guess:
        choose_in_first_run(compiled)
    if not session.options.verify:
        session.leave_unverified("the option 'verify' is off")
    elif isinstance(compiled, CompiledFxGraph):
        with dynamo_timed(CHECK):
            _check_final(session, gm, compiled, is_backward=is_backward)
    else:
        session.leave_unverified("Inductor returned no Python wrapper that could be run")
    return compiled


def _compiling(outcome: Outcome) -> tuple[CompiledBeside | None, CompiledBeside | None]:
    """The processes that compile forward and backward; backward's is begun now if it is not yet."""
    lowered = _lowered_of(outcome.measured)
    if lowered is None and not outcome.is_guess:
        return None, None
    forward, backward = (None, None) if lowered is None else lowered.compiling
    if backward is None:
        backward = begin_backward(outcome.captured, lowered, compile_graph)
    return forward, backward


def choose_in_first_run(compiled: Any) -> None:
    """On CUDA, the kernels of a graph choose their block sizes in its first run that ends.

    They hold nothing for it beside the step (`passes.inductor.block_sizes`).  Code that PyTorch's
    cache loads comes with what was chosen.
    """
    if not isinstance(compiled, CompiledFxGraph) or "cuda" not in compiled.device_types:
        return
    call = compiled.current_callable
    assert call is not None

    def first(inputs: Sequence[Any]) -> Any:
        with applied(Purpose.FIRST_RUN):
            outputs = call(inputs)
        if compiled.current_callable is first:
            compiled.current_callable = call
        return outputs

    compiled.current_callable = first


def _check_final(
    session: Session, gm: fx.GraphModule, compiled: CompiledFxGraph, *, is_backward: bool
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
    if _is_measured(outcome, session.wrappers):
        session.verify(outcome.measured)
        return
    with at_sizes(session.assignment.sizes):
        backward = session.wrappers[1] if is_backward else None
        final = LoweredStep(captured, tuple(session.graphs), session.wrappers[0], backward)
        measured = replace(Measured.of(trace(final)), by_sizes=ScheduleSizeModel(final))
    if outcome.is_guess:
        if backward_follows:
            measured = measured.with_backward(outcome.baseline_measured)
        session.measured_estimate(measured, backward_follows=backward_follows)
        if is_backward and session.state is SessionState.TOO_LARGE:
            guess = outcome.baseline[2].peak_bytes
            raise VerificationError(
                f"Inductor's final schedule holds {measured.peak_bytes} bytes at"
                f" {measured.peak_at!r}, more than the budget. The budget looked ample beside an"
                f" estimate of {guess} bytes, so nothing was planned: pass one below"
                f" {AMPLE * guess} bytes, and the peak is measured before anything is compiled; and"
                " please report the model."
            )
        return
    peak_bytes = measured.peak_with(outcome.others)
    promised = outcome.measured.peak_with(outcome.others)
    budget_bytes = outcome.budget_bytes
    if budget_bytes is not None:
        budget_bytes -= outcome.others.outside_bytes
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


def _is_measured(outcome: Outcome, wrappers: Sequence[Wrapper]) -> bool:
    """Whether these wrappers are those that the promise was read from, letter for letter."""
    lowered = _lowered_of(outcome.measured)
    if lowered is None or lowered.captured.symbols or any(w.constants for w in wrappers):
        return False
    known = [w.source for w in (lowered.forward, lowered.backward) if w is not None]
    return known == [wrapper.source for wrapper in wrappers]


def _lowered_before(outcome: Outcome, *, is_backward: bool) -> Wrapper:
    """What was read while the graph was planned, which tells what each buffer belongs to."""
    lowered = _lowered_of(outcome.measured)
    found = None
    if lowered is not None:
        found = lowered.backward if is_backward else lowered.forward
    return Wrapper("", {}) if found is None else found


def _lowered_of(measured: Measured) -> LoweredStep | None:
    by_sizes = measured.by_sizes
    return by_sizes.lowered if isinstance(by_sizes, ScheduleSizeModel) else None
