"""FSDP2: ``fully_shard``, compiled block by block or as a whole model.

torchrun --nproc-per-node 2 docs/examples/fsdp2.py --per block
torchrun --nproc-per-node 2 docs/examples/fsdp2.py --per model
"""

import argparse
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import dtrcompile


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(nn.functional.gelu(self.up(x)))


class Net(nn.Module):
    """A class of its own, because ``nn.Sequential(...).compile()`` silently compiles nothing."""

    def __init__(self, width: int, blocks: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(width) for _ in range(blocks))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--per", choices=("block", "model"), default="block")
    per = parser.parse_args().per
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", "0")
    os.environ.setdefault("RANK", "0")
    os.environ.setdefault("WORLD_SIZE", "1")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dist.init_process_group("nccl" if device == "cuda" else "gloo")
    mesh = init_device_mesh(device, (dist.get_world_size(),))
    torch.manual_seed(0)
    model = Net(64, 4)
    options = {"budget": "8MiB", "reserve": "optimizer"}
    # In place, before it is sharded: the hooks that gather weights then stay around the graph.
    for module in model.blocks if per == "block" else [model]:
        module.compile(backend="dtr", options=options)
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(4):
        optimizer.zero_grad()
        model(torch.randn(512, 64)).square().mean().backward()
        optimizer.step()
    for report in dtrcompile.reports():
        print(report)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
