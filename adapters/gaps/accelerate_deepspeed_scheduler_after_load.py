# /// script
# dependencies = ["accelerate==1.15.0", "deepspeed==0.19.8", "torch==2.13.0"]
#
# [tool.meshmark]
# title = "A scheduler loses the optimizer that Accelerate puts in place of AdamW once a checkpoint is loaded"
# framework = "accelerate"
# symptom = "After load_state_dict the learning rate that trains no longer follows the schedule."
# cause = """
# map_pytorch_optim_to_deepspeed builds another optimizer over the same parameter groups. load_state_dict makes
# new groups, and the scheduler goes on with the old ones."""
# operators = "cpu_adam"
# processes = 1
# ///
import sys

import torch
from accelerate.utils.deepspeed import map_pytorch_optim_to_deepspeed
from torch import nn

given = torch.optim.AdamW(nn.Linear(2, 2).parameters(), lr=1.0)
scheduler = torch.optim.lr_scheduler.LambdaLR(given, lambda step: 1.0 / (1 + step))
replacement = map_pytorch_optim_to_deepspeed(given)
given.step()  # PyTorch warns of a scheduler that steps first.
scheduler.step()
assert replacement.param_groups[0]["lr"] == 0.5
replacement.load_state_dict(replacement.state_dict())
scheduler.step()
rate = replacement.param_groups[0]["lr"]
if abs(rate - 1 / 3) > 1e-6:
    sys.exit(f"expected: a learning rate of 1/3; got: {rate}")
