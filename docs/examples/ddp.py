"""DistributedDataParallel, whose buckets are subtracted from the budget.

torchrun --nproc-per-node 2 docs/examples/ddp.py
"""

import os

import torch
import torch.distributed as dist
from torch import nn

import dtrcompile


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(128, 128) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = nn.functional.gelu(layer(x))
        return x


def main() -> None:
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", "0")
    os.environ.setdefault("RANK", "0")
    os.environ.setdefault("WORLD_SIZE", "1")
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    torch.manual_seed(0)
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters())
    options = {"budget": "8MiB", "optimizer": optimizer}
    ddp = nn.parallel.DistributedDataParallel(model)
    compiled = torch.compile(ddp, backend="dtr", options=options)
    for _ in range(4):
        optimizer.zero_grad()
        compiled(torch.randn(512, 128)).square().mean().backward()
        optimizer.step()
    for report in dtrcompile.reports():
        print(report)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
