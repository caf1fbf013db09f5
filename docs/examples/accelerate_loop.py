"""Accelerate: a custom training loop with gradient accumulation.

    python docs/examples/accelerate_loop.py

The model is compiled in place before ``prepare``; Accelerate's own ``dynamo_backend`` takes a fixed
list of names.
"""

import torch
from accelerate import Accelerator
from torch import nn

import dtrcompile


class Net(nn.Module):
    """A class of its own, because ``nn.Sequential(...).compile()`` silently compiles nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(64, 256), nn.Linear(256, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(nn.functional.gelu(self.up(x)))


def main() -> None:
    torch.manual_seed(0)
    accelerator = Accelerator(gradient_accumulation_steps=2, cpu=not torch.cuda.is_available())
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model.compile(backend="dtr", options={"budget": "4MiB", "optimizer": optimizer})
    data = torch.utils.data.TensorDataset(torch.randn(300, 64), torch.randn(300, 1))
    loader = torch.utils.data.DataLoader(data, batch_size=64)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for _ in range(2):
        for x, y in loader:
            with accelerator.accumulate(model):
                loss = nn.functional.mse_loss(model(x), y)
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
    for report in dtrcompile.reports():
        print(report)


if __name__ == "__main__":
    main()
