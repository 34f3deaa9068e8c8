# /// script
# dependencies = ["fairscale==0.4.13", "torch==2.13.0"]
#
# [tool.meshmark]
# title = "load_local_state_dict raises before the first forward pass"
# framework = "fairscale"
# symptom = "A model with nested wrappers cannot load its shards when it has just been built, as in a new process."
# cause = """
# It frees the gathered parameters of every wrapper, which inner ones have not got before they are first called:
# `_lazy_init` of the outermost wrapper prepares its own alone."""
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


def build() -> nn.Module:
    return wrap(nn.Sequential(wrap(nn.Linear(4, 4)), nn.Linear(4, 4)))


shards = build().local_state_dict()
try:
    build().load_local_state_dict(shards)
except AttributeError as error:
    sys.exit(f"expected: the shards are loaded; got: {error}")
