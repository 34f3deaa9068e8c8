# /// script
# dependencies = ["deepspeed==0.19.8", "torch==2.13.0"]
#
# [tool.meshmark]
# title = "DeepSpeed's OneCycle replaces the optimizer's second beta with 0.99"
# framework = "deepspeed"
# symptom = "With `OneCycle`, whose `cycle_momentum` is on by default, AdamW's betas of (0.9, 0.95) become (0.8, 0.99)."
# cause = """
# `_initialize_momentum` (lr_schedules.py) writes `(momentum, 0.99)` into every group's `betas`."""
# processes = 1
# ///
import sys

import torch
from deepspeed.runtime.lr_schedules import OneCycle
from torch import nn

optimizer = torch.optim.AdamW(nn.Linear(2, 2).parameters(), lr=1e-3, betas=(0.9, 0.95))
schedule = OneCycle(optimizer, cycle_min_lr=1e-4, cycle_max_lr=1e-3, cycle_first_step_size=3)
optimizer.step()
schedule.step()
betas = optimizer.param_groups[0]["betas"]
if betas[1] != 0.95:
    sys.exit(f"expected: the second beta stays 0.95; got: betas {betas}")
