"""``nn.LSTM`` in a graph that trains, unrolled into its cells.

With ``torch._dynamo.config.allow_rnn`` Dynamo takes `nn.RNN`, `nn.GRU` and `nn.LSTM` into the
graph.  PyTorch decomposes the first two into their cells, which a plan can free and compute again
one by one.  An LSTM on a CPU it may turn into a call of oneDNN (``aten.mkldnn_rnn_layer``), whose
kernel returns an undefined tensor where the trace, and so backward, has a workspace: Inductor
raises a TypeError, or the process aborts.  Without gradients that call is right, and holds less.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from dtrcompile.passes.torch_private import mkldnn_enabled, set_mkldnn_enabled


def unroll_recurrent(gm: fx.GraphModule) -> None:
    """Have LSTMs of Dynamo's graph, and of graphs inside it, traced cell by cell.

    The sequence's length is then part of the graph: each length is a graph of its own.
    """
    for module in gm.modules():
        if isinstance(module, fx.GraphModule):
            calls = module.graph.find_nodes(op="call_function", target=torch.lstm)
            for call in calls:
                call.target = _cell_by_cell
            if calls:
                module.recompile()


def _cell_by_cell(*args: Any, **kwargs: Any) -> Any:
    was_enabled = mkldnn_enabled()
    # (``torch.backends.mkldnn.flags`` sets all other flags too, and warns about some.)
    set_mkldnn_enabled(False)
    try:
        return torch.lstm(*args, **kwargs)
    finally:
        set_mkldnn_enabled(was_enabled)
