"""The loop of Accelerate's examples: prepare, accumulate, clip, schedule.

`accelerate_loop.py zero 2` trains with DeepSpeed, as under `accelerate launch --use_deepspeed`.
"""

import os
import sys

import torch
from accelerate import Accelerator, DeepSpeedPlugin, InitProcessGroupKwargs
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def accelerator_of(stage: int | None) -> Accelerator:
    if stage is None:
        return Accelerator(gradient_accumulation_steps=2, cpu=True)
    os.environ |= {"ACCELERATE_USE_DEEPSPEED": "true", "ACCELERATE_TORCH_DEVICE": "cpu"}
    return Accelerator(
        gradient_accumulation_steps=2,
        deepspeed_plugin=DeepSpeedPlugin(zero_stage=stage, gradient_accumulation_steps=2, gradient_clipping=1.0),
        kwargs_handlers=[InitProcessGroupKwargs(backend="gloo")],
    )


def main(stage: int | None) -> None:
    accelerator = accelerator_of(stage)
    torch.manual_seed(7)
    data = TensorDataset(torch.randn(256, 12), torch.randint(5, (256,)))
    loader = DataLoader(data, batch_size=8, shuffle=True)
    model = nn.Sequential(nn.Linear(12, 32), nn.Tanh(), nn.Dropout(0.1), nn.Linear(32, 5))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    criterion = nn.CrossEntropyLoss()
    model.train()
    for inputs, targets in loader:
        with accelerator.accumulate(model):
            loss = criterion(model(inputs), targets)
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()


if __name__ == "__main__":
    main(int(sys.argv[-1]) if "zero" in sys.argv else None)
