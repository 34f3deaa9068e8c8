# /// script
# dependencies = ["torch==2.13.0"]
#
# [tool.meshmark]
# title = "A pipeline stage that is given no shapes updates batch norms once more"
# framework = "torch"
# symptom = "A batch norm has seen three batches after a step of two micro-batches."
# cause = """
# PipelineStage runs the module once on zeros to infer the shapes of its outputs. With input_args and output_args
# it does not."""
# processes = 1
# ///
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

dist.init_process_group("gloo")
norm = nn.BatchNorm1d(2)
stage = PipelineStage(norm, 0, 1, torch.device("cpu"))
schedule = ScheduleGPipe(stage, 2, loss_fn=lambda out, target: (out - target).square().sum())
schedule.step(torch.randn(8, 2), target=torch.randn(8, 2))
if int(norm.num_batches_tracked) != 2:
    sys.exit(f"expected: 2 micro-batches tracked; got: {int(norm.num_batches_tracked)}")
