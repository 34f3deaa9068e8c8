# /// script
# dependencies = ["deepspeed==0.19.8", "torch==2.13.0"]
#
# [tool.meshmark]
# title = "ZeRO-3 cannot set a parameter whose elements the ranks do not divide"
# framework = "deepspeed"
# symptom = """
# safe_set_full_fp32_param raises "start + length exceeds dimension size" on the last rank for a bias of one element, or
# any tensor of an odd number on two ranks."""
# cause = """
# stage3.py, set_full_hp_param: each rank takes its part by narrow(0, size * rank, size); the last part is padded."""
# processes = 2
# ///
import sys

import deepspeed
import torch
from deepspeed.utils import safe_get_full_fp32_param, safe_set_full_fp32_param
from torch import nn

deepspeed.ops.__compatible_ops__ = {}  # On a CPU, DeepSpeed would compile an operator.

model = nn.Linear(4, 3)
config = {
    "train_batch_size": 2,
    "train_micro_batch_size_per_gpu": 1,
    "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
    "zero_allow_untested_optimizer": True,
    "zero_force_ds_cpu_optimizer": False,
}
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
value = torch.tensor([1.0, 2.0, 3.0])
try:
    safe_set_full_fp32_param(engine.module.bias, value)
    found = safe_get_full_fp32_param(engine.module.bias)
except RuntimeError as error:
    sys.exit(f"expected: the bias is {value.tolist()}; got: {str(error).splitlines()[0]}")
if not torch.equal(found, value):
    sys.exit(f"expected: the bias is {value.tolist()}; got: {found.tolist()}")
