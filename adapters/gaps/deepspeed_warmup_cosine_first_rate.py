# /// script
# dependencies = ["deepspeed==0.19.8", "torch==2.13.0"]
#
# [tool.meshmark]
# title = "DeepSpeed's WarmupCosineLR takes its first step at a rate of 0, whatever warmup_min_ratio says"
# framework = "deepspeed"
# symptom = "The first optimizer step with `WarmupCosineLR` changes no parameter."
# cause = """
# `get_lr` (lr_schedules.py) returns 0 until the scheduler is stepped, which the engine does after the optimizer's first
# step."""
# processes = 1
# ///
import sys

import torch
from deepspeed.runtime.lr_schedules import WarmupCosineLR
from torch import nn

model = nn.Linear(2, 2)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
schedule = WarmupCosineLR(optimizer, 100, warmup_min_ratio=0.5, warmup_num_steps=10, warmup_type="linear")
before = model.weight.detach().clone()
model(torch.ones(1, 2)).sum().backward()
optimizer.step()
schedule.step()
if torch.equal(before, model.weight):
    sys.exit("expected: a first step at half of the rate of 0.001; got: a rate of 0, which changes nothing")
