# /// script
# dependencies = ["torch==2.13.0"]
#
# [tool.meshmark]
# title = "ZBV and DualPipeV schedules cannot evaluate"
# framework = "torch"
# symptom = "schedule.eval() raises: can't steal_bwd_input."
# cause = "Two stages on one rank hand over gradients in evaluation too, where there are none."
# processes = 1
# ///
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import ScheduleDualPipeV, ScheduleZBVZeroBubble

dist.init_process_group("gloo")
for schedule_class in (ScheduleZBVZeroBubble, ScheduleDualPipeV):
    stages = [PipelineStage(nn.Linear(2, 2), index, 2, torch.device("cpu")) for index in range(2)]
    schedule = schedule_class(stages, 2, loss_fn=lambda out, target: (out - target).square().sum())
    try:
        schedule.eval(torch.randn(8, 2), target=torch.randn(8, 2), losses=[])
    except AssertionError as error:
        sys.exit(f"expected: losses; got: {schedule_class.__name__}: {str(error)[:120]}")
