# /// script
# dependencies = ["torch==2.13.0"]
#
# [tool.meshmark]
# title = "A whole optimizer state that is flattened cannot be loaded"
# framework = "torch"
# symptom = """
# `set_state_dict` raises a KeyError with `StateDictOptions(full_state_dict=True, flatten_optimizer_state_dict=True)`,
# for what `get_state_dict` made with the same options."""
# cause = """
# `_load_optim_state_dict` (torch/distributed/checkpoint/state_dict.py) unflattens what it is given, and compares it
# with a local state that is flattened. Without `flatten_optimizer_state_dict` the same state loads."""
# processes = 2
# ///
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
options = StateDictOptions(full_state_dict=True, flatten_optimizer_state_dict=True)
weights, moments = get_state_dict(model, optimizer, options=options)
try:
    set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=moments, options=options)
except KeyError as error:
    sys.exit(f"expected: the state that was taken is loaded; got: KeyError: {error}")
