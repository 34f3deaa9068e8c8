# /// script
# dependencies = ["deepspeed==0.19.8", "torch==2.13.0"]
#
# [tool.meshmark]
# title = "DeepSpeed reads zeros for masters that `offload_states` has moved"
# framework = "deepspeed"
# symptom = "`safe_get_full_fp32_param` returns zeros, without a word, until `reload_states`."
# cause = """
# `offload_states` of stages 1 and 2 drops where the master of a weight is (`_clear_hp_buffer_references`), and
# `get_full_hp_param` (tensor_fragment.py) takes a weight without one for a part of another rank: it adds up nothing."""
# processes = 2
# ///
import sys

import deepspeed
import torch
from deepspeed.utils import safe_get_full_fp32_param
from torch import nn

deepspeed.ops.__compatible_ops__ = {}  # On a CPU, DeepSpeed would compile an operator.
torch.manual_seed(0)
model = nn.Linear(4, 4, bias=False)
config = {
    "train_batch_size": 2,
    "train_micro_batch_size_per_gpu": 1,
    "zero_optimization": {"stage": 2},
    "zero_allow_untested_optimizer": True,
    "zero_force_ds_cpu_optimizer": False,
}
engine, *_ = deepspeed.initialize(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), config=config)
engine.backward(engine(torch.ones(1, 4)).sum())
engine.step()
before = safe_get_full_fp32_param(model.weight).clone()
engine.offload_states(pin_memory=False)
away = safe_get_full_fp32_param(model.weight)
engine.reload_states()
if not torch.equal(safe_get_full_fp32_param(model.weight), before):
    sys.exit("expected: the master once it is back; got another")
if not torch.equal(away, before):
    sys.exit(f"expected: the master, of norm {float(before.norm()):.3g}; got: one of norm {float(away.norm()):.3g}")
