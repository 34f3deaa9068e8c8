# /// script
# dependencies = ["fairscale==0.4.13", "torch==2.13.0"]
#
# [tool.meshmark]
# title = "FairScale's FSDP raises when a wrapped module takes no part in a backward pass"
# framework = "fairscale"
# symptom = "The step raises: expected to be in states."
# cause = """
# The state machine of a wrapper that is not used is in a state that the end of the backward pass does not expect."""
# upstream = "https://github.com/facebookresearch/fairseq/issues/3353"
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


class TwoLayers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.always, self.sometimes = wrap(nn.Linear(4, 4)), wrap(nn.Linear(4, 4))

    def forward(self, x: torch.Tensor, both: bool) -> torch.Tensor:
        return self.sometimes(self.always(x)) if both else self.always(x)


model = wrap(TwoLayers())
model(torch.ones(1, 4), True).sum().backward()
try:
    model(torch.ones(1, 4), False).sum().backward()
except ValueError as error:
    sys.exit(f"expected: a backward pass; got: {str(error)[:160]}")
