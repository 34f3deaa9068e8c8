# /// script
# dependencies = ["deepspeed==0.19.8", "torch==2.13.0"]
#
# [tool.meshmark]
# title = "A DeepSpeed pipeline with base_seed=0 draws the same masks for every micro-batch"
# framework = "deepspeed"
# symptom = "With seed_layers and base_seed=0, dropout draws the masks of the first micro-batch for all of them."
# cause = """
# The seed of a layer is base_seed times the number of the micro-batch, plus the number of the layer. A factor of 0
# leaves the micro-batch out."""
# processes = 1
# ///
import sys

import deepspeed
import torch
from deepspeed.pipe import PipelineModule
from torch import nn

deepspeed.ops.__compatible_ops__ = {}  # On a CPU, DeepSpeed would compile an operator.

deepspeed.init_distributed(dist_backend="gloo", auto_mpi_discovery=False)
for seed in (1, 0):
    model = PipelineModule([nn.Dropout()], num_stages=1, seed_layers=True, base_seed=seed)
    model.train()
    first, second = (model(torch.ones(1, 64)) for _ in range(2))
    same = torch.equal(first, second)
    print(f"base_seed {seed}: the same mask twice: {same}")
    if same:
        sys.exit(f"expected: other masks for the second micro-batch; got: the same ones, with base_seed={seed}")
