"""Lightning: a submodule is compiled; the sanity check before the first step stays enabled.

DTRCOMPILE_RESERVE=optimizer python docs/examples/lightning_module.py
"""

import lightning
import torch
from torch import nn

import dtrcompile


class Net(nn.Module):
    """A class of its own, because ``nn.Sequential(...).compile()`` silently compiles nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = nn.functional.gelu(layer(x))
        return x.mean(1, keepdim=True)


class Regression(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.model = Net()
        self.model.compile(backend="dtr", options={"budget": "70%"})

    def training_step(self, batch: list[torch.Tensor], _index: int) -> torch.Tensor:
        x, y = batch
        return nn.functional.mse_loss(self.model(x), y)

    def validation_step(self, batch: list[torch.Tensor], _index: int) -> None:
        x, y = batch
        self.log("loss", nn.functional.mse_loss(self.model(x), y))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1e-3)


def main() -> None:
    lightning.seed_everything(0, verbose=False)
    data = torch.utils.data.TensorDataset(torch.randn(1100, 64), torch.randn(1100, 1))
    loader = torch.utils.data.DataLoader(data, batch_size=512)
    trainer = lightning.Trainer(
        max_epochs=2,
        num_sanity_val_steps=2,
        accelerator="auto",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Regression(), loader, loader)
    for report in dtrcompile.reports():
        print(report)


if __name__ == "__main__":
    main()
