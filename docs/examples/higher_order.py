"""Derivatives inside of a compiled model: a network that solves a differential equation.

    python docs/examples/higher_order.py

``torch.func`` takes the slope of the network at each sample, and backward differentiates through
that.  All of it is one graph, under one budget.
"""

import torch
from torch import nn
from torch.func import grad, vmap

import dtrcompile

BUDGET = 3 * 2**20
STEPS = 4


class Equation(nn.Module):
    """How far a network ``u`` is from solving u'(t) = -u(t), u(0) = 1."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(1, 64)
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(2))
        self.last = nn.Linear(64, 1)

    def u(self, t: torch.Tensor) -> torch.Tensor:
        h = torch.tanh(self.first(t.reshape(1)))
        for layer in self.layers:
            h = torch.tanh(layer(h))
        return self.last(h).sum()

    def forward(self, t: torch.Tensor) -> torch.Tensor:
        slopes, values = vmap(grad(self.u))(t), vmap(self.u)(t)
        at_zero = self.u(torch.zeros_like(t[0]))
        return (slopes + values).square().mean() + (at_zero - 1).square()


def train(budget: int | None) -> tuple[list[float], dtrcompile.Watch]:
    """Returns the loss of each step, and what the last step held."""
    torch.manual_seed(0)
    model = Equation()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    if budget is not None:
        model.compile(backend="dtr", options={"budget": budget, "optimizer": optimizer})
    t = torch.linspace(0, 2, 1024)
    losses = []

    def step() -> None:
        loss = model(t)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())

    for _ in range(STEPS - 1):
        step()
    with dtrcompile.watch() as seen:
        step()
    return losses, seen


def main() -> None:
    expected, _ = train(budget=None)
    losses, seen = train(BUDGET)
    torch.testing.assert_close(losses, expected, rtol=1e-4, atol=1e-4)
    held_bytes = seen.observed_bytes - seen.outside_bytes
    assert held_bytes <= seen.promised_bytes <= BUDGET, f"a step held {held_bytes} bytes"
    print(f"losses from {losses[0]:.3f} to {losses[-1]:.3f}, as without a budget")
    print(f"a step held {held_bytes / 2**20:.2f} of {BUDGET / 2**20:.2f} MiB")


if __name__ == "__main__":
    main()
