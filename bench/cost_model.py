"""Does the roofline see what kernels really cost, relative to one another?

Planning needs only ratios: what a recomputation costs against what else could be recomputed for the
same bytes.  Each function here becomes one kernel of Inductor's; its time on this machine stands
beside the roofline's, both divided by the matrix product's.  A ratio of ratios of 1 would be
perfect; what is off by a factor misleads the planner by that factor.

    python -m bench.cost_model [--device cuda] [--quick] [--out FILE]

`bench.gpu` asks the same of more operators, with the shapes and dtypes of training on a GPU.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional as F

from bench.measure import format_table, machine, write_json_line
from dtrcompile.passes.device.costs import RooflineCostModel, time_ns
from dtrcompile.passes.torch_private import select_decomp_table

# The first is what the others are compared with.
FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "matrix product": lambda x: x @ x.t(),
    "copy": lambda x: x + 1,
    "gelu": lambda x: F.gelu(x),
    "softmax": lambda x: x.softmax(-1),
    "layer norm": lambda x: F.layer_norm(x, x.shape[-1:]),
    "row sums": lambda x: x.sum(-1),
    "dropout mask": lambda x: torch.rand_like(x) > 0.1,
}
HEADER = ("kernel", "modelled us", "measured us", "modelled ratio", "measured ratio", "off by")
_QUICK = ("matrix product", "copy", "dropout mask")


def modelled_ns(function: Callable[..., Tensor], *inputs: Tensor) -> int:
    """The roofline's price of the function as one operator."""
    graph = make_fx(function, select_decomp_table(), tracing_mode="fake")(*inputs).graph
    nodes = [n for n in graph.nodes if n.op == "call_function"]
    (result,) = graph.output_node().all_input_nodes
    return RooflineCostModel(inputs[0].device).cost_ns(
        nodes, graph.find_nodes(op="placeholder"), [result]
    )


def measured_ns(function: Callable[..., Tensor], *inputs: Tensor) -> float:
    """The time of the compiled function on this machine."""
    compiled = torch.compile(function, dynamic=False)
    with torch.no_grad():
        return time_ns(lambda: compiled(*inputs))


def main(argv: Sequence[str] | None = None) -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--quick", action="store_true", help="three small kernels")
    parser.add_argument("--out", type=Path, help="append JSON lines to this file")
    args = parser.parse_args(argv)
    x = torch.randn(256 if args.quick else 2048, 1024, device=args.device)
    rows: list[tuple[str, ...]] = []
    first: tuple[float, float] | None = None
    for name, function in FUNCTIONS.items():
        if args.quick and name not in _QUICK:
            continue
        modelled, measured = modelled_ns(function, x), measured_ns(function, x)
        first = first or (modelled, measured)
        ratios = modelled / first[0], measured / first[1]
        rows.append(
            (
                name,
                f"{modelled / 1e3:.0f}",
                f"{measured / 1e3:.0f}",
                f"{ratios[0]:.3f}",
                f"{ratios[1]:.3f}",
                f"{ratios[0] / ratios[1]:.2f}",
            )
        )
        row = {"kernel": name, "modelled_ns": modelled, "measured_ns": round(measured)}
        write_json_line(
            args.out, {"bench": "cost_model", **row, "machine": machine(torch.device(args.device))}
        )
    print(format_table(HEADER, rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
