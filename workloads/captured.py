"""Programs of real models, as the backend captures them; nothing is compiled and nothing runs."""

from __future__ import annotations

from typing import Any, NoReturn

import torch
from torch import fx, nn

from dtrcompile.passes.device.costs import make_cost_model
from dtrcompile.passes.graphs.capture import Captured, capture
from dtrcompile.passes.graphs.default_split import default_split
from dtrcompile.passes.torch_private import (
    V,
    aot_autograd,
    detect_fake_mode,
    joint_graph_passes,
    select_decomp_table,
)


class _Done(BaseException):
    """Thrown out of the compilation; not an error, so Dynamo lets it pass."""

    def __init__(self, captured: Captured) -> None:
        super().__init__()
        self.captured = captured


def captured_of(module: nn.Module, *inputs: torch.Tensor) -> Captured:
    """The program of a training step of ``module``, with costs from the roofline.

    Values are never read, so parameters may be uninitialized.
    """

    def partition(joint: fx.GraphModule, joint_inputs: Any, **kwargs: Any) -> NoReturn:
        forward, backward = default_split(joint_graph_passes(joint), joint_inputs, **kwargs)
        raise _Done(
            capture(
                forward,
                backward,
                num_fwd_outputs=kwargs["num_fwd_outputs"],
                static_input_indices=kwargs.get("static_lifetime_input_indices") or (),
                cost_model=make_cost_model("roofline", inputs[0].device),
            )
        )

    def backend(gm: fx.GraphModule, example_inputs: list[torch.Tensor]) -> NoReturn:
        with V.set_fake_mode(detect_fake_mode(example_inputs)):
            aot_autograd(
                fw_compiler=lambda gm, _: gm,
                partition_fn=partition,
                decompositions=select_decomp_table(),
            )(gm, example_inputs)
        raise AssertionError("a training step is partitioned")

    torch._dynamo.reset()
    try:
        torch.compile(module, backend=backend, fullgraph=True)(*inputs)
    except _Done as done:
        return done.captured
    raise AssertionError("nothing was captured")
