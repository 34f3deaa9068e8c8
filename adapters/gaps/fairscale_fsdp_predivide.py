# /// script
# dependencies = ["fairscale==0.4.13", "torch==2.13.0"]
#
# [tool.meshmark]
# title = "FairScale's FSDP scales gradients where gradient_predivide_factor exceeds the number of ranks"
# framework = "fairscale"
# symptom = "With `gradient_predivide_factor=4` on two ranks, gradients are half of what they should be."
# cause = """
# Gradients are to be divided by world_size / factor after the reduction, which it does only if that is more than 1."""
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
model = FullyShardedDataParallel(
    nn.Linear(4, 1, bias=False), compute_device=torch.device("cpu"), gradient_predivide_factor=4.0, bucket_cap_mb=0
)
model(torch.ones(1, 4)).sum().backward()
got = float(next(model.parameters()).grad[0])
if got != 1.0:
    sys.exit(f"expected: the mean over ranks of gradients of 1; got: {got}")
