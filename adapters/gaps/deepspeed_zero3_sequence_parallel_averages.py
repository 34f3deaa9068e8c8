# /// script
# dependencies = ["deepspeed==0.19.8", "torch==2.13.0"]
#
# [tool.meshmark]
# title = "ZeRO-3 averages gradients over the ranks of a sequence, where stages 1 and 2 sum"
# framework = "deepspeed"
# symptom = "Under sequence parallelism of degree n, gradients at stage 3 are n times too small."
# cause = """
# reduce_scatter_coalesced divides by all ranks. The other stages divide by the ranks that hold other sequences."""
# processes = 2
# ///
import sys

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.runtime.sequence_parallel import parallel_state_sp
from deepspeed.utils import safe_get_full_fp32_param
from torch import nn

deepspeed.init_distributed(dist_backend="gloo", auto_mpi_discovery=False)
parallel_state_sp.initialize_sequence_parallel(2)
model = nn.Linear(1, 1, bias=False)
nn.init.zeros_(model.weight)
config = {
    "train_batch_size": 1,
    "train_micro_batch_size_per_gpu": 1,
    "zero_optimization": {"stage": 3},
    "zero_allow_untested_optimizer": True,
}
optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config, mpu=parallel_state_sp)
# Two ranks share one sequence: their gradients, 1 and 2, are parts of one sum.
engine.backward(engine(torch.full((1, 1), 1.0 + dist.get_rank())).sum())
engine.step()
moved = -float(safe_get_full_fp32_param(model.weight))
if moved != 3.0:
    sys.exit(f"expected: a step by the sum, 3; got: {moved}")
