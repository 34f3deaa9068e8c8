# /// script
# dependencies = ["torch==2.13.0"]
#
# [tool.meshmark]
# title = "DDP does not wait for the delayed all-reduce"
# framework = "torch"
# symptom = "With `delay_all_reduce_named_params`, those gradients are not yet reduced when `backward` returns."
# cause = """
# `_delayed_all_reduce_hook` (torch/nn/parallel/distributed.py) starts the reduction with `async_op=True` and drops what
# `wait` would have to be called on."""
# processes = 2
# ///
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
model = nn.Sequential(nn.Linear(2, 4, bias=False), nn.Linear(4, 2_000_000, bias=False))
late = model[1].weight
wrapped = DistributedDataParallel(
    model, delay_all_reduce_named_params=[("1.weight", late)], param_to_hook_all_reduce=model[0].weight
)
(wrapped(torch.ones(1, 2)).sum() * (1 + 2 * dist.get_rank())).backward()
got = late.grad.clone()
dist.all_reduce(torch.zeros(late.numel()))
if not torch.equal(got, late.grad):
    sys.exit(f"expected: reduced gradients after backward; got: {int((got != late.grad).sum())} that changed after it")
