# /// script
# dependencies = ["torch==2.13.0"]
#
# [tool.meshmark]
# title = "PowerSGD resumed from a checkpoint continues with another parameter's error"
# framework = "torch"
# symptom = "Parameters after a resumed run differ from those of a run that was not interrupted."
# cause = """
# PowerSGDState keeps errors by bucket index. DDP rebuilds its buckets after the first step, so a resumed run
# starts with other buckets than those that were saved."""
# processes = 2
# ///
import pickle
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")


def train(*sittings: int) -> torch.Tensor:
    """Train for some steps in each sitting; the hook's state is pickled between two of them."""
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(8, 8, bias=False), nn.Tanh(), nn.Linear(8, 8, bias=False), nn.Tanh())
    saved, step = pickle.dumps(PowerSGDState(None, matrix_approximation_rank=1, start_powerSGD_iter=2)), 0
    for steps in sittings:
        state, model = pickle.loads(saved), DistributedDataParallel(layers)
        model.register_comm_hook(state, powerSGD_hook)
        for _ in range(steps):
            rows = torch.Generator().manual_seed(2 * step + dist.get_rank())
            model(torch.randn(16, 8, generator=rows)).square().sum().backward()
            for parameter in layers.parameters():
                parameter.data.sub_(parameter.grad, alpha=0.01)
                parameter.grad = None
            step += 1
        saved = pickle.dumps(state)
    return torch.cat([p.detach().flatten() for p in layers.parameters()])


if moved := float((train(5) - train(3, 2)).abs().max()):
    sys.exit(f"expected: the same parameters after 5 steps and after 3 + 2; got: a difference of {moved:.2g}")
