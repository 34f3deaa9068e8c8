# /// script
# dependencies = ["deepspeed==0.19.8", "torch==2.13.0"]
#
# [tool.meshmark]
# title = "ZeRO never trains parameters that are unfrozen after initialize"
# framework = "deepspeed"
# symptom = """
# They stay as they are, at all three stages and without a word, although the optimizer that was given holds them. \
# Stage 0 trains them."""
# cause = """
# Stages 1 to 3 partition the parameters that require a gradient when the engine is made; all others are left out."""
# processes = 1
# ///
import sys

import deepspeed
import torch
from torch import nn

deepspeed.ops.__compatible_ops__ = {}  # On a CPU, DeepSpeed would compile an operator.

found = {}
for stage in (0, 1, 2, 3):
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
    backbone = model[0].weight.requires_grad_(False)
    config = {
        "train_batch_size": 1,
        "zero_optimization": {"stage": stage},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
    }
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    backbone.requires_grad_()
    with deepspeed.zero.GatheredParameters([backbone], enabled=stage == 3):
        before = backbone.detach().clone()
    engine.backward(engine(torch.ones(1, 4)).sum())
    engine.step()
    with deepspeed.zero.GatheredParameters([backbone], enabled=stage == 3):
        found[stage] = bool((backbone != before).any())
if not all(found.values()):
    sys.exit(f"expected: the unfrozen weight moves at every stage; got: {found}")
