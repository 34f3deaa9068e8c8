"""Lightning's manual optimization under DDP: `lightning_manual.py [two] [kept]`.

`two` trains a generator and a critic with an optimizer each. `kept` forgets to clear gradients.
"""

import sys

import pytorch_lightning as lightning
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Manual(lightning.LightningModule):
    def __init__(self, kept: bool) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.kept = kept
        self.layers = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 4))

    def forward(self, rows):
        return self.layers(rows)

    def training_step(self, batch, index):
        optimizer = self.optimizers()
        loss = F.cross_entropy(self(batch[0]), batch[1])
        if not self.kept:
            optimizer.zero_grad()
        self.manual_backward(loss)
        self.clip_gradients(optimizer, gradient_clip_val=0.5, gradient_clip_algorithm="norm")
        optimizer.step()
        self.log("loss", loss)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


class Two(lightning.LightningModule):
    def __init__(self, kept: bool) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.kept = kept
        self.generator = nn.Sequential(nn.Linear(6, 32), nn.GELU(), nn.Linear(32, 16))
        self.critic = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 1))

    def training_step(self, batch, index):
        first, second = self.optimizers()
        rows = batch[0]
        real, made = torch.ones(len(rows), 1), torch.zeros(len(rows), 1)
        self.toggle_optimizer(first)
        images = self.generator(torch.randn(len(rows), 6))
        self.manual_backward(F.binary_cross_entropy_with_logits(self.critic(images), real))
        first.step()
        first.zero_grad()
        self.untoggle_optimizer(first)
        self.toggle_optimizer(second)
        loss = F.binary_cross_entropy_with_logits(self.critic(rows), real)
        loss = loss + F.binary_cross_entropy_with_logits(self.critic(images.detach()), made)
        self.manual_backward(loss / 2)
        second.step()
        if not self.kept:
            second.zero_grad()
        self.untoggle_optimizer(second)

    def configure_optimizers(self):
        return [torch.optim.Adam(part.parameters(), lr=1e-3) for part in (self.generator, self.critic)]


if __name__ == "__main__":
    lightning.seed_everything(0)
    rows = TensorDataset(torch.randn(64, 16), torch.randint(4, (64,)))
    trainer = lightning.Trainer(
        accelerator="cpu", devices=2, strategy="ddp_find_unused_parameters_true" if "two" in sys.argv else "ddp",
        max_steps=12, enable_progress_bar=False, logger=False, enable_checkpointing=False,
    )  # fmt: skip
    trainer.fit((Two if "two" in sys.argv else Manual)("kept" in sys.argv), DataLoader(rows, 4))
