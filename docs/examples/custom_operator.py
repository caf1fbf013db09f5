"""A custom operator, declared pure so that a plan may run it again.

python docs/examples/custom_operator.py
"""

from typing import Any

import torch
from torch import nn

import dtrcompile

BUDGET = "min"
CAP = 2.0


@torch.library.custom_op("examples::softcap", mutates_args=())
def softcap(x: torch.Tensor, cap: float) -> torch.Tensor:
    """Values that grow ever slower towards ``cap``."""
    return cap * torch.tanh(x / cap)


@softcap.register_fake
def _(x: torch.Tensor, cap: float) -> torch.Tensor:  # noqa: ARG001
    return torch.empty_like(x)


def save_for_backward(ctx: Any, inputs: tuple[torch.Tensor, float], output: torch.Tensor) -> None:
    ctx.save_for_backward(output)
    ctx.cap = inputs[1]


def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
    (output,) = ctx.saved_tensors
    return gradient * (1 - (output / ctx.cap) ** 2), None


softcap.register_autograd(backward, setup_context=save_for_backward)


class Net(nn.Module):
    """Returns the loss, which is then part of the graph and of its budget."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = softcap(layer(x), CAP)
        return x.square().mean()


def train(budget: str | None) -> tuple[list[float], dtrcompile.Watch]:
    """Returns the loss of each step, and what the last step held."""
    torch.manual_seed(0)
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if budget is not None:
        model.compile(backend="dtr", options={"budget": budget})
    x = torch.randn(512, 64)
    losses = []

    def step() -> None:
        loss = model(x)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())

    for _ in range(3):
        step()
    with dtrcompile.watch() as seen:
        step()
    return losses, seen


def main() -> None:
    # Equal inputs give equal outputs, and nothing else happens.
    dtrcompile.declare_operator(softcap, pure=True)
    expected, _ = train(budget=None)
    losses, seen = train(BUDGET)
    torch.testing.assert_close(losses, expected, rtol=1e-4, atol=1e-4)
    held_bytes = seen.observed_bytes - seen.outside_bytes
    assert held_bytes <= seen.promised_bytes, f"{held_bytes} of {seen.promised_bytes} bytes"
    (report,) = dtrcompile.reports()
    again = sum(runs for name, runs in report.recomputed.items() if "softcap" in name)
    assert again > 0, "no plan runs the operator again"
    print(f"losses from {losses[0]:.4f} to {losses[-1]:.4f}, as without a budget")
    print(
        f"a step held {held_bytes / 2**20:.2f} MiB instead of"
        f" {report.baseline_peak_bytes / 2**20:.2f}; softcap runs {again} more times"
    )


if __name__ == "__main__":
    main()
