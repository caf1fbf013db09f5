"""A U-Net of diffusers learns to predict noise; from a configuration, with random weights.

pip install diffusers
python docs/examples/diffusers_unet.py
"""

import torch
from diffusers import DDPMScheduler, UNet2DModel
from torch import nn

import dtrcompile

BUDGET = 10 * 2**20
STEPS = 4


class DenoisingLoss(nn.Module):
    """Returns the loss, which is then part of the graph and of its budget."""

    def __init__(self) -> None:
        super().__init__()
        self.unet = UNet2DModel(
            sample_size=16,
            block_out_channels=(16, 32),
            layers_per_block=1,
            down_block_types=("DownBlock2D", "AttnDownBlock2D"),
            up_block_types=("AttnUpBlock2D", "UpBlock2D"),
            norm_num_groups=8,
            attention_head_dim=8,
        )

    def forward(self, noisy: torch.Tensor, t: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
        return nn.functional.mse_loss(self.unet(noisy, t).sample, noise)


def train(budget: int | None) -> tuple[list[float], dtrcompile.Watch]:
    """Returns the loss of each step, and what the last step held."""
    torch.manual_seed(0)
    model = DenoisingLoss()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    if budget is not None:
        model.compile(backend="dtr", options={"budget": budget, "optimizer": optimizer})
    scheduler = DDPMScheduler()
    images = torch.randn(16, 3, 16, 16)
    losses = []

    def step() -> None:
        noise = torch.randn_like(images)
        t = torch.randint(scheduler.config.num_train_timesteps, (len(images),))
        loss = model(scheduler.add_noise(images, noise, t), t, noise)
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
    torch.testing.assert_close(losses, expected, rtol=1e-3, atol=1e-3)
    held_bytes = seen.observed_bytes - seen.outside_bytes
    assert held_bytes <= seen.promised_bytes <= BUDGET
    print(f"losses from {losses[0]:.3f} to {losses[-1]:.3f}, as without a budget")
    print(f"a step held {held_bytes / 2**20:.2f} of {BUDGET / 2**20:.2f} MiB")


if __name__ == "__main__":
    main()
