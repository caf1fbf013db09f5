"""A GAN: two models whose graphs share one budget.

    python docs/examples/gan.py

A step of the discriminator and a step of the generator run different graphs.  ``several_graphs``
says so before the first of them is compiled.
"""

import torch
from torch import nn

import dtrcompile

BUDGET = 2 * 2**20
STEPS = 6
ROWS = 512


class Generator(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(4))

    def forward(self, z: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            z = z + nn.functional.gelu(layer(z))
        return z


class Discriminator(nn.Module):
    """Returns the loss of taking all of ``x`` for real, or for fake."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(4))
        self.score = nn.Linear(64, 1)

    def forward(self, x: torch.Tensor, is_real: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + nn.functional.leaky_relu(layer(x), 0.2)
        scores = self.score(x)
        return nn.functional.binary_cross_entropy_with_logits(scores, is_real.expand_as(scores))


def train(budget: int | None) -> tuple[list[float], list[dtrcompile.Watch]]:
    """Returns the losses of both models, and what the last step of each held."""
    torch.manual_seed(0)
    generator, discriminator = Generator(), Discriminator()
    of_generator = torch.optim.Adam(generator.parameters(), lr=1e-3)
    of_discriminator = torch.optim.Adam(discriminator.parameters(), lr=1e-3)
    if budget is not None:
        # Graphs whose options are equal share a budget.
        options = {
            "budget": budget,
            "optimizer": [of_generator, of_discriminator],
            "several_graphs": True,
        }
        generator.compile(backend="dtr", options=options)
        discriminator.compile(backend="dtr", options=options)
    real, fake = torch.ones(1), torch.zeros(1)
    losses = []

    def discriminate() -> None:
        x = 0.5 * torch.randn(ROWS, 64) + 1.0
        with torch.no_grad():
            made = generator(torch.randn(ROWS, 64))
        loss = discriminator(x, real) + discriminator(made, fake)
        of_discriminator.zero_grad()
        loss.backward()
        of_discriminator.step()
        losses.append(loss.item())

    def generate() -> None:
        loss = discriminator(generator(torch.randn(ROWS, 64)), real)
        of_generator.zero_grad()
        loss.backward()
        of_generator.step()
        losses.append(loss.item())

    for _ in range(STEPS):
        discriminate()
        generate()
    seen = []
    for step in (discriminate, generate):
        with dtrcompile.watch() as watch:
            step()
        seen.append(watch)
    return losses, seen


def main() -> None:
    expected, _ = train(budget=None)
    losses, seen = train(BUDGET)
    torch.testing.assert_close(losses, expected, rtol=1e-4, atol=1e-4)
    held_bytes = [watch.observed_bytes - watch.outside_bytes for watch in seen]
    assert max(held_bytes) <= BUDGET
    print(f"{len(losses)} losses as without a budget")
    d, g = (f"{held / 2**20:.2f}" for held in held_bytes)
    print(f"the discriminator's step held {d} of {BUDGET / 2**20:.2f} MiB, the generator's {g}")


if __name__ == "__main__":
    main()
