# /// script
# dependencies = ["deepspeed==0.19.8", "torch==2.13.0"]
#
# [tool.meshmark]
# title = "DeepSpeed loads no elastic checkpoint of PyTorch's AdamW"
# framework = "deepspeed"
# symptom = "`load_checkpoint` raises an AssertionError without a message."
# cause = """
# With `elastic_checkpoint: true`, stages 1 and 2 save the count of steps of `param_groups[0]["step"]`, where
# DeepSpeed's fused optimizers keep it. PyTorch's keep it by parameter: nothing is saved, and
# `_restore_step_from_elastic_checkpoint` (stage_1_and_2.py) asserts that it is there."""
# processes = 2
# ///
import os
import sys
import tempfile

import deepspeed
import torch
from torch import nn

deepspeed.ops.__compatible_ops__ = {}  # On a CPU, DeepSpeed would compile an operator.
torch.manual_seed(0)
config = {
    "train_batch_size": 2,
    "train_micro_batch_size_per_gpu": 1,
    "zero_optimization": {"stage": 2, "elastic_checkpoint": True},
}


def engine_of_adamw() -> deepspeed.DeepSpeedEngine:
    model = nn.Linear(4, 4, bias=False)
    return deepspeed.initialize(model=model, optimizer=torch.optim.AdamW(model.parameters()), config=config)[0]


engine = engine_of_adamw()
engine.backward(engine(torch.ones(1, 4)).sum())
engine.step()
folder = [tempfile.mkdtemp() if os.environ["RANK"] == "0" else None]
torch.distributed.broadcast_object_list(folder)
engine.save_checkpoint(folder[0], tag="saved")
try:
    engine_of_adamw().load_checkpoint(folder[0], tag="saved")
except AssertionError as error:
    sys.exit(f"expected: the checkpoint is loaded; got: AssertionError: {error}")
