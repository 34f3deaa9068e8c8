# /// script
# dependencies = ["pytorch-lightning==2.6.6", "torch==2.13.0"]
#
# [tool.meshmark]
# title = "BackboneFinetuning trains the backbone of each rank by its own gradients under DDP"
# framework = "pytorch-lightning"
# symptom = "From the epoch that unfreezes the backbone on, its gradients are not reduced, and replicas drift apart."
# cause = """
# The callback freezes the backbone in its setup, before the strategy makes DistributedDataParallel, which leaves out \
# what is frozen then. find_unused_parameters does not help."""
# upstream = "https://github.com/Lightning-AI/pytorch-lightning/issues/20340"
# processes = 2
# ///
import sys

import torch
from pytorch_lightning import LightningModule, Trainer
from pytorch_lightning.callbacks import BackboneFinetuning
from torch import nn
from torch.utils.data import DataLoader


class Tuned(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.backbone, self.head = (nn.Linear(1, 1, bias=False).requires_grad_() for _ in range(2))
        self.backbone.weight.data.fill_(1.0)
        self.head.weight.data.fill_(2.0)

    def training_step(self, batch: torch.Tensor, index: int) -> torch.Tensor:
        return self.head(self.backbone(batch)).sum()

    def on_after_backward(self) -> None:
        if self.current_epoch == 1 and (got := self.backbone.weight.grad.item()) != 3.0:
            sys.exit(
                f"expected: a gradient of 3 in epoch 1, the mean of 2 and 4; got: {got:g} on rank {self.global_rank}"
            )

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.head.parameters(), lr=0.0)


quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}
unfreezes = BackboneFinetuning(unfreeze_backbone_at_epoch=1)
trainer = Trainer(accelerator="cpu", devices=2, strategy="ddp", max_epochs=2, callbacks=[unfreezes], **quiet)
trainer.fit(Tuned(), DataLoader(torch.tensor([[1.0], [2.0]]), batch_size=1))
