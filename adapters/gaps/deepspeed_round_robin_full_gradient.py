# /// script
# dependencies = ["deepspeed==0.19.8", "torch==2.13.0"]
#
# [tool.meshmark]
# title = "DeepSpeed reads another parameter's gradient under round_robin_gradients"
# framework = "deepspeed"
# symptom = "`safe_get_full_grad` fails on sizes that do not fit, or returns another parameter's gradient."
# cause = """
# With `round_robin_gradients: true`, stages 1 and 2 partition reordered parameters. Averaged gradients are in that
# order, and `get_full_hp_grad` (tensor_fragment.py) looks them up by `_index_in_param_group`, the order before."""
# processes = 2
# ///
import sys

import deepspeed
import torch
from deepspeed.utils import safe_get_full_grad
from torch import nn

deepspeed.ops.__compatible_ops__ = {}  # On a CPU, DeepSpeed would compile an operator.
torch.manual_seed(0)
model = nn.Sequential(*(nn.Linear(4, 4, bias=False) for _ in range(4)))
plain = nn.Sequential(*(nn.Linear(4, 4, bias=False) for _ in range(4)))
plain.load_state_dict(model.state_dict())
config = {
    "train_batch_size": 2,
    "train_micro_batch_size_per_gpu": 1,
    "zero_optimization": {"stage": 2, "round_robin_gradients": True},
    "zero_allow_untested_optimizer": True,
    "zero_force_ds_cpu_optimizer": False,
}
engine, *_ = deepspeed.initialize(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), config=config)
engine.backward(engine(torch.ones(1, 4)).sum())
plain(torch.ones(1, 4)).sum().backward()
for name, parameter in model.named_parameters():
    expected = plain.get_parameter(name).grad
    got = safe_get_full_grad(parameter)
    if got is None or float((got - expected).abs().max()) > 1e-6:
        off = "none" if got is None else f"{float((got - expected).abs().max()):.3g} off"
        sys.exit(f"expected: the gradient of {name}; got: {off}")
