# /// script
# dependencies = ["torch==2.13.0"]
#
# [tool.meshmark]
# title = "FSDP1 accumulates in bf16 under no_sync, whatever reduce_dtype says"
# framework = "torch"
# symptom = "Gradients of several micro-batches are added in bf16 and lose digits, though reduce_dtype is float32."
# cause = """
# Under `no_sync`, autograd adds micro-batches' gradients up in the unsharded parameter's `grad`, which has the dtype
# `param_dtype`. Only their sum is cast to `reduce_dtype`. `fully_shard` adds them in `reduce_dtype`."""
# processes = 2
# ///
import contextlib
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision

dist.init_process_group("gloo")
layer = nn.Linear(2, 1, bias=False)
policy = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
module = FullyShardedDataParallel(layer, mixed_precision=policy, device_id=torch.device("cpu"), use_orig_params=True)
inputs = (256.0, 1.0, 1.0)  # Each is its micro-batch's gradient. In bf16, 256 + 1 is 256.
for i, value in enumerate(inputs):
    with module.no_sync() if i < len(inputs) - 1 else contextlib.nullcontext():
        module(torch.full((1, 2), value)).sum().backward()
for parameter in module.parameters():
    if parameter.grad is not None and parameter.grad.numel() and float(parameter.grad.flatten()[0]) != sum(inputs):
        sys.exit(f"expected: a gradient of {sum(inputs)}, summed in float32; got: {float(parameter.grad.flatten()[0])}")
