# /// script
# dependencies = ["deepspeed==0.19.8", "torch==2.13.0"]
#
# [tool.meshmark]
# title = "DeepSpeed's seq_parallel_communication_data_type is not heeded up to stage 2"
# framework = "deepspeed"
# symptom = "Where ranks share a sequence, gradients are sent in float32, whatever was asked for."
# cause = """
# allreduce_bucket of stage_1_and_2.py sets float32 where sequence_parallel_size exceeds one. Stage 3 heeds the
# option."""
# processes = 2
# ///
import sys

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.runtime.sequence_parallel import parallel_state_sp
from torch import nn

deepspeed.ops.__compatible_ops__ = {}  # otherwise it compiles an operator, which nothing here uses
deepspeed.init_distributed(dist_backend="gloo", auto_mpi_discovery=False)
parallel_state_sp.initialize_sequence_parallel(2)
config = {
    "train_batch_size": 1,
    "train_micro_batch_size_per_gpu": 1,
    "bf16": {"enabled": True},
    "zero_optimization": {"stage": 2},
    "zero_allow_untested_optimizer": True,
    "seq_parallel_communication_data_type": "bf16",
}
model = nn.Linear(64, 64, bias=False)
optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config, mpu=parallel_state_sp)
sent, reduce = [], dist.all_reduce


def noting(tensor: torch.Tensor, **options: object) -> object:
    if tensor.numel() >= 64 * 64:
        sent.append(tensor.dtype)
    return reduce(tensor, **options)


dist.all_reduce = noting
engine.backward(engine(torch.ones(1, 64, dtype=torch.bfloat16)).sum())
if sent != [torch.bfloat16]:
    sys.exit(f"expected: gradients sent as torch.bfloat16; got: {sent}")
