# /// script
# dependencies = ["megatron-core==0.16.1", "torch==2.13.0"]
#
# [tool.meshmark]
# title = "After a load, all tensors of a distributed optimizer share one count of steps"
# framework = "megatron-core"
# symptom = """
# Without Apex or Transformer Engine, AdamW's bias correction is wrong after a resume: at each step the count grows by
# the number of tensors. In the format dp_reshardable it begins at the count of before the load. Nothing is said."""
# cause = """
# One tensor is made of the saved count, and becomes the state of every parameter. In dp_reshardable, the count of a
# parameter is a LocalNonpersistentObject, which is copied back over it."""
# processes = 1
# ///
import sys
from types import SimpleNamespace

import torch
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import param_group_identifier_keys

weights = [torch.ones(2, requires_grad=True) for _ in range(3)]
adam = torch.optim.AdamW([{"params": weights, **dict.fromkeys(param_group_identifier_keys, 1.0)}])
distributed = SimpleNamespace(
    optimizer=adam,
    grad_scaler=None,
    ddp_config=SimpleNamespace(use_megatron_fsdp=False),
    config=SimpleNamespace(fp16=False),
)
for loads in (False, True):
    if loads:
        DistributedOptimizer.load_state_dict(distributed, DistributedOptimizer.state_dict(distributed))
    sum(weight.sum() for weight in weights).backward()
    adam.step()
counts = [int(adam.state[weight]["step"]) for weight in weights]
if counts != [2, 2, 2]:
    sys.exit(f"expected: counts of 2 after a step, a load and a step; got: {counts}")
