"""Lightning's Trainer with DDP in bf16, whose optimizer calls forward and backward by a closure."""

import pytorch_lightning as lightning
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Classifier(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 4))

    def forward(self, rows):
        return self.layers(rows)

    def training_step(self, batch, index):
        loss = F.cross_entropy(self(batch[0]), batch[1])
        self.log("loss", loss)
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


if __name__ == "__main__":
    lightning.seed_everything(0)
    rows = TensorDataset(torch.randn(64, 16), torch.randint(4, (64,)))
    lightning.Trainer(
        accelerator="cpu", devices=2, strategy="ddp", max_steps=6, accumulate_grad_batches=2, gradient_clip_val=0.5,
        precision="bf16-mixed", enable_progress_bar=False, logger=False, enable_checkpointing=False,
    ).fit(Classifier(), DataLoader(rows, 4))  # fmt: skip
