# /// script
# dependencies = ["accelerate==1.15.0", "torch==2.13.0"]
#
# [tool.meshmark]
# title = "FSDP2 with cpu_ram_efficient_loading fails for a model with buffers"
# framework = "accelerate"
# symptom = "prepare() raises AttributeError."
# cause = "fsdp2_load_full_state_dict takes every entry of the state dict for a DTensor. Buffers are plain tensors."
# upstream = "https://github.com/huggingface/accelerate/issues/3898"
# processes = 2
# ///
import sys

import torch
from accelerate import Accelerator, PartialState
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin
from torch import nn

# Accelerate's mode for several CPUs ignores plugins; this is the one that heeds them.
PartialState(backend="gloo", cpu=True).distributed_type = DistributedType.MULTI_GPU
plugin = FullyShardedDataParallelPlugin(fsdp_version=2, cpu_ram_efficient_loading=True, auto_wrap_policy="no_wrap")
model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
try:
    Accelerator(fsdp_plugin=plugin).prepare(model, optimizer)
except AttributeError as error:
    sys.exit(f"expected: a sharded model; got: {error}")
