# /// script
# dependencies = ["megatron-core==0.16.1", "torch==2.13.0"]
#
# [tool.meshmark]
# title = "A distributed optimizer that has not stepped cannot load a checkpoint"
# framework = "megatron-core"
# symptom = "sharded_state_dict(is_loading=True) fails with an AssertionError, without Apex or Transformer Engine."
# cause = """
# It begins with state_dict, which asserts that there is one count of steps. A new torch.optim.AdamW has none."""
# processes = 1
# ///
import sys
from types import SimpleNamespace

import torch
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

weight = torch.ones(2, requires_grad=True)
adam = torch.optim.AdamW([weight])
for steps in (1, 0):
    adam = torch.optim.AdamW([weight])
    for _ in range(steps):
        weight.sum().backward()
        adam.step()
    try:
        DistributedOptimizer.state_dict(SimpleNamespace(optimizer=adam, grad_scaler=None))
    except AssertionError:
        sys.exit(f"expected: a state dict; got: AssertionError after {steps} steps")
