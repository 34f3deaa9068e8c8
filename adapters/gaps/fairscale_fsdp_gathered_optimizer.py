# /// script
# dependencies = ["fairscale==0.4.13", "torch==2.13.0"]
#
# [tool.meshmark]
# title = "gather_full_optim_state_dict breaks the optimizer that it reads"
# framework = "fairscale"
# symptom = "The next step of AdamW raises about state_steps."
# cause = """
# It changes the optimizer's step counts in place, although its documentation says that the state is not modified."""
# upstream = "https://github.com/facebookresearch/fairscale/issues/1083"
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
for gathers in (True, False):
    model(torch.ones(1, 4)).sum().backward()
    try:
        optimizer.step()
    except RuntimeError as error:
        sys.exit(f"expected: a step; got: {str(error)[:160]}")
    if gathers:
        model.gather_full_optim_state_dict(optimizer)
