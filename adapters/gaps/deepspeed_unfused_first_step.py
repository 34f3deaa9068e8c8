# /// script
# dependencies = ["deepspeed==0.19.8", "torch==2.13.0"]
#
# [tool.meshmark]
# title = "DeepSpeed updates a bf16 model once before it trains"
# framework = "deepspeed"
# symptom = "Without ZeRO, weights have decayed before the first step, and Adam counts that step as its second."
# cause = """
# `initialize_optimizer_states` of `FP16_UnfusedOptimizer` (and of `FP16_Optimizer`) calls the optimizer's `step` with
# gradients of zero, so that states exist. That decays the weights, and Adam counts it as the first step."""
# processes = 2
# ///
import sys

import deepspeed
import torch
from torch import nn

deepspeed.ops.__compatible_ops__ = {}  # On a CPU, DeepSpeed would compile an operator.
model = nn.Linear(4, 4, bias=False)
nn.init.ones_(model.weight)
config = {"train_batch_size": 2, "train_micro_batch_size_per_gpu": 1, "bf16": {"enabled": True}}
optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.5)
engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
master = optimizer.param_groups[0]["params"][0]
steps = float(optimizer.state[master]["step"])
if float(master.detach().min()) != 1 or steps:
    sys.exit(f"expected: weights of 1 before the first step; got: {float(master.detach().min()):.3g} after {steps:.0f}")
