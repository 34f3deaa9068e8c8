# /// script
# dependencies = ["deepspeed==0.19.8", "torch==2.13.0"]
#
# [tool.meshmark]
# title = "The gradient norm of a DeepSpeed pipeline counts one stage only"
# framework = "deepspeed"
# symptom = "Without ZeRO, gradients of a two-stage pipeline are clipped by the norm of the first stage."
# cause = """
# clip_grad_norm_ leaves out what tensor-parallel ranks replicate. It takes the ranks of the pipeline's stages for
# such ranks. With ZeRO stage 1 the norm is right."""
# processes = 2
# ///
import sys

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.pipe import PipelineModule
from deepspeed.runtime.utils import clip_grad_norm_
from torch import nn

deepspeed.ops.__compatible_ops__ = {}  # On a CPU, DeepSpeed would compile an operator.

deepspeed.init_distributed(dist_backend="gloo", auto_mpi_discovery=False)
layers = [nn.Linear(1, 1, bias=False) for _ in range(2)]
model = PipelineModule(layers, num_stages=2, loss_fn=nn.MSELoss(), partition_method="uniform")
(weight,) = model.parameters()
weight.grad = torch.full((1, 1), 3.0 + dist.get_rank())  # 3 on the first stage, 4 on the second
norm = float(clip_grad_norm_(model.parameters(), max_norm=100.0, mpu=model._grid))
if abs(norm - 5.0) > 1e-5:
    sys.exit(f"expected: a norm of 5; got: {norm}")
