# /// script
# dependencies = ["torch==2.13.0"]
#
# [tool.meshmark]
# title = "A stage that is cut from a trace keeps the whole model"
# framework = "torch"
# symptom = """
# `pipeline(model, ...).build_stage(...)` leaves every rank with the parameters of all stages in memory, however many
# ranks there are."""
# cause = """
# The stage keeps `pipe_info`, whose `graph` refers to the module that it is the graph of (`owning_module`): the
# container of all stages (torch/distributed/pipelining/_IR.py, `Pipe.info`)."""
# processes = 2
# ///
import gc
import sys
import weakref

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import SplitPoint, pipeline

dist.init_process_group("gloo")
model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
there = [weakref.ref(parameter) for parameter in model.parameters()]
pipe = pipeline(model, (torch.ones(2, 4),), split_spec={"1": SplitPoint.BEGINNING})
stage = pipe.build_stage(dist.get_rank(), torch.device("cpu"))
del model, pipe
gc.collect()
own = len(list(stage.submod.parameters()))
left = sum(parameter() is not None for parameter in there)
if left > own:
    sys.exit(f"expected: the {own} parameters of the stage; got: {left}, those of all stages")
