"""What reads a buffer of a plan as memory, whatever its layout is."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx

from dtrcompile.passes.inductor.step import planned_config
from dtrcompile.passes.nodes import mark
from dtrcompile.passes.torch_private import inductor_config


@pytest.mark.inductor
def test_what_as_strided_reads_has_the_strides_that_were_traced() -> None:
    """A buffer of a plan would be channels-last near a convolution, and its memory is read here."""

    def flat(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        image = F.conv2d(x, weight, padding=1).sigmoid()
        again = F.conv2d(image, weight.transpose(0, 1).contiguous())
        return torch.as_strided(image, (2 * 8, 6 * 6), (6 * 6, 1)) * 2, again

    def keep_all(graph: fx.Graph) -> None:
        for node in graph.find_nodes(op="call_function", target=torch.ops.aten.sigmoid.default):
            mark(node, is_buffer=True)

    torch.manual_seed(0)
    x, weight = torch.randn(2, 3, 6, 6), torch.randn(8, 3, 3, 3)
    options = {"post_grad_custom_post_pass": keep_all, "fx_graph_cache": False}
    with torch.no_grad(), inductor_config.patch(options), planned_config():
        torch._dynamo.reset()
        found = torch.compile(flat, dynamic=False)(x, weight)
        torch.testing.assert_close(found, flat(x, weight))
