"""From an out-of-memory error to training, by one more argument.

    python docs/examples/out_of_memory.py

Two processes train the same model on a CPU (Linux) within the same limit of memory: plain
``torch.compile`` runs out of it, and the same script with a budget trains.  On a GPU, the limit is
the device's memory, and the default budget is what is free of it.
"""

import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn

# What a process may allocate beyond what it has when it begins to train.  That is the step and the
# memory that compiling takes.
LIMIT = 800 * 2**20
BUDGET = 448 * 2**20


class Net(nn.Module):
    """Returns the loss, which is then part of the graph and of its budget."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(12))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + nn.functional.relu(layer(x))
        return x.square().mean()


def train(**compile_options: Any) -> list[float]:
    """Returns the loss of each step."""
    torch.manual_seed(0)
    model = Net()
    model.compile(**compile_options)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    x = torch.randn(2**20, 16)
    losses = []
    for _ in range(2):
        loss = model(x)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def limit_memory() -> None:
    """Allow this process so much more data than it has now."""
    torch.compile(nn.Linear(1, 1))(torch.ones(1, 1)).sum().backward()  # loads the compiler
    status = dict(line.split(":") for line in Path("/proc/self/status").read_text().splitlines())
    now = int(status["VmData"].split()[0]) * 2**10
    resource.setrlimit(resource.RLIMIT_DATA, (now + LIMIT, now + LIMIT))


def run(kind: str) -> subprocess.CompletedProcess[str]:
    """This script's training in a process of its own."""
    command = [sys.executable, __file__, kind]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def main() -> None:
    if len(sys.argv) > 1:
        options: dict[str, dict[str, Any]] = {
            "plain": {},
            "budgeted": {"backend": "dtr", "options": {"budget": BUDGET}},
        }
        limit_memory()
        print(*train(**options[sys.argv[1]]))
        return
    plain = run("plain")
    assert plain.returncode != 0, "torch.compile needs less than the limit"
    error = plain.stderr.strip().splitlines()[-1]
    assert "allocate memory" in error, plain.stderr
    print(f"without a budget: {error}")
    budgeted = run("budgeted")
    assert budgeted.returncode == 0, budgeted.stderr
    losses = [float(word) for word in budgeted.stdout.split()]
    torch.testing.assert_close(losses, train(backend="eager"), rtol=1e-4, atol=1e-4)
    print(f"within {BUDGET / 2**20:.0f} MiB: losses {', '.join(f'{loss:.4f}' for loss in losses)}")


if __name__ == "__main__":
    main()
