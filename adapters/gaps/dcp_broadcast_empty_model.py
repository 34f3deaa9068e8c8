# /// script
# dependencies = ["torch==2.13.0"]
#
# [tool.meshmark]
# title = "`set_state_dict` does not wait for what the first rank broadcasts"
# framework = "torch"
# symptom = """
# With `broadcast_from_rank0`, ranks that pass an empty `model_state_dict` return without the weights, and their next
# collective gets what the first rank sends."""
# cause = """
# `set_state_dict` (torch/distributed/checkpoint/state_dict.py) takes an empty `model_state_dict` for a wish to load the
# optimizer alone (`optim_only=not model_state_dict`), on the ranks that the weights are to be sent to.
# `set_model_state_dict` and `set_optimizer_state_dict`, one after the other, do as asked."""
# processes = 2
# ///
import contextlib
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard

dist.init_process_group("gloo")
model = nn.Linear(4, 2)
fully_shard(model)
optimizer = torch.optim.SGD(model.parameters(), momentum=0.9)
weights, moments = get_state_dict(model, optimizer, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
first = dist.get_rank() == 0
options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
told: list[object] = [None]
if first:
    with contextlib.suppress(RuntimeError):  # of a connection that the other rank has closed
        set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=moments, options=options)
        dist.broadcast_object_list(["after the weights"], src=0)
else:
    set_state_dict(model, optimizer, model_state_dict={}, optim_state_dict={}, options=options)
    dist.broadcast_object_list(told, src=0)
    if told != ["after the weights"]:
        sys.exit(f"expected: what the first rank sends after the weights; got: {type(told[0]).__name__} of weights")
