# /// script
# dependencies = ["megatron-core==0.16.1", "torch==2.13.0"]
#
# [tool.meshmark]
# title = "Megatron's default format of a distributed optimizer's states cannot be saved"
# framework = "megatron-core"
# symptom = """
# Where no format is named, save fails with "ShardedTensor.flattened_range is not supported"."""
# cause = """
# The default is fully_sharded_model_space, whose tensors have a flattened_range. ShardedTensor takes none any more."""
# processes = 1
# ///
import sys
from types import SimpleNamespace

import torch
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.dist_checkpointing.core import CheckpointingException
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

weight = torch.ones(4)
rank_holds = {"param": SimpleNamespace(start=0, end=2)}
distributed = SimpleNamespace(
    gbuf_ranges=[{torch.float32: [{"param_map": {weight: rank_holds}}]}],
    _get_main_param_and_optimizer_states=lambda _: {"param": weight[:2]},
    distributed_optimizer_instance_id=0,
)
model = {"weight": ShardedTensor.from_rank_offsets("weight", weight, replica_id=(0, 0, 0))}
try:
    DistributedOptimizer.sharded_param_state_fs_model_space(distributed, model)
except CheckpointingException as error:
    sys.exit(f"expected: a description of the states; got: {error}")
