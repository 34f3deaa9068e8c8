# /// script
# dependencies = ["transformers==5.23.0", "accelerate==1.15.0", "deepspeed==0.19.8", "torch==2.13.0"]
#
# [tool.meshmark]
# title = "Under DeepSpeed the Trainer drops the optimizer that it is given"
# framework = "transformers"
# symptom = "Trainer(optimizers=...) trains by AdamW of its own arguments, and says nothing; under FSDP it refuses."
# cause = """
# deepspeed_init sets trainer.optimizer to None, and create_optimizer then makes one of TrainingArguments."""
# processes = 1
# ///
import os
import sys
import tempfile

os.environ.update(DS_ACCELERATOR="cpu", LOCAL_SIZE="1", ACCELERATE_TORCH_DEVICE="cpu")
import deepspeed
import torch
from torch import nn
from transformers import Trainer, TrainingArguments

deepspeed.ops.__compatible_ops__ = {}  # asked for, it would be filled by running compilers


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 1)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": (self.linear(x) - labels).square().mean()}


model = Model()
given = torch.optim.SGD(model.parameters(), lr=0.1)
zero = {"train_micro_batch_size_per_gpu": 2, "zero_optimization": {"stage": 1}, "zero_allow_untested_optimizer": True}
schedule = torch.optim.lr_scheduler.LambdaLR(given, lambda step: 1.0)
with tempfile.TemporaryDirectory() as folder:
    trainer = Trainer(
        model=model,
        args=TrainingArguments(
            output_dir=folder,
            max_steps=1,
            per_device_train_batch_size=2,
            use_cpu=True,
            ddp_backend="gloo",
            save_strategy="no",
            report_to=[],
            deepspeed=zero,
        ),
        train_dataset=[{"x": torch.ones(4), "labels": torch.ones(1)}] * 4,
        optimizers=(given, schedule),
    )
    trainer.train()
inside = trainer.deepspeed.optimizer.optimizer
if not isinstance(inside, torch.optim.SGD):
    sys.exit(f"expected: the SGD that was given; got: {type(inside).__name__}")
