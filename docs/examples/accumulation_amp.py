"""Gradient accumulation over micro-batches, with autocast to bfloat16.

    python docs/examples/accumulation_amp.py

From the second micro-batch on, the gradients of the earlier ones are in ``.grad`` while backward
makes new ones.  They are subtracted from the budget, and the log says so.
"""

import torch
from torch import nn

import dtrcompile

BUDGET = 11 * 2**18
MICRO_BATCHES = 3
STEPS = 5


class Net(nn.Module):
    """Returns the loss, which is then part of the graph and of its budget."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.ModuleList(nn.Linear(64, 256) for _ in range(3))
        self.down = nn.ModuleList(nn.Linear(256, 64) for _ in range(3))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        for up, down in zip(self.up, self.down, strict=True):
            x = x + down(nn.functional.gelu(up(x)))
        return nn.functional.mse_loss(x, y)


def train(budget: int | None) -> tuple[list[float], int]:
    """Returns the loss of each step, and the most bytes that the last micro-batches held."""
    torch.manual_seed(0)
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    if budget is not None:
        model.compile(backend="dtr", options={"budget": budget, "optimizer": optimizer})
    x = [torch.randn(256, 64) for _ in range(MICRO_BATCHES)]
    y = [part.roll(1, dims=-1) for part in x]
    losses, held_bytes = [], 0

    def micro_batch(i: int) -> float:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = model(x[i], y[i]) / MICRO_BATCHES
        loss.backward()
        return loss.item()

    for step in range(STEPS):
        loss = 0.0
        for i in range(MICRO_BATCHES):
            if step < STEPS - 1:
                loss += micro_batch(i)
                continue
            with dtrcompile.watch() as seen:
                loss += micro_batch(i)
            held_bytes = max(held_bytes, seen.observed_bytes - seen.outside_bytes)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss)
    return losses, held_bytes


def main() -> None:
    expected, _ = train(budget=None)
    losses, held_bytes = train(BUDGET)
    torch.testing.assert_close(losses, expected, rtol=1e-2, atol=1e-3)
    assert 0 < held_bytes <= BUDGET, f"a micro-batch held {held_bytes} bytes"
    print(f"losses from {losses[0]:.3f} to {losses[-1]:.3f}, as without a budget")
    print(f"a micro-batch held {held_bytes / 2**20:.2f} of {BUDGET / 2**20:.2f} MiB")


if __name__ == "__main__":
    main()
