# /// script
# dependencies = ["deepspeed==0.19.8", "torch==2.13.0"]
#
# [tool.meshmark]
# title = "ZeRO-3 updates an unused parameter with the gradient of an earlier step"
# framework = "deepspeed"
# symptom = "A parameter that a step does not use moves, under plain SGD."
# cause = """
# stage3.py never clears grad_partitions_flat_buffer. The first micro-batch overwrites only the parts that bring a
# gradient."""
# processes = 2
# ///
import sys

import deepspeed
import torch
from deepspeed.utils import safe_get_full_fp32_param
from torch import nn

deepspeed.ops.__compatible_ops__ = {}  # On a CPU, DeepSpeed would compile an operator.


class TwoLayers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.always, self.sometimes = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)

    def forward(self, x: torch.Tensor, both: bool) -> torch.Tensor:
        return (self.sometimes(self.always(x)) if both else self.always(x)).sum()


for stage in (3,):
    torch.manual_seed(0)
    model = TwoLayers()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    config = {
        "train_batch_size": 2,
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {"stage": stage},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
    }
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    weights = []
    for both in (True, False):
        engine.backward(engine(torch.ones(1, 4), both))
        engine.step()
        weight = safe_get_full_fp32_param(model.sometimes.weight)
        weights.append(weight.detach().clone())
    if moved := float((weights[1] - weights[0]).abs().max()):
        sys.exit(f"expected: an unused parameter stays; got: stage {stage} moves it by {moved:.3g}")
