# /// script
# dependencies = ["accelerate==1.15.0", "torch==2.13.0"]
#
# [tool.meshmark]
# title = "A prepared scheduler makes one step per process for each optimizer step"
# framework = "accelerate"
# symptom = "Warm-up is over in half of the steps on two processes."
# cause = """
# AcceleratedScheduler assumes that each process brings a batch of its own. split_batches=True gives one step."""
# processes = 2
# ///
import sys

import torch
from accelerate import Accelerator
from torch import nn

accelerator = Accelerator(cpu=True)
model = nn.Linear(4, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0 - 0.1 * step)
model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)
accelerator.backward(model(torch.ones(1, 4)).sum())
optimizer.step()
scheduler.step()
steps = round((1.0 - scheduler.get_last_lr()[0] / 0.1) / 0.1, 3)
if steps != 1:
    sys.exit(f"expected: 1 step of the scheduler; got: {steps:g}")
