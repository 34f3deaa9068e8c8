# /// script
# dependencies = ["fairscale==0.4.13", "torch==2.13.0"]
#
# [tool.meshmark]
# title = "FairScale's FSDP accumulates in bf16 under no_sync, though fp32_reduce_scatter is on"
# framework = "fairscale"
# symptom = "Gradients of several micro-batches lose digits."
# cause = """
# Under `no_sync`, micro-batches are added up in the whole parameter's `grad`, which has the dtype `compute_dtype`."""
# processes = 2
# ///
import contextlib
import sys
from types import ModuleType, SimpleNamespace

import torch
import torch.distributed as dist
from fairscale.nn.data_parallel import FullyShardedDataParallel, fully_sharded_data_parallel
from torch import nn

dist.init_process_group("gloo")
if not torch.cuda.is_available():  # FairScale takes streams for granted.
    stream = SimpleNamespace(wait_stream=lambda other: None)
    shim = ModuleType("torch")
    shim.__getattr__ = lambda name: getattr(torch, name)
    shim.cuda = SimpleNamespace(
        is_available=lambda: True,
        Stream=lambda: stream,
        current_stream=lambda: stream,
        stream=lambda stream: contextlib.nullcontext(),
    )
    fully_sharded_data_parallel.torch = shim
    torch.Tensor.record_stream = lambda self, stream: None
dtypes = {"mixed_precision": True, "compute_dtype": torch.bfloat16, "fp32_reduce_scatter": True}
model = FullyShardedDataParallel(nn.Embedding(1, 2), compute_device=torch.device("cpu"), bucket_cap_mb=0, **dtypes)
for i, value in enumerate((256.0, 1.0, 1.0)):  # Each is its micro-batch's gradient. In bf16, 256 + 1 is 256.
    with model.no_sync() if i < 2 else contextlib.nullcontext():
        (model(torch.zeros(1, dtype=torch.long)).sum() * value).backward()
if (got := float(next(model.parameters()).grad[0])) != 258.0:
    sys.exit(f"expected: a gradient of 258.0, summed in float32; got: {got}")
