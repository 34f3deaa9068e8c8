# /// script
# dependencies = ["torch==2.13.0"]
#
# [tool.meshmark]
# title = "A zero-bubble pipeline fails where a stage runs a block twice"
# framework = "torch"
# symptom = "The backward pass raises: Trying to backward through the graph a second time."
# cause = "Parameters are taken in groups. Those of a block that runs twice share nodes, which the first group frees."
# processes = 1
# ///
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import ScheduleInterleavedZeroBubble


class Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(2):
            x = x + self.linear(self.norm(x))
        return x


dist.init_process_group("gloo")
stages = [PipelineStage(Twice(), index, 2, torch.device("cpu")) for index in range(2)]
schedule = ScheduleInterleavedZeroBubble(stages, 2, loss_fn=lambda out, target: (out - target).square().sum())
try:
    schedule.step(torch.randn(8, 4), target=torch.randn(8, 4), losses=[])
except RuntimeError as error:
    sys.exit(f"expected: gradients; got: {str(error).splitlines()[0][:120]}")
