# /// script
# dependencies = ["torch==2.13.0"]
#
# [tool.meshmark]
# title = "FSDP1's whole state dict crashes on a CPU if it is offloaded to the CPU"
# framework = "torch"
# symptom = """
# `state_dict` under `FullStateDictConfig(offload_to_cpu=True)`, as Lightning Fabric's `state_dict_type="full"` has it,
# ends the process by a segmentation fault."""
# cause = """
# What is on the CPU is not copied by `tensor.to("cpu")`, and is freed when the unit is sharded again;
# `_full_post_state_dict_hook` (torch/distributed/fsdp/_state_dict_utils.py) then clones it."""
# processes = 2
# ///
import os
import signal
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullStateDictConfig, FullyShardedDataParallel, StateDictType

if child := os.fork():
    _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGSEGV:
        sys.exit("expected: the weights; got: a segmentation fault")
    sys.exit()
dist.init_process_group("gloo")
here = torch.device("cpu")
inner = FullyShardedDataParallel(nn.Linear(64, 64), device_id=here, use_orig_params=True)
model = FullyShardedDataParallel(nn.Sequential(inner, nn.Linear(64, 4)), device_id=here, use_orig_params=True)
model(torch.ones(2, 64)).sum().backward()
config = FullStateDictConfig(offload_to_cpu=True, rank0_only=True)
with FullyShardedDataParallel.state_dict_type(model, StateDictType.FULL_STATE_DICT, config):
    print({name: float(value.sum()) for name, value in model.state_dict().items()})
