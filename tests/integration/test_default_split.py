"""Forward writes into what backward needs as it was, where plain Inductor reads the new value."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

import dtrcompile
from dtrcompile.passes.graphs.default_split import default_split, stale_inputs
from dtrcompile.passes.graphs.modules import copied_module
from dtrcompile.passes.torch_private import (
    aot_autograd,
    joint_graph_passes,
    min_cut_rematerialization_partition,
    select_decomp_table,
)
from workloads.training import compile_dtr, live_peak_bytes, relative_error, static_bytes

WIDTH, ROWS, STEPS = 32, 128, 3

pytestmark = pytest.mark.usefixtures("nothing_compiled")


class Layers(nn.Module):
    """A few layers, and a buffer that forward writes into."""

    def __init__(self, buffer: Tensor) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(4)])
        self.register_buffer("kept", buffer)

    def scaled(self, x: Tensor, scale: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.sin(layer(x) * scale)
        return x


class CountsCalls(Layers):
    """Every layer is divided by the number of calls."""

    def __init__(self) -> None:
        super().__init__(torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        self.kept += 1
        return self.scaled(x, 1 / self.kept).square().mean()


class Decays(Layers):
    """Every layer is scaled by a copy of what decays afterwards."""

    def __init__(self) -> None:
        super().__init__(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        scale = self.kept.clone()
        result = self.scaled(x, scale).square().mean()
        self.kept.mul_(0.5)
        return result


class Quantizes(Layers):
    """As in a VQ-VAE: the nearest rows of a codebook, which follows the mean of what chose them."""

    def __init__(self) -> None:
        super().__init__(torch.randn(16, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        x = self.scaled(x, torch.ones(()))
        chosen = torch.cdist(x, self.kept).argmin(1)
        nearest = F.embedding(chosen, self.kept)
        with torch.no_grad():
            hits = F.one_hot(chosen, 16).to(x.dtype)
            means = hits.t() @ x / hits.sum(0).clamp(min=1)[:, None]
            self.kept.lerp_(means, 0.5)
        return F.mse_loss(x, nearest) + (x + (nearest - x).detach()).square().mean()


class Queues(Layers):
    """As in momentum contrast: scores against a queue of keys, some of which are then replaced."""

    def __init__(self) -> None:
        super().__init__(F.normalize(torch.randn(WIDTH, 2 * ROWS), dim=0))

    def forward(self, x: Tensor) -> Tensor:
        query = F.normalize(self.scaled(x, torch.ones(())), dim=1)
        scores = query @ self.kept.clone().detach()
        self.kept[:, :ROWS] = query.detach().t()
        return F.cross_entropy(scores, torch.arange(ROWS))


MODELS = (CountsCalls, Decays, Quantizes, Queues)


def trained(model: nn.Module, step: nn.Module) -> dict[str, Tensor]:
    """Gradients of each step, losses, and the buffer at the end."""
    torch.manual_seed(1)
    seen = {}
    for i in range(STEPS):
        model.zero_grad(set_to_none=True)
        loss = step(torch.randn(ROWS, WIDTH))
        loss.backward()
        seen[f"loss {i}"] = loss.detach()
        for name, parameter in model.named_parameters():
            assert parameter.grad is not None
            seen[f"{name} {i}"] = parameter.grad
    assert isinstance(model.kept, Tensor)
    return {**seen, "kept": model.kept.double()}


def made(model_type: type[Layers]) -> Layers:
    torch.manual_seed(0)
    return model_type()


@pytest.mark.parametrize("budget", [1 << 30, "min"])
@pytest.mark.parametrize(
    "compiler",
    ["eager", pytest.param("inductor", marks=(pytest.mark.inductor, pytest.mark.slow))],
)
@pytest.mark.parametrize("model_type", MODELS)
def test_gradients_are_those_of_plain_pytorch(
    model_type: type[Layers], compiler: str, budget: object
) -> None:
    model = made(model_type)
    expected = trained(reference := copy.deepcopy(model), reference)
    compiled = compile_dtr(model, budget, compiler=compiler)
    assert relative_error(trained(model, compiled), expected) < 1e-5
    if compiler == "inductor" and budget == "min":
        x = torch.randn(ROWS, WIDTH)
        model.zero_grad(set_to_none=True)
        held = live_peak_bytes(lambda: compiled(x).backward())
        held += static_bytes(x) + static_bytes(model)
        assert held <= dtrcompile.reports()[-1].promised_peak_bytes


def joint_of(model: nn.Module) -> tuple[fx.GraphModule, list[object], dict[str, object]]:
    """What AOTAutograd gives to a partitioner."""
    found: list[tuple[fx.GraphModule, list[object], dict[str, object]]] = []

    def partition(
        joint: fx.GraphModule, inputs: list[object], **kwargs: object
    ) -> tuple[fx.GraphModule, fx.GraphModule]:
        joint = joint_graph_passes(joint)
        found.append((copied_module(joint), inputs, kwargs))
        return min_cut_rematerialization_partition(joint, inputs, **kwargs)

    backend = aot_autograd(
        fw_compiler=lambda gm, _: gm,
        partition_fn=partition,
        decompositions=select_decomp_table(),
        keep_inference_input_mutations=True,
    )
    torch.compile(model, backend=backend)(torch.randn(ROWS, WIDTH))
    return found[0]


def test_other_graphs_are_split_as_pytorch_does() -> None:
    normalized = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.ReLU())
    joint, inputs, kwargs = joint_of(normalized)  # it writes into running statistics
    expected = min_cut_rematerialization_partition(copied_module(joint), inputs, **kwargs)
    for found, wanted in zip(default_split(joint, inputs, **kwargs), expected, strict=True):
        assert str(found.graph) == str(wanted.graph)


def test_the_old_value_is_saved_and_read_by_backward_alone() -> None:
    joint, inputs, kwargs = joint_of(made(CountsCalls))
    n_outputs = kwargs["num_fwd_outputs"]
    assert isinstance(n_outputs, int)
    stock = min_cut_rematerialization_partition(copied_module(joint), inputs, **kwargs)
    assert len(stale_inputs(*stock, n_outputs)) == 1
    forward, backward = default_split(joint, inputs, **kwargs)
    assert stale_inputs(forward, backward, n_outputs) == []
    (output,) = forward.graph.find_nodes(op="output")
    for held in forward.graph.find_nodes(op="call_function", target=torch.ops.aten.clone.default):
        assert set(held.users) == {output}
