"""Compiling for the eager executor, which runs a plan as it is and counts bytes as it runs."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from torch import fx

from dtrcompile.compilation.planning import Joint, plan_inference, plan_step
from dtrcompile.compilation.session import Session
from dtrcompile.compilation.settings import inductor_patches
from dtrcompile.passes.graphs.default_split import default_split
from dtrcompile.passes.graphs.executor import EagerExecutor, Predicted
from dtrcompile.passes.graphs.recompute_tags import tag_scopes
from dtrcompile.passes.nodes import mark_of
from dtrcompile.passes.program.plan import Boundary
from dtrcompile.passes.program.program import StorageKind
from dtrcompile.passes.program.replay import replay
from dtrcompile.passes.program.sizes import Sizes, at_sizes
from dtrcompile.passes.torch_private import (
    FakeTensorMode,
    V,
    aot_autograd,
    detect_fake_mode,
    functorch_config,
    inductor_config,
    joint_graph_passes,
    select_decomp_table,
)


def compile_eager(
    gm: fx.GraphModule, example_inputs: Sequence[Any], session: Session
) -> Callable[..., Any]:
    """Compile a Dynamo graph for the eager executor."""

    def partition(
        joint: fx.GraphModule, joint_inputs: Sequence[object], **kwargs: Any
    ) -> tuple[fx.GraphModule, fx.GraphModule]:
        joint = joint_graph_passes(joint)
        tag_scopes(joint)

        def split(joint: fx.GraphModule) -> tuple[fx.GraphModule, fx.GraphModule]:
            return default_split(joint, joint_inputs, **kwargs)

        forward, backward = split(joint)
        outcome = plan_step(
            session,
            forward,
            backward,
            num_fwd_outputs=kwargs["num_fwd_outputs"],
            static_input_indices=kwargs.get("static_lifetime_input_indices") or (),
            joint=Joint(joint, split),
        )
        assert outcome.chosen is not None
        emitted = outcome.chosen.emitted
        assert emitted.backward is not None
        return emitted.forward, emitted.backward

    def compile_phase(phase: str, module: fx.GraphModule, _inputs: Sequence[Any]) -> Any:
        return _executor(session, module, phase)

    def compile_inference(module: fx.GraphModule, inputs: Sequence[Any]) -> Any:
        module = joint_graph_passes(module)
        return compile_phase("inference", plan_inference(session, module), inputs)

    fake_mode = detect_fake_mode(example_inputs) or FakeTensorMode(allow_non_fake_inputs=True)
    with (
        V.set_fake_mode(fake_mode),
        inductor_config.patch(inductor_patches(session.options)),
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


def _executor(session: Session, module: fx.GraphModule, phase: str) -> EagerExecutor:
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
        """What the referee predicts at these sizes."""
        with at_sizes(session.assignment.sizes if sizes is None else sizes):
            sized = captured.resized()
        plan = replace(candidate.plan, program=sized.fingerprint)
        during = enumerate(replay(sized, plan)[0].during_bytes)
        return Predicted(
            {i: b for i, b in during if (i > boundary) == is_backward},
            sum(sized.storages[s].size_bytes for s in elsewhere),
        )

    return EagerExecutor(module, phase=phase, predict=predict, constants=frozenset(constants))
