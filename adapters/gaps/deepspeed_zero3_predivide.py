# /// script
# dependencies = ["deepspeed==0.19.8", "torch==2.13.0"]
#
# [tool.meshmark]
# title = "ZeRO-3 scales gradients by one over gradient_predivide_factor where that is the number of ranks"
# framework = "deepspeed"
# symptom = "With `gradient_predivide_factor: 2` on two ranks, gradients of stage 3 are half of what they should be."
# cause = """
# `__avg_scatter_contiguous_grads` (stage3.py) divides by the factor and by the number of ranks, and multiplies by the
# factor after the reduction only if that is another number."""
# processes = 2
# ///
import sys

import deepspeed
import torch
from deepspeed.utils import safe_get_full_grad
from torch import nn

deepspeed.ops.__compatible_ops__ = {}
model = nn.Linear(4, 4, bias=False)
config = {
    "train_batch_size": 2,
    "train_micro_batch_size_per_gpu": 1,
    "gradient_predivide_factor": 2.0,
    "zero_optimization": {"stage": 3, "reduce_scatter": False, "reduce_bucket_size": 64},
    "zero_allow_untested_optimizer": True,
    "zero_force_ds_cpu_optimizer": False,
}
engine, *_ = deepspeed.initialize(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), config=config)
engine.backward(engine(torch.ones(1, 4)).sum())
got = float(safe_get_full_grad(model.weight).flatten()[0])
if got != 1.0:
    sys.exit(f"expected: the mean over ranks of gradients of 1; got: {got}")
