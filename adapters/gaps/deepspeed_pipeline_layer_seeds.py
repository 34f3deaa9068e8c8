# /// script
# dependencies = ["deepspeed==0.19.8", "torch==2.13.0"]
#
# [tool.meshmark]
# title = "Layers of a DeepSpeed pipeline share their seed where activations are checkpointed"
# framework = "deepspeed"
# symptom = "With seed_layers and activation_checkpoint_interval=1, dropout in all layers of a stage draws one mask."
# cause = """
# forward numbers the layers of each checkpointed range from 0, so that the seed of every range begins anew. Without
# checkpointing, each layer has a seed of its own."""
# processes = 1
# ///
import sys

import deepspeed
import torch
from deepspeed.pipe import PipelineModule
from deepspeed.runtime.activation_checkpointing.checkpointing import non_reentrant_checkpoint
from torch import Tensor, nn

deepspeed.ops.__compatible_ops__ = {}  # On a CPU, DeepSpeed would compile an operator.

deepspeed.init_distributed(dist_backend="gloo", auto_mpi_discovery=False)
masks = []


class Noted(nn.Dropout):
    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(torch.ones_like(x))
        masks.append(tuple(y.flatten().tolist()))
        return x


for interval in (0, 1):
    masks.clear()
    model = PipelineModule(
        [Noted() for _ in range(4)],
        num_stages=1,
        seed_layers=True,
        seed_fn=torch.manual_seed,
        activation_checkpoint_interval=interval,
        activation_checkpoint_func=non_reentrant_checkpoint,
        checkpointable_layers=[Noted.__name__],
    )
    model._precompute_checkpointable_values()
    model.train()
    model(torch.ones(1, 64))
    distinct = len(set(masks))
    print(f"interval {interval}: {distinct} masks in 4 layers")
    if distinct != 4:
        sys.exit(f"expected: a mask for each of 4 layers; got: {distinct}")
