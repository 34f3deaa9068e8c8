# /// script
# dependencies = ["megatron-core==0.16.1", "torch==2.13.0"]
#
# [tool.meshmark]
# title = "A distributed optimizer that has stepped cannot load the format fully_reshardable"
# framework = "megatron-core"
# symptom = """
# load_state_dict fails with KeyError: 'step', without Apex or Transformer Engine."""
# cause = """
# Every state of a tensor is expected in the checkpoint. The format has no count of steps for a tensor, which PyTorch's
# AdamW keeps. The format dp_zero_gather_scatter fails likewise."""
# processes = 1
# ///
import sys
from types import SimpleNamespace

import torch
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

weight = torch.ones(2, requires_grad=True)
adam = torch.optim.AdamW([weight])
weight.sum().backward()
adam.step()
distributed = SimpleNamespace(
    optimizer=adam,
    model_param_group_index_map={weight: (0, 0)},
    config=SimpleNamespace(use_precision_aware_optimizer_no_fp8_or_ds_fp8=False),
)
saved = {name: torch.zeros(2) for name in ("param", "exp_avg", "exp_avg_sq")}  # what both formats have of a tensor
try:
    with torch.no_grad():
        DistributedOptimizer._set_main_param_and_optimizer_states(distributed, weight, saved)
except KeyError as error:
    sys.exit(f"expected: states that are loaded; got: KeyError: {error}")
