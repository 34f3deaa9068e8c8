# /// script
# dependencies = ["fairscale==0.4.13", "torch==2.13.0"]
#
# [tool.meshmark]
# title = "gather_full_optim_state_dict mixes moments up on a CPU"
# framework = "fairscale"
# symptom = "Both moments of AdamW that it returns are the second ones."
# cause = """
# `_gather_optim_state` gathers every tensor into one buffer, and keeps what `.cpu()` returns of it. On a CPU that is
# the buffer itself, which the next tensor overwrites."""
# processes = 2
# ///
import contextlib
import sys
import types

import torch
import torch.distributed as dist
from fairscale.nn.data_parallel import FullyShardedDataParallel, fully_sharded_data_parallel
from torch import nn

dist.init_process_group("gloo")
if not torch.cuda.is_available():  # FairScale takes CUDA's streams for granted. These do nothing.
    stream = types.SimpleNamespace(wait_stream=lambda other: None)
    without_streams = types.ModuleType("torch")
    without_streams.__getattr__ = lambda name: getattr(torch, name)
    without_streams.cuda = types.SimpleNamespace(
        is_available=lambda: True,
        Stream=lambda: stream,
        current_stream=lambda: stream,
        stream=lambda stream: contextlib.nullcontext(),
        synchronize=lambda: None,
    )
    fully_sharded_data_parallel.torch = without_streams
    torch.Tensor.record_stream = lambda self, stream: None


def wrap(module: nn.Module) -> nn.Module:
    return FullyShardedDataParallel(module, compute_device=torch.device("cpu"), bucket_cap_mb=0)


model = wrap(nn.Linear(4, 4))
optimizer = torch.optim.AdamW(model.parameters())
model(torch.ones(1, 4)).sum().backward()
optimizer.step()
gathered = model.gather_full_optim_state_dict(optimizer)
if gathered and torch.equal(gathered["state"][0]["exp_avg"], gathered["state"][0]["exp_avg_sq"]):
    sys.exit("expected: first and second moments; got: the second ones twice")
