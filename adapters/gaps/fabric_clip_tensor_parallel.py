# /// script
# dependencies = ["lightning-fabric==2.6.6", "torch==2.13.0"]
#
# [tool.meshmark]
# title = "ModelParallelStrategy cannot clip a model that is split in part"
# framework = "lightning-fabric"
# symptom = "clip_gradients raises for gradients of which some are DTensors, or lie on two meshes."
# cause = """
# It calls torch.nn.utils.clip_grad_norm_ for all parameters at once, which takes one kind of tensor and one mesh."""
# processes = 2
# ///
import sys

import torch
from lightning_fabric import Fabric
from lightning_fabric.plugins.environments import TorchElasticEnvironment
from lightning_fabric.strategies import ModelParallelStrategy
from torch import nn
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

strategy = ModelParallelStrategy(
    lambda model, mesh: parallelize_module(model, mesh["tensor_parallel"], {"1": ColwiseParallel()}),
    data_parallel_size=1,
    tensor_parallel_size=2,
)
fabric = Fabric(accelerator="cpu", devices=2, strategy=strategy, plugins=[TorchElasticEnvironment()])
fabric.launch()
model = fabric.setup_module(nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)))
optimizer = fabric.setup_optimizers(torch.optim.SGD(model.parameters(), lr=0.1))
for parameter in model.parameters():
    parameter.grad = torch.ones_like(parameter)
try:
    norm = float(fabric.clip_gradients(model, optimizer, max_norm=1.0))
except RuntimeError as error:
    sys.exit(f"expected: a norm of {32**0.5:.4g}; got: {str(error)[:160]}")
if abs(norm - 32**0.5) > 1e-4:
    sys.exit(f"expected: a norm of {32**0.5:.4g}; got: {norm}")
