# /// script
# dependencies = ["deepspeed==0.19.8", "torch==2.13.0"]
#
# [tool.meshmark]
# title = "sequence_parallel_size in DeepSpeed's configuration reduces no gradient over the ranks of a sequence"
# framework = "deepspeed"
# symptom = "Each rank of a sequence steps by its own gradient."
# cause = """
# _get_sequence_data_parallel_group of deepspeed/utils/groups.py returns the data-parallel group of the mesh only."""
# processes = 2
# ///
import sys

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.utils import safe_get_full_fp32_param
from torch import nn

deepspeed.init_distributed(dist_backend="gloo", auto_mpi_discovery=False)
model = nn.Linear(1, 1, bias=False)
nn.init.zeros_(model.weight)
config = {
    "train_batch_size": 1,
    "train_micro_batch_size_per_gpu": 1,
    "zero_optimization": {"stage": 2},
    "zero_allow_untested_optimizer": True,
    "sequence_parallel_size": 2,
    "data_parallel_size": 1,
}
optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
# Two ranks share one sequence: their gradients, 1 and 2, are parts of one sum.
engine.backward(engine(torch.full((1, 1), 1.0 + dist.get_rank())).sum())
engine.step()
moved = -float(safe_get_full_fp32_param(model.weight))
if moved != 3.0:
    sys.exit(f"expected: a step by the sum, 3; got: {moved}")
