# /// script
# dependencies = ["deepspeed==0.19.8", "torch==2.13.0"]
#
# [tool.meshmark]
# title = "ZeRO-3 cannot train a parameter without a dimension"
# framework = "deepspeed"
# symptom = "A module with a scalar parameter, such as CLIP's logit_scale, fails when it is initialised or trained."
# cause = """
# The gathered parameter is made by narrow(0, ...) of a flat one, which a scalar does not allow."""
# processes = 2
# ///
import sys

import deepspeed
import torch
from torch import nn

deepspeed.ops.__compatible_ops__ = {}  # On a CPU, DeepSpeed would compile an operator.


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.scale = nn.Linear(4, 4), nn.Parameter(torch.tensor(2.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.linear(x) * self.scale).sum()


model = Scaled()
config = {
    "train_batch_size": 2,
    "train_micro_batch_size_per_gpu": 1,
    "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
    "zero_allow_untested_optimizer": True,
    "zero_force_ds_cpu_optimizer": False,
}
try:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    engine.backward(engine(torch.ones(1, 4)))
    engine.step()
except (IndexError, RuntimeError, ValueError) as error:
    sys.exit(f"expected: a module with a scalar parameter is trained; got: {str(error).splitlines()[0]}")
