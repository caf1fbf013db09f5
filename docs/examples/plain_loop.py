"""A plain training loop: a shorter last batch, evaluation, a checkpoint, and a run that resumes.

    python docs/examples/plain_loop.py

The model is compiled in place, so the names in its checkpoint are those of the model itself.
"""

import contextlib
import tempfile
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import dtrcompile

BUDGET = 2**20
EPOCHS = 4


class Net(nn.Module):
    """Returns the loss, which is then part of the graph and of its budget."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(4))
        self.head = nn.Linear(64, 10)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + nn.functional.gelu(layer(x))
        return nn.functional.cross_entropy(self.head(x), labels)


def random_data(rows: int, seed: int) -> TensorDataset:
    x = torch.randn(rows, 64, generator=torch.Generator().manual_seed(seed))
    return TensorDataset(x, x[:, :10].argmax(1))


def train(checkpoint: Path, epochs: int, budget: int | None) -> tuple[list[float], int]:
    """Train up to ``epochs``, from the checkpoint on if there is one.

    Returns the losses of training and evaluation, and the most bytes that a step of the last epoch
    held.
    """
    torch.manual_seed(0)
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    if budget is not None:
        model.compile(backend="dtr", options={"budget": budget, "optimizer": optimizer})
    first_epoch, losses, held_bytes = 0, [], 0
    if checkpoint.exists():
        state = torch.load(checkpoint)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        first_epoch, losses = state["epochs"], state["losses"]

    validation = DataLoader(random_data(300, seed=1), batch_size=512)
    for epoch in range(first_epoch, epochs):
        order = torch.Generator().manual_seed(epoch)
        # Batches of 512, 512 and 176 rows.
        loader = DataLoader(random_data(1200, seed=0), 512, shuffle=True, generator=order)
        model.train()
        for x, labels in loader:
            is_last = epoch == EPOCHS - 1
            with dtrcompile.watch() if is_last else contextlib.nullcontext() as seen:
                loss = model(x, labels)
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
            losses.append(loss.item())
            if seen is not None:
                held_bytes = max(held_bytes, seen.observed_bytes - seen.outside_bytes)
        model.eval()
        with torch.no_grad():
            losses += [model(x, labels).item() for x, labels in validation]

    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    torch.save({**state, "epochs": epochs, "losses": losses}, checkpoint)
    return losses, held_bytes


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        expected, _ = train(Path(folder, "unbudgeted.pt"), EPOCHS, budget=None)
        train(Path(folder, "budgeted.pt"), 1, BUDGET)
        torch._dynamo.reset()  # as in a new process
        losses, held_bytes = train(Path(folder, "budgeted.pt"), EPOCHS, BUDGET)
    torch.testing.assert_close(losses, expected, rtol=1e-4, atol=1e-4)
    assert 0 < held_bytes <= BUDGET, f"a step held {held_bytes} bytes"
    print(f"losses from {losses[0]:.3f} to {losses[-1]:.3f}, as without a budget")
    print(f"a step held {held_bytes / 2**20:.2f} of {BUDGET / 2**20:.2f} MiB")


if __name__ == "__main__":
    main()
