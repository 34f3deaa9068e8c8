# /// script
# dependencies = ["megatron-core==0.16.1", "torch==2.13.0"]
#
# [tool.meshmark]
# title = "A column-parallel weight is not marked as a shard unless Megatron initializes it"
# framework = "megatron-core"
# symptom = "The global gradient norm counts the first rank's part of the weight only."
# cause = """
# With perform_initialization=False the attribute tensor_model_parallel is not set, and the shard passes for a
# replica."""
# upstream = "https://github.com/NVIDIA/Megatron-LM/issues/4084"
# processes = 2
# ///
import sys

import torch
import torch.distributed as dist
from megatron.core import ModelParallelConfig, parallel_state
from megatron.core.tensor_parallel import ColumnParallelLinear

dist.init_process_group("gloo")
parallel_state.initialize_model_parallel(2, create_gloo_process_groups=False)
for initialized in (True, False):
    config = ModelParallelConfig(
        tensor_model_parallel_size=2, perform_initialization=initialized, use_cpu_initialization=True
    )
    group = parallel_state.get_tensor_model_parallel_group()
    layer = ColumnParallelLinear(4, 4, config=config, init_method=torch.nn.init.ones_, bias=False, tp_group=group)
    if not getattr(layer.weight, "tensor_model_parallel", False):
        sys.exit(f"expected: tensor_model_parallel is set; got: it is not, with perform_initialization={initialized}")
