# /// script
# dependencies = ["torch==2.13.0"]
#
# [tool.meshmark]
# title = "FSDP1 gives a parameter that no forward pass uses a gradient of zero"
# framework = "torch"
# symptom = "Weight decay and momentum move a parameter that DDP and FSDP2 leave alone."
# cause = """
# The gradient of a unit is one flat tensor, of which every parameter has a view, also with `use_orig_params=True`."""
# processes = 2
# ///
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel

dist.init_process_group("gloo")
model = nn.Linear(4, 4, bias=False)
model.spare = nn.Parameter(torch.ones(64))
wrapped = FullyShardedDataParallel(model, use_orig_params=True, device_id=torch.device("cpu"))
wrapped(torch.ones(1, 4)).sum().backward()
gradient = next(p for name, p in wrapped.named_parameters() if name.endswith("spare")).grad
if gradient is not None:
    sys.exit(f"expected: no gradient of a parameter that is not used; got: {len(gradient)} elements")
